"""The next step: from what is desired and what is plugged to the one thing to do now (SPEC 7).

Pure. A grow, a shrink, a retry, a roll-back's surplus and a restart are all the same here: desired and plugged
differ, take one step. vCPUs and memory take turns: one step is a step of one of them. Times are readings of one
monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TypeAlias

import msgspec

from hypervisors.base import Plugged
from kata_resmgr import memory_step
from kata_resmgr.memory_step import GrowMemory, MemorySituation, ShrinkMemory
from kata_resmgr.removal import Removal

LOOK_FIRST = 0.02
LOOK_LONGEST = 10.0
"""Seconds between looks at what is under way and does not tell of its end: as long as it has been asked for, from the
first to the longest."""


class Situation(msgspec.Struct, frozen=True, gc=False):
    """All that the next step depends on."""

    desired: int
    plugged: Plugged
    max_vcpus: int
    pending: Mapping[str, Removal]
    keep: int
    """What :class:`Grace` says; 0 when a shrink may start at once."""
    keep_until: float | None
    """Infinite while what somebody else plugged is let stand."""
    grow_from: float
    """Not to be grown before then: the pause after a refusal; infinite while a foreign removal is let stand."""
    removable: bool
    """Whether vCPUs may be removed on this machine (not under TCG)."""
    growable: bool
    """Whether vCPUs may be added (under TCG not after a removal)."""
    one_by_one: bool = False
    """Whether a removal is to end before the next one starts (under TCG: QEMU loses vCPUs' wake-ups otherwise)."""
    one_resize: bool = False
    """Whether nothing else may be resized while vCPUs are being removed (Cloud Hypervisor)."""
    tells_changes: bool = True
    """Whether the hypervisor speaks when something changes. Otherwise what is under way has to be looked at."""
    fresh: bool = True
    """Whether nothing has been done since *plugged* was read."""
    sent_at: float = 0.0
    """When something was last asked of the hypervisor, and *read_at* when it was last read."""
    read_at: float = 0.0
    memory: MemorySituation | None = None
    """None: the memory is not driven, and has the size that it has."""

    @property
    def waits(self) -> bool:
        """Whether nothing may be resized before the removal of vCPUs that is under way has ended."""
        return self.one_resize and bool(self.pending)


class AddVcpus(msgspec.Struct, frozen=True, gc=False):
    count: int


class RemoveVcpus(msgspec.Struct, frozen=True, gc=False):
    """Ask for these, in this order; some may have been asked for before."""

    ids: tuple[str, ...]


class Look(msgspec.Struct, frozen=True, gc=False):
    """Read back."""


class Idle(msgspec.Struct, frozen=True, gc=False):
    """Nothing to do until then, or until something happens."""

    until: float | None


Step: TypeAlias = AddVcpus | RemoveVcpus | GrowMemory | ShrinkMemory | Look | Idle


def effective(plugged: Plugged, pending: Mapping[str, Removal]) -> int:
    """vCPUs that will stay: what is plugged less what was asked to leave."""
    return len(plugged.vcpus) - len(pending)


def next_step(now: float, situation: Situation) -> Step:
    """The one thing to do now.

    Growing comes before shrinking, and vCPUs before memory. First what is surplus and not being removed serves a
    grow, then free slots do. Where a removal holds the slots that are needed, its end is waited for. A shrink takes
    the last plugged first; what is not ours is never asked.
    """
    s = situation
    memory = None if s.waits else s.memory
    step: Step | None = _add(now, s)
    if step is None and memory is not None:
        step = memory_step.grow(now, memory)
    if step is None:
        step = _remove(now, s)
    if step is None and memory is not None:
        step = memory_step.shrink(now, memory)
    if step is not None:
        return step
    look = _look_at(s)
    if look is not None and look <= now:
        return Look()
    return Idle(min(_times(s, look), default=None))


def _add(now: float, s: Situation) -> AddVcpus | None:
    lacking = s.desired - effective(s.plugged, s.pending)
    if lacking <= 0 or not s.growable or now < s.grow_from or s.waits:
        return None
    free = s.max_vcpus - len(s.plugged.vcpus)
    return AddVcpus(min(lacking, free)) if free > 0 else None


def _remove(now: float, s: Situation) -> RemoveVcpus | Look | None:
    if not s.removable:
        return None
    ask: list[str] = []
    surplus = effective(s.plugged, s.pending) - max(s.desired, s.keep, s.plugged.vcpu_floor)
    if s.one_by_one:
        surplus = min(surplus, 1 - len(s.pending))
    if surplus > 0 and not s.waits:
        ask.extend(_last_plugged(s.plugged, s.pending, surplus))
        if ask and not s.fresh and not s.tells_changes:
            return Look()  # what the floor follows from may have changed
    ask.extend(vcpu for vcpu, removal in s.pending.items() if removal.due <= now)
    return RemoveVcpus(tuple(ask)) if ask else None


def _look_at(s: Situation) -> float | None:
    """When to look at what is under way; None: nothing is, or its end will be told."""
    moves = s.memory is not None and s.plugged.memory_asked is not None  # events of it are few and late (measured)
    if not moves and (s.tells_changes or not (s.pending or (s.memory is not None and s.memory.leaving))):
        return None
    return max(s.read_at, s.sent_at) + min(max(s.read_at - s.sent_at, LOOK_FIRST), LOOK_LONGEST)


def _times(s: Situation, look: float | None) -> Iterable[float]:
    """When there is something to do, if nothing happens before."""
    stays = effective(s.plugged, s.pending)
    if s.removable:
        for removal in s.pending.values():
            yield removal.due
        if s.keep_until is not None and s.keep_until != inf and stays > s.desired:
            yield s.keep_until
    if stays < s.desired and s.growable and s.max_vcpus > len(s.plugged.vcpus) and s.grow_from != inf and not s.waits:
        yield s.grow_from
    if s.memory is not None and not s.waits:
        yield from memory_step.times(s.memory)
    if look is not None:
        yield look


def _last_plugged(plugged: Plugged, pending: Mapping[str, Removal], count: int) -> Iterable[str]:
    for vcpu in reversed(plugged.vcpus):
        if count == 0:
            return
        if vcpu.ours and vcpu.id not in pending:
            count -= 1
            yield vcpu.id


def leavable(situation: Situation) -> bool:
    """Whether something that is surplus, and is not being removed, could still be removed."""
    s = situation
    if s.memory is not None and memory_step.leavable(s.memory):
        return True
    return (
        s.removable
        and effective(s.plugged, s.pending) > max(s.desired, s.plugged.vcpu_floor)
        and any(vcpu.ours and vcpu.id not in s.pending for vcpu in s.plugged.vcpus)
    )


def surplus_reason(now: float, situation: Situation) -> str | None:
    """Why what is plugged above desired is still there (SPEC 7); None without surplus or while a removal is fresh.

    Where vCPUs and memory have different ones, that of the vCPUs, but one that passes (``grace``) gives way.
    """
    s = situation
    memory = None if s.memory is None else memory_step.surplus_reason(now, s.memory)
    vcpus = _vcpu_surplus_reason(now, s)
    return memory if vcpus is None or (vcpus == "grace" and memory is not None) else vcpus


def _vcpu_surplus_reason(now: float, s: Situation) -> str | None:
    if len(s.plugged.vcpus) <= s.desired:
        return None
    if any(removal.refused for removal in s.pending.values()):
        return "guest-refused"
    if any(removal.attempts > 1 for removal in s.pending.values()):
        return "guest-silent"
    if s.pending:
        return None
    if not any(vcpu.ours for vcpu in s.plugged.vcpus):
        return "boot-floor"
    if not s.removable:
        return "tcg"
    if len(s.plugged.vcpus) <= s.plugged.vcpu_floor:
        return "queue-floor"
    return "grace" if s.keep_until is not None and now < s.keep_until else None
