"""Who is at the other end of a connection, and whether they may call.

Checked by credentials that the kernel recorded when the peer connected, whatever the mode of the socket file: an
inherited socket may be open to everybody.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid (unix(7))
_SO_PEERGROUPS = 59
_MOST_GROUPS = 256
"""As many as Python's ``getsockopt`` can take; of a peer with more only the primary group counts."""


class Peered(Protocol):
    """A connected Unix socket."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected. ``allowed``: it may use this API."""

    pid: int
    uid: int
    allowed: bool


def identify(connection: Peered, group: int | None) -> Peer:
    """The peer of *connection*. Root and this process's own user may call, and the members of *group*."""
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    allowed = uid in (0, os.geteuid()) or (group is not None and (gid == group or group in _groups(connection)))
    return Peer(pid, uid, allowed)


def _groups(connection: Peered) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:  # ERANGE: more groups than that
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)
