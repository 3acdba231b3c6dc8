"""What a service says to its manager, and what it inherits: sd_notify(3) and sd_listen_fds(3)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_FIRST = 3


class InheritedError(Exception):
    """A descriptor that was handed over is of no use here; the text is one line."""


def notify(*lines: str) -> None:
    """Tell the service manager, where there is one. That it does not listen is its own affair."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.setblocking(False)
        manager.connect("\0" + path[1:] if path[0] == "@" else path)
        manager.send("\n".join(lines).encode())


def watchdog_period() -> float | None:
    """Seconds after which the service manager ends a process of which it has not heard; None: it does not watch."""
    period, watched = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not period.isdecimal() or int(period) == 0 or watched not in ("", str(os.getpid())):
        return None
    return int(period) / 1e6


def inherited_sockets() -> list[socket.socket]:
    """The listening Unix sockets that this process was started with. Raises :class:`InheritedError`.

    The environment is cleared, so that no child takes them for its own.
    """
    count, owner = os.environ.pop("LISTEN_FDS", "0"), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if owner != str(os.getpid()) or not count.isdecimal():
        return []
    return [_listener(descriptor) for descriptor in range(_FIRST, _FIRST + int(count))]


def _listener(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
        listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise InheritedError(f"inherited descriptor {descriptor}: {error.strerror}; hand over Unix sockets") from error
    if not listening or listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM:
        listener.close()
        raise InheritedError(f"inherited descriptor {descriptor} is no listening Unix stream socket (ListenStream=)")
    listener.set_inheritable(False)
    return listener
