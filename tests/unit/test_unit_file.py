"""The systemd units, judged by systemd's own tool. tests/system runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"
EXPOSURE = 20
"""Tenths: what `systemd-analyze security` may say at most."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@pytest.fixture
def service(tmp_path: Path) -> Path:
    """The service, beside its socket, with a program that is there: the daemon need not be installed."""
    shutil.copy(UNITS / "kata-resmgr.socket", tmp_path)
    copy = tmp_path / "kata-resmgr.service"
    copy.write_text((UNITS / copy.name).read_text().replace("/usr/bin/kata-resmgr serve", "/bin/true serve"))
    return copy


def analyze(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_systemd
def test_systemd_has_nothing_to_say_against_them(service: Path) -> None:
    """The tool's status is 0 for unknown keys: its silence counts."""
    assert analyze("verify", "--man=no", str(service), str(service.with_suffix(".socket"))) == (0, "")


@needs_systemd
def test_the_service_is_little_exposed(service: Path) -> None:
    status, told = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", str(service))
    assert status == 0, told


def test_a_stop_leaves_what_is_known_of_the_vms() -> None:
    """systemd would empty a RuntimeDirectory: tmpfiles.d makes it."""
    settings = {line.partition("=")[0] for line in (UNITS / "kata-resmgr.service").read_text().splitlines()}
    assert not settings & {"RuntimeDirectory", "RuntimeDirectoryPreserve"}
    assert "d /run/kata-resmgr 0750 root kata-resmgr" in (UNITS / "tmpfiles.d" / "kata-resmgr.conf").read_text()
