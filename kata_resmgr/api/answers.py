"""Answers on the wire: values, texts, streams and problems, as HTTP/1.1 responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from kata_resmgr.api.problems import ProblemBody
from kata_resmgr.problem import Problem

API_VERSION = 1

_encode = msgspec.json.Encoder().encode
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_VERSION = f"Api-Version: {API_VERSION}\r\n".encode()


def _typed(kind: str) -> bytes:
    return b"%bContent-Type: %b\r\n" % (_VERSION, kind.encode("latin-1"))


_JSON = _typed("application/json")
_PROBLEM = _typed("application/problem+json")


class Text(NamedTuple):
    """A body that is not JSON, or is JSON already."""

    kind: str
    """Its Content-Type."""
    body: bytes


class Stream(NamedTuple):
    """A body that comes bit by bit; it ends with its caller."""

    kind: str
    pieces: AsyncGenerator[bytes, None]


class Answer(NamedTuple):
    """A status, and the value that goes with it: a :class:`Text`, a :class:`Stream`, what becomes JSON, or no body."""

    status: int
    value: Any = None


class Response(msgspec.Struct, frozen=True, gc=False):
    """What is sent: *headers* are whole lines, and say nothing of the body's length."""

    status: int
    headers: bytes
    body: bytes = b""
    pieces: AsyncGenerator[bytes, None] | None = None

    def head(self, *, close: bool, chunked: bool = False) -> bytes:
        """*close*: the connection ends with this answer; *chunked*: its pieces are sent in chunks."""
        if self.pieces is not None:
            length = b"Transfer-Encoding: chunked\r\n" if chunked else b""
        else:
            length = b"" if self.status == 204 else b"Content-Length: %d\r\n" % len(self.body)
        end = b"Connection: close\r\n\r\n" if close else b"\r\n"
        return b"%b%b%b%b" % (_STATUS[self.status], self.headers, length, end)


def render(answer: Answer) -> Response:
    """The response to a call that went well."""
    value = answer.value
    if value is None:
        return Response(answer.status, _VERSION)
    if isinstance(value, Text):
        return Response(answer.status, _typed(value.kind), value.body)
    if isinstance(value, Stream):
        return Response(answer.status, _typed(value.kind), pieces=value.pieces)
    return Response(answer.status, _JSON, _encode(value))


def render_problem(problem: Problem, allowed: str | None = None) -> Response:
    """The response to a call that did not; *allowed*: the methods that there are."""
    headers = _PROBLEM
    if problem.retry_after is not None:
        headers += b"Retry-After: %d\r\n" % problem.retry_after
    if allowed is not None:
        headers += b"Allow: %b\r\n" % allowed.encode("ascii")
    return Response(problem.code.status, headers, _encode(ProblemBody.of(problem)))
