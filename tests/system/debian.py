"""A Debian of its own for the tests: all of it is in the initial RAM disk, and systemd is its first process.

mmdebstrap makes it from the archives that this machine's apt knows, and it is kept in the guests' cache. What is under
test comes on top: the program as `make install` puts it, and what is in ``guest/`` beside this file.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypervisors.base import Accelerator
from kata_resmgr.guest import build
from kata_resmgr.guest.cpio import Archive
from kata_resmgr.guest.machine import LinuxGuest
from kata_resmgr.guest.packages import Need, Say, run, silent

SOURCE = Path(__file__).parents[2]
BESIDE = Path(__file__).with_name("guest")
TESTS = "usr/lib/kata-resmgr-tests"
"""Where the guest finds what is not installed."""

_MMDEBSTRAP = Need("mmdebstrap", "mmdebstrap", lambda: shutil.which("mmdebstrap") is not None)
_PACKAGES = ("systemd-sysv", "procps", "python3")
_LEFT_OUT = (
    "boot", "dev", "etc/udev/hwdb.bin", "usr/lib/udev", "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl-base", "usr/share/bash-completion", "usr/share/doc", "usr/share/i18n",
    "usr/share/locale", "usr/share/man", "usr/share/perl5", "usr/share/zoneinfo", "var/cache", "var/lib/apt",
    "var/lib/dpkg",
)  # fmt: skip
_MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "getty.target", "systemd-firstboot.service", "systemd-logind.service", "systemd-pstore.service",
    "systemd-random-seed.service", "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service",
)  # fmt: skip
"""What only takes time here."""
_DEADLINE = 600.0
_ROOT = "root.cpio"


class Debian(LinuxGuest):
    """The guest, with the daemon installed and nothing of it started."""

    kind = "Debian with systemd"

    def __init__(self, initrd: Path, accelerator: Accelerator) -> None:
        self._initrd = initrd
        super().__init__(
            ["-m", "1G", "-smp", "2", "-initrd", str(initrd)],
            kernel_params=["rdinit=/sbin/init", "systemd.show_status=0"],
            accelerator=accelerator,
        )


@contextmanager
def initrd(say: Say = silent) -> Iterator[Path]:
    """The whole of the guest's files, with the program as it is now. Raises :class:`GuestError`."""
    with tempfile.TemporaryDirectory(prefix="kata-resmgr-system-") as scratch:
        installed = Path(scratch, "installed")
        python = _install(installed)
        whole = Path(scratch, "initrd")
        # The kernel unpacks one archive after the other.
        whole.write_bytes(_root(python, say).read_bytes() + _on_top(installed).content())
        yield whole


def _install(into: Path) -> str:
    """Do as `make install` does; the name of the Python that is to run the program."""
    environment = os.environ | {"DESTDIR": str(into), "PREFIX": "/usr"}
    subprocess.run(
        ["sh", ".ci/install", sys.prefix], cwd=SOURCE, env=environment, check=True, timeout=_DEADLINE, stdout=sys.stderr
    )
    shebang, _, _ = (into / "usr/bin/kata-resmgr").read_text().partition("\n")
    return Path(shebang.removeprefix("#!").split()[0]).name


def _root(python: str, say: Say) -> Path:
    """The distribution's part."""
    sources = [
        path for path in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")) if _used(path)
    ]
    recipe = repr((_PACKAGES, python, _LEFT_OUT, [path.read_text() for path in sources])).encode()
    wanted = [*_PACKAGES, python]
    name = build.key("debian", recipe)
    return build.cached(name, [_MMDEBSTRAP], lambda into: _bootstrap(into, wanted, sources), say) / _ROOT


def _used(source: Path) -> bool:
    return source.suffix in (".list", ".sources") and source.is_file() and source.stat().st_size > 0


def _bootstrap(into: Path, wanted: Sequence[str], sources: Sequence[Path]) -> None:
    archive = into / "root.tar"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(wanted)}"]
    run([*command, "", str(archive), *map(str, sources)], deadline=_DEADLINE)
    files = Archive()
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.removeprefix("./").rstrip("/")
            if name in ("", ".") or any(name == left or name.startswith(f"{left}/") for left in _LEFT_OUT):
                continue
            owner = (member.uid, member.gid)
            if member.isdir():
                files.add(name, stat.S_IFDIR | member.mode, owner=owner)
            elif member.issym():
                files.symlink(name, member.linkname)
            elif (data := members.extractfile(member)) is not None:
                # With its date, by which Python knows what it has compiled.
                files.add(name, stat.S_IFREG | member.mode, data.read(), owner=owner, modified=int(member.mtime))
    archive.unlink()
    files.directory("dev")
    files.character_device("dev/console", 5, 1)
    (into / _ROOT).write_bytes(files.content())


def _on_top(installed: Path) -> Archive:
    files = Archive()
    for path in sorted(installed.rglob("*")):
        status, content = path.stat(), path.read_bytes() if path.is_file() else b""
        files.add(str(path.relative_to(installed)), status.st_mode, content, modified=int(status.st_mtime))
    units = "etc/systemd/system"
    for unit in _MASKED:
        files.symlink(f"{units}/{unit}", "/dev/null")
    files.file(f"{units}/host.service", (BESIDE / "host.service").read_bytes())
    files.directory(f"{units}/multi-user.target.wants")
    files.symlink(f"{units}/multi-user.target.wants/host.service", "../host.service")
    for directory in (TESTS, f"{TESTS}/tests", f"{TESTS}/tests/fakes"):
        files.directory(directory)
    for program in ("host", "ask", "vmm"):
        files.file(f"{TESTS}/{program}", (BESIDE / program).read_bytes(), executable=True)
    for module in (SOURCE / "tests/__init__.py", *sorted((SOURCE / "tests/fakes").glob("*.py"))):
        files.file(f"{TESTS}/{module.relative_to(SOURCE)}", module.read_bytes())
    return files
