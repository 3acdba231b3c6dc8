"""The next step of a VM's memory, for each way in which a machine's memory changes (SPEC 5, 7 to 9).

Pure, as :mod:`kata_resmgr.step` is, which puts it together with that of the vCPUs. All sizes are bytes, boot memory
included.

- DIMMs come and leave whole. One that does not fit into what is surplus stays.
- virtio-mem has one size that is *asked* for. The guest comes to it in its own time, or gets stuck, says nothing, and
  tries again when it is asked again (measured; with the same size too).
- ACPI memory (Cloud Hypervisor) only ever grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from math import inf
from typing import NamedTuple

import msgspec

from hypervisors.base import Dimm, MemoryMethod, Plugged
from kata_resmgr.removal import Removal

GROWTH_MAX = 48
"""How many times the present memory may come at once: a guest describes new memory in its old, a page in 64 bytes."""
WHOLE = "memory"
"""The unit of a removal where memory has no pieces."""


class MemorySituation(msgspec.Struct, frozen=True, gc=False):
    """All that the next step depends on."""

    desired: int
    plugged: Plugged
    method: MemoryMethod
    granularity: int
    """What machine and guest both take."""
    maximum: int
    """What the machine can ever have."""
    pending: Mapping[str, Removal]
    keep: int = 0
    """Not to be shrunk below, for a while; 0 when a shrink may start at once."""
    keep_until: float | None = None
    """Infinite while what somebody else has made of it is let stand."""
    grow_from: float = 0.0
    """Not to be grown before then; infinite while a foreign change is let stand."""

    @property
    def asked(self) -> int:
        """What there is once the guest has done as it was asked."""
        return asked(self.plugged)

    @property
    def leaving(self) -> int:
        """What was asked to leave and is still there."""
        if self.method is MemoryMethod.DIMM:
            return sum(removal.size for removal in self.pending.values())
        return max(self.plugged.memory - self.asked, 0)

    @property
    def stays(self) -> int:
        """What is there and will stay: effective."""
        return self.plugged.memory - self.leaving

    @property
    def room(self) -> int:
        """How much more the machine can take, in whole granules."""
        has = self.plugged.memory if self.method is MemoryMethod.DIMM else self.asked
        return self._whole(self.maximum - has)

    def _whole(self, size: int) -> int:
        """*size* in whole granules, rounded down."""
        return max(size, 0) // self.granularity * self.granularity


class GrowMemory(msgspec.Struct, frozen=True, gc=False):
    """Ask for so much in all."""

    to: int


class ShrinkMemory(msgspec.Struct, frozen=True, gc=False):
    """Ask the guest to give back until so much is left."""

    to: int
    units: Mapping[str, int]
    """What is to leave, and its bytes: DIMMs, in this order; else :data:`WHOLE`. Some may have been asked before.

    Nothing where a grow that the guest has not come to yet is taken back.
    """


class Obstacle(Enum):
    """Why a machine cannot be grown as things are."""

    SLOTS = "no slot is left"
    ROOM = "the machine's maximum is reached"
    REMOVAL = "what is being removed holds what is needed"


def asked(plugged: Plugged) -> int:
    """What there is once the guest has done as it was asked."""
    return plugged.memory if plugged.memory_asked is None else plugged.memory_asked


def obstacle(s: MemorySituation) -> Obstacle | None:
    """What stands in the way of what is lacking; None: nothing, or nothing is lacking."""
    if s.stays >= s.desired or (s.method is MemoryMethod.VIRTIO_MEM and s.asked >= s.desired):
        return None
    no_slot = s.plugged.memory_grows_left == 0
    if not no_slot and s.room:
        return None
    if s.leaving:
        return Obstacle.REMOVAL
    return Obstacle.SLOTS if no_slot else Obstacle.ROOM


def grow(now: float, s: MemorySituation) -> GrowMemory | None:
    """The next step up, where something is lacking and can be asked for now."""
    if s.stays >= s.desired or now < s.grow_from or obstacle(s) is not None:
        return None
    if s.method is MemoryMethod.VIRTIO_MEM:
        return GrowMemory(s.asked + min(_granules(s.desired - s.asked, s), s.room))
    lacking = _granules(s.desired - s.stays, s)
    at_once = max(s._whole(GROWTH_MAX * s.plugged.memory), s.granularity)
    return GrowMemory(s.plugged.memory + min(lacking, at_once, s.room))


def shrink(now: float, s: MemorySituation) -> ShrinkMemory | None:
    """The next step down: what is surplus and has not been asked to leave, and what is to be asked again."""
    match s.method:
        case MemoryMethod.DIMM:
            units = {dimm.id: dimm.size for dimm in _fitting(s, s.stays - max(s.desired, s.keep))}
            to = s.stays - sum(units.values())
            units |= {unit: removal.size for unit, removal in s.pending.items() if removal.due <= now}
            return ShrinkMemory(to, units) if units else None
        case MemoryMethod.VIRTIO_MEM if (wish := _wish(s)) is not None and wish.due <= now:
            return ShrinkMemory(wish.to, {WHOLE: wish.size} if wish.size else {})
    return None


class _Wish(NamedTuple):
    """What virtio-mem should be asked to come down to, the bytes that leave, and when to say so."""

    to: int
    size: int
    due: float


def _wish(s: MemorySituation) -> _Wish | None:
    if s.keep_until == inf:
        return None
    known = s.pending.get(WHOLE)
    if more := s._whole(s.asked - max(s.desired, s.keep, s.plugged.memory_floor)):
        to = s.asked - more
        size = max(s.plugged.memory - to, 0)
        return _Wish(to, size, known.due if known is not None and known.size == size else -inf)
    if s.leaving:
        return _Wish(s.asked, s.leaving, -inf) if known is None else _Wish(s.asked, known.size, known.due)
    return None


def times(s: MemorySituation) -> Iterable[float]:
    """When there is something to do, if nothing happens before."""
    if s.method is MemoryMethod.DIMM:
        for removal in s.pending.values():
            yield removal.due
    elif s.method is MemoryMethod.VIRTIO_MEM and (wish := _wish(s)) is not None:
        yield wish.due
    if s.keep_until is not None and s.keep_until != inf and leavable(s):
        yield s.keep_until
    if s.stays < s.desired and s.grow_from != inf and obstacle(s) is None:
        yield s.grow_from


def leavable(s: MemorySituation) -> bool:
    """Whether something that is surplus, and has not been asked to leave, could still be asked."""
    match s.method:
        case MemoryMethod.DIMM:
            return any(True for _ in _fitting(s, s.stays - s.desired))
        case MemoryMethod.VIRTIO_MEM:
            return s._whole(s.asked - max(s.desired, s.plugged.memory_floor)) > 0
    return False


def surplus_reason(now: float, s: MemorySituation) -> str | None:
    """Why what is plugged above desired is still there (SPEC 7); None without surplus or while a removal is fresh."""
    if s.plugged.memory <= s.desired:
        return None
    if s.method is MemoryMethod.ACPI:
        return "acpi-memory"
    if s.leaving or s.pending:
        if any(removal.refused for removal in s.pending.values()):
            return "guest-refused"
        return "guest-silent" if any(removal.attempts > 1 for removal in s.pending.values()) else None
    if leavable(s):
        return "grace" if s.keep_until is not None and now < s.keep_until else None
    if s.method is MemoryMethod.DIMM:
        return "granularity" if any(dimm.ours for dimm in s.plugged.dimms) else "boot-floor"
    return "boot-floor" if s.plugged.memory_floor > s.desired else "granularity"


def _fitting(s: MemorySituation, surplus: int) -> Iterable[Dimm]:
    """DIMMs of ours that are no more than *surplus* together, the last plugged first."""
    for dimm in reversed(s.plugged.dimms):
        if dimm.ours and dimm.id not in s.pending and dimm.size <= surplus:
            surplus -= dimm.size
            yield dimm


def _granules(size: int, s: MemorySituation) -> int:
    """*size* in whole granules, rounded up; 0 for less than nothing."""
    return -(-max(size, 0) // s.granularity) * s.granularity
