"""A monitor of QEMU's beside the daemon's: as much of QMP as these tests need."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE = 30.0
"""Seconds for whatever should take far less."""


class Monitor:
    """One connection. What QEMU refuses fails the test."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")
        self._events: list[dict[str, Any]] = []
        self._message()
        self.execute("qmp_capabilities")

    def execute(self, command: str, **arguments: object) -> None:
        """Have it done."""
        self._exchange(command, arguments)

    def query(self, command: str) -> list[dict[str, Any]]:
        """The list that *command* returns."""
        answer: list[dict[str, Any]] = self._exchange(command, {})["return"]
        return answer

    def status(self, command: str) -> str:
        """The ``status`` in what *command* returns; "" where it tells none."""
        return str(self._exchange(command, {})["return"].get("status", ""))

    def event(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event that *matches*, those first that came before an answer."""
        while True:
            while self._events:
                if matches(event := self._events.pop(0)):
                    return event
            self._events.append(self._message())

    def heard(self) -> list[str]:
        """The names of the events up to now, all but those that were asked for before."""
        self.execute("query-status")
        names = [event["event"] for event in self._events]
        self._events.clear()
        return names

    def plug(self, name: str | None) -> None:
        """Add a vCPU in the lowest free slot, with that id or without one."""
        free = [slot for slot in self.query("query-hotpluggable-cpus") if "qom-path" not in slot]
        named = {} if name is None else {"id": name}
        self.execute("device_add", driver=free[-1]["type"], **named, **free[-1]["props"])

    def vcpus(self) -> int:
        """How many vCPUs QEMU has."""
        return sum("qom-path" in slot for slot in self.query("query-hotpluggable-cpus"))

    def _exchange(self, command: str, arguments: dict[str, object]) -> dict[str, Any]:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while "event" in (message := self._message()):
            self._events.append(message)
        assert "error" not in message, message
        return message

    def _message(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("QEMU closed the monitor")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def monitor(path: Path) -> Iterator[Monitor]:
    """A connection to the monitor at *path*."""
    connected = Monitor(path)
    try:
        yield connected
    finally:
        connected.close()
