"""A process is known by pid and start time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kata_resmgr.process import Process

NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)  # PR_SET_NAME
print("named", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until its standard input ends."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


def test_this_process_lives() -> None:
    this = Process.of(os.getpid())
    assert this is not None
    assert this.pid == os.getpid()
    assert this.lives()


def test_another_process_with_the_same_pid_is_not_the_one_that_was() -> None:
    this = Process.of(os.getpid())
    assert this is not None
    assert not replace(this, started=this.started - 1).lives()


def test_a_process_that_came_later_started_later(child: subprocess.Popen[bytes]) -> None:
    this, later = Process.of(os.getpid()), Process.of(child.pid)
    assert this is not None
    assert later is not None
    assert later.started > this.started


def test_one_that_has_ended_and_waits_to_be_collected_is_none(child: subprocess.Popen[bytes]) -> None:
    process = Process.of(child.pid)
    assert process is not None
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and its exit status is still there
    assert not process.lives()
    assert Process.of(child.pid) is None
    child.wait()
    assert Process.of(child.pid) is None


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1, 2**70])
def test_a_pid_that_nobody_has(pid: int) -> None:
    assert Process.of(pid) is None


@pytest.mark.parametrize("name", [b"a b", b") Z 1 (", b"\xff\xfe", b"((("])
def test_the_name_of_a_process_may_be_anything(name: bytes) -> None:
    command = [sys.executable, "-c", NAMED, name.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        assert named.stdout.readline() == b"named\n"
        process = Process.of(named.pid)
        assert process is not None
        assert process.lives()
