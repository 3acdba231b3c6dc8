"""Many shims at once in one thread: each with its connection, its VM, and one request under way."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.shim import body_of

PATIENCE = 30.0
"""Seconds for an answer."""


class _Shim:
    """One connection; its requests go round."""

    def __init__(self, path: Path, requests: Sequence[bytes]) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self._requests = requests
        self._answer = b""
        self.answered = 0

    def ask(self) -> None:
        """Send the next request, which is small enough to be taken whole."""
        request = self._requests[self.answered % len(self._requests)]
        sent = self.socket.send(request)
        assert sent == len(request)

    def hear(self) -> bool:
        """Read what has come; whether it is the whole answer, which must be a success."""
        received = self.socket.recv(65536)
        assert received, "the daemon closed the connection"
        self._answer += received
        if body_of(self._answer) is None:
            return False
        assert self._answer.startswith(b"HTTP/1.1 2"), self._answer
        self._answer = b""
        self.answered += 1
        return True

    @property
    def has_gone_round(self) -> bool:
        return self.answered % len(self._requests) == 0


class Shims:
    """As many shims as there are lists of requests. Close it."""

    def __init__(self, path: Path, requests: Sequence[Sequence[bytes]]) -> None:
        self._selector = selectors.DefaultSelector()
        self._shims = [_Shim(path, each) for each in requests]
        for shim in self._shims:
            self._selector.register(shim.socket, selectors.EVENT_READ, shim)

    def work(self, seconds: float) -> list[int]:
        """How many answers each had in so many seconds, all asking again at once; each goes on to its last request."""
        end = time.monotonic() + seconds
        counted: list[int] | None = None
        under_way = len(self._shims)
        for shim in self._shims:
            shim.ask()
        while under_way:
            ready = self._selector.select(PATIENCE)
            assert ready, f"no answer in {PATIENCE:g} s, {under_way} under way"
            if counted is None and time.monotonic() >= end:
                counted = [shim.answered for shim in self._shims]
            for key, _ in ready:
                asked: _Shim = key.data
                if asked.hear():
                    if counted is not None and asked.has_gone_round:
                        under_way -= 1
                    else:
                        asked.ask()
        return counted or [shim.answered for shim in self._shims]

    def once(self) -> float:
        """Let each ask for all of its requests once; the seconds until the last answer."""
        began = time.monotonic()
        self.work(0)
        return time.monotonic() - began

    def close(self) -> None:
        self._selector.close()
        for shim in self._shims:
            shim.socket.close()
