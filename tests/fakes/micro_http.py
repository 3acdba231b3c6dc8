"""The HTTP server of Cloud Hypervisor on the wire, byte for byte: its micro_http, with any handler behind it.

One thread, called ``http-server``, does everything: a request is handled before the next one is read, whoever sends it.
Ten connections, none of which is closed for being idle.
"""

from __future__ import annotations

import re
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fakes.threads import join, name_this_thread

CONNECTIONS: Final = 10
LINE: Final = 1024
"""Bytes of the request line, and of each header."""
METHODS: Final = frozenset({"GET", "PUT", "PATCH"})
FULL: Final = (
    b"HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: 40\r\n\r\n"
    b'{ "error": "Too many open connections" }'
)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes | None


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""


@dataclass(frozen=True)
class Raw:
    """Bytes instead of a response; then the connection ends."""

    bytes: bytes


Handler = Callable[[Request], Response | Raw | None]
"""None: the connection ends without an answer."""


class ParserError(Exception):
    """What the HTTP parser says."""


class MicroHttp:
    """Serves on *path* from construction to :meth:`close`. *limit* is that of a body; *methods* are those it parses."""

    def __init__(
        self, path: Path, handler: Handler, *, limit: int = 4 << 20, methods: frozenset[str] = METHODS
    ) -> None:
        self._handler = handler
        self._limit = limit
        self._methods = methods
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._path = path
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._received: dict[socket.socket, bytearray] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="http-server")
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._received)

    def wait_until_free(self) -> None:
        """Until there is no connection any more."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._received, 5.0):
                raise TimeoutError(f"{len(self._received)} connections are left")

    def close(self) -> None:
        """End it; a handler under way must end by itself."""
        if not self._stopping:
            self._stopping = True
            self._wake.send(b"x")
            join(self._thread)
            for each in (*self._received, self._listener, self._waker, self._wake):
                each.close()
            self._selector.close()
            with suppress(OSError):
                self._path.unlink()

    def _serve(self) -> None:
        name_this_thread("http-server")
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._waker:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._received) >= CONNECTIONS:
            connection.sendall(FULL)
            connection.close()
            return
        connection.setblocking(True)
        self._received[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
            if not data:
                self._end(connection)
                return
            received = self._received[connection]
            received += data
            try:
                requests = self._parse(connection, received)
            except ParserError as error:  # earlier ones of this batch are dropped with it
                received.clear()
                text = f'{{ "error": "{error}\nAll previous unanswered requests will be dropped." }}'
                connection.sendall(wire(Response(400, text.encode()), server="Firecracker API"))
                return
            for request in requests:
                answer = self._handler(request)
                if isinstance(answer, Response):
                    connection.sendall(wire(answer))
                    continue
                if isinstance(answer, Raw):
                    connection.sendall(answer.bytes)
                self._end(connection)
                return
        except OSError:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        with self._changed:
            del self._received[connection]
            self._changed.notify_all()

    def _parse(self, connection: socket.socket, received: bytearray) -> list[Request]:
        """All requests that are complete."""
        requests = []
        while b"\r\n" in received:
            first, _, _ = bytes(received).partition(b"\r\n")
            method, path = self._request_line(first)
            head, end, rest = bytes(received).partition(b"\r\n\r\n")
            if not end:
                break
            length, expects = self._headers(head.split(b"\r\n")[1:])
            if expects and not rest:
                connection.sendall(b"HTTP/1.1 100 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n")
            if len(rest) < length:
                break
            del received[: len(head) + 4 + length]
            requests.append(Request(method, path, rest[:length] or None))
        return requests

    def _request_line(self, line: bytes) -> tuple[str, str]:
        parts = line.decode(errors="replace").split(" ")
        if len(line) > LINE or len(parts) != 3:
            raise ParserError("Invalid request.")
        method, path, version = parts
        if method not in self._methods:
            raise ParserError("Invalid HTTP Method: Unsupported HTTP method.")
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            raise ParserError("Invalid HTTP Version: Unsupported HTTP version.")
        return method, re.sub(r"^http://[^/]*", "", path)

    def _headers(self, lines: list[bytes]) -> tuple[int, bool]:
        """The body's length, and whether the client waits before it sends it."""
        length, expects = 0, False
        for line in lines:
            name, colon, value = line.decode(errors="replace").partition(":")
            if len(line) > LINE or not colon:
                raise ParserError("Invalid request.")
            name, said = name.lower(), value.strip()
            if name == "content-length":
                if not said.isdecimal():
                    raise ParserError(f"Invalid header. Reason: Invalid value. Key:Content-Length; Value:{value}")
                length = int(said)
                if length > self._limit:
                    raise ParserError(
                        f"Request payload with size {length} is larger than the limit of {self._limit} allowed by "
                        "server."
                    )
            elif name == "transfer-encoding" and said == "chunked":
                raise ParserError("Invalid request.")
            elif name == "accept-encoding" and (not said or "identity;q=0" in said):
                raise ParserError(f"Invalid header. Reason: Invalid value. Key:Accept-Encoding; Value:{said}")
            elif name == "expect":
                expects = True
        return length, expects


def wire(response: Response, server: str = "Cloud Hypervisor API") -> bytes:
    """*response* as bytes: no reason phrase, and nothing of a body with 204."""
    head = f"HTTP/1.1 {response.status} \r\nServer: {server}\r\nConnection: keep-alive\r\n"
    if response.status != 204:
        head += f"Content-Type: application/json\r\nContent-Length: {len(response.body)}\r\n"
    return head.encode() + b"\r\n" + (b"" if response.status == 204 else response.body)
