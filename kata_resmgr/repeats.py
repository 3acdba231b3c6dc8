"""What is said again and again: the first few times in full, then how often.

Pure. Times are readings of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

FIRST: Final = 5
"""Times in the first period that something is said in full; once in each later one."""
SHORTEST: Final = 60.0
LONGEST: Final = 3600.0
"""Seconds of a period: doubled from the shortest to the longest for as long as it is said again in each."""
KINDS: Final = 1024
"""Things that are told apart; beyond that the oldest is forgotten."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Period:
    ends: float
    length: float
    left: int
    said: int = 0
    dropped: int = 0


class Repeats(Generic[K]):
    """Who is to be heard, by what is said."""

    def __init__(self) -> None:
        self._periods: dict[K, _Period] = {}
        self._look_at = float("inf")

    def hears(self, what: K, now: float) -> bool:
        """Whether it is to be said in full this time."""
        period = self._periods.get(what)
        if period is None:
            self._begin(what, _Period(now + SHORTEST, SHORTEST, FIRST))
            period = self._periods[what]
        period.said += 1
        if period.left:
            period.left -= 1
            return True
        period.dropped += 1
        return False

    def over(self, now: float) -> list[tuple[K, int, float]]:
        """What was dropped in periods that are over: what, how often, in how many seconds. Each is told once."""
        told: list[tuple[K, int, float]] = []
        while len(self._periods) > KINDS:
            oldest = next(iter(self._periods))
            period = self._periods.pop(oldest)
            if period.dropped:
                told.append((oldest, period.dropped, period.length))
        if now < self._look_at:
            return told
        ended = [(what, period) for what, period in self._periods.items() if period.ends <= now]
        for what, period in ended:
            del self._periods[what]
            if period.dropped:
                told.append((what, period.dropped, period.length))
            if period.said:
                length = min(2 * period.length, LONGEST)
                self._begin(what, _Period(now + length, length, 1))
        self._look_at = min((period.ends for period in self._periods.values()), default=float("inf"))
        return told

    def _begin(self, what: K, period: _Period) -> None:
        self._periods[what] = period
        self._look_at = min(self._look_at, period.ends)
