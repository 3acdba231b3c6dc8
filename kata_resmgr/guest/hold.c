/*
 * hold BYTES: uses so much memory, and in every 2 MiB of it one page that the kernel cannot move, until it is killed.
 *
 * What is in a pipe stays where it is: memory that is to leave the machine waits for it, as for a device's buffers.
 * It goes to the background when it holds all of it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define BLOCK (2ul << 20)
#define PAGE 4096
#define PIPE (1 << 20) /* its room in bytes: as many pages of it are one page each */

int main(int argc, char **argv)
{
    size_t size = argc == 2 ? strtoul(argv[1], NULL, 10) : 0;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("hold: mmap");
        return 1;
    }
    memset(memory, 1, size);
    int ends[2] = {-1, -1};
    for (size_t block = 0; block * BLOCK < size; block++) {
        struct iovec page = {.iov_base = memory + block * BLOCK, .iov_len = PAGE};
        if (block % (PIPE / PAGE) == 0 && (pipe(ends) < 0 || fcntl(ends[1], F_SETPIPE_SZ, PIPE) < 0)) {
            perror("hold: pipe");
            return 1;
        }
        if (vmsplice(ends[1], &page, 1, SPLICE_F_NONBLOCK) != PAGE) {
            perror("hold: vmsplice");
            return 1;
        }
    }
    if (daemon(0, 0) < 0) {
        perror("hold: daemon");
        return 1;
    }
    for (;;)
        pause();
}
