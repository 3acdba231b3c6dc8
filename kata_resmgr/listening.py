"""The daemon's own Unix socket: where it is put, who may connect, and what happens to one that is already there."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path


class ListenError(Exception):
    """The socket cannot be had; the text is one line that says why and what to do."""


class Listener:
    """A bound socket with mode 0600, or 0660 and *group*. Close it by :meth:`remove` when it is no longer served."""

    def __init__(self, path: Path, group: int | None) -> None:
        """Bind *path*; a socket on which nobody answers any more is replaced. Raises :class:`ListenError`."""
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            make_directory(path.parent, group)
            self._bind()
            if group is not None:
                os.chown(path, -1, group)
                path.chmod(0o660)
            self._file = path.lstat()
        except OSError as error:
            self.socket.close()
            raise ListenError(f"cannot listen on {path}: {error.strerror or error}") from error
        except ListenError:
            self.socket.close()
            raise

    def remove(self) -> None:
        """Take the file away, unless another daemon has put its own in its place."""
        self.socket.close()
        with suppress(OSError):
            if os.path.samestat(self._path.lstat(), self._file):
                self._path.unlink()

    def _bind(self) -> None:
        mask = os.umask(0o177)  # never open to others, not even for the moment until a chmod
        try:
            try:
                self.socket.bind(str(self._path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                _remove_stale(self._path)
                self.socket.bind(str(self._path))
        finally:
            os.umask(mask)


def make_directory(directory: Path, group: int | None) -> None:
    """Make it, where it is not there: for root alone, or for *group* to pass through too. Raises :class:`OSError`."""
    if directory.is_dir():
        return
    directory.mkdir(mode=0o700, parents=True)
    if group is not None:
        os.chown(directory, -1, group)
        directory.chmod(0o750)


def _remove_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ListenError(f"cannot listen on {path}: it is there and no socket; remove it or name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its queue is full: somebody is there
            pass
    raise ListenError(f"cannot listen on {path}: another process serves it; stop that one or name another path")
