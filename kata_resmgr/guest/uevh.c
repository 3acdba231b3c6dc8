/*
 * Brings hot-plugged CPUs and memory online: Linux leaves both to user space.
 *
 * The order closes the window in which an event could be missed: bind first, then bring online what is there, then
 * listen. It goes to the background when it is bound and has looked once. Memory goes to the movable zone, from
 * which it can be taken away again.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CPUS "/devices/system/cpu/cpu"
#define MEMORY "/devices/system/memory/memory"

/* Writing to what is online already fails and changes nothing. */
static void bring_online(const char *device)
{
    int memory = !strncmp(device, MEMORY, strlen(MEMORY));
    const char *value = memory ? "online_movable" : "1";
    char path[256];
    if (snprintf(path, sizeof path, "/sys%s/%s", device, memory ? "state" : "online") >= (int)sizeof path)
        return;
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0)
        return; /* CPU 0 has no such file */
    if (write(file, value, strlen(value)) < 0 && errno != EINVAL)
        perror(path);
    close(file);
}

static void look(const char *directory, const char *prefix)
{
    char path[256];
    snprintf(path, sizeof path, "/sys%s", directory);
    DIR *listing = opendir(path);
    if (!listing)
        return;
    for (struct dirent *entry; (entry = readdir(listing));) {
        size_t length = strlen(prefix);
        if (strncmp(entry->d_name, prefix, length) || entry->d_name[length] < '0' || entry->d_name[length] > '9')
            continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        bring_online(path);
    }
    closedir(listing);
}

static void look_at_all(void)
{
    look("/devices/system/cpu", "cpu");
    look("/devices/system/memory", "memory");
}

int main(void)
{
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK, .nl_groups = 1};
    int room = 1 << 20;
    int events = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);
    if (events < 0 || setsockopt(events, SOL_SOCKET, SO_RCVBUF, &room, sizeof room) < 0 ||
        bind(events, (struct sockaddr *)&kernel, sizeof kernel) < 0) {
        perror("uevh");
        return 1;
    }
    look_at_all();
    if (daemon(0, 1) < 0) {
        perror("uevh");
        return 1;
    }
    for (;;) {
        char event[8192];
        ssize_t length = recv(events, event, sizeof event - 1, 0);
        if (length < 0 && errno == ENOBUFS) {
            look_at_all(); /* events were lost */
            continue;
        }
        if (length <= 0)
            continue;
        event[length] = 0;
        if (!strncmp(event, "add@" CPUS, strlen("add@" CPUS)) ||
            !strncmp(event, "add@" MEMORY, strlen("add@" MEMORY)))
            bring_online(event + strlen("add@"));
    }
}
