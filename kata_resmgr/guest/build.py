"""Builds the guests, and keeps them in a cache outside any source tree.

The cache is ``$KATA_RESMGR_CACHE``, else ``kata-resmgr`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Its directories are
named after the hash of what they were made from, and appear complete, by a rename: any number of processes may build
at once, and what is there is right. Deleting the cache is always safe.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import platform
import re
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import resources
from pathlib import Path, PurePosixPath

from kata_resmgr.guest import GuestError, packages
from kata_resmgr.guest.cpio import Archive
from kata_resmgr.guest.packages import Need, Say, run, silent

_FORM = 1
"""Part of every hash: raise it when the way of building changes."""

_META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-kvm", "linux-image-amd64")
"""Kernels made for virtual machines first: Debian's, Ubuntu's two, Debian's general one."""

_MODULES = (
    "virtio",
    "virtio_balloon",
    "virtio_mem",
    "virtio_pci",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_ring",
)
"""What virtio-mem and the balloon need. Kernels differ in which are built in: those are not there to be loaded."""

_PROGRAMS = ("uevh.c", "hold.c")
"""Our own, in the Linux guest's ``/bin``."""

_KERNEL = "vmlinuz"
_RELEASE = "release"
_BUSYBOX = "busybox"
_INITRD = "initrd"
_FIRMWARE = "minifw.bin"
_FIRMWARE_PC = "minifw-pc.bin"
_TOOL_DEADLINE = 120.0


@dataclass(frozen=True, slots=True)
class LinuxImage:
    """What boots Linux, and its kernel's release, as ``uname -r`` tells it."""

    kernel: Path
    initrd: Path
    release: str


def firmware(machine: str = "q35", say: Say = silent) -> Path:
    """The mini firmware's image for that type of machine, built when it is not in the cache.

    Raises :class:`GuestError` when it cannot be built.
    """
    source = _source("minifw.S")
    needs = [packages.COMPILER, packages.LINKER]
    built = cached(key("firmware", source), needs, _build_firmware, say)
    older = machine == "pc" or machine.startswith("pc-i440fx")
    return built / (_FIRMWARE_PC if older else _FIRMWARE)


def linux(say: Say = silent) -> LinuxImage:
    """The Linux guest, its kernel fetched and its initial RAM disk built when they are not in the cache.

    Raises :class:`GuestError` when that cannot be done.
    """
    recipe = repr((_META_PACKAGES, _MODULES)).encode()
    distribution = cached(key("linux", recipe), [packages.ZSTD], lambda into: _fetch_linux(into, say), say)
    parts = b"".join(_source(name) for name in ("init", *_PROGRAMS)) + distribution.name.encode()
    needs = [packages.COMPILER, packages.STATIC_LIBC]
    initrd = cached(key("initrd", parts), needs, lambda into: _build_initrd(distribution, into), say) / _INITRD
    return LinuxImage(distribution / _KERNEL, initrd, (distribution / _RELEASE).read_text())


def cache() -> Path:
    """The directory that holds what was built."""
    if chosen := os.environ.get("KATA_RESMGR_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kata-resmgr"


def _source(name: str) -> bytes:
    return resources.files(__package__).joinpath(name).read_bytes()


def key(name: str, made_from: bytes) -> str:
    """What is made from this, and called *name* by people, is kept under this name."""
    return f"{name}-{hashlib.sha256(b'%d %s' % (_FORM, made_from)).hexdigest()[:16]}"


def cached(name: str, needs: list[Need], make: Callable[[Path], None], say: Say) -> Path:
    """The directory of what *make* makes, made now if it is not there. *name* is of :func:`key`.

    *needs* are what *make* calls.
    """
    final = cache() / name
    if final.is_dir():
        return final
    if platform.machine() != "x86_64":
        raise GuestError(f"the guests are for x86_64 hosts, and this is {platform.machine()}")
    packages.ensure(needs, say)
    say(f"building {final}")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=final.parent) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        make(made)
        try:
            made.rename(final)
        except OSError:
            # Somebody else was first, with the same content.
            if not final.is_dir():
                raise
    return final


def _build_firmware(into: Path) -> None:
    source, code = into / "minifw.S", into / "minifw.o"
    source.write_bytes(_source("minifw.S"))
    for image, variant in ((_FIRMWARE, []), (_FIRMWARE_PC, ["-Wa,--defsym,PC=1"])):
        run(["gcc", "-m32", "-c", *variant, "-o", str(code), str(source)], deadline=_TOOL_DEADLINE)
        flat = ["-m", "elf_i386", "-Ttext=0", "--oformat", "binary", "-o", str(into / image)]
        run(["ld", *flat, str(code)], deadline=_TOOL_DEADLINE)


