"""Paths that callers name (SPEC 11)."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_resmgr import paths
from kata_resmgr.problem import Code, Problem


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="krm") as name:
        yield Path(name).resolve()


def _refusal(path: str, *roots: Path) -> Problem:
    with pytest.raises(Problem) as refusal:
        paths.under_roots(path, roots)
    assert refusal.value.code is Code.INVALID_PATH
    return refusal.value


def _socket_refusal(path: str, *roots: Path) -> Problem:
    with pytest.raises(Problem) as refusal:
        paths.socket_under_roots(path, roots)
    assert refusal.value.code is Code.INVALID_PATH
    return refusal.value


def test_a_path_under_a_root_is_taken_whether_it_is_there_or_not(root: Path) -> None:
    assert paths.under_roots(f"{root}/s1/monitor.sock", [Path("/nowhere"), root]) == root / "s1/monitor.sock"
    assert paths.under_roots(f"{root}/./s1//s2/../monitor.sock", [root]) == root / "s1/monitor.sock"
    assert paths.under_roots(str(root), [root]) == root


@pytest.mark.parametrize("path", ["", "s1", "./s1", "../s1", "s1\0", "/s1\0/s2"])
def test_a_path_must_be_absolute(root: Path, path: str) -> None:
    assert "is not an absolute path" in _refusal(path, root).detail


@pytest.mark.parametrize("path", ["/", "/etc/passwd", "{root}/..", "{root}/../other", "{root}x/s1"])
def test_a_path_outside_the_roots_is_refused_naming_them(root: Path, path: str) -> None:
    named = path.format(root=root)
    detail = _refusal(named, root, Path("/run/vc")).detail
    assert detail == f'"{named}" is not under {root}, /run/vc: use one there, or add to vm_roots'


def test_without_roots_nothing_is_allowed(root: Path) -> None:
    assert "not under a root, for vm_roots is empty" in _refusal(str(root)).detail


@pytest.mark.parametrize("target", ["/etc", "..", "../.."])
def test_a_symbolic_link_out_of_the_root_is_refused(root: Path, target: str) -> None:
    (root / "out").symlink_to(target)
    assert "is not under" in _refusal(f"{root}/out/passwd", root).detail


def test_a_symbolic_link_within_the_root_is_followed(root: Path) -> None:
    (root / "real").mkdir()
    (root / "link").symlink_to("real")
    assert paths.under_roots(f"{root}/link/s", [root]) == root / "real/s"


def test_a_root_that_is_a_symbolic_link_is_its_target(root: Path) -> None:
    (root / "real").mkdir()
    (root / "link").symlink_to("real")
    assert paths.under_roots(f"{root}/link/s", [root / "link"]) == root / "real/s"
    assert paths.under_roots(f"{root}/real/s", [root / "link"]) == root / "real/s"


def test_a_symbolic_link_to_itself_is_no_way_out(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    path = paths.under_roots(f"{root}/loop", [root])
    with pytest.raises(Problem) as refusal:
        paths.must_be_socket(path)
    assert refusal.value.code is Code.INVALID_PATH


def _path_of(root: Path, bytes_: int) -> str:
    """A path under *root* of so many bytes, with characters that have two."""
    name = "é" * ((bytes_ - len(os.fsencode(root)) - 1) // 2)
    path = f"{root}/{name}"
    return path + "x" * (bytes_ - len(os.fsencode(path)))


def test_a_path_has_no_more_bytes_than_a_socket_may_have(root: Path) -> None:
    assert str(paths.socket_under_roots(_path_of(root, 107), [root])) == _path_of(root, 107)
    assert "a path of 108 bytes; a socket's path has at most 107" in _socket_refusal(_path_of(root, 108), root).detail
    assert "a path of 5000 bytes" in _socket_refusal(_path_of(root, 5000), root).detail


def test_a_short_link_to_a_path_that_is_too_long_is_refused(root: Path) -> None:
    long = root / ("x" * 100)
    long.mkdir()
    (root / "link").symlink_to(long)
    assert f"a path of {len(os.fsencode(long)) + 2} bytes" in _socket_refusal(f"{root}/link/s", root).detail


def test_a_socket_is_a_socket(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(str(root / "s"))
        other.bind(str(root / "t"))
        found = paths.must_be_socket(root / "s")
        (root / "again").hardlink_to(root / "s")
        assert paths.inode(root / "again") == (found.st_dev, found.st_ino)
        assert paths.inode(root / "t") not in (None, (found.st_dev, found.st_ino))
        assert paths.inode(root / "none") is None


def test_a_symbolic_link_that_came_after_the_check_leads_nowhere(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s"))
        (root / "vm").mkdir()
        path = paths.socket_under_roots(f"{root}/vm/s", [root])
        (root / "vm" / "s").symlink_to(root / "s")
        with pytest.raises(Problem, match="a symbolic link is in the way"):
            paths.must_be_socket(path)
        (root / "vm" / "s").unlink()
        (root / "vm").rmdir()
        (root / "vm").symlink_to(root)
        with pytest.raises(Problem, match="a symbolic link is in the way"):
            paths.must_be_socket(path)


def test_a_socket_that_is_not_there_yet_may_come(root: Path) -> None:
    with pytest.raises(Problem, match=r"is not there: start the VM with vmm.args, then repeat") as refusal:
        paths.must_be_socket(root / "s")
    assert refusal.value.code is Code.HYPERVISOR_UNREACHABLE
    assert refusal.value.retryable
    assert refusal.value.retry_after == 1


def test_a_file_or_a_directory_is_no_socket(root: Path) -> None:
    (root / "file").touch()
    for path in (root, root / "file"):
        with pytest.raises(Problem, match="is not a socket") as refusal:
            paths.must_be_socket(path)
        assert refusal.value.code is Code.INVALID_PATH


def test_what_lies_under_a_file_is_refused(root: Path) -> None:
    (root / "file").touch()
    with pytest.raises(Problem, match="Not a directory") as refusal:
        paths.must_be_socket(root / "file" / "s")
    assert refusal.value.code is Code.INVALID_PATH


def test_a_directory_is_a_directory(root: Path) -> None:
    paths.must_be_directory(root)
    (root / "file").touch()
    for path in (root / "file", root / "none", root / "file" / "below"):
        with pytest.raises(Problem, match="is not a directory: make it first") as refusal:
            paths.must_be_directory(path)
        assert refusal.value.code is Code.INVALID_PATH


def test_a_disk_is_a_file_or_a_block_device(root: Path) -> None:
    (root / "image").touch()
    (root / "link").symlink_to("image")
    assert paths.disk_under_roots(f"{root}/link", [root]) == root / "image"
    os.mkfifo(root / "fifo")
    for path, said in (
        (f"{root}", "is neither a regular file nor a block device: name a disk"),
        (f"{root}/fifo", "is neither a regular file nor a block device: name a disk"),
        (f"{root}/none", "No such file or directory; name a disk that is there"),
        ("/dev/null", f"is not under {root}: use one there, or add to disk_roots"),
    ):
        with pytest.raises(Problem) as refusal:
            paths.disk_under_roots(path, [root])
        assert refusal.value.code is Code.INVALID_PATH
        assert said in refusal.value.detail
    with pytest.raises(Problem, match="not under a root, for disk_roots is empty"):
        paths.disk_under_roots(f"{root}/image", [])


@pytest.mark.skipif(not Path("/dev/vda").is_block_device(), reason="no block device /dev/vda here")
def test_a_block_device_is_a_disk() -> None:
    assert paths.disk_under_roots("/dev/vda", [Path("/dev")]) == Path("/dev/vda")
