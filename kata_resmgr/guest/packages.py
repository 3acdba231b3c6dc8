"""What the guests need from the machine, and how it is got: with apt where that can be, else by asking for it.

Nothing is called when nothing is missing. Kernels and busybox are fetched and unpacked, never installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from kata_resmgr.guest import GuestError

Say: TypeAlias = Callable[[str], None]
"""Told, in one line, of anything that takes time."""

NOTHING_MORE: Final[Mapping[str, str]] = MappingProxyType({})

_INSTALL_DEADLINE = 900.0
"""Seconds for one apt call: a slow mirror, or another apt that holds the lock."""
_LOCK_SECONDS = 300
_QUERY_DEADLINE = 60.0
_LINES_OF_ERROR = 5


def silent(_line: str) -> None:
    """A :data:`Say` that says nothing."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something that must be on the machine, and Debian's and Ubuntu's package that brings it."""

    name: str
    package: str
    present: Callable[[], bool]


def _command(name: str, package: str) -> Need:
    return Need(name, package, lambda: shutil.which(name) is not None)


def _static_libc() -> bool:
    if shutil.which("gcc") is None:
        return False
    # gcc answers with the bare name when it finds no such file.
    return Path(run(["gcc", "-print-file-name=libc.a"], deadline=_QUERY_DEADLINE).strip()).is_absolute()


QEMU = _command("qemu-system-x86_64", "qemu-system-x86")
COMPILER = _command("gcc", "gcc")
LINKER = _command("ld", "binutils")
STATIC_LIBC = Need("libc.a", "libc6-dev", _static_libc)
ZSTD = _command("zstd", "zstd")
SETPRIV = _command("setpriv", "util-linux")


def ensure(needs: Iterable[Need], say: Say = silent) -> None:
    """Install those of *needs* that are missing: with apt as root, else :class:`GuestError` says what to install."""
    missing = [need for need in needs if not need.present()]
    if not missing:
        return
    names = ", ".join(need.name for need in missing)
    packages = sorted({need.package for need in missing})
    request = f"missing: {names}; install them (Debian, Ubuntu: apt-get install {' '.join(packages)}) and try again"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise GuestError(request)
    say(f"installing {' '.join(packages)}")
    update()
    apt_get("install", "--yes", "--no-install-recommends", *packages)
    if still := [need.name for need in missing if not need.present()]:
        raise GuestError(f"still missing after apt-get install {' '.join(packages)}: {', '.join(still)}")


@cache
def update() -> None:
    """Refresh apt's lists, once in a process."""
    apt_get("update")


def dependencies(package: str) -> list[str]:
    """The packages that *package* depends on, as apt's lists have it; none where the package is not known."""
    if shutil.which("apt-cache") is None:
        return []
    try:
        listing = run(["apt-cache", "depends", package], deadline=_QUERY_DEADLINE)
    except GuestError:
        return []
    return re.findall(r"^[ |]+(?:Pre)?Depends: ([a-z0-9][a-z0-9.+-]*)$", listing, re.MULTILINE)


def download(package: str, directory: Path) -> Path:
    """Fetch *package* into *directory* without installing it, checked by apt against its signed lists."""
    target = directory / package
    target.mkdir()
    apt_get("download", package, directory=target)
    (archive,) = target.glob("*.deb")
    return archive


def apt_get(*arguments: str, directory: Path | None = None) -> None:
    """One call of apt-get. Raises :class:`GuestError` when it fails."""
    if shutil.which("apt-get") is None:
        raise GuestError("apt-get is missing: guests are made from the packages of Debian or Ubuntu")
    # As apt's own user it could not write into our directory, and would say so.
    options = ["-qq", "-o", f"DPkg::Lock::Timeout={_LOCK_SECONDS}", "-o", "APT::Sandbox::User=root"]
    run(["apt-get", *options, *arguments], deadline=_INSTALL_DEADLINE, directory=directory)


def run(
    argv: Sequence[str],
    *,
    deadline: float,
    directory: Path | None = None,
    environment: Mapping[str, str] = NOTHING_MORE,
) -> str:
    """What *argv* prints, *environment* added to ours.

    :class:`GuestError` when it fails or takes longer than *deadline* seconds.
    """
    quiet = {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    command = " ".join(argv)
    try:
        done = subprocess.run(
            argv,
            check=True,
            cwd=directory,
            env={**os.environ, **quiet, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline,
        )
    except subprocess.TimeoutExpired:
        raise GuestError(f"{command}: not done in {deadline:g} s") from None
    except subprocess.CalledProcessError as error:
        last = "\n".join(error.stderr.strip().splitlines()[-_LINES_OF_ERROR:])
        raise GuestError(f"{command}: status {error.returncode}: {last}") from None
    except OSError as error:
        raise GuestError(f"{command}: {error.strerror}") from None
    return done.stdout
