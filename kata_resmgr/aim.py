"""What is wanted of one resource of a VM, its vCPUs or its bytes of memory, and what was asked of the guest for it.

Times are readings of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from math import inf

from kata_resmgr.removal import Removal, pause


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


class Aim:
    """One resource: vCPUs, or bytes. Mutable; its VM alone changes it."""

    __slots__ = ("_tries", "desired", "grace", "grow_from", "lets_stand", "pending")

    def __init__(self) -> None:
        self.desired = 0
        self.pending: dict[str, Removal] = {}
        """Removals that were sent and have not been seen to end."""
        self.grace = Grace()
        self.grow_from = 0.0
        """Not to be grown before then; infinite while what somebody else took is let stand."""
        self.lets_stand = False
        """Whether what somebody else has added is let stand: nothing of ours goes for it."""
        self._tries = 0

    def move(self, desired: int, grace_until: float) -> bool:
        """From now on *desired* is wanted; where that is less, the old size is kept until then. Whether it is new."""
        if desired == self.desired:
            return False
        self.grace.note(self.desired, desired, grace_until)
        self.desired = desired
        self.lets_stand = False
        return True

    # Growing

    def try_again(self) -> None:
        """An operation or reconcile: do not wait out a pause, nor let stand what somebody else has done."""
        self.grow_from = 0.0
        self.lets_stand = False
        self._tries = 0

    def grown(self) -> None:
        """An attempt has brought what was asked for."""
        self._tries = 0
        if self.grow_from != inf:
            self.grow_from = 0.0

    def failed(self) -> int:
        """An attempt to grow has brought nothing, or not yet all; how many in a row there were."""
        self._tries += 1
        return self._tries

    def pause(self, now: float) -> None:
        """The next attempt comes after a pause that gets longer with each."""
        self.grow_from = now + pause(self._tries)

    # Shrinking

    def keep(self, now: float, there: int) -> int:
        """Not to be shrunk below; 0 when a shrink may start at once."""
        return there if self.lets_stand else self.grace.highest(now)

    @property
    def keep_until(self) -> float | None:
        """When that is over, or becomes less; after :meth:`keep`."""
        return inf if self.lets_stand else self.grace.ends()

    def shrink_now(self) -> None:
        """Do not wait out ``shrink_delay``, nor the pause before removals are repeated."""
        self.grace.end()
        self.lets_stand = False
        self.hurry()

    def pending_with(self, sizes: Mapping[str, int], now: float) -> dict[str, Removal]:
        """The removals as they are when these have been sent; *sizes* are their bytes, 0 for vCPUs.

        One of another size than before is another one.
        """
        pending = self.pending.copy()
        for unit, size in sizes.items():
            known = pending.get(unit)
            same = known is not None and known.size == size
            pending[unit] = known.again(now) if known is not None and same else Removal(now, now, size=size)
        return pending

    def hurry(self) -> None:
        """Repeat the removals at once."""
        self.pending = {unit: removal.hurried() for unit, removal in self.pending.items()}

    def strike_out(self, units: Collection[str]) -> None:
        """These removals have ended."""
        for unit in units:
            del self.pending[unit]
