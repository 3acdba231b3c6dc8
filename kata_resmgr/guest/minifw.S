# The mini firmware: 64 KiB for `-machine q35 -bios`, or assembled with PC defined for `-machine pc`: a "guest" that
# answers ACPI hot-plug of CPUs and DIMMs by its registers, with no operating system and no AML. It halts when there is
# nothing to do, so that it costs no CPU.
#
# The host sends one byte on COM1, which is echoed with a newline, and holds from then on:
#   c  cooperate: eject what is asked for, and report it (at first)
#   i  ignore requests for removal; they stay latched
#   r  refuse them, by _OST status 0x81
#   s  spin with interrupts off, deaf to hot-plug
# "R" and a newline say that it is up, after a reset too.
#
# Registers: QEMU's docs/specs/acpi_cpu_hotplug and acpi_mem_hotplug, the data sheets of ICH9 (q35) and PIIX4 (pc), the
# 8259A and the 16550.
#
# Everywhere below: %bl mode, %ecx slot, %esi number of CPU slots, %edi and %ebp event and status for _OST.

        .code16
        .ifdef  PC
        .set    CPU, 0xaf00             # ACPI CPU hot-plug
        .set    GPE0_STATUS, 0xafe0
        .set    GPE0_ENABLE, 0xafe2
        .set    ACPI_ENABLE, 0xf1       # for the APM port
        .else
        .set    CPU, 0x0cd8
        .set    GPE0_STATUS, PMBASE + 0x20
        .set    GPE0_ENABLE, PMBASE + 0x28
        .set    ACPI_ENABLE, 2
        .endif
        .set    CPU_FLAGS, CPU + 4
        .set    CPU_COMMAND, CPU + 5
        .set    CPU_DATA, CPU + 8
        .set    MEM, 0x0a00             # ACPI memory hot-plug
        .set    MEM_EVENT, MEM + 4
        .set    MEM_STATUS, MEM + 8
        .set    MEM_FLAGS, MEM + 0x14
        .set    MEM_SLOTS, 32           # scanned at most
        .set    INSERTED, 2             # in both FLAGS: an insert to be acknowledged,
        .set    REMOVING, 4             #   a removal asked for,
        .set    EJECT, 8                #   and the order to eject
        .set    NO_SLOT, 0xff
        .set    OST_INSERT, 1           # _OST events and statuses (ACPI 6, 6.3.5)
        .set    OST_EJECT, 3
        .set    OST_DONE, 0
        .set    OST_REFUSED, 0x81
        .set    OST_EJECTING, 0x84
        .set    COM1, 0x3f8
        .set    PMBASE, 0x600
        .set    GPE_MEMORY, 8
        .set    GPE_HOTPLUG, 4 | GPE_MEMORY     # bit 2: CPUs
        .set    RAISED, 0x500           # in RAM: the GPEs since the memory slots were looked at

        .section .text
        .org    0
start:  cli
        xor     %ax, %ax
        mov     %ax, %ds
        mov     %ax, %ss
        mov     $0x7000, %sp
        # Vectors: IRQ 9 (SCI) is 0x29, IRQ 4 (COM1) is 0x24, with the PIC's bases set below.
        movw    $on_sci, 0x29 * 4
        movw    $0xf000, 0x29 * 4 + 2
        movw    $on_serial, 0x24 * 4
        movw    $0xf000, 0x24 * 4 + 2
        movb    $GPE_MEMORY, RAISED     # what was there before us

        # Unreal mode: %es reaches the local APIC, which is enabled and passes the PIC's interrupts (LINT0 = ExtINT).
        lgdtl   %cs:gdt_pointer
        mov     %cr0, %eax
        or      $1, %al
        mov     %eax, %cr0
        jmp     1f
1:      mov     $8, %ax
        mov     %ax, %es
        mov     %cr0, %eax
        and     $0xfe, %al
        mov     %eax, %cr0
        jmp     1f
