"""HTTP/1.1 on inherited or own Unix sockets: limits, peers, and one place where every request passes.

Built on aiohttp's low-level server: its parser and connections, without its router. Slow senders are cut off: a
connection that has not sent a complete head 10 s after it was opened or last answered is closed, a body has 10 s, and
an answer that is not read within 30 s is given up.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from kata_resmgr.api import peers
from kata_resmgr.api.answers import Answer, render, render_problem, taken_at_once
from kata_resmgr.api.bodies import read_body
from kata_resmgr.api.queries import read_query
from kata_resmgr.api.routes import Call, NoSuchMethod, Route, find
from kata_resmgr.manager import ResourceManager
from kata_resmgr.problem import Code, Problem

BODY_LIMIT = 1 << 20
HEAD_LIMIT = 16 << 10
CONNECTIONS = 4096
BACKLOG = 1024
IDLE = 10.0
"""Seconds without a complete head after which a connection is closed."""
BODY_TIME = 10.0
"""Seconds that a body may take to arrive."""
ANSWER_TIME = 30.0
"""Seconds within which a caller must have read its answer, but for what fits into the socket's buffers."""
_LINGER = 1.0
_LOG_AFTER = 0.001
"""Seconds from an answer to its line in the log."""

log = structlog.get_logger(__name__)


