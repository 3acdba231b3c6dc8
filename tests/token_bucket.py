"""The reference model of Cloud Hypervisor's rate limiter (its ``rate_limiter`` crate, the same from v44 on).

It says what a guest gets from given buckets, to the token, and the closed formula by which this program tells the
effective rate is held against it. It has no I/O, and its clock is the test's. Times are nanoseconds where nothing else
is said; as in the original, all sums are taken modulo 2^64.

A **bucket** starts full, and with a burst on top that never comes back. Tokens are earned as time goes by, but they are
counted only when some are asked for, and each time the fraction of a token is dropped. A request larger than the whole
bucket is let through, at the price of a pause.

A **limiter** has a bucket for bytes and one for operations, and one timer for both: a request that does not fit blocks
everything for 100 ms, then the guest tries again. Bandwidth and operations are therefore not independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import gcd

_MILLISECOND = 1_000_000
_PAUSE = 100 * _MILLISECOND
_WRAP = 1 << 64


@dataclass
class Clock:
    """Time as the test has it."""

    now: int = 0

    def advance(self, *, milliseconds: int = 0, nanoseconds: int = 0) -> None:
        self.now += milliseconds * _MILLISECOND + nanoseconds


class Outcome(StrEnum):
    """Whether tokens were there."""

    SUCCESS = "success"
    FAILURE = "failure"


@dataclass(frozen=True)
class OverConsumption:
    """More was asked for than the bucket can ever hold: it passes, and *ratio* buckets are still to be paid."""

    ratio: float


class Bucket:
    """One bucket. *refill_time* is in milliseconds; it and *size* are above 0."""

    def __init__(self, size: int, burst: int, refill_time: int, *, clock: Clock) -> None:
        self.size = size
        self.refill_time = refill_time
        self.burst = burst
        self.budget = size
        divisor = gcd(size, refill_time * _MILLISECOND)
        self.rate = (size // divisor, refill_time * _MILLISECOND // divisor)
        """Tokens, and the nanoseconds that earn them, in lowest terms."""
        self._clock = clock
        self._last = clock.now

    def reduce(self, tokens: int) -> Outcome | OverConsumption:
        """Take *tokens*. The burst is used up first, and what of it was too small is lost even by a failure."""
        if self.burst:
            if self.burst >= tokens:
                self.burst -= tokens
                self._last = self._clock.now  # what was earned meanwhile is lost
                return Outcome.SUCCESS
            tokens -= self.burst
            self.burst = 0
        self._refill()
        if tokens <= self.budget:
            self.budget -= tokens
            return Outcome.SUCCESS
        if tokens <= self.size:
            return Outcome.FAILURE
        owed = tokens - self.budget
        self.budget = 0
        return OverConsumption(owed / self.size)

    def replenish(self, tokens: int) -> None:
        """Give back what a request took that was then not made. A burst grows by it without a bound."""
        if self.burst:
            self.burst += tokens
        else:
            self.budget = min(self.budget + tokens, self.size)

    def _refill(self) -> None:
        earned, period = self.rate
        elapsed = self._clock.now - self._last
        self._last = self._clock.now
        self.budget = min(self.budget + elapsed * earned % _WRAP // period, self.size)


def bucket(size: int, burst: int, refill_time: int, *, clock: Clock) -> Bucket | None:
    """A bucket of no size, or that needs no time to fill, limits nothing: there is none."""
    return Bucket(size, burst, refill_time, clock=clock) if size and refill_time else None


class Limiter:
    """A device's limiter: None for what is not limited."""

    def __init__(self, bandwidth: Bucket | None, ops: Bucket | None, *, clock: Clock) -> None:
        self.buckets = {"bytes": bandwidth, "ops": ops}
        self.blocked = False
        self._clock = clock
        self._timer: int | None = None

    def consume(self, kind: str, tokens: int) -> bool:
        """Whether a request of *tokens* ``"bytes"`` or ``"ops"`` passes."""
        if self.blocked:
            return False
        bucket = self.buckets[kind]
        if bucket is None:
            return True
        match bucket.reduce(tokens):
            case OverConsumption(ratio):
                self._block(int(ratio * bucket.refill_time) * _MILLISECOND)
                return True
            case Outcome.FAILURE:
                self._block(_PAUSE)
                return False
            case _:
                return True

    def wake(self) -> bool:
        """The owner handles the timer's event. False: the timer has not fired, and nothing changes."""
        if self._timer is None or self._clock.now < self._timer:
            return False
        self._timer = None
        self.blocked = False
        return True

    def _block(self, pause: int) -> None:
        self.blocked = True
        self._timer = self._clock.now + pause if pause else None  # a timer set to 0 is off: blocked for ever
