"""Connecting to a VMM's Unix socket, and to no other.

The directory of such a socket may belong to the VMM's user, who could put a symbolic link to another service in its
place. So nothing on the way is followed: each name is opened by itself, and what is connected to is what was found, by
its descriptor and not again by its path.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def opened(path: str) -> Iterator[int]:
    """*path*, absolute and without ``..``, as a descriptor that only stands for it (O_PATH, open(2)).

    Raises :class:`OSError`; ELOOP where a symbolic link is in the way.
    """
    found = _find(path)
    try:
        yield found
    finally:
        os.close(found)


def connect(connection: socket.socket, path: str) -> None:
    """Connect to the socket at *path*, of any length. Raises :class:`OSError`, as connect(2) and :func:`opened` do."""
    with opened(path) as found:
        connection.connect(f"/proc/self/fd/{found}")


def _find(path: str) -> int:
    names = path.split("/")
    if not path.startswith("/") or ".." in names or "\0" in path:
        raise OSError(errno.EINVAL, "not an absolute path without ..")
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in filter(None, names):
            # A link itself is opened, not what it names; and below a link there is nothing.
            there = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = there
            if stat.S_ISLNK(os.fstat(here).st_mode):
                raise OSError(errno.ELOOP, "a symbolic link is in the way")
    except OSError as error:
        os.close(here)
        raise OSError(error.errno, error.strerror) from None  # without the name, which is a part only
    return here
