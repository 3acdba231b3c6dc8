"""The bare exchange that the daemon is measured against: a blocking socket, stdlib json, one command at a time."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class BareQmp:
    """Plug and unplug with read-back, as the shortest honest script would."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")
        self._lines.readline()  # the greeting
        self.call("qmp_capabilities")
        slots: list[dict[str, Any]] = self.call("query-hotpluggable-cpus")
        self._slots = [slot for slot in reversed(slots) if "qom-path" not in slot]

    def call(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        self._socket.sendall(json.dumps({"execute": name, "arguments": arguments}).encode())
        while True:
            message = json.loads(self._lines.readline())
            if "return" in message:
                return message["return"]
            assert "error" not in message, message

    def plug(self) -> None:
        slot = self._slots[0]
        self.call("device_add", driver=slot["type"], id="bare", **slot["props"])
        self.call("query-hotpluggable-cpus")

    def unplug(self) -> None:
        self._socket.sendall(b'{"execute": "device_del", "arguments": {"id": "bare"}}')
        while json.loads(self._lines.readline()).get("event") != "DEVICE_DELETED":
            pass
        self.call("query-hotpluggable-cpus")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
