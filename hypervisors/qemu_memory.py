"""A QEMU's memory: what the machine can do, what it has, and the arguments of what changes it. No I/O.

What this module relies on was measured on QEMU 7.2:

- ``memory`` of ``/machine`` tells the slots and the size of the address space, both left out where there are none; a
  virtio-mem device is a row of ``query-memory-devices`` from the start. So the method is what the machine has.
- ``query-memory-size-summary`` counts an NVDIMM as memory, which to the guest is a disk (Kata's root image is one). So
  the size is added up from ``query-memory-devices``, and an NVDIMM only takes a slot and its room.
- A backend outlives the device that was to use it, whether that was refused or has left. What is called ours and used
  by nobody is an orphan, and one rule finds all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from hypervisors.base import FIXED_MEMORY, Dimm, MemoryHotplug, MemoryMethod

MIB: Final = 1 << 20

OUR_DIMM: Final = "resmgr-mem-"
"""What a DIMM that the driver plugs is called, and its backend, with a number that counts up (as for vCPUs)."""
VIRTIO_MEM: Final = "resmgr-virtio-mem"
"""The virtio-mem device of our own arguments, and its backend."""
DIMM_GRANULARITY: Final = 128 * MIB
"""Bytes: Linux's smallest block of memory on x86. A DIMM that is no multiple is taken by QEMU and ignored by Linux."""

PREALLOCATED: Final = 256 * MIB
"""Bytes that a host provides in a second, at the least (measured: 512 MiB of shared memory, on two busy cores)."""

_OUR_DIMM: Final = re.compile(re.escape(OUR_DIMM) + "([1-9][0-9]{0,8})")
_OBJECTS: Final = "/objects/"
_DIMM: Final = "dimm"
_VIRTIO_MEM: Final = "virtio-mem"
_SLOTTED: Final = (_DIMM, "nvdimm")
"""Kinds of memory device that sit in an ACPI slot."""


# What QEMU answers

_MOST: Final = (1 << 63) - 1
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST)]
"""JSON's numbers have no bounds; QEMU's counts and sizes fit into 63 bits."""


class Configured(msgspec.Struct, rename="kebab", gc=False):
    """``memory`` of ``/machine``: bytes. Unknown before QEMU 7.1."""

    max_size: Natural = 0
    slots: Natural = 0


class Summary(msgspec.Struct, rename="kebab", gc=False):
    """``query-memory-size-summary``: bytes."""

    base_memory: Natural


class _Data(msgspec.Struct, rename="kebab", gc=False):
    id: str = ""
    memdev: str = ""
    size: Natural = 0
    slot: Annotated[int, Meta(ge=-1, le=_MOST)] = -1
    requested_size: Natural = 0
    max_size: Natural = 0
    block_size: Annotated[int, Meta(ge=1, le=_MOST)] = 1


class MemoryDevice(msgspec.Struct, gc=False):
    """A row of ``query-memory-devices``."""

    type: str
    data: _Data


class Backend(msgspec.Struct, rename="kebab", gc=False):
    """A row of ``query-memdev``: who lends host memory to the guest, and on which terms."""

    id: str = ""
    size: Natural = 0
    share: bool = False
    prealloc: bool = False
    merge: bool = True
    dump: bool = True
    reserve: bool = True
    policy: str = "default"
    host_nodes: list[int] = []


# What that means


class Ability(msgspec.Struct, frozen=True, gc=False):
    """What the machine can do, and what it needs to be asked by."""

    hotplug: MemoryHotplug = FIXED_MEMORY
    base: int = 0
    """Bytes: the boot memory."""
    slots: int = 0
    device: str = ""
    """The id of the virtio-mem device."""


class Memory(msgspec.Struct, frozen=True, gc=False):
    """What the machine has, as just read."""

    total: int = 0
    asked: int | None = None
    dimms: tuple[Dimm, ...] = ()
    grows_left: int | None = None
    requested: int = 0
    """Bytes that are asked of the virtio-mem device."""
    beside: int = 0
    """Bytes that are there beside what is in the virtio-mem device."""
    slots: Mapping[int, str] = {}
    """Who sits in which slot."""
    highest: int = 0
    """The highest number in a name of ours."""
    orphans: tuple[str, ...] = ()
    """Backends of ours that no device uses."""


def ability(base: int, configured: Configured, devices: Sequence[MemoryDevice]) -> Ability:
    """What a machine with *base* bytes can do. A virtio-mem device without an id cannot be asked, so it is none."""
    room = configured.max_size - sum(row.data.size for row in devices if row.type not in (_DIMM, _VIRTIO_MEM))
    movable = [row.data for row in devices if row.type == _VIRTIO_MEM and row.data.id]
    if movable:
        chosen = next((data for data in movable if data.id == VIRTIO_MEM), movable[0])
        beside = sum(row.data.size for row in devices if row.type in (_DIMM, _VIRTIO_MEM)) - chosen.size
        hotplug = MemoryHotplug(MemoryMethod.VIRTIO_MEM, chosen.block_size, base + beside + chosen.max_size)
        return Ability(hotplug, base, configured.slots, chosen.id)
    if configured.slots and room > base:
        return Ability(MemoryHotplug(MemoryMethod.DIMM, DIMM_GRANULARITY, room), base, configured.slots)
    return Ability(base=base)


