"""The guests themselves: that they do on real QEMU what other tests and the demo build upon."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypervisors.base import Accelerator
from kata_resmgr.guest import GuestError, build, packages, qemus
from kata_resmgr.guest.machine import FirmwareGuest, Mode
from tests.conftest import StartFirmware, StartLinux
from tests.integration.monitor import DEADLINE, monitor


def machine(directory: Path, memory: str = "32M") -> list[str]:
    """A machine that starts with one vCPU of four, its monitor in *directory*."""
    return ["-smp", "1,maxcpus=4", "-m", memory, "-qmp", f"unix:{directory}/qmp,server=on,wait=off"]


def eventually(value: Callable[[], object], expected: object) -> None:
    """Fail unless *value* becomes *expected* before the deadline."""
    until = time.monotonic() + DEADLINE
    while (last := value()) != expected and time.monotonic() < until:
        time.sleep(0.02)
    assert last == expected


def removal_report(event: dict[str, Any]) -> bool:
    """Whether the guest reports on a vCPU's removal, other than that it is under way."""
    if event["event"] != "ACPI_DEVICE_OST":
        return False
    report = event["data"]["info"]
    return bool(report["source"] == 3 and report["status"] != 132)


def alive(pid: int) -> bool:
    """Whether the process runs: one that ended may be kept by its parent for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_firmware_cooperates(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    guest = minifw_guest(machine(short_tmp))
    guest.ready()
    with monitor(short_tmp / "qmp") as qmp:
        qmp.plug("cpu1")
        qmp.plug("cpu2")
        assert qmp.vcpus() == 3
        qmp.execute("device_del", id="cpu1")
        assert qmp.event(removal_report)["data"]["info"]["status"] == 0
        assert qmp.vcpus() == 2


def test_firmware_refuses_a_removal(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    guest = minifw_guest(machine(short_tmp))
    guest.ready()
    guest.mode("r")
    with monitor(short_tmp / "qmp") as qmp:
        qmp.plug("cpu1")
        qmp.execute("device_del", id="cpu1")
        assert qmp.event(removal_report)["data"]["info"]["status"] == 0x81
        assert qmp.vcpus() == 2


@pytest.mark.parametrize("deaf", ["i", "s"])
def test_firmware_that_did_not_look_removes_when_it_does(
    minifw_guest: StartFirmware, short_tmp: Path, deaf: Mode
) -> None:
    guest = minifw_guest(machine(short_tmp))
    guest.ready()
    with monitor(short_tmp / "qmp") as qmp:
        qmp.plug("cpu1")
        guest.mode(deaf)
        qmp.execute("device_del", id="cpu1")
        guest.mode(deaf)  # it is alive, and does not look
        assert qmp.vcpus() == 2
        guest.mode("c")
        assert qmp.event(removal_report)["data"]["info"]["status"] == 0
        assert qmp.vcpus() == 1


def test_firmware_takes_and_gives_back_memory(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    guest = minifw_guest(machine(short_tmp, "32M,slots=2,maxmem=1G"))
    guest.ready()
    with monitor(short_tmp / "qmp") as qmp:
        qmp.execute("object-add", **{"qom-type": "memory-backend-ram", "id": "mem1", "size": 128 << 20})
        qmp.execute("device_add", driver="pc-dimm", id="dimm1", memdev="mem1")
        assert len(qmp.query("query-memory-devices")) == 1
        qmp.execute("device_del", id="dimm1")
        assert qmp.event(lambda event: event["event"] == "DEVICE_DELETED")["data"]["device"] == "dimm1"
        assert qmp.query("query-memory-devices") == []


def test_firmware_is_up_again_after_a_reset(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    guest = minifw_guest(machine(short_tmp))
    guest.ready()
    with monitor(short_tmp / "qmp") as qmp:
        qmp.execute("system_reset")
        guest.ready()


def test_pause_and_kill(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    guest = minifw_guest(machine(short_tmp))
    guest.ready()
    guest.pause()
    with pytest.raises(GuestError, match=r"mini firmware under kvm: setting mode i, .* timed out; QEMU runs"):
        guest.mode("i", seconds=0.2)
    guest.resume()
    guest.mode("r")
    guest.kill()
    assert not guest.running
    with pytest.raises(GuestError, match="QEMU ended with status -9"):
        guest.mode("c")


def test_leaving_ends_qemu_and_its_sockets(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with minifw_guest(machine(short_tmp)) as guest:
        guest.ready()
        assert (short_tmp / "qmp").exists()
    assert not alive(guest.pid)
    with pytest.raises(GuestError, match="QEMU ended with status 0"):
        guest.mode("c")
    assert list(short_tmp.iterdir()) == []
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_paused_guest_ends_too(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    with minifw_guest(machine(short_tmp)) as guest:
        guest.ready()
        guest.pause()
    assert not alive(guest.pid)


@pytest.mark.kvm
def test_the_end_of_the_caller_ends_qemu() -> None:
    program = (
        "import time\n"
        "from kata_resmgr.guest.machine import FirmwareGuest\n"
        "guest = FirmwareGuest(['-m', '32M'])\n"
        "guest.ready()\n"
        "print(guest.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        assert alive(pid)
        caller.send_signal(signal.SIGKILL)
    eventually(lambda: alive(pid), False)


@pytest.mark.kvm
def test_what_qemu_says_is_told() -> None:
    with (
        FirmwareGuest(["-m", "32M", "-device", "nonesuch"], accelerator=Accelerator.KVM) as guest,
        pytest.raises(GuestError, match=r"(?s)QEMU ended with status 1.*'nonesuch' is not a valid device"),
    ):
        guest.ready()


def test_linux_uses_what_is_plugged(linux_guest: StartLinux, short_tmp: Path) -> None:
    guest = linux_guest(machine(short_tmp, "256M,slots=2,maxmem=1G"))
    guest.ready()
    assert guest.online_cpus() == 1
    memory = guest.mem_total()
    with monitor(short_tmp / "qmp") as qmp:
        qmp.plug("cpu1")
        qmp.plug("cpu2")
        eventually(guest.online_cpus, 3)
        qmp.execute("object-add", **{"qom-type": "memory-backend-ram", "id": "mem1", "size": 128 << 20})
        qmp.execute("device_add", driver="pc-dimm", id="dimm1", memdev="mem1")
        eventually(guest.mem_total, memory + (128 << 20))
        qmp.execute("device_del", id="cpu1")
        eventually(guest.online_cpus, 2)


def test_linux_brings_online_what_was_plugged_while_it_booted(linux_guest: StartLinux, short_tmp: Path) -> None:
    guest = linux_guest([*machine(short_tmp, "256M"), "-S"])
    eventually((short_tmp / "qmp").exists, True)
    with monitor(short_tmp / "qmp") as qmp:
        qmp.plug("cpu1")
        qmp.execute("cont")
        guest.ready()
        qmp.plug("cpu2")
        eventually(guest.online_cpus, 3)


def test_linux_answers(linux_guest: StartLinux) -> None:
    guest = linux_guest(["-m", "256M"], kernel_params=["canary=42"])
    assert guest.run("uname -r") == guest.release
    assert "canary=42" in guest.run("cat /proc/cmdline").split()
    assert guest.run("printf 'no newline'") == "no newline"
    assert guest.run("echo one; echo; echo two >&2; echo") == "one\n\ntwo\n"
    assert guest.run("true") == ""
    assert len(guest.run("head -c 50000 /dev/zero | tr '\\0' x")) == 50000
    with pytest.raises(GuestError, match="ended with status 3: told"):
        guest.run("echo told; exit 3")
    with pytest.raises(GuestError, match="timed out; QEMU runs"):
        guest.run("sleep 1; echo late", seconds=0.3)
    assert guest.run("echo later") == "later"


def test_linux_that_panics_ends_with_its_last_words(linux_guest: StartLinux) -> None:
    guest = linux_guest(["-m", "256M"], kernel_params=["rdinit=/nonesuch"])
    with pytest.raises(GuestError, match=r"(?s)QEMU ended with status 0.*the console said: .*panic"):
        guest.ready()


def test_the_cache_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KATA_RESMGR_CACHE", str(tmp_path))
    said: list[str] = []
    packages.ensure([packages.COMPILER, packages.LINKER])
    first = build.firmware(say=said.append)
    assert first.stat().st_size == 64 << 10
    assert build.firmware(say=said.append) == first
    assert said == [f"building {first.parent}"]
    assert list(tmp_path.iterdir()) == [first.parent]


def test_what_is_missing_is_named_where_it_cannot_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GuestError, match=r"missing: gcc, libc.a; install them .* apt-get install gcc libc6-dev\)"):
        packages.ensure([packages.COMPILER, packages.STATIC_LIBC])


def test_where_there_is_no_second_qemu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KATA_RESMGR_CACHE", str(tmp_path))
    with pytest.raises(GuestError, match=r"python -m kata_resmgr\.guest fetches it"):
        qemus.backports()
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt
    qemus.fetch_backports()
    with pytest.raises(GuestError, match="apt has no main archive"):
        qemus.backports()
