"""A small blocking client of the daemon's socket: one request, one bounded answer, one deadline.

Written on plain sockets because ``http.client`` would double the time a command takes to start; and on CPython's own
``_socket``, of which ``socket`` is the wrapper, because that takes as long to import as all that is done with it here.
"""

from __future__ import annotations

import _socket
import time

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0
"""Seconds for an answer where the caller names no deadline of the operation."""
_MARGIN = 5.0
_ANSWER_LIMIT = 64 << 20


class Unreachable(Exception):
    """There is no answer to be had; the text is one line that says what to do."""


class Reply:
    """What the daemon answered: the body is JSON, or empty."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body


def call(path: str, method: str, target: str, body: bytes | None = None, *, operation: float | None = None) -> Reply:
    """Ask the daemon at *path*. *operation*: the seconds that the operation itself may take. Raises Unreachable."""
    patience = PATIENCE if operation is None else operation + _MARGIN
    end = time.monotonic() + patience
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"\r\n" + (body or b"")
    return _asked(path, request, patience, lambda connection: _parse(_receive(connection, end)))


def follow(path: str, target: str, each: Callable[[bytes], None]) -> Reply:
    """Ask for lines that come as things happen, and hand *each* over, until the daemon ends them.

    The reply's body is empty, unless it says why there are none. Raises Unreachable, also when the lines break off.
    """
    request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    return _asked(path, request, PATIENCE, lambda connection: _lines(connection, each))


def _asked(path: str, request: bytes, patience: float, hear: Callable[[_socket.socket], Reply]) -> Reply:
    """Send *request*, and let *hear* take what comes."""
    try:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            connection.settimeout(patience)
            connection.connect(path)
            try:  # noqa: SIM105 - contextlib costs a millisecond of every start
                connection.sendall(request)
            except (BrokenPipeError, ConnectionResetError):  # refused before all was sent: the answer says why
                pass
            return hear(connection)
        finally:
            connection.close()
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unreachable(
            f"no daemon serves {path}: start it (systemctl start kata-resmgr, or kata-resmgr serve), or say --socket"
        ) from None
    except PermissionError:
        raise Unreachable(f"{path} may not be used: be root, or a member of [daemon] socket_group") from None
    except TimeoutError:
        raise Unreachable(
            f"no answer from {path} within {patience:g} s; what was asked may still be done: look with kata-resmgr ps"
        ) from None
    except OSError as error:
        raise Unreachable(f"the daemon at {path} cannot be asked: {error.strerror or error}; is it running?") from None


def _receive(connection: _socket.socket, end: float) -> bytes:
    received = bytearray()
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(1 << 18)
        if not data:
            return bytes(received)
        received += data
        if len(received) > _ANSWER_LIMIT:
            raise OSError("its answer is larger than 64 MiB")


def _lines(connection: _socket.socket, each: Callable[[bytes], None]) -> Reply:
    """The lines of an answer in chunks. The daemon ends a line with its chunk."""
    received = bytearray()

    def more() -> None:
        data = connection.recv(1 << 18)
        if not data:
            raise OSError("the connection broke off: who does not read for long is given up")
        received.extend(data)
        if len(received) > _ANSWER_LIMIT:
            raise OSError("its answer is larger than 64 MiB")

    def until(mark: bytes) -> bytes:
        while (found := received.find(mark)) < 0:
            more()
        taken = bytes(received[:found])
        del received[: found + len(mark)]
        return taken

    head = until(b"\r\n\r\n")
    if b"\r\ntransfer-encoding: chunked" not in head.lower():
        rest = _receive(connection, time.monotonic() + PATIENCE)
        return _parse(head + b"\r\n\r\n" + bytes(received) + rest)
    connection.settimeout(None)
    while size := int(until(b"\r\n"), 16):
        while len(received) < size + 2:
            more()
        for line in bytes(received[:size]).splitlines():
            each(line)
        del received[: size + 2]
    return Reply(200, b"")


def _parse(answer: bytes) -> Reply:
    """One response with a Content-Length, which is all that the daemon sends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = lines[0].split(" ")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    length = headers.get("content-length", "0")
    if len(status) < 2 or status[0] != "HTTP/1.1" or not status[1].isdecimal() or not length.isdecimal():
        raise OSError("what answers there is not the daemon")
    if len(body) != int(length):
        raise OSError("the connection ended within the answer")
    return Reply(int(status[1]), body)