class Api:
    """The socket's side of one :class:`ResourceManager`. *group*: whose members may call beside root."""

    def __init__(self, manager: ResourceManager, group: int | None) -> None:
        self._manager = manager
        self._closing = asyncio.Event()
        self._http = _Server(self._serve, group)
        self._listeners: list[asyncio.Server] = []
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, sockets: Iterable[socket.socket]) -> None:
        """Accept connections on *sockets*, which are this object's from now on."""
        loop = asyncio.get_running_loop()
        for listener in sockets:
            self._listeners.append(await loop.create_server(self._http, sock=listener, backlog=BACKLOG))

    async def stop(self, patience: float) -> None:
        """Accept nothing more, let what runs come to its end for *patience* seconds, and close all connections."""
        self._closing.set()
        for listener in self._listeners:
            listener.close()
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()  # operations whose caller has gone run on too
        except TimeoutError:
            log.warning("operations are cut short", running=self._running)
        self._http.pre_shutdown()
        await self._http.shutdown(1.0)
        await asyncio.sleep(2 * _LOG_AFTER)  # the last lines

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request that could be parsed. Whatever happens, it is answered here."""
        began = time.perf_counter()
        self._running += 1
        self._idle.clear()
        code = None
        try:
            response = render(await self._answer(request))
        except Problem as problem:
            code = problem.code.text
            headers = {"Allow": problem.allowed} if isinstance(problem, NoSuchMethod) else {}
            response = render_problem(problem, **headers)
        except Exception:
            log.exception("defect", method=request.method, path=request.raw_path[:256])
            code = Code.INTERNAL.text
            response = render_problem(Problem(Code.INTERNAL, "this is a defect of the daemon; its log tells more"))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        if request.method != "GET":
            ms = 1000 * (time.perf_counter() - began)
            # Later than the answer, and than the caller's next request: while a hypervisor works there is time for it.
            asyncio.get_running_loop().call_later(
                _LOG_AFTER,
                _log_change,
                request.method,
                request.raw_path,
                response.status,
                code,
                _connection(request).peer,
                ms,
            )
        return response

    async def _answer(self, request: web.BaseRequest) -> Answer:
        connection = _connection(request)
        peer = connection.peer
        if not peer.allowed:
            raise Problem(
                Code.FORBIDDEN,
                f"uid {peer.uid} may not use this socket; be root, or a member of [daemon] socket_group",
            )
        if sum(len(name) + len(value) + 4 for name, value in request.raw_headers) > HEAD_LIMIT:
            raise Problem(Code.HEADERS_TOO_LARGE, f"the headers are larger than {HEAD_LIMIT} bytes; send fewer")
        path, _, query = request.raw_path.partition("?")
        route, sandbox, container = find(request.method, path)
        if self._closing.is_set() and request.method != "GET":
            raise Problem(Code.SHUTTING_DOWN, "the daemon is stopping; repeat this after its restart", retry_after=1)
        call = Call(
            self._manager,
            self._closing,
            sandbox,
            container,
            read_query(query, route.query),
            None if route.body is None else await _body(request, route),
        )
        try:
            if request.method != "GET":
                return await route.handler(call)
            with connection.looking():
                return await route.handler(call)
        except RecursionError as error:  # nothing here recurses but over the body's own nesting
            raise Problem(Code.INVALID_BODY, "the body is nested too deeply; flatten it") from error


def _log_change(method: str, path: str, status: int, code: str | None, peer: peers.Peer, ms: float) -> None:
    log.info(
        "change",
        method=method[:16],
        path=path[:256],
        status=status,
        code=code,
        pid=peer.pid,
        uid=peer.uid,
        ms=round(ms, 3),
    )


async def _body(request: web.BaseRequest, route: Route) -> Any:  # noqa: ANN401 - the route's own type
    assert route.body is not None  # noqa: S101 - said by the caller
    kind = request.headers.get("Content-Type")
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        raise Problem(
            Code.UNSUPPORTED_TYPE, f"Content-Type {kind[:80]!r} is not taken; send 'Content-Type: application/json'"
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise Problem(Code.UNSUPPORTED_TYPE, f"Content-Encoding {encoding[:80]!r} is not taken; send the body plain")
    if (request.content_length or 0) > BODY_LIMIT:
        raise _too_large()
    try:
        if request.content.is_eof():
            text = await request.read()
        else:
            async with asyncio.timeout(BODY_TIME):
                if "Expect" in request.headers:
                    await _continue(request)
                text = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large() from error
    except TimeoutError as error:
        raise Problem(Code.TIMEOUT, f"the body did not arrive within {BODY_TIME:g} s; send it faster") from error
    except web.RequestPayloadError as error:
        raise Problem(Code.INVALID_BODY, f"the body did not arrive whole: {error}") from error
    return read_body(route.body, text or b"{}" if route.body_optional else text)


def _too_large() -> Problem:
    return Problem(Code.TOO_LARGE, f"the body is larger than {BODY_LIMIT} bytes; split it up")


async def _continue(request: web.BaseRequest) -> None:
    """Tell a careful client (curl with a larger body) that its body is wanted."""
    if request.headers["Expect"].lower() != "100-continue":
        raise Problem(Code.INVALID_BODY, "Expect: only 100-continue is known; leave it out")
    transport = request.transport
    if transport is not None:
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _connection(request: web.BaseRequest) -> _Connection:
    connection = request.protocol
    assert isinstance(connection, _Connection)  # noqa: S101 - made by _Server alone
    return connection


class _Server(web.Server):
    """aiohttp's server with this API's connections and limits."""

    def __init__(self, handler: Any, group: int | None) -> None:  # noqa: ANN401 - aiohttp names no public type for it
        super().__init__(handler)
        self.group = group

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self.group)


class _Connection(web.RequestHandler):
    """One connection. Its peer is asked for once: credentials do not change after connect(2)."""

    __slots__ = ("_group", "_looking", "_server", "peer")

    def __init__(self, server: _Server, group: int | None) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # documented as "no access log"
            keepalive_timeout=IDLE,
            tcp_keepalive=False,
            lingering_time=_LINGER,
            max_line_size=HEAD_LIMIT,
            max_field_size=HEAD_LIMIT,
            auto_decompress=False,
        )
        self._server = server
        self._group = group
        self.peer = peers.Peer(pid=0, uid=-1, allowed=False)
        self._looking: asyncio.Task[object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        try:
            self.peer = peers.identify(transport.get_extra_info("socket"), self._group)
        except OSError:
            log.warning("a peer without credentials")
        if len(self._server.connections) > CONNECTIONS:
            log.warning("too many connections", limit=CONNECTIONS, pid=self.peer.pid, uid=self.peer.uid)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._looking is not None:
            self._looking.cancel()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around what only looks: unlike an operation, it ends with its caller, or waits would pile up."""
        self._looking = asyncio.current_task()
        try:
            yield
        finally:
            self._looking = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer, but not for ever."""
        transport = self.transport
        if (
            isinstance(resp, web.Response)
            and isinstance(transport, asyncio.WriteTransport)
            and taken_at_once(resp.body if isinstance(resp.body, bytes) else b"", transport)
        ):
            return await super().finish_response(request, resp, start_time)
        giving_up = asyncio.get_running_loop().call_later(ANSWER_TIME, self._abort)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            giving_up.cancel()

    def _abort(self) -> None:
        log.warning("an answer is not read", pid=self.peer.pid, uid=self.peer.uid)
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp could not parse, or what went wrong outside of :meth:`Api._serve`."""
        text = " ".join(str(exc.args[0] if exc is not None and exc.args else message).split())
        if status >= 500:
            log.error("defect of the connection", exc_info=exc)
            problem = Problem(Code.INTERNAL, "this is a defect of the daemon; its log tells more")
        elif isinstance(exc, LineTooLong) or "Too many headers" in text:
            problem = Problem(Code.HEADERS_TOO_LARGE, f"the head is larger than {HEAD_LIMIT} bytes; send less")
        else:
            problem = Problem(Code.INVALID_BODY, f"this is not an HTTP/1.1 request: {text}")
        response = render_problem(problem)
        response.force_close()
        return response
