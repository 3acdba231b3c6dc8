"""The daemon's own socket: modes, and what happens to what is already there."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_resmgr.listening import Listener, ListenError

GROUP = 47110


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rm-"))
    yield path
    shutil.rmtree(path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_root_only(directory: Path) -> None:
    path = directory / "new" / "api.sock"
    listener = Listener(path, None)
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    listener.remove()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_with_a_group(directory: Path) -> None:
    path = directory / "new" / "api.sock"
    listener = Listener(path, GROUP)
    assert (mode(path.parent), mode(path)) == (0o750, 0o660)
    assert path.stat().st_gid == path.parent.stat().st_gid == GROUP
    listener.remove()


def test_a_directory_that_is_there_is_left_as_it_is(directory: Path) -> None:
    directory.chmod(0o755)
    Listener(directory / "api.sock", None).remove()
    assert mode(directory) == 0o755


def test_a_stale_socket_is_replaced(directory: Path) -> None:
    path = directory / "api.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    listener = Listener(path, None)
    listener.socket.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.remove()


@pytest.mark.parametrize("backlog", [5, 0])
def test_a_socket_that_somebody_serves_is_not(directory: Path, backlog: int) -> None:
    path = directory / "api.sock"
    with socket.socket(socket.AF_UNIX) as alive, socket.socket(socket.AF_UNIX) as waiting:
        alive.bind(str(path))
        alive.listen(backlog)
        waiting.connect(str(path))  # with a backlog of 0 the queue is full from here on
        with pytest.raises(ListenError, match="another process serves it; stop that one or name another path"):
            Listener(path, None)
        assert path.exists()


def test_what_is_no_socket_is_not_touched(directory: Path) -> None:
    path = directory / "api.sock"
    path.write_text("precious")
    with pytest.raises(ListenError, match="it is there and no socket"):
        Listener(path, None)
    assert path.read_text() == "precious"


def test_a_directory_that_cannot_be_made(directory: Path) -> None:
    (directory / "file").write_text("")
    with pytest.raises(ListenError, match=r"cannot listen on .*: (Not a directory|File exists)"):
        Listener(directory / "file" / "api.sock", None)


def test_the_socket_of_a_successor_is_left_alone(directory: Path) -> None:
    path = directory / "api.sock"
    first = Listener(path, None)
    path.unlink()
    second = Listener(path, None)
    first.remove()
    assert path.exists()
    second.remove()
