"""The threads for Cloud Hypervisor's calls: few, shared, and not for those alone that hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from hypervisors.base import HypervisorError, TimedOut, Unreachable
from hypervisors.ch_pool import CallPool

LONG = 30.0
"""Seconds that nothing in these tests takes."""


class Calls:
    """Calls that wait until they are let go, or cut."""

    def __init__(self, pool: CallPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._ends: list[threading.Event] = []
        self._tasks: list[asyncio.Task[str]] = []
        self.most = 0

    @property
    def running(self) -> list[str]:
        with self._lock:
            return sorted(self._running)

    def start(self, vm: str, within: float = LONG) -> asyncio.Task[str]:
        end = threading.Event()
        error: list[HypervisorError] = []

        def call() -> str:
            with self._lock:
                self._running.append(vm)
                self.most = max(self.most, len(self._running))
            end.wait(LONG)
            with self._lock:
                self._running.remove(vm)
            if error:
                raise error[0]
            return vm

        def cut(why: HypervisorError) -> None:
            error.append(why)
            end.set()

        self._ends.append(end)
        self._tasks.append(asyncio.create_task(self._pool.run(vm, call, cut, within)))
        return self._tasks[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what threads do, no event of the loop tells
                await asyncio.sleep(0.001)

    async def let_go(self) -> None:
        for end in self._ends:
            end.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def make_suspect(self, *vms: str) -> None:
        """Their last call timed out."""
        for vm in vms:
            with pytest.raises(TimedOut, match=r"no answer in 0\.01 s"):
                await self.start(vm, within=0.01)
            assert self._pool.suspected(vm)


@pytest.fixture
async def pool() -> AsyncIterator[CallPool]:
    pool = CallPool(threads=8)
    yield pool
    await pool.close()


@pytest.fixture
async def calls(pool: CallPool) -> AsyncIterator[Calls]:
    calls = Calls(pool)
    yield calls
    await calls.let_go()


async def test_no_more_calls_at_a_time_than_threads(calls: Calls) -> None:
    tasks = [calls.start(f"vm{number}") for number in range(50)]
    await calls.until(lambda: len(calls.running) == 8)
    await calls.let_go()

    assert [await task for task in tasks] == [f"vm{number}" for number in range(50)]
    assert calls.most == 8


async def test_those_that_hang_share_a_quarter(calls: Calls) -> None:
    hung = [f"hung{number}" for number in range(10)]
    await calls.make_suspect(*hung)
    for vm in hung:
        calls.start(vm)
    await calls.until(lambda: len(calls.running) == 2)
    for number in range(20):
        calls.start(f"sound{number}")

    await calls.until(lambda: len(calls.running) == 8)

    assert [vm[:4] for vm in calls.running] == ["hung"] * 2 + ["soun"] * 6


async def test_who_answers_again_is_suspected_no_more(pool: CallPool, calls: Calls) -> None:
    await calls.make_suspect("vm")
    task = calls.start("vm")
    await calls.until(lambda: calls.running == ["vm"])
    await calls.let_go()
    await task

    assert not pool.suspected("vm")


async def test_a_turn_that_does_not_come_is_no_suspicion(pool: CallPool, calls: Calls) -> None:
    for number in range(8):
        calls.start(f"vm{number}")
    await calls.until(lambda: len(calls.running) == 8)

    with pytest.raises(TimedOut, match=r"late: not sent: all threads were busy for 0\.02 s"):
        await calls.start("late", within=0.02)

    assert not pool.suspected("late")
    assert "late" not in calls.running
    await calls.let_go()
    task = calls.start("late")
    await calls.until(lambda: calls.running == ["late"])
    await calls.let_go()
    assert await task == "late"


async def test_a_cancelled_call_is_cut_and_gives_its_turn_back(calls: Calls) -> None:
    tasks = [calls.start(f"vm{number}") for number in range(8)]
    await calls.until(lambda: len(calls.running) == 8)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert calls.running == []

    again = calls.start("again")
    await calls.until(lambda: calls.running == ["again"])
    await calls.let_go()
    assert await again == "again"


async def test_a_cancelled_wait_takes_no_turn_with_it(calls: Calls) -> None:
    for number in range(8):
        calls.start(f"vm{number}")
    await calls.until(lambda: len(calls.running) == 8)
    waiting = [calls.start("waiting") for _ in range(8)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await calls.let_go()

    for number in range(8):
        calls.start(f"next{number}")
    await calls.until(lambda: len(calls.running) == 8)


async def test_what_a_call_raises_is_raised(pool: CallPool) -> None:
    def call() -> None:
        raise Unreachable("gone")

    with pytest.raises(Unreachable, match="gone"):
        await pool.run("vm", call, lambda _: None, LONG)
    assert not pool.suspected("vm")


async def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    pool = CallPool(threads=4)
    await asyncio.gather(*(pool.run(f"vm{n}", lambda: None, lambda _: None, LONG) for n in range(20)))
    assert threading.active_count() > before
    await pool.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("clh")]
