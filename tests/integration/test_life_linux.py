"""A pod's life on a real Linux guest: what the daemon says is plugged is what the guest uses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hypervisors.base import Accelerator
from tests.conftest import StartLinux
from tests.daemon import PROGRAM, Daemon, until

SANDBOX = "/v1/sandboxes/s1"


@pytest.mark.every_qemu
def test_the_guest_uses_what_is_plugged_and_gives_it_back(short_tmp: Path, linux_guest: StartLinux) -> None:
    config = '[resmgr]\nhost_cpus = 8\ntcg_unplug = "once"\n[hypervisor.qemu]\ndefault_memory = 256\n'
    with Daemon(short_tmp, config) as daemon:
        caller = daemon.caller()
        vmm = caller.ok("PUT", SANDBOX, {"hypervisor": "qemu"})["vmm"]
        guest = linux_guest(vmm["args"], kernel_params=vmm["kernelParams"])
        guest.ready()
        caller.ok("PUT", f"{SANDBOX}/vm", {"pid": guest.pid})
        assert guest.online_cpus() == 1
        caller.ok("PUT", f"{SANDBOX}/containers/a", {"resources": {"cpu": {"quota": 150000, "period": 100000}}})
        until(lambda: guest.online_cpus() == 3, "the guest uses 3 CPUs")
        caller.ok("PUT", f"{SANDBOX}/containers/b", {"resources": {"cpu": {"quota": 100000, "period": 100000}}})
        until(lambda: guest.online_cpus() == 4, "the guest uses 4 CPUs")
        caller.ok("DELETE", f"{SANDBOX}/containers/b?wait=30s&deadline=30s")
        assert caller.ok("GET", SANDBOX)["vcpus"]["plugged"] == 3
        assert guest.online_cpus() == 3
        caller.ok("DELETE", f"{SANDBOX}/containers/a?wait=30s&deadline=30s")
        assert caller.ok("GET", SANDBOX)["converged"]
        assert guest.online_cpus() == 1


@pytest.mark.parametrize("linux_guest", [pytest.param(Accelerator.TCG, marks=pytest.mark.tcg)], indirect=True)
def test_under_tcg_nothing_is_removed_unless_it_was_allowed(short_tmp: Path, linux_guest: StartLinux) -> None:
    with Daemon(short_tmp, "[resmgr]\nhost_cpus = 8\n[hypervisor.qemu]\ndefault_memory = 256\n") as daemon:
        caller = daemon.caller()
        vmm = caller.ok("PUT", SANDBOX, {"hypervisor": "qemu"})["vmm"]
        guest = linux_guest(vmm["args"], kernel_params=vmm["kernelParams"])
        guest.ready()
        caller.ok("PUT", f"{SANDBOX}/vm", {})
        caller.ok("PUT", f"{SANDBOX}/containers/a", {"resources": {"cpu": {"quota": 100000}}})
        caller.ok("DELETE", f"{SANDBOX}/containers/a?wait=5s")
        state = caller.ok("GET", SANDBOX)
        assert (state["converged"], state["surplus"]["reason"]) == (True, "tcg")
        assert caller.ok("PUT", f"{SANDBOX}/containers/a", {"resources": {"cpu": {"quota": 200000}}})
        until(lambda: guest.online_cpus() == 3, "the guest uses 3 CPUs")


def test_the_demo() -> None:
    done = subprocess.run([PROGRAM, "demo", "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"step": "boot", "desired": 1, "plugged": 1, "online": 1},
        {"step": "create c1 with 1.5 CPUs", "desired": 3, "plugged": 3, "online": 3},
        {"step": "update c1 to 2.5 CPUs", "desired": 4, "plugged": 4, "online": 4},
        {"step": "delete c1", "desired": 1, "plugged": 1, "online": 1},
    ]
