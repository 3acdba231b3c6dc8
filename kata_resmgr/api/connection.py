"""One HTTP/1.1 connection on a Unix socket: requests in, answers out, and a bound on all of it.

httptools (llhttp) takes the bytes apart; what is here is when to listen, to answer and to give up. The requests of one
connection are answered one after the other. A caller has ``HEAD_TIME`` from the opening, or from its last answer, until
a complete head is there, then ``BODY_TIME`` until the body is, and is to read its answer within ``ANSWER_TIME``.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, Protocol

import msgspec
import structlog
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from kata_resmgr.api.answers import Response, render_problem
from kata_resmgr.api.peers import Peer
from kata_resmgr.events import BrokenStream
from kata_resmgr.problem import Code, Problem

BODY_LIMIT: Final = 1 << 20
HEAD_LIMIT: Final = 16 << 10
HEAD_TIME = 10.0
BODY_TIME = 10.0
ANSWER_TIME = 30.0
"""Seconds; what fits into the socket's buffers needs no reader."""
LINGER = 1.0
"""Seconds for which the rest of a request that was refused is read: who still sends would not see the answer."""
PIPELINED: Final = 64
"""Requests of one connection that may wait for the answers before theirs."""

log = structlog.get_logger(__name__)


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request, whole. Names of headers are in lower case; of repeated ones the last counts."""

    method: str
    target: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    """Whether the connection may go on after the answer."""
    chunks: bool
    """Whether the caller understands an answer in chunks (HTTP/1.1)."""


class Server(Protocol):
    """Who makes connections, and answers on them."""

    def identify(self, connection: socket.socket) -> Peer:
        """Who is at the other end."""

    def began(self, connection: Connection) -> None:
        """It is open; it may be refused here."""

    def ended(self, connection: Connection) -> None:
        """It is closed, and the work for it is done."""

    async def serve(self, request: Request, connection: Connection) -> Response:
        """Answer whatever could be parsed. Raises nothing."""


class Connection(asyncio.Protocol):
    """One connection of *server*. Its peer is asked for once: credentials do not change after connect(2)."""

    peer: Peer

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._unparsed = 0
        """Bytes that have come since the last request, or head, was complete."""
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_size = 0
        self._body: list[bytes] = []
        self._body_size = 0
        self._in_body = False
        self._waiting: deque[Request | Problem] = deque()
        self._deaf = False
        """Nothing more is listened to: something was at fault, or the connection is to end."""
        self._task: asyncio.Task[None] | None = None
        self._lost = False
        self._ends_with_caller = False
        self._overdue_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self._lingers = False

    # Seen from the server

    def end_with_caller(self) -> None:
        """What is being served only looks: unlike an operation it ends with its caller, or waits would pile up."""
        self._ends_with_caller = True

    def refuse(self, problem: Problem) -> None:
        """Answer *problem* to whatever will be asked, and close."""
        self._deaf = True
        self._write(render_problem(problem), close=True)
        self._transport.close()

    def close(self) -> None:
        """Take no further request; the one that is being answered is."""
        self._deaf = True
        self._waiting.clear()
        if self._task is None:
            self._transport.close()

    def abort(self) -> None:
        """End it now, whatever is under way."""
        self._transport.abort()

    # Seen from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what a server of streams makes
        self._transport = transport
        transport.set_write_buffer_limits(0)  # to be told of whatever waits for the reader
        self.peer = self._server.identify(transport.get_extra_info("socket"))
        self._allow(HEAD_TIME)
        self._server.began(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._deaf = True
        self._waiting.clear()
        self._disallow()
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        if self._task is None:
            self._server.ended(self)
        elif self._ends_with_caller:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:  # nothing else is spoken here: it is answered as it is, and that is the end
            self._deaf = True
        except HttpParserError as error:
            self._fault(Problem(Code.INVALID_BODY, f"this is not an HTTP/1.1 request: {error}"))
        if not self._in_body and self._unparsed > HEAD_LIMIT:
            self._fault(_head_too_large())
        if self._task is not None:
            if self._waiting:  # it runs ahead of its answers
                self._transport.pause_reading()
        elif self._waiting:
            self._disallow()
            self._task = self._loop.create_task(self._answer())

    def eof_received(self) -> bool:
        """Whether the connection stays: for who has only ceased to ask, and waits for answers (``nc -N``)."""
        self._deaf = True
        return self._task is not None and not _hung_up(self._transport.get_extra_info("socket"))

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    # Seen from the parser

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = {}
        self._head_size = 0
        self._body = []
        self._body_size = 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        self._head_size += len(name) + len(value) + len(": \r\n")

    def on_headers_complete(self) -> None:
        self._in_body = True
        if self._task is None:
            self._allow(BODY_TIME)
        headers = self._headers
        if self._head_size > HEAD_LIMIT:
            self._fault(_head_too_large())
        elif self._parser.get_http_version() not in ("1.0", "1.1"):
            self._fault(Problem(Code.INVALID_BODY, "this is not an HTTP/1.1 request: send one"))
        elif int(headers.get(b"content-length", b"0")) > BODY_LIMIT:
            self._fault(_body_too_large())
        elif b"expect" in headers:
            if headers[b"expect"].lower() != b"100-continue":
                self._fault(Problem(Code.INVALID_BODY, "Expect: only 100-continue is known; leave it out"))
            elif self._task is None and not self._waiting:  # a careful client, such as curl with a larger body
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > BODY_LIMIT:
            self._fault(_body_too_large())
        if not self._deaf:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._unparsed = 0
        if self._deaf:
            return
        if len(self._waiting) == PIPELINED:
            self._fault(Problem(Code.TOO_MANY, f"more than {PIPELINED} requests are ahead of their answers: read some"))
            return
        request = Request(
            method=self._parser.get_method().decode("ascii"),
            target=self._target.decode("utf-8", "backslashreplace"),
            headers=self._headers,
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
            chunks=self._parser.get_http_version() == "1.1",
        )
        self._waiting.append(request)
        self._deaf = not request.keep_alive

    def _fault(self, problem: Problem) -> None:
        """What comes from now on cannot be made sense of: after this answer there is an end."""
        if not self._deaf:
            self._deaf = True
            self._waiting.append(problem)

    # Answering

    async def _answer(self) -> None:
        """Whatever waits, one after the other."""
        try:
            while self._waiting:
                asked = self._waiting.popleft()
                if isinstance(asked, Problem):
                    self._write(render_problem(asked), close=True)
                    self._lingers = True
                else:
                    await self._answer_to(asked)
                if self._drained is not None:
                    await self._read_by_caller(self._drained)
        except BrokenStream:
            self._transport.abort()
        except Exception:
            log.exception("defect of the connection")
            self._transport.abort()
        finally:
            self._task = None
            if self._lost:
                self._server.ended(self)
        if not self._deaf:
            self._transport.resume_reading()
            self._allow(BODY_TIME if self._in_body else HEAD_TIME)
        elif self._lingers and not self._transport.is_closing():
            self._transport.resume_reading()
            self._transport.write_eof()
            self._allow(LINGER)
        else:
            self._transport.close()

    async def _answer_to(self, request: Request) -> None:
        response = await self._server.serve(request, self)
        close = not request.keep_alive or (self._deaf and not self._waiting)
        if response.pieces is None:
            self._write(response, close=close, body=request.method != "HEAD")
        elif request.chunks:
            await self._stream(response, response.pieces, close=close)
        else:
            self._deaf = True
            await self._stream(response, response.pieces, close=True, chunked=False)
        self._ends_with_caller = False

    def _write(self, response: Response, *, close: bool, body: bool = True) -> None:
        if not self._transport.is_closing():
            head = response.head(close=close)
            self._transport.write(head + response.body if body else head)

    async def _stream(
        self, response: Response, pieces: AsyncGenerator[bytes, None], *, close: bool, chunked: bool = True
    ) -> None:
        """Where *pieces* fail, the connection breaks: the caller shall not take them for complete."""
        self._transport.write(response.head(close=close, chunked=chunked))
        async with aclosing(pieces):
            async for piece in pieces:
                if piece:
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                if self._drained is not None:
                    await self._read_by_caller(self._drained)
        if chunked:
            self._transport.write(b"0\r\n\r\n")

    async def _read_by_caller(self, drained: asyncio.Future[None]) -> None:
        self._allow(ANSWER_TIME)
        await drained
        self._disallow()

    # Time

    def _allow(self, seconds: float) -> None:
        """From now on the caller has so long for what is awaited of it. One timer, moved only when it must be."""
        self._overdue_at = self._loop.time() + seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._overdue_at, self._look_at_the_clock)
        elif self._timer.when() > self._overdue_at:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._overdue_at, self._look_at_the_clock)

    def _disallow(self) -> None:
        self._overdue_at = None

    def _look_at_the_clock(self) -> None:
        self._timer = None
        if self._overdue_at is None:
            return
        if self._loop.time() < self._overdue_at:
            self._timer = self._loop.call_at(self._overdue_at, self._look_at_the_clock)
        elif self._drained is not None:
            log.warning("an answer is not read", pid=self.peer.pid, uid=self.peer.uid)
            self._transport.abort()
        elif self._deaf or not self._unparsed:
            self._transport.close()
        else:
            what, seconds = ("body", BODY_TIME) if self._in_body else ("head", HEAD_TIME)
            self._fault(Problem(Code.TIMEOUT, f"the {what} did not arrive within {seconds:g} s; send it faster"))
            self._task = self._loop.create_task(self._answer())


def _hung_up(connection: socket.socket) -> bool:
    """Whether the other end is closed for both directions."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _head_too_large() -> Problem:
    return Problem(Code.HEADERS_TOO_LARGE, f"the head is larger than {HEAD_LIMIT} bytes; send less")


def _body_too_large() -> Problem:
    return Problem(Code.TOO_LARGE, f"the body is larger than {BODY_LIMIT} bytes; split it up")
