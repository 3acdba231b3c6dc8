"""The next step: from what is desired and what is plugged to the one thing to do now (SPEC 7).

Pure. A grow, a shrink, a retry, a roll-back's surplus and a restart are all the same here: desired and plugged
differ, take one step. Times are readings of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import inf
from typing import TypeAlias

import msgspec

from hypervisors.base import Plugged

REPEATS = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds between one attempt and the next; the last one goes on for ever."""


def pause(attempts: int) -> float:
    """How long to wait after the given number of attempts (1 or more)."""
    return REPEATS[min(attempts, len(REPEATS)) - 1]


class Removal(msgspec.Struct, frozen=True, gc=False):
    """One removal that was sent and has not been seen to end."""

    first: float
    """When it was first sent."""
    last: float
    attempts: int = 1
    refusal: str | None = None
    """What the guest last said, where it said no."""
    refused_attempt: int = 0
    """The attempt that it said no to."""
    urgent: bool = False
    """To be repeated at once: after a guest reset, or when asked to converge now."""

    @property
    def due(self) -> float:
        """When it is to be repeated."""
        return self.last if self.urgent else self.last + pause(self.attempts)

    @property
    def refused(self) -> bool:
        """Whether the guest said no to this attempt, or to the one before while this one has no answer yet."""
        return self.refusal is not None and self.attempts - self.refused_attempt <= 1

    def again(self, now: float) -> Removal:
        """As it is after one more attempt."""
        return msgspec.structs.replace(self, last=now, attempts=self.attempts + 1, urgent=False)

    def hurried(self) -> Removal:
        """As it is when it is to be repeated at once."""
        return msgspec.structs.replace(self, urgent=True)

    def told_no(self, reason: str) -> Removal:
        """As it is after the guest's refusal."""
        return msgspec.structs.replace(self, refusal=reason, refused_attempt=self.attempts)


class Grace:
    """The sizes that were desired a short while ago: a shrink goes no lower until they have been over for the delay.

    A falling sequence of levels with the times at which they cease to count, so that each lower target has stood for
    the whole delay before it is acted on, however often it changes.
    """

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: deque[tuple[int, float]] = deque()

    def note(self, before: int, after: int, until: float) -> None:
        """The target went from *before* to *after*; where it fell, *before* counts until then."""
        while self._levels and self._levels[-1][0] <= max(before, after):
            self._levels.pop()
        if after < before:
            self._levels.append((before, until))

    def highest(self, now: float) -> int:
        """The highest level that still counts; 0 when none does."""
        while self._levels and self._levels[0][1] <= now:
            self._levels.popleft()
        return self._levels[0][0] if self._levels else 0

    def ends(self) -> float | None:
        """When the highest level ceases to count."""
        return self._levels[0][1] if self._levels else None

    def end(self) -> None:
        """Let it be over now."""
        self._levels.clear()


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


class AddVcpus(msgspec.Struct, frozen=True, gc=False):
    count: int


class RemoveVcpus(msgspec.Struct, frozen=True, gc=False):
    """Ask for these, in this order; some may have been asked for before."""

    ids: tuple[str, ...]


class Idle(msgspec.Struct, frozen=True, gc=False):
    """Nothing to do until then, or until something happens."""

    until: float | None


Step: TypeAlias = AddVcpus | RemoveVcpus | Idle


def effective(plugged: Plugged, pending: Mapping[str, Removal]) -> int:
    """vCPUs that will stay: what is plugged less what was asked to leave."""
    return len(plugged.vcpus) - len(pending)


def next_step(now: float, situation: Situation) -> Step:
    """The one thing to do now.

    First what is surplus and not being removed serves a grow, then free slots do. Where a removal holds the slots
    that are needed, its end is waited for. A shrink takes the last plugged first; what is not ours is never asked.
    """
    s = situation
    stays = effective(s.plugged, s.pending)
    if stays < s.desired and s.growable and now >= s.grow_from:
        free = s.max_vcpus - len(s.plugged.vcpus)
        if free > 0:
            return AddVcpus(min(s.desired - stays, free))
    ask: list[str] = []
    if s.removable:
        surplus = stays - max(s.desired, s.keep)
        if s.one_by_one:
            surplus = min(surplus, 1 - len(s.pending))
        if surplus > 0:
            ask.extend(_last_plugged(s.plugged, s.pending, surplus))
        ask.extend(vcpu for vcpu, removal in s.pending.items() if removal.due <= now)
    if ask:
        return RemoveVcpus(tuple(ask))
    return Idle(_earliest(_times(s, stays)))


def _times(s: Situation, stays: int) -> Iterable[float]:
    if s.removable:
        for removal in s.pending.values():
            yield removal.due
        if s.keep_until is not None and s.keep_until != inf and stays > s.desired:
            yield s.keep_until
    if stays < s.desired and s.growable and s.max_vcpus > len(s.plugged.vcpus) and s.grow_from != inf:
        yield s.grow_from


def _last_plugged(plugged: Plugged, pending: Mapping[str, Removal], count: int) -> Iterable[str]:
    for vcpu in reversed(plugged.vcpus):
        if count == 0:
            return
        if vcpu.ours and vcpu.id not in pending:
            count -= 1
            yield vcpu.id


def _earliest(times: Iterable[float]) -> float | None:
    return min(times, default=None)


def leavable(situation: Situation) -> bool:
    """Whether something that is surplus, and is not being removed, could still be removed."""
    s = situation
    return (
        s.removable
        and effective(s.plugged, s.pending) > s.desired
        and any(vcpu.ours and vcpu.id not in s.pending for vcpu in s.plugged.vcpus)
    )


def surplus_reason(now: float, situation: Situation) -> str | None:
    """Why what is plugged above desired is still there (SPEC 7); None without surplus or while a removal is fresh."""
    s = situation
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
    return "grace" if s.keep_until is not None and now < s.keep_until else None
