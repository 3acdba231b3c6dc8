"""Connections as such: pieces, pipelines, ends, streams and times, on a real Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from kata_resmgr.api import connection, routes, server
from kata_resmgr.api.answers import Answer, Stream, Text
from tests.api.api_harness import Served, read_reply, serving, until

VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
C1 = "/v1/sandboxes/s1/containers/c1"
PUT = f"PUT {C1} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17\r\n\r\n".encode() + b'{"resources": {}}'


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as api:
        yield api


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_unix_connection(served.path)
        try:
            yield reader, writer
        finally:
            writer.close()


async def test_a_request_in_pieces_of_one_byte(served: Served) -> None:
    async with connected(served) as (reader, writer):
        for byte in PUT:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await read_reply(reader)).status == 200


async def test_answers_come_in_the_order_of_the_requests(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(PUT + VERSION + f"GET {C1} HTTP/1.1\r\n\r\n".encode())
        statuses = [(await read_reply(reader)).json for _ in range(3)]
    assert [sorted(body) for body in statuses] == [
        ["container", "sandbox"],
        ["apiVersion", "minApiVersion", "version"],
        ["id", "resources"],
    ]


async def test_requests_far_ahead_of_their_answers_are_the_last(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(VERSION * (connection.PIPELINED + 1))
        for _ in range(connection.PIPELINED):
            assert (await read_reply(reader)).status == 200
        reply = await read_reply(reader)
        assert (reply.status, reply.json["code"], reply.headers["connection"]) == (429, "too_many", "close")
        assert await reader.read() == b""


async def test_who_writes_on_and_on_without_reading_is_not_listened_to(served: Served) -> None:
    gate = asyncio.Event()
    served.manager.gate = gate
    async with connected(served) as (reader, writer):
        writer.write(PUT)
        writer.write(VERSION)
        await until(lambda: len(served.manager.calls) == 1)
        writer.write(PUT)
        gate.set()
        assert [(await read_reply(reader)).status for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /version HTTP/1.0\r\n\r\n",
        b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /version HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
async def test_the_last_request_of_a_connection(served: Served, request_bytes: bytes) -> None:
    async with connected(served) as (reader, writer):
        writer.write(request_bytes)
        reply = await read_reply(reader)
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await reader.read() == b""


async def test_an_old_client_may_keep_its_connection(served: Served) -> None:
    async with connected(served) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await read_reply(reader)).status == 200


async def test_the_answer_to_head_has_no_body(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(b"HEAD /version HTTP/1.1\r\n\r\n" + VERSION)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 405 ")
        assert (await read_reply(reader)).status == 200


async def test_a_faulty_request_after_a_good_one(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(PUT + b"hello\r\n\r\n" + VERSION)
        assert (await read_reply(reader)).status == 200
        assert (await read_reply(reader)).status == 400
        assert await reader.read() == b""


async def test_who_has_ceased_to_ask_still_gets_the_answers(served: Served) -> None:
    async with connected(served) as (reader, writer):
        writer.write(PUT + VERSION + b"GET /vers")
        writer.write_eof()
        assert [(await read_reply(reader)).status for _ in range(2)] == [200, 200]
        assert await reader.read() == b""


# Time


async def test_a_connection_that_asks_nothing_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIME", 0.05)
    async with connected(served) as (reader, _):
        assert await reader.read() == b""


async def test_an_idle_connection_is_closed_after_its_last_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIME", 0.05)
    async with connected(served) as (reader, writer):
        writer.write(VERSION)
        assert (await read_reply(reader)).status == 200
        assert await reader.read() == b""


async def test_a_head_that_arrives_too_slowly(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIME", 0.05)
    monkeypatch.setattr(connection, "LINGER", 0.05)
    async with connected(served) as (reader, writer):
        writer.write(b"GET /version HTT")
        reply = await read_reply(reader)
        assert (reply.status, reply.json["code"], reply.headers["connection"]) == (408, "timeout", "close")
        assert await reader.read() == b""


async def test_an_operation_has_all_the_time_it_needs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_TIME", "BODY_TIME", "ANSWER_TIME"):
        monkeypatch.setattr(connection, name, 0.01)
    served.manager.gate = gate = asyncio.Event()
    async with connected(served) as (reader, writer):
        writer.write(PUT)
        await until(lambda: len(served.manager.calls) == 1)
        asyncio.get_running_loop().call_later(0.05, gate.set)
        assert (await read_reply(reader)).status == 200


async def test_one_connection_too_many_is_told_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 1)
    async with connected(served) as (reader, writer):
        writer.write(VERSION)
        assert (await read_reply(reader)).status == 200
        async with connected(served) as (second, _):
            reply = await read_reply(second)
            assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (429, "too_many", "1")
            assert await second.read() == b""
        writer.write(VERSION)
        assert (await read_reply(reader)).status == 200


# Streams


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Answer]) -> None:
    async def handler(_: routes.Call) -> Answer:
        return answer()

    monkeypatch.setattr(server, "find", lambda _, path: (routes.Route(handler), "", ""))


async def test_a_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda: Answer(200, Text("text/plain; version=1", b"a 1\n")))
    reply = await served.raw(VERSION)
    assert (reply.status, reply.headers["content-type"], reply.body) == (200, "text/plain; version=1", b"a 1\n")


async def pieces(*texts: bytes) -> AsyncGenerator[bytes, None]:
    for text in texts:
        yield text
        await asyncio.sleep(0)


async def test_a_stream(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda: Answer(200, Stream("application/x-ndjson", pieces(b"one\n", b"", b"two\n"))))
    async with connected(served) as (reader, writer):
        writer.write(VERSION)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert "transfer-encoding: chunked" in head
        assert "content-length" not in head
        assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\n"
        writer.write(b"hello\r\n\r\n")
        assert (await read_reply(reader)).status == 400


async def test_a_stream_for_an_old_client_ends_with_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, lambda: Answer(200, Stream("application/x-ndjson", pieces(b"one\n", b"two\n"))))
    async with connected(served) as (reader, writer):
        writer.write(b"GET /version HTTP/1.0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b"one\ntwo\n"


async def test_a_stream_that_fails_is_not_taken_for_complete(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"one\n"
        raise RuntimeError("broken")

    answering(monkeypatch, lambda: Answer(200, Stream("application/x-ndjson", broken())))
    async with connected(served) as (reader, writer):
        writer.write(VERSION)
        await reader.readuntil(b"\r\n\r\n")
        assert not (await reader.read()).endswith(b"0\r\n\r\n")


async def test_a_stream_ends_with_its_caller(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    answering(monkeypatch, lambda: Answer(200, Stream("application/x-ndjson", endless())))
    async with connected(served) as (reader, writer):
        writer.write(VERSION)
        await reader.readuntil(b"one\n")
        writer.close()
        await ended.wait()


async def test_a_stream_that_is_not_read_waits_and_is_then_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_TIME", 0.05)
    sent = 0
    ended = asyncio.Event()

    async def flood() -> AsyncGenerator[bytes, None]:
        nonlocal sent
        try:
            while True:
                sent += 1
                yield b"x" * 65536
        finally:
            ended.set()

    answering(monkeypatch, lambda: Answer(200, Stream("application/x-ndjson", flood())))
    async with connected(served) as (reader, writer):
        reader._limit = 1  # type: ignore[attr-defined]  # so that the test's own side does not read ahead
        writer.write(VERSION)
        await ended.wait()
    assert sent < 100
