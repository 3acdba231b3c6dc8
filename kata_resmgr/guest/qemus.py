"""The QEMUs that guests can run under: the installed one, and where there is one a newer one from backports.

A driver is to get along with every QEMU that operators have, so the tests that matter run with both. The newer one is
fetched and unpacked into the cache, and never installed: the system's QEMU and its configuration stay as they are. It
runs from there, with its own modules and firmware, on the libraries of the system and those that came with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from kata_resmgr.guest import GuestError, build, packages
from kata_resmgr.guest.packages import Say, run, silent

PROGRAM: Final = "qemu-system-x86_64"

_PACKAGE: Final = "qemu-system-x86"
_MAKING: Final = b"backports 1"
"""Part of the name of what is kept: raise the number when the way of fetching changes."""
_ABSENT: Final = "absent"
"""The file that says why there is none to be had here, so that nobody asks for it again and again."""
_ASKING_DEADLINE: Final = 60.0
_UNPACKING_DEADLINE: Final = 120.0


@dataclass(frozen=True)
class Qemu:
    """A QEMU program, and what it needs to be told to find what belongs to it."""

    program: str = PROGRAM
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def version(self) -> str:
        """As it tells it, for people to read: what it can do is asked of the machine, and not looked up by this."""
        said = run([self.program, "--version"], deadline=_ASKING_DEADLINE, environment=self.environment)
        words = said.split()
        return words[3] if len(words) > 3 else said.strip()


INSTALLED: Final = Qemu()


def backports() -> Qemu:
    """The newer QEMU in the cache. Raises :class:`GuestError`, saying why, where there is none."""
    root = _directory()
    if not root.is_dir():
        raise GuestError("no QEMU from backports: python -m kata_resmgr.guest fetches it where there is one")
    if (absent := root / _ABSENT).exists():
        raise GuestError(f"no QEMU from backports: {absent.read_text()}")
    return _unpacked(root)


def fetch_backports(say: Say = silent) -> None:
    """Have the newer QEMU in the cache, or the reason why it is not to be had.

    Raises :class:`GuestError` where it might be had another time: without a network, for instance.
    """
    build.cached(_directory().name, [], lambda into: _fetch(into, say), say)


def _directory() -> Path:
    return build.cache() / build.key("qemu-backports", _MAKING + _release().encode())


def _release() -> str:
    """The distribution's code name; "" where it tells none."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return ""
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    return values.get("VERSION_CODENAME", "").strip('"')


def _fetch(into: Path, say: Say) -> None:
    source = _source()
    if source is None:
        (into / _ABSENT).write_text(f"apt has no main archive of the release {_release() or 'that runs here'}")
        return
    say(f"fetching {_PACKAGE} from {_release()}-backports (not installed)")
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        archives = _download(source, Path(scratch))
        for archive in archives:
            run(["dpkg-deb", "--extract", str(archive), str(into)], deadline=_UNPACKING_DEADLINE)
    if not (into / "usr/bin" / PROGRAM).exists():
        (into / _ABSENT).write_text(f"{_release()}-backports has none that is newer than the installed one")
        return
    _unpacked(into).version  # noqa: B018 - that it starts


def _source() -> str | None:
    """apt's line for the release's backports, at the mirror that serves the release itself."""
    release = _release()
    if not release or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    listed = run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"], deadline=_ASKING_DEADLINE)
    for line in listed.splitlines():
        address, *where = line.split()
        if where == [release, "main"]:
            return "\n".join(f"deb {address} {suite} main" for suite in (release, f"{release}-backports")) + "\n"
    return None


def _download(source: str, scratch: Path) -> list[Path]:
    """The packages that would have to be installed for the newer QEMU, with lists that are not the system's."""
    sources, lists, archives = scratch / "sources.list", scratch / "lists", scratch / "archives"
    sources.write_text(source)
    for directory in (lists, archives):
        (directory / "partial").mkdir(parents=True)
    options = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": lists,
        "Dir::Cache": scratch,
        "Dir::Cache::Archives": archives,
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    packages.apt_get(*settings, "update")
    packages.apt_get(
        *settings, "install", "--yes", "--no-install-recommends", "--download-only",
        "--target-release", f"{_release()}-backports", _PACKAGE,
    )  # fmt: skip
    return sorted(archives.glob("*.deb"))


def _unpacked(root: Path) -> Qemu:
    """The QEMU below *root*, which is laid out as the system is."""
    libraries = sorted({str(path.parent) for path in root.glob("usr/lib/*-linux-gnu/*.so*")})
    modules = next(iter(root.glob("usr/lib/*-linux-gnu/qemu")), None)
    environment = {}
    if libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    if modules is not None:
        environment["QEMU_MODULE_DIR"] = str(modules)
    data = [root / "usr/share" / name for name in ("qemu", "seabios")]
    options = tuple(word for directory in data if directory.is_dir() for word in ("-L", str(directory)))
    return Qemu(str(root / "usr/bin" / PROGRAM), options, environment)
