"""One removal that was asked of the guest: when it was sent, what came of it, and when it is sent again (SPEC 7).

Times are readings of one monotonic clock, in seconds.
"""

from __future__ import annotations

import msgspec

REPEATS = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds between one attempt and the next; the last one goes on for ever."""

REMEMBER_AGAIN = 1.0
"""Seconds until a removal that could not be recorded, and so was not sent, is tried again."""


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
    size: int = 0
    """Bytes of memory that are to leave; 0: it is a vCPU."""

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