def memory(able: Ability, devices: Sequence[MemoryDevice], backends: Sequence[Backend] = ()) -> Memory:
    """What there is. Without *backends*, those of our name that nobody uses are not found."""
    total, requested, moving = able.base, 0, 0
    dimms: list[tuple[int, Dimm]] = []
    slots: dict[int, str] = {}
    used = set()
    for row in devices:
        data = row.data
        used.add(data.memdev.removeprefix(_OBJECTS))
        if row.type in _SLOTTED:
            slots[data.slot] = data.id
        if row.type in (_DIMM, _VIRTIO_MEM):
            total += data.size
        if row.type == _DIMM:
            number = _number(data.id)
            dimms.append((number, Dimm(data.id or data.memdev, data.size, ours=number > 0)))
        elif row.type == _VIRTIO_MEM and data.id == able.device:
            requested, moving = data.requested_size, data.size
    dimms.sort(key=_first)  # stable: those that are not ours stay in QEMU's order, and before ours
    ours = [backend.id for backend in backends if _number(backend.id)]
    return Memory(
        total=total,
        asked=total - moving + requested if requested != moving else None,
        dimms=tuple([dimm for _, dimm in dimms]),
        grows_left=max(0, able.slots - len(slots)) if able.hotplug.method is MemoryMethod.DIMM else None,
        requested=requested,
        beside=total - moving,
        slots=slots,
        highest=max([0, *(number for number, _ in dimms), *map(_number, ours)]),
        orphans=tuple([backend for backend in ours if backend not in used]),
    )


def _number(name: str) -> int:
    """The number in a name of ours, and 0 in any other."""
    ours = _OUR_DIMM.fullmatch(name)
    return int(ours[1]) if ours else 0


def _first(pair: tuple[int, Dimm]) -> int:
    return pair[0]


# What may be asked


def piece(able: Ability, now: Memory, to: int) -> int:
    """Bytes of the DIMM that brings the machine *to* so many. Raises :class:`ValueError` for what cannot be."""
    by = to - now.total
    if by <= 0 or by % able.hotplug.granularity:
        raise ValueError(
            f"{to} bytes cannot be grown to from {now.total}: a DIMM is a multiple of {able.hotplug.granularity} bytes"
        )
    _check_maximum(able, to)
    return by


def requested_size(able: Ability, now: Memory, to: int) -> int:
    """Bytes that the virtio-mem device is asked for, so that there are *to*. Raises as :func:`piece` does."""
    size = to - now.beside
    if size < 0 or size % able.hotplug.granularity:
        raise ValueError(
            f"{to} bytes cannot be asked for: beside virtio-mem there are {now.beside}, and it moves by "
            f"{able.hotplug.granularity}"
        )
    _check_maximum(able, to)
    return size


def _check_maximum(able: Ability, to: int) -> None:
    if to > able.hotplug.maximum:
        raise ValueError(f"{to} bytes are above the machine's maximum of {able.hotplug.maximum}")


# The boot memory's backend, and more of its kind

_KINDS: Final = {
    "memory-backend-file": ("mem-path",),
    "memory-backend-memfd": ("hugetlb", "hugetlbsize", "seal"),
    "memory-backend-ram": (),
    "memory-backend-shm": (),
}
"""Kinds of backend of which there can be another, with the properties that ``query-memdev`` does not tell."""


def boot_backend(named: str, backends: Iterable[Backend], devices: Iterable[MemoryDevice]) -> Backend | None:
    """The backend of the boot memory: the one *named* by ``/machine``, which names none where each NUMA node has one.

    Then it is the first by name: nodes are numbered, and so are their backends, from node 0 up, where DIMMs go.
    """
    used = {row.data.memdev.removeprefix(_OBJECTS) for row in devices}
    boot = [backend for backend in backends if backend.id not in used and not _number(backend.id)]
    chosen = [backend for backend in boot if backend.id == named.removeprefix(_OBJECTS)]
    return min(chosen or boot, key=lambda backend: backend.id, default=None)


def seconds_to_lend(size: int, backends: Iterable[Backend]) -> float:
    """How much longer QEMU may take for a DIMM of *size* bytes, whose backend is as the boot memory's.

    It answers nothing until all of a preallocated one is there. In doubt which is the boot memory's, any will do.
    """
    return size / PREALLOCATED if any(backend.prealloc for backend in backends) else 0.0


def properties(kind: str) -> tuple[str, ...]:
    """What is to be asked of a backend of that kind beside what ``query-memdev`` tells."""
    return (*_KINDS.get(kind, ()), "prealloc-threads")


def another(like: Backend, kind: str, told: Mapping[str, object], *, private_path: bool) -> dict[str, object]:
    """The arguments of ``object-add``, but for ``id`` and ``size``, for a backend as *like* is.

    *told* are the values of its :func:`properties`. A file is mapped from its beginning: two backends in the same one
    would be the same memory. With *private_path* the path is such a file, not a directory in which each backend makes
    its own, and memory of no name takes its place.
    """
    if kind not in _KINDS:
        kind = "memory-backend-ram"
    if kind == "memory-backend-file" and private_path:
        kind = "memory-backend-memfd"
    more = {name: told[name] for name in _KINDS[kind] if name in told}
    if not more.get("hugetlb", False):
        more.pop("hugetlbsize", None)  # told as 0, and then refused
    arguments: dict[str, object] = {"qom-type": kind, "share": like.share, **more}
    if like.prealloc:
        arguments["prealloc"] = True
        if "prealloc-threads" in told:
            arguments["prealloc-threads"] = told["prealloc-threads"]
    if like.host_nodes:
        arguments |= {"host-nodes": like.host_nodes, "policy": like.policy}
    for name, value in (("merge", like.merge), ("dump", like.dump), ("reserve", like.reserve)):
        if not value:
            arguments[name] = False
    return arguments
