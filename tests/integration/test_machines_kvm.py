"""Machines of all shapes under real QEMU and KVM, through the daemon's socket: topologies, sizes, types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.monitor import monitor
from tests.integration.pod import SANDBOX, MakePod, Pod

MONITOR = "other"


def second_monitor(directory: Path) -> list[str]:
    return ["-qmp", f"unix:{directory / MONITOR},server=on,wait=off"]


def places(directory: Path) -> list[dict[str, int]]:
    """Where a vCPU sits, in QEMU's own terms."""
    with monitor(directory / MONITOR) as qmp:
        return [cpu["props"] for cpu in qmp.query("query-cpus-fast")]


def fill_and_empty(pod: Pod, boot: int, maximum: int) -> None:
    """To the maximum in one operation, then to what the VM was started with, one vCPU less at each of a few steps."""
    status, answer = pod.put(maximum)
    assert (status, answer["sandbox"]["vcpus"]["plugged"]) == (201, maximum)
    for fewer in (maximum - 1, maximum - 2, maximum // 2):
        pod.put(fewer - 1, "?wait=20s")  # with the vCPU of default_vcpus
        assert pod.sizes() == (fewer, fewer, 0)
    assert pod.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=20s")[0] == 204
    assert pod.sizes() == (1, boot, 0)


@pytest.mark.every_qemu
@pytest.mark.parametrize(
    ("boot", "maximum", "topology"),
    [
        pytest.param(2, 16, "sockets=2,dies=2,cores=2,threads=2", id="sockets, dies, cores, threads"),
        pytest.param(1, 18, "sockets=3,cores=3,threads=2", id="APIC ids with gaps"),
        pytest.param(3, 8, "sockets=8,cores=1,threads=1", id="as libvirt and Kata write it"),
    ],
)
def test_an_operators_topology_is_filled_and_emptied(
    pod: MakePod, short_tmp: Path, boot: int, maximum: int, topology: str
) -> None:
    smp = ["-smp", f"{boot},maxcpus={maximum},{topology}"]
    p = pod(maximum, host_cpus=maximum, arguments=[*smp, *second_monitor(short_tmp)])
    assert p.sizes() == (1, boot, 0)
    p.put(maximum)
    taken = places(short_tmp)
    assert len({tuple(sorted(place.items())) for place in taken}) == maximum
    for word in topology.split(","):
        level, _, count = word.partition("=")
        assert len({place.get(f"{level[:-1]}-id", 0) for place in taken}) == int(count)
    p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=20s")
    fill_and_empty(p, boot, maximum)


@pytest.mark.every_qemu
def test_the_older_machine_type(pod: MakePod) -> None:
    p = pod(6, hypervisor='machine_type = "pc"', machine="pc,vmport=on")
    fill_and_empty(p, 1, 6)


@pytest.mark.every_qemu
@pytest.mark.parametrize(
    "known", [pytest.param(True, id="as configured"), pytest.param(False, id="found when it is attached")]
)
def test_a_machine_without_hotplug_keeps_its_boot_size(pod: MakePod, known: bool) -> None:
    p = pod(4, hypervisor='machine_type = "microvm"' if known else "", machine="microvm")
    assert ("maxcpus" in " ".join(p.args)) is not known
    assert (p.state["mode"], p.sizes()) == ("static", (1, 1, 0))
    condition = p.condition("HotplugUnsupported")
    assert condition is not None
    assert condition["reason"] == "vcpus"
    assert p.put(2.5)[0] == 201
    assert p.put(1.5)[0] == 200
    assert p.sizes() == (1, 1, 0)
    excess = p.condition("DemandExceedsSize")
    assert excess is not None
    assert "1.5 vCPUs, fixed at 1" in excess["message"]
    assert p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=5s")[0] == 204
    assert p.state["converged"]


def test_two_hundred_and_forty_vcpus(pod: MakePod) -> None:
    p = pod(0, host_cpus=240)
    assert p.args[p.args.index("-smp") + 1] == "1,maxcpus=240"
    status, answer = p.put(239, "?deadline=60s")
    assert (status, answer["sandbox"]["vcpus"]["plugged"]) == (201, 240)
    assert p.caller.call("DELETE", f"{SANDBOX}/containers/c1?wait=60s&deadline=60s")[0] == 204
    assert p.sizes() == (1, 1, 0)
