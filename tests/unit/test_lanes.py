"""The order of operations on one sandbox's containers (SPEC 7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kata_resmgr.lanes import Lane, Lanes
from kata_resmgr.problem import Code, Problem

DEADLINE = 20.0
"""Seconds that a test may wait for what must happen."""


class _Operations:
    """Operations that are inside their lane until they are told to end, and a log of who was let in."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(self, label: str, name: str | None, deadline: float | None = None) -> asyncio.Task[None]:
        """An operation on *name* (None: on all) takes its place in the order."""
        end = asyncio.get_running_loop().time() + DEADLINE if deadline is None else deadline
        lane = self.lanes.all(end) if name is None else self.lanes.one(name, end)
        self._ends[label] = asyncio.Event()
        task = self._tasks[label] = asyncio.create_task(self._run(label, lane))
        await _rounds()
        return task

    async def _run(self, label: str, lane: Lane) -> None:
        async with lane:
            self.inside.append(label)
            await self._ends[label].wait()
        self.inside.remove(label)

    async def end(self, label: str) -> None:
        self._ends[label].set()
        await asyncio.wait_for(self._tasks[label], DEADLINE)
        await _rounds()

    async def cancel(self, label: str) -> None:
        self._tasks[label].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[label]
        if label in self.inside:
            self.inside.remove(label)
        await _rounds()


async def _rounds() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(10):
        await asyncio.sleep(0)


def _idle(lanes: Lanes) -> bool:
    """Whether nothing is remembered: the lanes of a sandbox at rest cost nothing."""
    return not lanes._last_of and lanes._last_of_all is None


def _now() -> float:
    return asyncio.get_running_loop().time()


async def test_operations_on_one_name_follow_each_other_in_order_of_arrival() -> None:
    operations = _Operations()
    for label in ("1", "2", "3"):
        await operations.arrive(label, "a")
    for label in ("1", "2", "3"):
        assert operations.inside == [label]
        await operations.end(label)
    assert _idle(operations.lanes)


async def test_operations_on_different_names_overlap() -> None:
    operations = _Operations()
    for label in ("a", "b", "c"):
        await operations.arrive(label, label)
    assert operations.inside == ["a", "b", "c"]
    await operations.end("b")
    assert operations.inside == ["a", "c"]
    await operations.end("c")
    await operations.end("a")
    assert _idle(operations.lanes)


async def test_an_operation_on_all_waits_for_all_before_and_holds_back_all_behind() -> None:
    operations = _Operations()
    await operations.arrive("a1", "a")
    await operations.arrive("b1", "b")
    await operations.arrive("all", None)
    await operations.arrive("a2", "a")
    await operations.arrive("c1", "c")
    assert operations.inside == ["a1", "b1"]
    await operations.end("a1")
    assert operations.inside == ["b1"]
    await operations.end("b1")
    assert operations.inside == ["all"]
    await operations.end("all")
    assert operations.inside == ["a2", "c1"]
    await operations.end("a2")
    await operations.end("c1")
    assert _idle(operations.lanes)


async def test_operations_on_all_follow_each_other() -> None:
    operations = _Operations()
    await operations.arrive("all 1", None)
    await operations.arrive("all 2", None)
    await operations.end("all 1")
    await operations.arrive("a", "a")
    await operations.arrive("all 3", None)
    for label in ("all 2", "a", "all 3"):
        assert operations.inside == [label]
        await operations.end(label)
    assert _idle(operations.lanes)


@pytest.mark.parametrize(("name", "told"), [("a", "an earlier operation on a is"), (None, "on this sandbox is")])
async def test_giving_up_at_the_deadline(name: str | None, told: str) -> None:
    operations = _Operations()
    await operations.arrive("first", "a")
    late = await operations.arrive("late", name, deadline=_now() + 0.01)
    with pytest.raises(Problem, match=told) as refusal:
        await asyncio.wait_for(late, DEADLINE)
    assert refusal.value.code is Code.HYPERVISOR_TIMEOUT
    assert operations.inside == ["first"]
    await operations.end("first")
    assert _idle(operations.lanes)


async def test_a_deadline_that_is_over_is_no_reason_where_the_lane_is_free() -> None:
    operations = _Operations()
    await operations.arrive("a", "a", deadline=_now() - 1)
    assert operations.inside == ["a"]
    await operations.end("a")


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_those_behind_one_that_gave_up_still_wait_for_those_before(name: str | None, how: str) -> None:
    operations = _Operations()
    await operations.arrive("first", "a")
    if how == "deadline":
        gives_up = await operations.arrive("gives up", name, deadline=_now())
        with pytest.raises(Problem):
            await asyncio.wait_for(gives_up, DEADLINE)
    else:
        await operations.arrive("gives up", name)
        await operations.cancel("gives up")
    await operations.arrive("behind", "a")
    assert operations.inside == ["first"]
    await operations.end("first")
    assert operations.inside == ["behind"]
    await operations.end("behind")
    assert _idle(operations.lanes)


async def test_one_that_waits_for_several_and_gives_up_goes_when_the_last_of_them_has_ended() -> None:
    operations = _Operations()
    await operations.arrive("a", "a")
    await operations.arrive("b", "b")
    await operations.arrive("all", None)
    await operations.cancel("all")
    await operations.arrive("c", "c")
    await operations.end("a")
    assert operations.inside == ["b"]
    await operations.end("b")
    assert operations.inside == ["c"]
    await operations.end("c")
    assert _idle(operations.lanes)


async def test_one_that_is_cancelled_inside_lets_the_next_in() -> None:
    operations = _Operations()
    await operations.arrive("first", "a")
    await operations.arrive("second", "a")
    await operations.cancel("first")
    assert operations.inside == ["second"]
    await operations.end("second")
    assert _idle(operations.lanes)


@pytest.mark.parametrize("rounds", range(6))
async def test_one_that_is_cancelled_at_the_moment_of_its_turn_lets_the_next_in(rounds: int) -> None:
    lanes = Lanes()
    end = _now() + DEADLINE

    async def pass_through() -> None:
        async with lanes.one("a", end):
            await asyncio.sleep(0)

    async with lanes.one("a", end):
        second = asyncio.create_task(pass_through())
        await _rounds()
        third = asyncio.create_task(pass_through())
        await _rounds()
    for _ in range(rounds):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait_for(third, DEADLINE)
    await asyncio.wait([second])
    assert _idle(lanes)


@pytest.mark.parametrize("lane", [lambda lanes: lanes.one("a", 0.0), lambda lanes: lanes.all(0.0)])
async def test_one_that_fails_inside_lets_the_next_in(lane: Callable[[Lanes], Lane]) -> None:
    lanes = Lanes()
    with pytest.raises(KeyError):
        async with lane(lanes):
            raise KeyError("a defect")
    async with lanes.one("a", 0.0):
        pass
    assert _idle(lanes)


async def test_a_long_queue_is_forgotten_as_it_goes() -> None:
    operations = _Operations()
    labels = [str(number) for number in range(200)]
    for label in labels:
        await operations.arrive(label, "a" if int(label) % 10 else None)
    for label in labels:
        assert operations.inside == [label]
        await operations.end(label)
    assert _idle(operations.lanes)