1:      mov     $0xfee000f0, %edi
        mov     $0x1ff, %eax
        addr32 mov %eax, %es:(%edi)
        mov     $0xfee00350, %edi
        mov     $0x8700, %eax
        addr32 mov %eax, %es:(%edi)

        # PIC: bases 0x20 and 0x28; IRQs 2 (cascade), 4 and 9 unmasked; IRQ 9 level triggered.
        mov     $0x11, %al
        out     %al, $0x20
        out     %al, $0xa0
        mov     $0x20, %al
        out     %al, $0x21
        mov     $0x28, %al
        out     %al, $0xa1
        mov     $4, %al
        out     %al, $0x21
        mov     $2, %al
        out     %al, $0xa1
        mov     $1, %al
        out     %al, $0x21
        out     %al, $0xa1
        mov     $0xeb, %al
        out     %al, $0x21
        mov     $0xfd, %al
        out     %al, $0xa1
        mov     $0x4d1, %dx
        mov     $2, %al
        out     %al, %dx

        # PMBASE and what enables it, in the LPC bridge (00:1f.0) or PIIX4's power management (00:01.3); then ACPI mode
        # by the APM port, and the two GPEs.
        .ifdef  PC
        .set    PM_FUNCTION, 0x80000b00
        .set    PM_ENABLE, 0x80         # PMREGMISC
        .set    PM_ENABLED, 1
        .else
        .set    PM_FUNCTION, 0x8000f800
        .set    PM_ENABLE, 0x44         # ACPI_CNTL
        .set    PM_ENABLED, 0x80
        .endif
        mov     $0xcf8, %dx
        mov     $PM_FUNCTION | 0x40, %eax
        out     %eax, %dx
        mov     $0xcfc, %dx
        mov     $PMBASE | 1, %eax
        out     %eax, %dx
        mov     $0xcf8, %dx
        mov     $PM_FUNCTION | PM_ENABLE, %eax
        out     %eax, %dx
        mov     $0xcfc, %dx
        mov     $PM_ENABLED, %al
        out     %al, %dx
        mov     $ACPI_ENABLE, %al
        out     %al, $0xb2
        mov     $GPE0_ENABLE, %dx
        mov     $GPE_HOTPLUG, %al
        out     %al, %dx

        # COM1: interrupt on receive (OUT2 lets it through).
        mov     $COM1 + 1, %dx
        mov     $1, %al
        out     %al, %dx
        mov     $COM1 + 4, %dx
        mov     $8, %al
        out     %al, %dx

        # CPU hot-plug starts with the legacy bitmap; a write of 0 switches to the modern registers.
        mov     $CPU, %dx
        xor     %eax, %eax
        out     %eax, %dx

        # The number of CPU slots: fw_cfg key 0x0f, two bytes, little-endian.
        mov     $0x510, %dx
        mov     $0x0f, %ax
        out     %ax, %dx
        mov     $0x511, %dx
        in      %dx, %al
        mov     %al, %bh
        in      %dx, %al
        mov     %al, %ah
        mov     %bh, %al
        movzwl  %ax, %esi

        mov     $'c', %bl
        mov     $'R', %al
        call    put_line

main:   cli
        mov     $COM1 + 5, %dx          # line status: bit 0, a byte is there
        in      %dx, %al
        cmp     $0xff, %al              # no COM1
        je      1f
        test    $1, %al
        jz      1f
        mov     $COM1, %dx
        in      %dx, %al
        mov     %al, %bl
        orb     $GPE_MEMORY, RAISED     # what was ignored is seen to in the new mode
        call    put_line
1:      cmp     $'s', %bl
        je      main

        xor     %ecx, %ecx
cpu:    mov     $CPU, %dx
        mov     %ecx, %eax
        out     %eax, %dx
        mov     $CPU_FLAGS, %dx
        in      %dx, %al
        cmp     $NO_SLOT, %al
        je      memory
        mov     %al, %bh
        test    $INSERTED, %bh
        jz      1f
        call    cpu_inserted
1:      test    $REMOVING, %bh
        jz      1f
        call    cpu_removing
1:      inc     %ecx
        cmp     %esi, %ecx
        jb      cpu

        # There is no telling how many memory slots there are, and each look at one is slow: only when one calls.
