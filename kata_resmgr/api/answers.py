"""Answers on the wire: values, and problems, as JSON."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from kata_resmgr.api.problems import ProblemBody
from kata_resmgr.problem import Problem

API_VERSION = 1

_IN_ONE_PIECE = 16 << 10
"""Bytes of a body that a socket takes without its reader's help."""

_encode = msgspec.json.Encoder().encode
_JSON = {"Api-Version": str(API_VERSION), "Content-Type": "application/json"}
_PROBLEM = {"Api-Version": str(API_VERSION), "Content-Type": "application/problem+json"}
_EMPTY = {"Api-Version": str(API_VERSION)}


class Reply(web.Response):
    """A response that is whole from the start, and is written in one piece where nothing speaks against it.

    aiohttp's own way, through a writer that could as well stream and compress, is the longest part of a short answer.
    """

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        transport = request.transport
        body = self.body if isinstance(self.body, bytes) else b""
        if (
            not isinstance(transport, asyncio.WriteTransport)
            or not taken_at_once(body, transport)
            or request.version != HttpVersion11
            or request.method == "HEAD"
            or not request.keep_alive
            or self._keep_alive is False
        ):
            return await super().prepare(request)
        self._keep_alive = True
        length = "" if self.status == 204 else f"Content-Length: {len(body)}\r\n"
        head = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items() if name != "Content-Length"])
        transport.write(f"HTTP/1.1 {self.status} {self.reason}\r\n{head}{length}\r\n".encode("latin-1") + body)
        self._written = True
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        if not self._written:
            await super().write_eof(data)

    _written = False


def taken_at_once(body: bytes, transport: asyncio.WriteTransport) -> bool:
    """Whether *body* is small, and nothing before it waits for the caller to read."""
    return len(body) <= _IN_ONE_PIECE and transport.get_write_buffer_size() == 0


class Answer(NamedTuple):
    """A status, and the value that goes with it; None: no body."""

    status: int
    value: Any = None


def render(answer: Answer) -> Reply:
    """The response to a call that went well."""
    if answer.value is None:
        return Reply(status=answer.status, headers=_EMPTY)
    return Reply(status=answer.status, body=_encode(answer.value), headers=_JSON)


def render_problem(problem: Problem, **headers: str) -> Reply:
    """The response to a call that did not."""
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    body = ProblemBody.of(problem)
    return Reply(status=problem.code.status, body=_encode(body), headers={**_PROBLEM, **headers})
