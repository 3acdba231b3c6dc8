"""Connecting to a socket without following anything on the way."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypervisors import vmm_socket


@pytest.fixture
def listener(short_tmp: Path) -> Iterator[Path]:
    """The path of a socket that takes connections."""
    path = short_tmp.resolve() / "monitor"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield path


def refusal(path: Path | str) -> int | None:
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(OSError, match=r"^\[Errno \d+\] ") as error:
        vmm_socket.connect(connection, str(path))
    return error.value.errno


def connects(path: Path | str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        vmm_socket.connect(connection, str(path))
        return str(connection.getpeername()) != ""


def test_a_socket(listener: Path) -> None:
    assert connects(listener)
    assert connects(f"//{listener.parent}/.//{listener.name}")


def test_a_path_that_is_too_long_for_connect(listener: Path) -> None:
    deep = listener.parent / ("x" * 100)
    deep.mkdir()
    listener.rename(deep / "monitor")
    assert len(str(deep / "monitor")) > 107
    assert connects(deep / "monitor")


@pytest.mark.parametrize("target", ["monitor", "/etc/passwd", "nowhere"])
def test_a_link_in_its_place_is_not_followed(listener: Path, target: str) -> None:
    (listener.parent / "link").symlink_to(target)
    assert refusal(listener.parent / "link") == errno.ELOOP


def test_a_link_on_the_way_is_not_followed(listener: Path) -> None:
    (listener.parent / "link").symlink_to(".")
    assert refusal(listener.parent / "link" / "monitor") == errno.ELOOP


def test_what_is_no_way_to_a_socket(listener: Path) -> None:
    (listener.parent / "file").touch()
    for path, why in (
        (listener.parent / "none", errno.ENOENT),
        (listener.parent / "file", errno.ECONNREFUSED),
        (listener.parent / "file" / "monitor", errno.ENOTDIR),
        (f"{listener.parent}/../monitor", errno.EINVAL),
        (listener.name, errno.EINVAL),
        (f"{listener}\0", errno.EINVAL),
        ("", errno.EINVAL),
    ):
        assert refusal(path) == why


def test_no_descriptor_is_left_open(listener: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    connects(listener)
    refusal(listener.parent / "none")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
