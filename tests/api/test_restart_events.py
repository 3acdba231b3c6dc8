"""Events of a real daemon that is stopped, started, and killed: numbers go on, and what may be missing is said."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr.cli import client
from tests.daemon import Daemon


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rm-"))
    yield path
    shutil.rmtree(path)


def events(daemon: Daemon, query: str = "") -> list[dict[str, Any]]:
    reply = client.call(str(daemon.socket), "GET", f"/v1/events{query}")
    assert reply.status == 200, reply.body
    return [json.loads(line) for line in reply.body.splitlines()]


def register(daemon: Daemon, name: str) -> None:
    daemon.caller().ok("PUT", f"/v1/sandboxes/{name}", {})


def test_numbers_rise_across_a_stop_and_a_kill(directory: Path) -> None:
    with Daemon(directory) as daemon:
        register(daemon, "s1")
        last = events(daemon)[-1]
        assert (last["sandbox"], last["type"]) == ("s1", "sandbox.created")
    with Daemon(directory) as daemon:  # nothing was missed: one who had heard all goes on
        register(daemon, "s2")
        (created,) = events(daemon, f"?since={last['seq']}")
        assert (created["seq"], created["sandbox"]) == (last["seq"] + 1, "s2")
        daemon.process.kill()
    with Daemon(directory) as daemon:
        register(daemon, "s3")
        (after,) = events(daemon)
        assert after["seq"] > created["seq"]
        reply = client.call(str(daemon.socket), "GET", f"/v1/events?since={created['seq']}")
        assert (reply.status, json.loads(reply.body)["code"]) == (410, "gone")
