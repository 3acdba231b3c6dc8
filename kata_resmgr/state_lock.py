"""One state, one daemon: a lock beside the state that the kernel drops when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path


class StateError(Exception):
    """The state cannot be used; the text is one line that says why and what to do."""


class StateLock:
    """Held from when it is made until :meth:`release`, or until the process is gone."""

    def __init__(self, state: Path) -> None:
        """Raises :class:`StateError`, with the holder's pid where another process has it."""
        path = state.with_name(f"{state.name}.lock")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StateError(f"{path}: the lock of the state cannot be made: {error.strerror}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._file)
            os.close(self._file)
            who = "another daemon" if holder is None else f"another daemon, pid {holder}"
            raise StateError(f"{state}: {who}, owns this state; stop it, or name another [daemon] state") from error

    def release(self) -> None:
        """Let another have it. The file stays: taken away, it could be the one that a second daemon has just locked."""
        os.close(self._file)


def _holder(file: int) -> int | None:
    """The pid of whoever holds the lock (fcntl(2), F_GETLK); None where it has just let go, or is out of sight."""
    layout = "hhqqi0q"  # struct flock: type, whence, start, length, pid
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None
