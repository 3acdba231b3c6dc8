"""``[daemon]``: what the process itself lives by, read once, at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kata_resmgr.config_keys import OUR_KEYS
from kata_resmgr.config_table import Table

SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (unix(7))."""


class LogLevel(StrEnum):
    """The least of what is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """``auto`` is JSON unless stderr is a terminal."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """The effective values; *origins* tells for each field where it comes from."""

    socket: Path
    socket_group: str | None
    state: Path
    vm_roots: tuple[Path, ...]
    disk_roots: tuple[Path, ...]
    log_level: LogLevel
    log_format: LogFormat
    origins: Mapping[str, str]

    def vm_directory(self, sandbox_id: str) -> Path:
        """Where the daemon makes a directory for a sandbox that names none."""
        return self.socket.parent / "vm" / sandbox_id


def daemon_config(table: Table) -> DaemonConfig:
    """Make *table* effective. Raises :class:`ConfigError`."""
    socket = table.path("socket") or Path("/run/kata-resmgr/api.sock")
    if len(bytes(socket)) > SOCKET_PATH_LIMIT:
        table.refuse("socket", f"a path of at most {SOCKET_PATH_LIMIT} bytes")
    roots, disk_roots = table.paths("vm_roots"), table.paths("disk_roots")
    default_roots = (Path("/run/vc"), Path("/run/kata"), Path("/run/kata-resmgr"))
    return DaemonConfig(
        socket=socket,
        socket_group=table.text("socket_group") or None,
        state=table.path("state") or Path("/run/kata-resmgr/state.db"),
        vm_roots=default_roots if roots is None else roots,
        disk_roots=disk_roots or (),
        log_level=table.choice("log_level", LogLevel) or LogLevel.INFO,
        log_format=table.choice("log_format", LogFormat) or LogFormat.AUTO,
        origins={key: table.origin(key) for key in OUR_KEYS["daemon"]},
    )
