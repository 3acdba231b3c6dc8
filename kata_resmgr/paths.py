"""Paths that callers name: under a root, without leaving it, and what they should be (SPEC 11).

A path is resolved once, when it is checked. What is done with it later follows no symbolic link any more
(:mod:`hypervisors.vmm_socket`), so one that comes into its way leads nowhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from hypervisors import vmm_socket
from kata_resmgr.problem import Code, Problem

SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (unix(7))."""


def under_roots(path: str, roots: Iterable[Path], key: str = "vm_roots") -> Path:
    """*path* with its symbolic links resolved. Raises :class:`Problem` ``invalid_path``, naming what is allowed.

    *key* is the configuration's name for *roots*.
    """
    if not path.startswith("/") or "\0" in path:
        raise Problem(Code.INVALID_PATH, f'"{path}" is not an absolute path')
    real = Path(os.path.realpath(path))
    allowed = tuple(roots)
    if not any(real.is_relative_to(os.path.realpath(root)) for root in allowed):
        names = ", ".join(map(str, allowed)) or f"a root, for {key} is empty"
        raise Problem(Code.INVALID_PATH, f'"{path}" is not under {names}: use one there, or add to {key}')
    return real


def leads_to(path: str, real: Path | None) -> bool:
    """Whether *path*, with its symbolic links resolved, is *real*."""
    return "\0" not in path and os.path.realpath(path) == str(real)


def socket_under_roots(path: str, roots: Iterable[Path]) -> Path:
    """As :func:`under_roots`, and short enough for a socket to be there."""
    real = under_roots(path, roots)
    longest = max(len(os.fsencode(path)), len(os.fsencode(real)))  # either may be what is bound or connected to
    if longest > SOCKET_PATH_LIMIT:
        raise Problem(
            Code.INVALID_PATH,
            f"a path of {longest} bytes; a socket's path has at most {SOCKET_PATH_LIMIT}: use a shorter one than "
            f'"{path}"',
        )
    return real


def must_be_socket(path: Path) -> os.stat_result:
    """Which socket *path* is: no other has its device and inode.

    Raises :class:`Problem`: ``hypervisor_unreachable`` where nothing is, ``invalid_path`` where no socket is.
    """
    try:
        status = _look_at(path)
    except FileNotFoundError:
        raise Problem(
            Code.HYPERVISOR_UNREACHABLE,
            f'"{path}" is not there: start the VM with vmm.args, then repeat',
            retry_after=1,
        ) from None
    except OSError as error:
        raise Problem(Code.INVALID_PATH, f'"{path}": {error.strerror}') from None
    if not stat.S_ISSOCK(status.st_mode):
        raise Problem(Code.INVALID_PATH, f'"{path}" is not a socket: name the VM\'s monitor')
    return status


def inode(path: Path) -> tuple[int, int] | None:
    """Device and inode of what *path* leads to, by whatever name; None where nothing is."""
    try:
        status = _look_at(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def must_be_directory(path: Path) -> None:
    """Raise :class:`Problem` ``invalid_path`` where *path* is no directory."""
    if not os.path.isdir(path):  # noqa: PTH112 - Path's own raises where the name is too long
        raise Problem(Code.INVALID_PATH, f'"{path}" is not a directory: make it first')


def disk_under_roots(path: str, roots: Iterable[Path]) -> Path:
    """A disk's image or device, under ``disk_roots``, with its symbolic links resolved.

    Raises :class:`Problem` ``invalid_path`` where it is neither a regular file nor a block device.
    """
    real = under_roots(path, roots, "disk_roots")
    try:
        mode = _look_at(real).st_mode
    except OSError as error:
        raise Problem(Code.INVALID_PATH, f'"{path}": {error.strerror}; name a disk that is there') from None
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise Problem(Code.INVALID_PATH, f'"{path}" is neither a regular file nor a block device: name a disk')
    return real


def _look_at(path: Path) -> os.stat_result:
    with vmm_socket.opened(str(path)) as found:
        return os.fstat(found)
