"""The daemon under a real systemd."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from tests.system.conftest import Host

pytestmark = pytest.mark.system

START = "systemctl start kata-resmgr.service"
CONFIG = """
[resmgr]
host_cpus = 8
host_memory = 8192
[hypervisor.qemu]
default_memory = {memory}
"""
S1 = "/v1/sandboxes/s1"


def start_vmm(host: Host) -> int:
    """A VM of another user's, in a directory that only he may enter; its process."""
    host.run(
        "install -d -o nobody -g nogroup -m 700 /run/vc/vm/s1 && "
        "systemd-run --quiet --unit=vmm-s1 --uid=nobody $(command -v vmm) /run/vc/vm/s1/resmgr.sock"
    )
    host.until("[ -S /run/vc/vm/s1/resmgr.sock ]")
    return int(host.run("systemctl show --value --property=MainPID vmm-s1"))


def start_pod(host: Host) -> dict[str, Any]:
    """A sandbox with a VM and a container of 1.5 CPUs."""
    pid = start_vmm(host)
    assert host.ask("PUT", S1, {"directory": "/run/vc/vm/s1"})[0] == 201
    status, answer = host.ask("PUT", f"{S1}/vm", {"pid": pid})
    if status == 503 and answer["retryable"]:  # under emulation a call may take longer than the daemon's patience
        status, answer = host.ask("PUT", f"{S1}/vm", {"pid": pid})
    assert status == 200, answer
    status, answer = host.ask("PUT", f"{S1}/containers/c1", {"resources": {"cpu": {"quota": 150000}}})
    assert status == 201, answer
    sandbox: dict[str, Any] = answer["sandbox"]
    assert (sandbox["phase"], sandbox["vcpus"]["plugged"]) == ("running", 3)
    return sandbox


def test_the_units_are_sound(host: Host) -> None:
    assert host.run("systemd-analyze verify --man=no kata-resmgr.service kata-resmgr.socket 2>&1") == ""
    host.run("systemd-analyze security --threshold=20 kata-resmgr.service")


def test_the_group_and_the_runtime_directory_were_made_at_boot(host: Host) -> None:
    assert host.run("stat -c '%A %U %G' /run/kata-resmgr") == "drwxr-x--- root kata-resmgr"


def test_the_sample_configuration_is_good(host: Host) -> None:
    host.run("kata-resmgr check-config /usr/share/kata-resmgr/config.toml")


def test_it_is_active_once_it_is_ready(host: Host) -> None:
    host.run(START)
    assert host.ask("GET", "/readyz") == (200, {"ok": True, "reasons": []})
    records = [json.loads(line["MESSAGE"]) for line in host.journal() if line["MESSAGE"].startswith("{")]
    (serving,) = [datetime.fromisoformat(record["time"]) for record in records if record["event"] == "serving"]
    told = host.run("systemctl show --value --timestamp=us+utc --property=ActiveEnterTimestamp kata-resmgr")
    assert serving < datetime.strptime(f"{told} +0000", "%a %Y-%m-%d %H:%M:%S.%f %Z %z")


def test_one_that_does_not_get_ready_is_not_active(host: Host) -> None:
    host.run(f"{START} --no-block")
    host.until('[ "$(systemctl show --value --property=MainPID kata-resmgr)" != 0 ]')
    host.send("STOP")
    assert host.show("ActiveState") == ("activating",)
    host.send("CONT")
    host.until("systemctl --quiet is-active kata-resmgr")
    assert host.ask("GET", "/readyz")[0] == 200


def test_a_call_starts_it(host: Host) -> None:
    host.run("systemctl start kata-resmgr.socket")
    assert host.show("ActiveState") == ("inactive",)
    assert host.ask("GET", "/readyz")[0] == 200
    assert host.show("ActiveState") == ("active",)


