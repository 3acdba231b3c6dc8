"""Cloud Hypervisor's memory: what it can do, and what ``vm.info`` says of it. Pure.

ACPI
    Grows by pieces of 128 MiB, which are there at once, in eight steps from one start to the next. Never shrinks while
    the guest runs: a smaller size is accepted, shown, and has no effect.
virtio-mem
    The guest comes to the size that it is asked for, in blocks of 2 MiB. Since v52 ``memory_actual_size`` tells how
    far it has come; before, it tells what was asked for, and nothing tells more.

A balloon, if there is one, takes from what the guest has: ``memory_actual_size`` is without what it holds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hypervisors.base import MemoryHotplug, MemoryMethod
from hypervisors.ch_types import ConfigInfo, VmInfo

MIB: Final = 1 << 20
PIECE: Final = 128 * MIB
BLOCK: Final = 2 * MIB
SLOTS: Final = 8
"""How often memory can be added by ACPI between two starts of the guest."""
NO_SLOT: Final = "No ACPI slot available"
"""What the VMM says to one more."""

_VIRTIO_MEM: Final = "VirtioMem"


class Memory(NamedTuple):
    """Bytes, boot memory included."""

    present: int
    asked: int


def memory(info: VmInfo) -> Memory:
    """What there is, and what was asked for."""
    config = info.config.memory
    asked = config.size + config.hotplugged_size
    if config.zones:
        asked = info.memory_actual_size
    return Memory(info.memory_actual_size or asked, asked)


def hotplug(config: ConfigInfo, boot_memory: int) -> MemoryHotplug:
    """What the machine's memory can do. *boot_memory* in bytes: with ACPI the VMM does not remember it."""
    if why_fixed(config):
        return MemoryHotplug(MemoryMethod.NONE)
    memory = config.memory
    if memory.hotplug_method == _VIRTIO_MEM:
        return MemoryHotplug(MemoryMethod.VIRTIO_MEM, BLOCK, memory.size + memory.hotplug_size)
    return MemoryHotplug(MemoryMethod.ACPI, PIECE, boot_memory + memory.hotplug_size)


def why_fixed(config: ConfigInfo) -> str | None:
    """Why the memory cannot change; None where it can."""
    if config.memory.zones:
        return "memory zones are not resized: boot the VM without zones (memory.zones)"
    if not config.memory.hotplug_size:
        return "the VM was booted without room to grow (memory.hotplug_size)"
    if config.platform.tdx or config.platform.sev_snp:
        return "a confidential VM keeps the memory that it was booted with"
    return None
