"""Order without locks: operations on one container follow each other in order of arrival, others overlap (SPEC 7).

An operation on the whole table waits for all that came before it and holds back all that come after.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from kata_resmgr.problem import Code, Problem


class Lanes:
    """The operations under way on one sandbox's containers. Its size is what is under way: idle, it is empty."""

    __slots__ = ("_last_of", "_last_of_all")

    def __init__(self) -> None:
        self._last_of: dict[str, asyncio.Future[None]] = {}
        self._last_of_all: asyncio.Future[None] | None = None

    def one(self, name: str, deadline: float) -> Lane:
        """``async with``: inside, nothing else is under way on *name*.

        Entering raises :class:`Problem` ``hypervisor_timeout`` when the turn has not come at the loop time *deadline*:
        what holds it up is an earlier operation that waits for the VM.
        """
        return Lane(self, name, deadline)

    def all(self, deadline: float) -> Lane:
        """``async with``: inside, nothing else is under way on any container. Raises as :meth:`one`."""
        return Lane(self, None, deadline)

    def _queue(self, name: str | None, mine: asyncio.Future[None]) -> list[asyncio.Future[None]]:
        """Take the last place; returned is whom to wait for."""
        before = [] if self._last_of_all is None else [self._last_of_all]
        if name is None:
            before.extend(self._last_of.values())
            self._last_of_all = mine
        else:
            if name in self._last_of:
                before.append(self._last_of[name])
            self._last_of[name] = mine
        return before

    def _leave(self, name: str | None, mine: asyncio.Future[None]) -> None:
        mine.set_result(None)
        if name is None:
            if self._last_of_all is mine:
                self._last_of_all = None
        elif self._last_of.get(name) is mine:
            del self._last_of[name]


class Lane:
    """One operation's place in the order."""

    __slots__ = ("_deadline", "_lanes", "_mine", "_name")

    def __init__(self, lanes: Lanes, name: str | None, deadline: float) -> None:
        self._lanes = lanes
        self._name = name
        self._deadline = deadline

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._mine = loop.create_future()
        before = self._lanes._queue(self._name, self._mine)
        if not before:
            return
        waiting: set[asyncio.Future[None]] = set(before)
        try:
            _, waiting = await asyncio.wait(before, timeout=max(self._deadline - loop.time(), 0))
        finally:
            if waiting:
                self._give_way(waiting)
        if waiting:
            raise Problem(
                Code.HYPERVISOR_TIMEOUT,
                f"an earlier operation on {self._name or 'this sandbox'} is still waiting for the VM; nothing was "
                "changed: repeat later or with a longer deadline",
            )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lanes._leave(self._name, self._mine)

    def _give_way(self, waiting: set[asyncio.Future[None]]) -> None:
        """Leave without having had the turn: those behind must still wait for those before."""
        left = len(waiting)

        def ended(_: asyncio.Future[None]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._lanes._leave(self._name, self._mine)

        for earlier in waiting:
            earlier.add_done_callback(ended)
