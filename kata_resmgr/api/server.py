"""The API's side of the socket: every request passes here, is checked, handed to its route, answered and logged."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import structlog

from kata_resmgr.api import peers
from kata_resmgr.api.answers import Answer, Response, render, render_problem
from kata_resmgr.api.bodies import read_body
from kata_resmgr.api.connection import Connection, Request
from kata_resmgr.api.queries import read_query
from kata_resmgr.api.routes import Call, NoSuchMethod, Route, find
from kata_resmgr.manager import ResourceManager
from kata_resmgr.problem import Code, Problem

CONNECTIONS: Final = 4096
BACKLOG: Final = 1024
_CLOSING: Final = 1.0
"""Seconds for callers to read their last answers."""
_ACCOUNT_AFTER: Final = 0.05
"""Seconds from an answer to its line in the log, and its place in the metrics."""
_ACCOUNTS_MOST: Final = 200
"""As many are not kept waiting for that."""

log = structlog.get_logger(__name__)


class Api:
    """The socket's side of one :class:`ResourceManager`. *group*: whose members may call beside root."""

    def __init__(self, manager: ResourceManager, group: int | None) -> None:
        self._manager = manager
        self._group = group
        self._closing = asyncio.Event()
        self._connections: set[Connection] = set()
        self._own: set[Connection] = set()
        """Over which the daemon asks itself: it is heard however many others there are."""
        self._listeners: list[asyncio.Server] = []
        self._inherited = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._all_ended = asyncio.Event()
        self._accounts: list[Callable[[], None]] = []

    async def start(self, sockets: Iterable[socket.socket], *, inherited: bool = False) -> None:
        """Accept connections on *sockets*, which are this object's from now on.

        On one that is *inherited* whoever comes while this stops waits for the next daemon; elsewhere it is told.
        """
        loop = asyncio.get_running_loop()
        self._inherited = inherited
        for listener in sockets:
            self._listeners.append(await loop.create_server(lambda: Connection(self), sock=listener, backlog=BACKLOG))

    async def stop(self, patience: float) -> None:
        """Refuse what comes, let what runs come to its end for *patience* seconds, and close all connections."""
        self._closing.set()
        if self._inherited:
            self._stop_listening()
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()  # operations whose caller has gone run on too
        except TimeoutError:
            log.warning("operations are cut short", running=self._running)
        self._stop_listening()
        self._manager.events.end()  # those who follow have heard of all that ran
        for connection in tuple(self._connections):
            connection.close()
        if self._connections:
            self._all_ended.clear()
            try:
                async with asyncio.timeout(_CLOSING):
                    await self._all_ended.wait()
            except TimeoutError:
                for connection in tuple(self._connections):
                    connection.abort()
        self._settle_accounts()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def succeeds(self, path: str) -> bool:
        """Whether a GET of *path* succeeds, asked as callers ask: over a connection, which only was not accepted."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        connection = Connection(self)
        self._own.add(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, theirs)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        finally:
            self._own.discard(connection)
            writer.close()

    # Connections

    def identify(self, connection: socket.socket) -> peers.Peer:
        """Who is at the other end; nobody who may call, where that cannot be told."""
        try:
            return peers.identify(connection, self._group)
        except OSError:
            log.warning("a peer without credentials")
            return peers.Peer(pid=0, uid=-1, allowed=False)

    def began(self, connection: Connection) -> None:
        self._connections.add(connection)
        if len(self._connections) > CONNECTIONS and connection not in self._own:
            log.warning("too many connections", limit=CONNECTIONS, pid=connection.peer.pid, uid=connection.peer.uid)
            connection.refuse(
                Problem(Code.TOO_MANY, f"there are {CONNECTIONS} connections, the most: close idle ones", retry_after=1)
            )

    def ended(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_ended.set()

    # Requests

    async def serve(self, request: Request, connection: Connection) -> Response:
        """Every request that could be parsed. Whatever happens, it is answered here."""
        began = time.perf_counter()
        self._running += 1
        self._idle.clear()
        code = None
        try:
            response = render(await self._answer(request, connection))
        except Problem as problem:
            code = problem.code.text
            response = render_problem(problem, problem.allowed if isinstance(problem, NoSuchMethod) else None)
        except Exception:
            log.exception("defect", method=request.method, path=request.target[:256])
            code = Code.INTERNAL.text
            response = render_problem(Problem(Code.INTERNAL, "this is a defect of the daemon; its log tells more"))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        if request.method != "GET":
            seconds = time.perf_counter() - began
            # Many together, and none in the way of the answer, or of the caller's next request: it is cheaper so.
            self._accounts.append(partial(self._account, request, response.status, code, connection.peer, seconds))
            if len(self._accounts) == 1:
                asyncio.get_running_loop().call_later(_ACCOUNT_AFTER, self._settle_accounts)
            elif len(self._accounts) == _ACCOUNTS_MOST:
                self._settle_accounts()
        return response

    def _settle_accounts(self) -> None:
        accounts, self._accounts = self._accounts, []
        for account in accounts:
            account()

    def _account(self, request: Request, status: int, code: str | None, peer: peers.Peer, seconds: float) -> None:
        """Count what was asked and log it, unless it could not have changed anything."""
        try:
            route, sandbox, container = find(request.method, request.target.partition("?")[0])
        except Problem:
            op, changes, names = "none", True, {}
        else:
            op, changes = route.op, route.changes
            names = {"sandbox": sandbox, "container": container}
        self._manager.metrics.operation(op, code or ("accepted" if status == 202 else "ok"), seconds)
        if changes:
            log.info(
                "change",
                method=request.method[:16],
                path=request.target[:256],
                **{what: name for what, name in names.items() if name},
                status=status,
                code=code,
                pid=peer.pid,
                uid=peer.uid,
                ms=round(1000 * seconds, 3),
            )

    async def _answer(self, request: Request, connection: Connection) -> Answer:
        if not connection.peer.allowed:
            raise Problem(
                Code.FORBIDDEN,
                f"uid {connection.peer.uid} may not use this socket; be root, or a member of [daemon] socket_group",
            )
        path, _, query = request.target.partition("?")
        route, sandbox, container = find(request.method, path)
        if request.method == "GET":
            connection.end_with_caller()
        elif self._closing.is_set():
            raise Problem(Code.SHUTTING_DOWN, "the daemon is stopping; repeat this after its restart", retry_after=1)
        call = Call(
            self._manager,
            self._closing,
            sandbox,
            container,
            read_query(query, route.query),
            None if route.body is None else _body(request, route),
        )
        try:
            return await route.handler(call)
        except RecursionError as error:  # nothing here recurses but over the body's own nesting
            raise Problem(Code.INVALID_BODY, "the body is nested too deeply; flatten it") from error


def _body(request: Request, route: Route) -> Any:  # noqa: ANN401 - the route's own type
    assert route.body is not None  # noqa: S101 - said by the caller
    kind = request.headers.get(b"content-type")
    if kind is not None and kind.partition(b";")[0].strip().lower() != b"application/json":
        raise Problem(
            Code.UNSUPPORTED_TYPE,
            f"Content-Type {_quoted(kind)} is not taken; send 'Content-Type: application/json'",
        )
    encoding = request.headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        raise Problem(Code.UNSUPPORTED_TYPE, f"Content-Encoding {_quoted(encoding)} is not taken; send the body plain")
    return read_body(route.body, request.body or b"{}" if route.body_optional else request.body)


def _quoted(value: bytes) -> str:
    return repr(value[:80].decode("utf-8", "backslashreplace"))