def _fetch_linux(into: Path, say: Say) -> None:
    """The distribution's kernel, the modules wanted of it, and its static busybox, none of them installed."""
    image = _kernel_package()
    if image is None:
        packages.update()
        image = _kernel_package()
    if image is None:
        raise GuestError(f"apt knows none of {', '.join(_META_PACKAGES)}: add the distribution's main archive")
    say(f"fetching {image} and busybox-static (not installed)")
    # Ubuntu keeps the modules in a package beside the kernel's.
    beside = [name for name in packages.dependencies(image) if name.startswith("linux-modules-")]
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        for package in (image, *beside, "busybox-static"):
            _unpack(packages.download(package, Path(scratch)), into)
    for part in (_KERNEL, _BUSYBOX):
        if not (into / part).exists():
            raise GuestError(f"{image} and busybox-static do not hold what is looked for: no {part}")
    (into / _RELEASE).write_text(image.removeprefix("linux-image-"))


def _kernel_package() -> str | None:
    """The package that a meta package stands for at present: its name holds the release."""
    for meta in _META_PACKAGES:
        for package in packages.dependencies(meta):
            if package.startswith("linux-image-"):
                return package
    return None


def _unpack(archive: Path, into: Path) -> None:
    """Put what is kept of a Debian package into *into*."""
    content = archive.with_suffix(".tar")
    unpack = 'exec dpkg-deb --fsys-tarfile "$1" >"$2"'
    run(["sh", "-c", unpack, "sh", str(archive), str(content)], deadline=_TOOL_DEADLINE)
    with tarfile.open(content) as files:
        for member in files:
            path = PurePosixPath("/") / member.name
            if (name := _kept_as(path)) and member.isfile() and (data := files.extractfile(member)):
                (into / name).write_bytes(_decompressed(path.suffix, data.read(), archive.parent))


def _kept_as(path: PurePosixPath) -> str | None:
    """The name under which a file of a package is kept; most are not."""
    if path.parent == PurePosixPath("/boot") and path.name.startswith("vmlinuz-"):
        return _KERNEL
    if path.parent.name == "bin" and path.name == "busybox":
        return _BUSYBOX
    module, _, suffix = path.name.partition(".")
    return f"{module}.ko" if module in _MODULES and suffix in ("ko", "ko.gz", "ko.xz", "ko.zst") else None


def _decompressed(suffix: str, data: bytes, scratch: Path) -> bytes:
    """*data* as its file name's suffix says; the kernel's own compression is left to itself."""
    match suffix:
        case ".gz":
            return gzip.decompress(data)
        case ".xz":
            return lzma.decompress(data)
        case ".zst":
            packed, unpacked = scratch / "packed", scratch / "unpacked"
            packed.write_bytes(data)
            run(["zstd", "-dqf", str(packed), "-o", str(unpacked)], deadline=_TOOL_DEADLINE)
            return unpacked.read_bytes()
        case _:
            return data


def _build_initrd(distribution: Path, into: Path) -> None:
    archive = Archive()
    for directory in ("bin", "dev", "modules", "proc", "sys"):
        archive.directory(directory)
    # The kernel opens it for PID 1, which mounts /dev only later.
    archive.character_device("dev/console", 5, 1)
    archive.file("bin/busybox", (distribution / _BUSYBOX).read_bytes(), executable=True)
    for name in _PROGRAMS:
        source = into / name
        source.write_bytes(_source(name))
        program = source.with_suffix("")
        run(["gcc", "-Os", "-static", "-Wall", "-o", str(program), str(source)], deadline=_TOOL_DEADLINE)
        archive.file(f"bin/{program.name}", program.read_bytes(), executable=True)
    archive.file("init", _source("init"), executable=True)
    modules = {path.stem: path.read_bytes() for path in sorted(distribution.glob("*.ko"))}
    for name, content in modules.items():
        archive.file(f"modules/{name}.ko", content)
    archive.file("modules/order", "".join(f"{name}\n" for name in _load_order(modules)).encode())
    # Not compressed: unpacking it under TCG takes longer than reading it.
    (into / _INITRD).write_bytes(archive.content())


def _load_order(modules: dict[str, bytes]) -> list[str]:
    """Each module after those that it needs, as its own ``.modinfo`` section names them."""
    needs: dict[str, set[str]] = {}
    for name, content in modules.items():
        found = re.search(rb"\0depends=([^\0]*)\0", content)
        named = found[1].decode().split(",") if found else []
        needs[name] = {need for need in named if need in modules}
    return list(TopologicalSorter(needs).static_order())
