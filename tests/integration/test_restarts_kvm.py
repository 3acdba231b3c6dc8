"""A daemon that is killed, and the next one, on real QEMU under KVM: no guest notices, and nothing answered is lost."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from tests.conftest import StartFirmware
from tests.daemon import until
from tests.integration.monitor import monitor
from tests.integration.pod import SANDBOX, MakePod, Pod

CONTAINER = f"{SANDBOX}/containers/c1"


def restart(p: Pod) -> None:
    """Kill -9, and another daemon."""
    p.daemon.kill()
    start(p)


def start(p: Pod) -> None:
    p.daemon.start_again()
    p.caller = p.daemon.caller()


def test_a_restart_is_invisible_to_the_guest(pod: MakePod, short_tmp: Path) -> None:
    path = short_tmp / "beside.sock"
    p = pod(6, arguments=("-qmp", f"unix:{path},server=on,wait=off"))
    p.put(2.5)
    with monitor(path) as beside:
        before = p.state
        beside.heard()
        restart(p)
        assert p.state | {"generation": 0} == before | {"generation": 0}
        assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
        assert beside.heard() == []
        assert p.put(4)[1]["sandbox"]["vcpus"]["plugged"] == 5
        assert beside.vcpus() == 5


def test_a_removal_latched_before_the_kill_completes_after_it(pod: MakePod) -> None:
    p = pod(4)
    p.put(2)
    p.guest.mode("i")
    p.caller.call("DELETE", f"{CONTAINER}?wait=0")
    until(lambda: p.sizes() == (1, 3, 2), "both are being removed")
    restart(p)
    assert p.sizes() == (1, 3, 2)
    p.guest.mode("c")
    assert p.caller.ok("GET", f"{SANDBOX}?wait=10s&for=converged")["converged"]
    assert p.sizes() == (1, 1, 0)


def test_a_removal_that_ends_while_nobody_looks(pod: MakePod, short_tmp: Path) -> None:
    path = short_tmp / "beside.sock"
    p = pod(4, arguments=("-qmp", f"unix:{path},server=on,wait=off"))
    p.put(1)
    p.guest.mode("i")
    p.caller.call("DELETE", f"{CONTAINER}?wait=0")
    until(lambda: p.sizes() == (1, 2, 1), "it is being removed")
    p.daemon.kill()
    p.guest.mode("c")
    with monitor(path) as beside:
        until(lambda: beside.vcpus() == 1, "it has left")
    start(p)
    assert (p.sizes(), p.state["conditions"], p.state["converged"]) == ((1, 1, 0), [], True)


def test_killed_in_the_middle_of_a_grow_it_is_undone(pod: MakePod) -> None:
    p = pod(4)
    p.put(0.5)
    p.guest.pause()
    unanswered: list[Exception] = []
    caller = p.daemon.caller()

    def grow() -> None:
        try:
            p.put(2.5, caller=caller)
        except OSError as error:
            unanswered.append(error)

    growing = threading.Thread(target=grow)
    growing.start()
    until(lambda: p.state["vcpus"]["desired"] == 4, "the grow has begun")
    p.daemon.kill()
    growing.join(20)
    assert len(unanswered) == 1
    p.guest.resume()
    start(p)
    assert p.caller.ok("GET", CONTAINER)["resources"]["cpu"]["quota"] == 50_000
    assert p.caller.ok("POST", f"{SANDBOX}/reconcile?wait=10s")["converged"]
    assert p.sizes() == (2, 2, 0)


def test_a_hung_vm_and_a_dead_one_hold_up_nobody(pod: MakePod, minifw_guest: StartFirmware) -> None:
    p = pod(4)
    hung = Pod(p.daemon, minifw_guest, "/v1/sandboxes/s2")
    dead = Pod(p.daemon, minifw_guest, "/v1/sandboxes/s3")
    for one in (p, hung, dead):
        one.put(1)
    p.daemon.kill()
    hung.guest.pause()
    dead.guest.kill()
    start(p)
    hung.caller = dead.caller = p.caller
    assert [one.state["phase"] for one in (p, hung, dead)] == ["running", "unreachable", "lost"]
    assert p.put(2)[0] == 200
    assert [hung.put(2)[1]["code"], dead.put(2)[1]["retryable"]] == ["hypervisor_unreachable", False]
    hung.guest.resume()
    until(lambda: hung.state["phase"] == "running", "it is adopted when it answers again")
    assert hung.put(2)[0] == 200


def test_another_vm_in_its_place_is_not_adopted(pod: MakePod, minifw_guest: StartFirmware) -> None:
    p = pod(4)
    p.put(1)
    p.daemon.kill()
    p.guest.kill()
    other = minifw_guest(p.args)
    other.ready()
    start(p)
    assert p.state["phase"] == "lost"
    status, problem = p.put(2)
    assert (status, problem["code"], problem["retryable"]) == (503, "hypervisor_unreachable", False)
    assert p.caller.ok("PUT", f"{SANDBOX}/vm", {})["phase"] == "running"
    assert p.caller.ok("GET", f"{SANDBOX}?wait=5s&for=satisfied")["vcpus"]["plugged"] == 2


def test_sigterm_lets_what_runs_end_and_refuses_what_comes(pod: MakePod) -> None:
    p = pod(4)
    p.guest.pause()
    answers: list[tuple[int, Any]] = []
    caller, late = p.daemon.caller(), p.daemon.caller()
    late.ok("GET", "/readyz")
    growing = threading.Thread(target=lambda: answers.append(p.put(1, "?deadline=20s", caller=caller)))
    growing.start()
    until(lambda: p.state["vcpus"]["desired"] == 2, "the grow has begun")
    p.daemon.process.send_signal(signal.SIGTERM)
    until(lambda: p.daemon.caller().call("GET", "/readyz")[0] == 503, "the daemon is stopping")
    for one in (late, p.daemon.caller()):  # a new connection is told as well
        status, problem = p.put(2, caller=one)
        assert (status, problem["code"], problem["retryable"]) == (503, "shutting_down", True)
    p.guest.resume()
    growing.join(20)
    assert answers[0][0] == 201
    assert p.daemon.process.wait(20) == 0
    start(p)
    assert p.sizes() == (2, 2, 0)
