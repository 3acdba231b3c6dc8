"""Memory through the daemon's socket: what the containers ask for is what the guest has, and it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartFirmware, StartLinux
from tests.daemon import Caller, Daemon, until
from tests.integration.monitor import Monitor

MIB = 1 << 20
SANDBOX = "/v1/sandboxes/s1"
DEADLINE = "wait=30s&deadline=30s"


def container(mib: int) -> dict[str, Any]:
    return {"resources": {"memory": {"limit": mib * MIB}}}


def memory(caller: Caller) -> tuple[int, int, int]:
    """MiB desired, plugged, pending."""
    told = caller.ok("GET", SANDBOX)["memory"]
    return told["desired"] // MIB, told["plugged"] // MIB, told["pending"] // MIB


@contextmanager
def daemon(directory: Path, boot_mib: int, more: str = "") -> Iterator[Caller]:
    config = (
        '[resmgr]\nhost_cpus = 2\nhost_memory = 4096\nshrink_delay = "0s"\n'
        f"[hypervisor.qemu]\ndefault_memory = {boot_mib}\n{more}\n"
    )
    with Daemon(directory, config) as process:
        yield process.caller()


@pytest.mark.parametrize("virtio_mem", [False, True], ids=["dimm", "virtio-mem"])
def test_the_guest_uses_memory_and_gives_back_what_it_can_and_the_rest_later(
    short_tmp: Path, linux_guest: StartLinux, virtio_mem: bool
) -> None:
    with daemon(short_tmp, 256, f"enable_virtio_mem = {str(virtio_mem).lower()}") as caller:
        vmm = caller.ok("PUT", SANDBOX, {"hypervisor": "qemu"})["vmm"]
        guest = linux_guest(vmm["args"], kernel_params=vmm["kernelParams"])
        guest.ready()
        caller.ok("PUT", f"{SANDBOX}/vm", {"pid": guest.pid})
        told: list[str] = []

        def tell(step: str) -> None:
            desired, plugged, pending = memory(caller)
            sizes = f"desired {desired}, plugged {plugged}, pending {pending} MiB"
            told.append(f"{step}: {sizes}; the guest's MemTotal {guest.mem_total() // 1024} kB")

        before = guest.mem_total()
        tell("boot")
        caller.ok("PUT", f"{SANDBOX}/containers/a?{DEADLINE}", container(256))
        until(lambda: guest.mem_total() == before + 256 * MIB, "the guest has 256 MiB more")
        tell("a")
        guest.hold_memory(32 * MIB)
        caller.ok("PUT", f"{SANDBOX}/containers/b?{DEADLINE}", container(256))
        until(lambda: guest.mem_total() == before + 512 * MIB, "the guest has 512 MiB more")
        assert memory(caller) == (768, 768, 0)
        tell("a and b")

        caller.ok("DELETE", f"{SANDBOX}/containers/b?{DEADLINE}")
        assert memory(caller) == (512, 512, 0)
        until(lambda: guest.mem_total() == before + 256 * MIB, "the guest has b's no more")
        tell("a, 32 MiB in use")

        caller.ok("DELETE", f"{SANDBOX}/containers/a")
        # What is in use stays: a whole DIMM, or little more than that itself.
        most = 256 + (64 if virtio_mem else 256)
        until(lambda: memory(caller)[1] <= most, "what is not in use has come back")
        until(lambda: caller.ok("GET", SANDBOX)["surplus"]["reason"] is not None, "the daemon says why not all")
        state = caller.ok("GET", SANDBOX)
        pending = state["memory"]["pending"]
        assert state["memory"] == {"desired": 256 * MIB, "plugged": 256 * MIB + pending, "pending": pending}
        assert state["surplus"] == {"vcpus": 0, "memoryBytes": pending, "reason": "guest-silent"}
        assert pending >= 32 * MIB
        assert not state["converged"]
        tell("nothing, 32 MiB in use")

        guest.free_memory()
        until(lambda: memory(caller) == (256, 256, 0), "the rest comes back by itself", seconds=90)
        until(lambda: guest.mem_total() == before, "the guest has what it began with")
        assert caller.ok("GET", SANDBOX)["converged"]
        tell("nothing, and nothing in use")
        print(*told, sep="\n")


def backends(directory: Path) -> list[str]:
    """Ids of those that QEMU has, by another monitor."""
    monitor = Monitor(directory / "other")
    try:
        return sorted(str(row["id"]) for row in monitor.query("query-memdev"))
    finally:
        monitor.close()


@pytest.mark.every_qemu
def test_the_eleventh_grow_with_ten_slots_is_refused_and_leaves_nothing(
    minifw_guest: StartFirmware, short_tmp: Path
) -> None:
    with daemon(short_tmp, 64) as caller:
        vmm = caller.ok("PUT", SANDBOX, {"hypervisor": "qemu"})["vmm"]
        minifw_guest([*vmm["args"], "-qmp", f"unix:{short_tmp}/other,server=on,wait=off"]).ready()
        caller.ok("PUT", f"{SANDBOX}/vm", {})
        for number in range(1, 11):
            caller.ok("PUT", f"{SANDBOX}/containers/c{number}", container(128))
            assert memory(caller) == (64 + number * 128, 64 + number * 128, 0)

        status, problem = caller.call("PUT", f"{SANDBOX}/containers/c11", container(128))

        assert (status, problem["code"]) == (409, "memory_slots_exhausted")
        assert f"{64 + 11 * 128}" in problem["detail"]
        assert memory(caller) == (64 + 1280, 64 + 1280, 0)
        assert backends(short_tmp) == sorted(["pc.ram", *(f"resmgr-mem-{number}" for number in range(1, 11))])
        assert caller.call("GET", f"{SANDBOX}/containers/c11")[0] == 404

        caller.ok("PUT", f"{SANDBOX}/containers?wait=10s", {"containers": {}})
        assert memory(caller) == (64, 64, 0)
        assert backends(short_tmp) == ["pc.ram"]
