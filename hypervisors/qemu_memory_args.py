"""QEMU's arguments for memory that comes and goes: what :mod:`hypervisors.qemu_memory` drives later. Pure.

The boot memory's backend is left to whoever starts QEMU: virtio-fs wants it shared, templates want it in a file, and a
DIMM's is made like it. Only virtio-mem's memory has to be there from the start, as a device of no size yet: q35's root
bus takes no devices later.
"""

from __future__ import annotations

from typing import Final

from hypervisors.qemu_memory import VIRTIO_MEM

VIRTIO_MEM_BLOCK_MIB: Final = 2
"""What the size of the device is a multiple of."""

_BALLOON: Final = "resmgr-balloon"
_VIRTIO_MEM_SLOT: Final = "0x1e"
_BALLOON_SLOT: Final = "0x1d"
"""PCI slots from the far end of the bus: QEMU fills it from the near end, and Kata numbers its bridges from 2 up."""


def growth(memory_mib: int, max_memory_mib: int, *, virtio_mem: bool) -> int:
    """MiB that can be added to *memory_mib*; virtio-mem's are whole blocks."""
    room = max_memory_mib - memory_mib
    return room - room % VIRTIO_MEM_BLOCK_MIB if virtio_mem else room


def virtio_mem(size_mib: int, *, huge_pages: bool, prealloc: bool) -> list[str]:
    """A virtio-mem device that can come to *size_mib*, and has nothing yet.

    Its memory is shared: a device in a process of its own (virtio-fs) could not reach it otherwise. No host memory is
    set aside for it. With *prealloc* what is plugged is there at once; so it is with *huge_pages*, since a QEMU whose
    guest touches a huge page that the host has not got is killed.
    """
    lender = f"memory-backend-memfd,id={VIRTIO_MEM},size={size_mib}M,share=on,reserve=off"
    device = f"virtio-mem-pci,id={VIRTIO_MEM},memdev={VIRTIO_MEM},requested-size=0,addr={_VIRTIO_MEM_SLOT}"
    if huge_pages:
        lender += ",hugetlb=on"
    if huge_pages or prealloc:
        device += ",prealloc=on"
    return ["-object", lender, "-device", device]


def free_page_reporting(machine_type: str) -> list[str]:
    """A balloon that is never blown up: through it the guest tells which pages it has freed, and they are let go."""
    place = "virtio-balloon-device" if machine_type == "microvm" else f"virtio-balloon-pci,addr={_BALLOON_SLOT}"
    return ["-device", f"{place},id={_BALLOON},free-page-reporting=on,deflate-on-oom=on"]