memory: testb   $GPE_MEMORY, RAISED
        jz      idle
        movb    $0, RAISED
        xor     %ecx, %ecx
dimm:   mov     $MEM, %dx
        mov     %ecx, %eax
        out     %eax, %dx
        mov     $MEM_FLAGS, %dx
        in      %dx, %al
        cmp     $NO_SLOT, %al
        je      idle
        mov     %al, %bh
        test    $INSERTED, %bh
        jz      1f
        call    dimm_inserted
1:      test    $REMOVING, %bh
        jz      1f
        call    dimm_removing
1:      inc     %ecx
        cmp     $MEM_SLOTS, %ecx
        jb      dimm

idle:   sti                             # takes effect after hlt: no wake-up is lost in between
        hlt
        jmp     main

cpu_inserted:
        mov     $CPU_FLAGS, %dx
        mov     $INSERTED, %al
        out     %al, %dx
        mov     $OST_INSERT, %edi
        mov     $OST_DONE, %ebp
        jmp     cpu_ost

cpu_removing:
        cmp     $'i', %bl
        je      2f
        mov     $CPU_FLAGS, %dx
        mov     $REMOVING, %al
        out     %al, %dx
        mov     $OST_EJECT, %edi
        cmp     $'r', %bl
        jne     1f
        mov     $OST_REFUSED, %ebp
        jmp     cpu_ost
1:      mov     $OST_EJECTING, %ebp
        call    cpu_ost
        mov     $CPU_FLAGS, %dx
        mov     $EJECT, %al
        out     %al, %dx
        mov     $OST_DONE, %ebp
cpu_ost:
        mov     $CPU_COMMAND, %dx
        mov     $1, %al                 # the event follows
        out     %al, %dx
        mov     $CPU_DATA, %dx
        mov     %edi, %eax
        out     %eax, %dx
        mov     $CPU_COMMAND, %dx
        mov     $2, %al                 # the status follows
        out     %al, %dx
        mov     $CPU_DATA, %dx
        mov     %ebp, %eax
        out     %eax, %dx
2:      ret

dimm_inserted:
        mov     $MEM_FLAGS, %dx
        mov     $INSERTED, %al
        out     %al, %dx
        mov     $OST_INSERT, %edi
        mov     $OST_DONE, %ebp
        jmp     dimm_ost

dimm_removing:
        cmp     $'i', %bl
        je      2f
        mov     $MEM_FLAGS, %dx
        mov     $REMOVING, %al
        out     %al, %dx
        mov     $OST_EJECT, %edi
        cmp     $'r', %bl
        jne     1f
        mov     $OST_REFUSED, %ebp
        jmp     dimm_ost
1:      mov     $OST_EJECTING, %ebp
        call    dimm_ost
        mov     $MEM_FLAGS, %dx
        mov     $EJECT, %al
        out     %al, %dx
        mov     $OST_DONE, %ebp
dimm_ost:
        mov     $MEM_EVENT, %dx
        mov     %edi, %eax
        out     %eax, %dx
        mov     $MEM_STATUS, %dx
        mov     %ebp, %eax
        out     %eax, %dx
2:      ret

put_line:                               # %al and a newline
        mov     $COM1, %dx
        out     %al, %dx
        mov     $'\n', %al
        out     %al, %dx
        ret

on_sci: push    %ax
        push    %dx
        mov     $GPE0_STATUS, %dx
        in      %dx, %al
        or      %al, RAISED
        mov     $GPE_HOTPLUG, %al       # clear what was raised
        out     %al, %dx
        mov     $0x20, %al              # end of interrupt, both PICs
        out     %al, $0xa0
        out     %al, $0x20
        pop     %dx
        pop     %ax
        iret

on_serial:
        push    %ax
        mov     $0x20, %al
        out     %al, $0x20
        pop     %ax
        iret

gdt:    .quad   0, 0x00cf93000000ffff   # flat data
gdt_pointer:
        .word   15
        .long   0xf0000 + gdt

        .org    0xfff0                  # where the CPU starts
        ljmp    $0xf000, $start
        .org    0xffff
        .byte   0
