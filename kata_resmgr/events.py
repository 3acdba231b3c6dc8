"""What happens to sandboxes, as a numbered sequence that callers read and follow (API.md, Events).

The newest events are kept in a ring. A follower is a position in it and nothing more: one that reads too slowly is
overtaken by the ring, and dropped. Numbers rise for as long as the store lives, across restarts too. They are reserved
in blocks, so that an event costs no commit; a daemon that was killed leaves a gap, never a number that is used twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

import msgspec
import structlog

from kata_resmgr.problem import Code, Problem

KEPT = 10_000
"""Events that can be asked for."""
FOLLOWERS = 16
"""Callers that may follow at a time."""
_BLOCK = 1_000
"""Numbers reserved at a time."""
_BATCH = 500
"""Events that are written out without letting anybody else have a turn."""

Data: TypeAlias = dict[str, int | str]
_Told: TypeAlias = tuple[int, float, str | None, str, Data]

log = structlog.get_logger(__name__)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event; ``sandbox`` is null where it concerns the daemon, and what ``data`` has depends on ``type``."""

    seq: int
    time: str
    sandbox: str | None
    type: str
    data: Data


class BrokenStream(Exception):
    """The stream cannot go on, and must not look complete; why has been logged."""


class Numbers(Protocol):
    """Where it is kept which numbers may have been used."""

    def last_event(self) -> int:
        """The highest number that may have been used; 0 at first."""

    def reserve_events(self, last: int) -> None:
        """Numbers up to *last* may have been used."""


class Events:
    """The events of one daemon. All methods belong to the event loop's thread."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._last = self._reserved = numbers.last_event()
        self._before = self._last
        self._kept: list[_Told | None] = [None] * KEPT
        self._sleeping: set[asyncio.Future[None]] = set()
        self.followers = 0
        """Callers that follow now."""
        self._ended = False
        self.reconnects = 0
        """How often a VM that could not be reached was reached again, since the start."""

    def tell(self, sandbox: str | None, kind: str, data: Data) -> None:
        """It has happened just now. Never fails."""
        if self._ended:
            return
        number = self._last = self._last + 1
        if number > self._reserved:
            self._reserve(number)
        self._kept[number % KEPT] = (number, time.time(), sandbox, kind, data)
        if self._sleeping:
            self._wake()

    @property
    def total(self) -> int:
        """How many were told since the start."""
        return self._last - self._before

    def end(self) -> None:
        """The daemon ends: followers come to theirs, nothing more is told, and the next number follows the last."""
        if self._ended:
            return
        self._ended = True
        self._wake()
        if self._last != self._reserved:
            self._keep_reserved(self._last)

    async def lines(self, since: int | None, sandbox: str | None) -> bytes:
        """What is kept of later than number *since*, as NDJSON. Raises :class:`Problem` (``gone``)."""
        events = self._between(self._start(since), sandbox)
        written = []
        for first in range(0, len(events), _BATCH):
            written.append(_written(events[first : first + _BATCH]))
            await asyncio.sleep(0)
        return b"".join(written)

    def follow(self, since: int | None, sandbox: str | None) -> AsyncGenerator[bytes, None]:
        """As :meth:`lines`, and then what comes, until the daemon ends. Raises :class:`Problem` (also ``too_many``)."""
        start = self._start(since)
        if self.followers >= FOLLOWERS:
            raise Problem(
                Code.TOO_MANY, f"{FOLLOWERS} callers follow already, the most: end one of them", retry_after=1
            )
        self.followers += 1
        return self._follow(start, sandbox)

    async def _follow(self, first: int, sandbox: str | None) -> AsyncGenerator[bytes, None]:
        """Raises :class:`BrokenStream` for one that was too slow: what would be told next is no longer kept."""
        try:
            while True:
                if first < self._oldest_kept():
                    log.warning("events are read too slowly", behind=self._last - first)
                    raise BrokenStream
                if first <= self._last:
                    events = self._between(first, sandbox, _BATCH)
                    first = min(self._last + 1, first + _BATCH)
                    yield _written(events)
                    await asyncio.sleep(0)
                elif self._ended:
                    return
                else:
                    await self._news()
        finally:
            self.followers -= 1

    def _start(self, since: int | None) -> int:
        """The first number to tell."""
        oldest = self._oldest_kept()
        if since is None:
            return oldest
        if not oldest - 1 <= since <= self._last:
            kept = f"{oldest} to {self._last} are" if oldest <= self._last else "none is"
            raise Problem(
                Code.GONE,
                f"what came after event {since} is not known any more, {kept} kept: read the sandboxes, "
                "then the events without since",
            )
        return since + 1

    def _oldest_kept(self) -> int:
        return max(self._before, self._last - KEPT) + 1

    def _between(self, first: int, sandbox: str | None, most: int = KEPT) -> list[_Told]:
        """The events from *first* on, at most *most* of them looked at."""
        last = min(self._last, first + most - 1)
        kept = (self._kept[number % KEPT] for number in range(first, last + 1))
        return [told for told in kept if told is not None and (sandbox is None or told[2] == sandbox)]

    async def _news(self) -> None:
        """Until something is told, or the end."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.add(news)
        try:
            await news
        finally:
            self._sleeping.discard(news)

    def _wake(self) -> None:
        for news in self._sleeping:
            if not news.done():
                news.set_result(None)

    # Numbers

    def _reserve(self, number: int) -> None:
        self._keep_reserved(number + _BLOCK - 1)
        self._reserved = number + _BLOCK - 1

    def _keep_reserved(self, last: int) -> None:
        try:
            self._numbers.reserve_events(last)
        except Problem as problem:  # events are told all the same: they are how an operator hears of it
            log.warning("event numbers cannot be kept", reason=problem.detail)


class Teller:
    """Tells of one sandbox."""

    __slots__ = ("_events", "_sandbox")

    def __init__(self, events: Events, sandbox: str) -> None:
        self._events = events
        self._sandbox = sandbox

    def __call__(self, kind: str, /, **data: int | str) -> None:
        self._events.tell(self._sandbox, kind, data)

    def phase(self, before: str, now: str) -> None:
        """The sandbox is in another phase; that it has no VM any more is no event of its own."""
        if now == before:
            return
        if now != "sized":
            self("sandbox." + now, before=before)
        if (before, now) == ("unreachable", "running"):
            self._events.reconnects += 1


_encode_lines = msgspec.json.Encoder().encode_lines


def _written(events: list[_Told]) -> bytes:
    return _encode_lines([Event(seq, _stamp(moment), *rest) for seq, moment, *rest in events])  # type: ignore[arg-type]


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
