"""Paths that callers name: under a root, without leaving it, and what they should be (SPEC 11)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kata_resmgr.problem import Code, Problem

SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (unix(7))."""


def under_roots(path: str, roots: Iterable[Path]) -> Path:
    """*path* with its symbolic links resolved. Raises :class:`Problem` ``invalid_path``, naming what is allowed."""
    if not path.startswith("/") or "\0" in path:
        raise Problem(Code.INVALID_PATH, f'"{path}" is not an absolute path')
    real = Path(os.path.realpath(path))
    longest = max(len(os.fsencode(path)), len(os.fsencode(real)))  # either may be what is bound or connected to
    if longest > SOCKET_PATH_LIMIT:
        raise Problem(
            Code.INVALID_PATH,
            f"a path of {longest} bytes; a socket's path has at most {SOCKET_PATH_LIMIT}: use a shorter one than "
            f'"{path}"',
        )
    allowed = tuple(roots)
    if not any(real.is_relative_to(os.path.realpath(root)) for root in allowed):
        names = ", ".join(map(str, allowed)) or "a root, for vm_roots is empty"
        raise Problem(Code.INVALID_PATH, f'"{path}" is not under {names}: use one there, or add to vm_roots')
    return real


def must_be_socket(path: Path) -> None:
    """Raise :class:`Problem`: ``hypervisor_unreachable`` where nothing is, ``invalid_path`` where no socket is."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise Problem(
            Code.HYPERVISOR_UNREACHABLE,
            f'"{path}" is not there: start the VM with vmm.args, then repeat',
            retry_after=1,
        ) from None
    except OSError as error:
        raise Problem(Code.INVALID_PATH, f'"{path}": {error.strerror}') from None
    if not stat.S_ISSOCK(mode):
        raise Problem(Code.INVALID_PATH, f'"{path}" is not a socket: name the VM\'s monitor')


def must_be_directory(path: Path) -> None:
    """Raise :class:`Problem` ``invalid_path`` where *path* is no directory."""
    if not path.is_dir():
        raise Problem(Code.INVALID_PATH, f'"{path}" is not a directory: make it first')
