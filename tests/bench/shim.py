"""The caller of the measurements: as little as a shim needs, so that what is measured is the daemon."""

from __future__ import annotations

import socket
from pathlib import Path


class Shim:
    """One kept connection; requests are bytes made beforehand."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    @staticmethod
    def request(method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    def connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(self._path)

    def call(self, request: bytes) -> bytes:
        """Send it, and wait for the whole answer, which must be a success; its body."""
        self._socket.sendall(request)
        answer = self._more()
        while (body := body_of(answer)) is None:
            answer += self._more()
        assert answer.startswith(b"HTTP/1.1 2"), answer
        return body

    def _more(self) -> bytes:
        data = self._socket.recv(65536)
        assert data, "the daemon closed the connection"
        return data

    def close(self) -> None:
        self._socket.close()


def body_of(answer: bytes) -> bytes | None:
    """The body of an answer; None while it has not come whole."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = answer[:end].lower()
    at = head.find(b"content-length: ")
    length = int(head[at + 16 :].partition(b"\r\n")[0]) if at > 0 else 0
    return answer[end + 4 :] if len(answer) >= end + 4 + length else None
