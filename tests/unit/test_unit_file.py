"""The systemd unit, judged by systemd's own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "kata-resmgr.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    """The tool's status is 0 for unknown keys: its silence counts. The program need not be installed for this."""
    text = UNIT.read_text()
    copy = tmp_path / "resmgr-under-test.service"
    copy.write_text(text.replace("/usr/bin/kata-resmgr serve", "/bin/true serve"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_stop_leaves_the_sockets_of_the_vms() -> None:
    assert "RuntimeDirectory=kata-resmgr\nRuntimeDirectoryPreserve=yes\n" in UNIT.read_text()
