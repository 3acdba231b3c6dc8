"""How soon to look after a VM has said that something changed: at once, unless it goes on saying so for nothing.

A guest causes events as often as it likes, and every look costs an exchange with the hypervisor. So when a few looks in
a row have found nothing new, the next one waits, twice as long each time, until one finds something, or there is quiet.
"""

from __future__ import annotations

FREE = 8
"""Looks in a row that may find nothing before the next one waits: sound VMs say some things twice."""
FIRST = 0.01
LONGEST = 1.0
"""Seconds that a look waits: doubled from the first to the longest, which is also how long quiet is."""


class Heed:
    """The looks at one VM. Times are the caller's clock, in seconds."""

    __slots__ = ("_last", "_pause", "_vain", "not_before")

    def __init__(self) -> None:
        self._vain = 0
        self._last = 0.0
        self._pause = FIRST
        self.not_before = 0.0
        """When the next look may be."""

    def looked(self, now: float, *, found: bool) -> None:
        """A look was made, and has *found* something new or not."""
        self._vain = 0 if found or now - self._last > 2 * LONGEST else self._vain + 1
        self._last = now
        if self._vain < FREE:
            self._pause, self.not_before = FIRST, 0.0
        else:
            self.not_before = now + self._pause
            self._pause = min(2 * self._pause, LONGEST)

    def end(self) -> None:
        """Somebody who may asks for a look now."""
        self._vain = 0
        self._pause = FIRST
        self.not_before = 0.0