def test_a_hung_one_is_ended_and_started_anew(host: Host) -> None:
    host.run(f"{START} && sleep 40")  # longer than the watchdog waits: it has proved its life
    assert host.show("NRestarts", "ActiveState", "WatchdogUSec") == ("0", "active", "30s")
    host.send("STOP")
    host.until('[ "$(systemctl show --value --property=NRestarts kata-resmgr)" = 1 ]')
    host.until("systemctl --quiet is-active kata-resmgr")
    assert host.ask("GET", "/readyz")[0] == 200
    told = [str(entry["MESSAGE"]) for entry in host.journal()]
    assert any("Watchdog timeout" in line for line in told)
    assert "Fatal Python error: Aborted" in told  # and where it hung


def test_a_reload_takes_a_good_file_and_survives_a_bad_one(host: Host) -> None:
    def boot_memory(name: str) -> int:
        return int(host.ask("PUT", f"/v1/sandboxes/{name}", {})[1]["boot"]["memoryBytes"]) >> 20

    def reload(memory: int, status: str) -> None:
        host.configure(CONFIG.format(memory=memory))
        host.run("systemctl reload kata-resmgr")
        host.until(f"systemctl show --value --property=StatusText kata-resmgr | grep -q '{status}'")

    host.configure(CONFIG.format(memory=128))
    host.run(START)
    assert boot_memory("s1") == 128
    reload(256, "configuration read again")
    assert boot_memory("s2") == 256
    reload(1, "configuration left as it was: .* default_memory = 1: ")
    assert boot_memory("s3") == 256
    assert host.show("ActiveState", "NRestarts") == ("active", "0")


@pytest.mark.parametrize("group", [None, "kata-resmgr"])
def test_who_is_served(host: Host, group: str | None) -> None:
    def ask_as_nobody(groups: str) -> str:
        return host.run(f"setpriv --reuid=nobody --regid=nogroup {groups} ask GET /v1/sandboxes 2>&1 || true")

    host.configure(f'[daemon]\nsocket_group = "{group}"' if group else "")
    host.run(START)
    assert "may not be used: be root, or a member" in ask_as_nobody("--clear-groups")  # connect(2) itself is refused
    member = ask_as_nobody("--groups=$(getent group kata-resmgr | cut -d: -f3)")
    assert member.startswith('200 {"sandboxes":[]}' if group else '403 {"type":"urn:kata-resmgr:error:forbidden"')


def test_a_vm_of_another_user_is_driven_and_its_end_noticed(host: Host) -> None:
    host.configure(CONFIG.format(memory=128))
    host.run(START)
    start_pod(host)
    host.run("systemctl kill --signal=KILL vmm-s1")
    host.until(f'ask GET {S1} | grep -q \'"phase":"lost"\'')


def test_after_a_kill_it_is_started_anew_and_drives_its_vms_on(host: Host) -> None:
    host.configure(CONFIG.format(memory=128))
    host.run(START)
    before = start_pod(host)
    host.send("KILL")
    status, after = host.ask("GET", f"{S1}?wait=20s&for=satisfied")  # it waits until somebody answers
    assert status == 200, after
    assert (after["phase"], after["vcpus"], after["counts"]) == ("running", before["vcpus"], before["counts"])
    assert host.show("NRestarts", "ActiveState") == ("1", "active")
    status, grown = host.ask("PUT", f"{S1}/containers/c2", {"resources": {"cpu": {"quota": 100000}}})
    assert (status, grown["sandbox"]["vcpus"]["plugged"]) == (201, 4)


def test_a_stop_and_a_start_keep_what_is_known(host: Host) -> None:
    host.configure(CONFIG.format(memory=128))
    host.run(START)
    before = start_pod(host)
    host.run("systemctl stop kata-resmgr.service")
    assert host.show("ActiveState", "Result") == ("inactive", "success")
    host.run(START)
    after = host.ask("GET", f"{S1}?wait=20s&for=satisfied")[1]
    assert (after["phase"], after["vcpus"], after["counts"]) == ("running", before["vcpus"], before["counts"])
