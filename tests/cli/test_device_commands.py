"""``disk add`` and ``net add``: what they read, ask and print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import Daemon, daemon, directory, run

__all__ = ["daemon", "directory"]

SHOWN = {
    "id": "d1",
    "config": {},
    "limits": {"bytesPerSecond": 1005, "burstBytes": 0, "opsPerSecond": 0, "burstOps": 0},
    "effective": {"bytesPerSecond": 1000},
    "group": None,
    "address": "0000:00:05.0",
    "counters": None,
}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ("--bytes-per-second 1005", {"limits": {"bytesPerSecond": 1005}}),
        ("--no-limits", {"limits": {}}),
        ("--group gold", {"group": "gold"}),
        ("", {}),
    ],
)
def test_a_disk_is_added_from_a_file(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: str, more: dict[str, object]
) -> None:
    (tmp_path / "disk.json").write_text('{"path": "/disks/a"}')
    daemon.say(201, SHOWN)
    assert run("disk", "add", "s1", "d1", "--config", str(tmp_path / "disk.json"), *options.split()) == 0
    assert daemon.asked == ("PUT /v1/sandboxes/s1/disks/d1", {"config": {"path": "/disks/a"}, **more})
    assert capfd.readouterr().out == "d1 at 0000:00:05.0, at most 1005 bytes/s (in effect 1000)\n"


def test_a_net_is_told_as_json(daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.json").write_text('{"tap": "tap0"}')
    daemon.say(201, SHOWN)
    assert run("net", "add", "s1", "n1", "--config", str(tmp_path / "net.json"), "--json") == 0
    assert json.loads(capfd.readouterr().out) == SHOWN


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), ("{", "is not JSON")])
def test_a_file_that_says_nothing_is_wrong_usage(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    file = tmp_path / "disk.json"
    if text is not None:
        file.write_text(text)
    assert run("disk", "add", "s1", "d1", "--config", str(file)) == 2
    assert says in capfd.readouterr().err
