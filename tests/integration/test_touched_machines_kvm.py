"""Machines that others touch beside the daemon: by another monitor on real QEMU under KVM."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import until
from tests.integration.monitor import Monitor, monitor
from tests.integration.pod import SANDBOX, MakePod, Pod

MAXIMUM = 6


@pytest.fixture
def other(short_tmp: Path, pod: MakePod) -> Iterator[tuple[Pod, Monitor]]:
    """A pod that starts with one vCPU of six, and somebody else's monitor of its VM."""
    path = short_tmp / "other"
    p = pod(MAXIMUM, arguments=["-qmp", f"unix:{path},server=on,wait=off"])
    with monitor(path) as qmp:
        yield p, qmp


def foreign_change(pod: Pod, before: int, now: int) -> None:
    """The condition must come, and tell both numbers."""
    until(lambda: pod.condition("ForeignChange") is not None, "the foreign change is told")
    condition = pod.condition("ForeignChange")
    assert condition is not None
    assert condition["message"] == f"changed by somebody else: {before} vCPUs before, {now} now"


@pytest.mark.parametrize("name", ["cpu7", None], ids=["another id", "no id"])
def test_what_others_plug_counts_and_stays(other: tuple[Pod, Monitor], name: str | None) -> None:
    p, qmp = other
    p.put(1)
    qmp.plug(name)
    foreign_change(p, 2, 3)
    assert (p.sizes(), p.state["surplus"]["reason"]) == ((2, 3, 0), "grace")
    assert p.put(5)[1]["sandbox"]["vcpus"]["plugged"] == MAXIMUM  # three of ours beside theirs
    assert p.condition("ForeignChange") is None
    p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=10s")
    state = p.state
    assert (p.sizes(), state["surplus"]["reason"], state["converged"]) == ((1, 2, 0), "boot-floor", True)


def test_what_others_take_is_not_fought_over_until_the_next_operation(other: tuple[Pod, Monitor]) -> None:
    p, qmp = other
    p.put(3)
    qmp.execute("device_del", id="resmgr-vcpu-2")
    foreign_change(p, 4, 3)
    assert (p.sizes(), p.state["satisfied"]) == ((4, 3, 0), False)
    assert p.caller.ok("POST", f"{SANDBOX}/reconcile?wait=10s")["converged"]
    assert (p.sizes(), p.condition("ForeignChange")) == ((4, 4, 0), None)


def test_a_boot_vcpu_that_others_take_is_replaced(pod: MakePod, short_tmp: Path) -> None:
    path = short_tmp / "other"
    p = pod(MAXIMUM, arguments=["-smp", f"3,maxcpus={MAXIMUM}", "-qmp", f"unix:{path},server=on,wait=off"])
    assert (p.sizes(), p.state["surplus"]["reason"]) == ((1, 3, 0), "boot-floor")  # more than it was sized for
    p.put(2)
    with monitor(path) as qmp:
        boot = next(cpu["qom-path"] for cpu in qmp.query("query-cpus-fast") if cpu["cpu-index"] == 1)
        qmp.execute("device_del", id=boot)
        foreign_change(p, 3, 2)
    assert p.put(3)[1]["sandbox"]["vcpus"]["plugged"] == 4
    p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=10s")
    assert p.sizes() == (1, 2, 0)


def test_others_come_and_go_while_the_daemon_is_detached(other: tuple[Pod, Monitor]) -> None:
    p, qmp = other
    p.put(2)
    assert p.caller.call("DELETE", f"{SANDBOX}/vm")[0] == 204
    qmp.plug("cpu7")
    qmp.execute("device_del", id="resmgr-vcpu-1")
    until(lambda: qmp.vcpus() == 3, "the removal has ended")
    p.caller.ok("PUT", f"{SANDBOX}/vm", {})
    assert p.sizes() == (3, 3, 0)
    p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=10s")
    assert p.sizes() == (1, 2, 0)


def test_a_reset_repeats_what_the_guest_ignored(other: tuple[Pod, Monitor]) -> None:
    p, qmp = other
    p.put(2)
    p.guest.mode("i")
    p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=0.1s")
    assert p.sizes() == (1, 3, 2)
    qmp.execute("system_reset")  # the firmware cooperates when it starts anew
    p.guest.ready()
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
    assert (p.sizes(), p.condition("ForeignChange")) == ((1, 1, 0), None)


@pytest.mark.every_qemu
def test_a_paused_vm_grows_at_once_and_shrinks_when_it_goes_on(other: tuple[Pod, Monitor]) -> None:
    p, qmp = other
    p.put(1)
    qmp.execute("stop")
    assert p.put(3)[1]["sandbox"]["vcpus"]["plugged"] == 4
    assert p.put(1, "?wait=0.1s")[0] == 202
    assert p.sizes() == (2, 4, 2)
    assert p.put(2)[0] == 200  # in slots that are free, beside those that are to go
    assert p.sizes() == (3, 5, 2)
    qmp.execute("cont")
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
    assert p.sizes() == (3, 3, 0)


@pytest.mark.every_qemu
def test_a_migration_under_way_refuses_and_its_end_goes_on(other: tuple[Pod, Monitor], short_tmp: Path) -> None:
    p, qmp = other
    p.put(1)
    with socket.socket(socket.AF_UNIX) as destination:
        destination.bind(str(short_tmp / "destination"))
        destination.listen()
        qmp.execute("migrate-set-parameters", **{"max-bandwidth": 1024, "downtime-limit": 1})  # it takes minutes
        qmp.execute("migrate", uri=f"unix:{short_tmp / 'destination'}")
        until(lambda: qmp.status("query-migrate") == "active", "the migration is under way")

        status, problem = p.put(3)
        assert (status, problem["code"]) == (502, "hypervisor_refused")
        assert "not allowed while migrating" in problem["detail"]
        assert p.sizes() == (2, 2, 0)
        p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=0.1s")
        until(lambda: p.state["surplus"]["reason"] == "guest-refused", "the removal is known to be refused")
        assert p.sizes() == (1, 2, 1)

        qmp.execute("migrate_cancel")
        until(lambda: qmp.status("query-migrate") == "cancelled", "the migration has ended")
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
    assert p.sizes() == (1, 1, 0)
    assert p.put(3)[1]["sandbox"]["vcpus"]["plugged"] == 4
