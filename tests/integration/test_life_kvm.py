"""One pod's life through the daemon's socket on real QEMU under KVM, with the mini firmware as its guest."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.conftest import StartFirmware
from tests.daemon import until
from tests.integration.pod import SANDBOX, MakePod, Pod


def test_three_hundred_cycles_end_converged(pod: MakePod) -> None:
    p = pod(4)
    for _ in range(300):
        assert p.put(2.5)[1]["sandbox"]["vcpus"]["plugged"] == 4
        assert p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=5s")[0] == 204
    state = p.state
    assert state["converged"]
    assert (state["vcpus"]["plugged"], state["surplus"], state["conditions"]) == (
        1,
        {"vcpus": 0, "memoryBytes": 0, "reason": None},
        [],
    )


def test_a_resized_sandbox(pod: MakePod) -> None:
    p = pod(4)
    assert p.caller.ok("PATCH", SANDBOX, {"resources": {"cpu": {"quota": 250_000}}})["vcpus"]["plugged"] == 3
    assert p.put(1.5)[1]["sandbox"]["vcpus"]["plugged"] == 3
    told = p.caller.ok("GET", f"{SANDBOX}/explain")
    assert {"name": "plugged: vCPUs", "value": "3", "source": "hypervisor"} in told["inputs"]
    assert "resized: at least 2.5" not in " ".join(told["explain"])  # the containers ask for as much
    assert p.caller.ok("PATCH", f"{SANDBOX}?wait=5s", {"resources": {"cpu": {"quota": 400_000}}})["converged"]
    assert p.sizes() == (4, 4, 0)
    assert p.caller.ok("PATCH", f"{SANDBOX}?wait=5s", {"resources": {"cpu": {"quota": -1}}})["converged"]
    assert p.sizes() == (3, 3, 0)


def test_a_guest_that_ignores_removals(pod: MakePod) -> None:
    p = pod(4)
    p.put(2)
    p.guest.mode("i")
    assert p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=0")[0] == 204
    assert p.state["satisfied"]
    until(lambda: p.state["surplus"]["reason"] == "guest-silent", "the surplus is called guest-silent")
    assert p.sizes() == (1, 3, 2)
    p.guest.mode("c")
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
    assert p.sizes() == (1, 1, 0)


def test_a_guest_that_refuses_removals(pod: MakePod) -> None:
    p = pod(4)
    p.put(2)
    p.guest.mode("r")
    p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=0")
    until(lambda: p.state["surplus"]["reason"] == "guest-refused", "the refusal is known", 0.9)
    assert [c["reason"] for c in p.state["conditions"]] == ["guest-refused"]
    p.guest.mode("c")
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]


@pytest.mark.every_qemu
def test_a_latched_removal_does_not_take_what_came_after_it(pod: MakePod) -> None:
    p = pod(6)
    p.put(3)
    p.guest.mode("i")
    assert p.put(1, "?wait=0.1s")[0] == 202
    assert p.sizes() == (2, 4, 2)
    assert p.put(3)[0] == 200
    assert p.sizes() == (4, 6, 2)
    p.guest.mode("c")
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
    assert p.sizes() == (4, 4, 0)


def test_a_grow_that_needs_latched_slots_is_told_so(pod: MakePod) -> None:
    p = pod(4)
    p.put(3)
    p.guest.mode("i")
    p.put(1, "?wait=0.1s")
    status, problem = p.put(3, "?deadline=1s")
    assert (status, problem["code"], problem["retryable"]) == (409, "shrink_pending", True)
    assert p.sizes() == (2, 4, 2)


def test_a_vm_killed_in_the_middle_of_a_grow_leaves_the_table_as_it_was(
    pod: MakePod, minifw_guest: StartFirmware
) -> None:
    p = pod(4)
    neighbour = Pod(p.daemon, minifw_guest, "/v1/sandboxes/s2")
    p.put(0.5)
    before = p.state
    p.guest.pause()
    answers: list[tuple[int, Any]] = []
    growing = threading.Thread(target=lambda: answers.append(p.put(2.5, caller=p.daemon.caller())))
    growing.start()
    until(lambda: p.state["vcpus"]["desired"] == 4, "the grow has begun")
    assert neighbour.put(2)[0] == 201  # beside a VM that does not answer
    p.guest.kill()
    growing.join(20)
    (status, problem) = answers[0]
    assert (status, problem["code"]) == (503, "hypervisor_unreachable")
    after = p.state
    assert after["vcpus"]["desired"] == before["vcpus"]["desired"] == 2
    assert after["counts"] == before["counts"]
    until(lambda: p.state["phase"] == "lost", "the VM's end is known")
    assert neighbour.caller.call("DELETE", f"{neighbour.path}/containers/c1?wait=5s")[0] == 204


def test_clamped_at_the_maximum_and_never_under_boot(pod: MakePod) -> None:
    p = pod(4)
    assert p.put(9)[1]["sandbox"]["vcpus"] == {"exact": "10", "desired": 4, "plugged": 4, "pending": 0, "online": None}
    (condition,) = p.state["conditions"]
    assert condition["type"] == "Clamped"
    assert "10 vCPUs" in condition["message"]
    assert "maximum is 4" in condition["message"]
    p.caller.ok("PUT", f"{SANDBOX}/containers?wait=5s", {"containers": {}})
    assert p.sizes() == (1, 1, 0)
    assert p.put(0.01)[1]["sandbox"]["vcpus"]["desired"] == 2  # default_vcpus is added to what is asked for
    assert p.put(-1)[1]["sandbox"]["vcpus"]["desired"] == 1


def test_a_removal_sent_to_a_stopped_vmm_is_carried_out_later(pod: MakePod) -> None:
    p = pod(4)
    p.put(2)
    p.guest.pause()  # the VMM itself: the removal is sent and not even read
    assert p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=0.2s")[0] == 204
    p.guest.resume()
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]


def test_the_daemon_ends_and_the_vm_runs_on(pod: MakePod) -> None:
    p = pod(4)
    p.put(2)
    p.daemon.process.terminate()
    assert p.daemon.process.wait(20) == 0
    assert p.guest.running
