"""What a shim adds to QEMU's command line, and to the guest's kernel, so that the driver can do its work."""

from __future__ import annotations

from typing import Final

from hypervisors import qemu_memory_args

KERNEL_PARAMS: Final = ("memhp_default_state=online_movable",)
"""Memory that is plugged comes up by itself, and in the zone from which it can be taken out again."""

_MONITOR: Final = "resmgr"


def vmm_arguments(
    vcpus: int,
    max_vcpus: int,
    memory_mib: int,
    max_memory_mib: int,
    memory_slots: int,
    monitor: str,
    *,
    machine_type: str = "q35",
    virtio_mem: bool = False,
    huge_pages: bool = False,
    prealloc: bool = False,
    free_page_reporting: bool = False,
) -> list[str]:
    """QEMU's arguments for a VM that can grow from *vcpus* and *memory_mib* to the maxima.

    *monitor* is the path of the socket that QEMU shall listen on. Where the boot vCPUs are the maximum already, as in
    static mode and on machines without hot-plug, nothing is said about more. Without *memory_slots*, or where the boot
    memory is the maximum already, memory cannot be plugged and nothing is said about it. Otherwise it comes through
    DIMMs, or through *virtio_mem*, lent as *huge_pages* and *prealloc* say. With *free_page_reporting* the host gets
    back what the guest frees.

    Raises :class:`ValueError` for a maximum below what the VM is started with.
    """
    if not 1 <= vcpus <= max_vcpus:
        raise ValueError(f"vcpus is {vcpus}, and must be from 1 to max_vcpus, {max_vcpus}")
    if not 1 <= memory_mib <= max_memory_mib:
        raise ValueError(f"memory_mib is {memory_mib}, and must be from 1 to max_memory_mib, {max_memory_mib}")
    room = qemu_memory_args.growth(memory_mib, max_memory_mib, virtio_mem=virtio_mem) if memory_slots else 0
    devices = []
    if virtio_mem and room:
        devices += qemu_memory_args.virtio_mem(room, huge_pages=huge_pages, prealloc=prealloc)
    if free_page_reporting:
        devices += qemu_memory_args.free_page_reporting(machine_type)
    return [
        "-smp",
        f"{vcpus},maxcpus={max_vcpus}" if max_vcpus > vcpus else f"{vcpus}",
        "-m",
        f"{memory_mib}M,slots={memory_slots},maxmem={memory_mib + room}M" if room else f"{memory_mib}M",
        *devices,
        "-chardev",
        f"socket,id={_MONITOR},path={_escaped(monitor)},server=on,wait=off",
        "-mon",
        f"chardev={_MONITOR},mode=control",
    ]


def _escaped(value: str) -> str:
    """*value* as QEMU's option parser reads it back: a comma is written twice."""
    return value.replace(",", ",,")
