"""Threads for calls that block, shared by all VMs (the library for Cloud Hypervisor's API knows no event loop).

There are few of them, however many VMs there are. A VM that hangs holds a thread until its call's deadline, so VMs
whose last call timed out share a quarter of the threads: they can take no more from the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from hypervisors.base import HypervisorError, TimedOut, Unreachable

T = TypeVar("T")

THREADS: Final = 16
_ENDING: Final = 1.0
"""Seconds to wait for the end of a call that was cut, so that the VM's next one does not overlap with it."""
_SUSPECTS_KEPT: Final = 10_000
"""VMs that are remembered to have timed out; the oldest is forgotten first."""


class CallPool:
    """*threads* in all; they are made when they are needed, and end with :meth:`close`. For one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="clh")
        self._turns = asyncio.Semaphore(threads)
        self._turns_of_suspects = asyncio.Semaphore(max(1, threads // 4))
        self._suspects: dict[str, None] = {}

    def suspected(self, vm: str) -> bool:
        """Whether the last call to this VM timed out."""
        return vm in self._suspects

    async def run(self, vm: str, call: Callable[[], T], cut: Callable[[HypervisorError], None], within: float) -> T:
        """Let a thread make *call* to *vm*.

        It waits for its turn at most *within* seconds, and then has as many again; at their end *cut* is called, from
        this thread, and must make it end. So it is when this is cancelled; a thread is another's when its call has
        ended. Raises :class:`TimedOut` where the turn does not come, and whatever *call* does.
        """
        suspect = self.suspected(vm)
        taken: list[asyncio.Semaphore] = []
        try:
            async with asyncio.timeout(within):
                for turns in (self._turns_of_suspects, self._turns) if suspect else (self._turns,):
                    await turns.acquire()
                    taken.append(turns)
        except BaseException as error:
            for turns in taken:
                turns.release()
            if isinstance(error, TimeoutError):
                raise TimedOut(f"{vm}: not sent: all threads were busy for {within:g} s") from None
            raise
        loop = asyncio.get_running_loop()
        timer = loop.call_later(within, cut, TimedOut(f"no answer in {within:g} s"))
        running = loop.run_in_executor(self._executor, call)

        def ended(_: asyncio.Future[T]) -> None:
            timer.cancel()
            for turns in taken:
                turns.release()

        running.add_done_callback(ended)
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            cut(Unreachable("given up"))
            running.add_done_callback(_forget_failure)
            await asyncio.wait([running], timeout=_ENDING)
            raise
        except TimedOut:
            self._suspects[vm] = None
            if len(self._suspects) > _SUSPECTS_KEPT:
                del self._suspects[next(iter(self._suspects))]
            raise
        except Exception:
            self._suspects.pop(vm, None)
            raise
        self._suspects.pop(vm, None)
        return result

    async def close(self) -> None:
        """End all threads, once the calls under way have ended; whoever made them has cut them."""
        for _ in range(self._threads):
            await self._turns.acquire()
        self._executor.shutdown()


def _forget_failure(running: asyncio.Future[T]) -> None:
    """A call that nobody waits for any more ends as it likes."""
    if not running.cancelled():
        running.exception()
