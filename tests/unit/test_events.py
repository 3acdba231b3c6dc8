"""The ring of events: numbers that only rise, what is kept of them, and followers that are never waited for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kata_resmgr.events import FOLLOWERS, KEPT, BrokenStream, Events, Teller
from kata_resmgr.problem import Code, Problem
from kata_resmgr.store import MemoryStore


def decoded(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


async def kept(events: Events, since: int | None = None, sandbox: str | None = None) -> list[int]:
    return [event["seq"] for event in decoded(await events.lines(since, sandbox))]


def told(number: int, store: MemoryStore | None = None) -> Events:
    events = Events(store or MemoryStore())
    for count in range(number):
        events.tell(f"s{count % 2}", "vcpus.plugged", {"added": count})
    return events


async def test_an_event_has_what_the_contract_says() -> None:
    events = Events(MemoryStore())
    Teller(events, "s1")("vcpus.plugged", added=2, plugged=3)
    (event,) = decoded(await events.lines(None, None))
    assert list(event) == ["seq", "time", "sandbox", "type", "data"]
    assert event["time"].endswith("Z")
    assert event | {"time": ""} == {
        "seq": 1, "time": "", "sandbox": "s1", "type": "vcpus.plugged", "data": {"added": 2, "plugged": 3},
    }  # fmt: skip


async def test_since_and_sandbox_choose() -> None:
    events = told(6)
    assert await kept(events) == [1, 2, 3, 4, 5, 6]
    assert await kept(events, since=4) == [5, 6]
    assert await kept(events, since=6) == []
    assert await kept(events, since=0, sandbox="s1") == [2, 4, 6]


@pytest.mark.parametrize("since", [0, 4, 11_000, 1 << 62])
async def test_what_is_not_known_any_more_is_gone(since: int) -> None:
    events = told(KEPT + 5)
    assert await kept(events, since=5) == list(range(6, KEPT + 6))
    with pytest.raises(Problem, match=f"after event {since} .* 6 to {KEPT + 5} are kept") as gone:
        await events.lines(since, None)
    assert gone.value.code is Code.GONE


async def test_a_daemon_that_ended_in_order_leaves_no_gap() -> None:
    store = MemoryStore()
    told(3, store).end()
    after = told(1, store)
    assert await kept(after, since=3) == [4]


async def test_a_daemon_that_was_killed_leaves_a_gap_and_no_number_twice() -> None:
    store = MemoryStore()
    told(1_003, store)
    after = told(1, store)
    (number,) = await kept(after)
    assert number > 1_003
    with pytest.raises(Problem, match="not known any more"):  # what it told last may have been heard by nobody
        await after.lines(1_003, None)


class Full(MemoryStore):
    """A store that keeps nothing."""

    def reserve_events(self, last: int) -> None:
        raise Problem(Code.INTERNAL, "the state cannot be written")


async def test_events_are_told_where_their_numbers_cannot_be_kept() -> None:
    assert await kept(told(3, Full())) == [1, 2, 3]


async def test_a_follower_hears_what_was_and_what_comes_and_the_end() -> None:
    events = told(2)
    follower = events.follow(1, None)
    assert [event["seq"] for event in decoded(await anext(follower))] == [2]
    next_one = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    assert not next_one.done()
    events.tell(None, "config.reloaded", {})
    (event,) = decoded(await next_one)
    assert (event["seq"], event["sandbox"], event["type"]) == (3, None, "config.reloaded")
    events.tell("s1", "sandbox.held", {"before": "running"})
    events.end()
    assert [event["seq"] for event in decoded(await anext(follower))] == [4]
    with pytest.raises(StopAsyncIteration):
        await anext(follower)


async def test_a_follower_that_does_not_keep_up_is_dropped() -> None:
    events = told(1)
    follower = events.follow(None, None)
    await anext(follower)
    for _ in range(KEPT + 1):
        events.tell("s1", "vcpus.desired", {})
    with pytest.raises(BrokenStream):
        await anext(follower)


async def test_followers_are_counted_and_their_places_come_free() -> None:
    events = told(1)

    async def begun() -> AsyncGenerator[bytes, None]:
        follower = events.follow(None, None)
        await anext(follower)
        return follower

    followers = [await begun() for _ in range(FOLLOWERS)]
    with pytest.raises(Problem, match="16 callers follow") as refused:
        events.follow(None, None)
    assert refused.value.code is Code.TOO_MANY
    await followers[0].aclose()
    followers[0] = await begun()
    for follower in followers:
        await follower.aclose()


async def test_reconnects_are_counted() -> None:
    events = Events(MemoryStore())
    tell = Teller(events, "s1")
    for before, now in [("sized", "running"), ("running", "unreachable"), ("unreachable", "running"), ("running",) * 2]:
        tell.phase(before, now)
    tell.phase("running", "sized")
    assert events.reconnects == 1
    assert events.total == 3
