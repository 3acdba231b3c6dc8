"""Events over a real socket, as a caller and the command line read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from kata_resmgr import cli
from kata_resmgr.events import FOLLOWERS, KEPT
from tests.api.api_harness import Served, serving, until


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


class Follower:
    """A connection that follows."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.head = b""

    async def chunk(self) -> bytes:
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def to_the_end(self) -> None:
        while await self.chunk():
            pass

    async def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.chunk()).splitlines()]


@asynccontextmanager
async def following(served: Served, query: str = "follow=true") -> AsyncIterator[Follower]:
    reader, writer = await asyncio.open_unix_connection(served.path)
    try:
        writer.write(f"GET /v1/events?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        follower = Follower(reader)
        async with asyncio.timeout(20):
            follower.head = await reader.readuntil(b"\r\n\r\n")
            yield follower
    finally:
        writer.close()


def tell(served: Served, number: int = 1) -> None:
    for count in range(number):
        served.manager.events.tell("s1", "vcpus.plugged", {"added": count})


async def test_what_is_kept(served: Served) -> None:
    tell(served, 3)
    reply = await served.ask("GET", "/v1/events?since=1&sandbox=s1")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    assert [json.loads(line)["seq"] for line in reply.body.splitlines()] == [2, 3]
    assert (await served.ask("GET", "/v1/events?since=3&follow=false")).body == b""


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("since=0", 410, "gone"),
        (f"since={KEPT + 7}", 410, "gone"),
        ("since=0&follow=true", 410, "gone"),
        ("since=-1", 400, "invalid_query"),
        ("since=9223372036854775808", 400, "invalid_query"),
        ("since=%C2%B2", 400, "invalid_query"),
        ("follow=yes", 400, "invalid_query"),
        ("sandbox=a/b", 400, "invalid_id"),
    ],
)
async def test_what_cannot_be_told(served: Served, query: str, status: int, code: str) -> None:
    tell(served, KEPT + 5)
    reply = await served.ask("GET", f"/v1/events?{query}")
    assert (reply.status, reply.json["code"]) == (status, code)


async def test_a_follower_hears_what_happens_and_the_end_of_the_daemon(served: Served) -> None:
    tell(served)
    async with following(served) as follower:
        assert b"Content-Type: application/x-ndjson" in follower.head
        assert [event["seq"] for event in await follower.events()] == [1]
        tell(served, 2)
        assert [event["seq"] for event in await follower.events()] == [2, 3]
        await served.api.stop(5)
        assert await follower.chunk() == b""


async def test_a_follower_too_many_is_told_so_and_a_place_comes_free(served: Served) -> None:
    async with following(served), AsyncExitStack() as others:
        for _ in range(FOLLOWERS - 1):
            await others.enter_async_context(following(served))
        reply = await served.ask("GET", "/v1/events?follow=true")
        assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (429, "too_many", "1")
        await others.aclose()
        await until(lambda: served.manager.events.followers == 1)
        async with following(served) as another:
            assert b" 200 " in another.head


async def test_one_who_does_not_read_is_dropped_without_holding_up_the_daemon(served: Served) -> None:
    async with following(served) as follower:
        pump = 0
        while served.manager.events.followers and pump < 100:
            tell(served, KEPT + 1)
            pump += 1
            await asyncio.sleep(0)
        assert not served.manager.events.followers
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):  # no end that looks like one
            await follower.to_the_end()


# The command line


async def run(served: Served, *arguments: str) -> int:
    """In a thread: the daemon lives in this one."""
    return await asyncio.to_thread(cli.main, ["events", "--socket", served.path, *arguments])


async def test_the_command_shows_them(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    tell(served, 2)
    served.manager.events.tell(None, "config.reloaded", {})
    assert await run(served) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first[24:] == "  1  s1  vcpus.plugged  added=0"
    assert last[24:] == "  3  -  config.reloaded"
    assert await run(served, "--json", "--since", "2") == 0
    assert json.loads(capsys.readouterr().out)["seq"] == 3
    assert await run(served, "--sandbox", "s2") == 0
    assert capsys.readouterr().out == ""


async def test_the_command_follows_until_the_daemon_ends(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    tell(served)
    command = asyncio.create_task(run(served, "--follow", "--json"))
    await until(lambda: served.manager.events.followers == 1)
    tell(served)
    shown = ""

    def both_are_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return len(shown.splitlines()) == 2

    await until(both_are_shown)
    assert not command.done()
    await served.api.stop(5)
    assert await command == 1
    assert capsys.readouterr().err == "kata-resmgr: the daemon has ended; go on with --since 2 when it is back\n"


async def test_the_command_tells_why_not(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(served, "--since", "7", "--follow") == 1
    assert "(gone)" in capsys.readouterr().err
    assert await run(served, "--since", "x", "--json") == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["code"] == "invalid_query"
    assert "(invalid_query)" in told.err
