"""The explanation of a size, line by line, as an operator reads it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from hypervisors.base import Accelerator, Machine, Plugged, Vcpu
from kata_resmgr import explain, sizing
from kata_resmgr.annotations import CONTAINERD, CRIO, TYPE_KEYS
from kata_resmgr.config import Base, Compat, CpusetSizing
from kata_resmgr.declared import declare
from kata_resmgr.declared import resized as declared_now
from kata_resmgr.demand import ContainerTable
from kata_resmgr.sizing import MIB
from kata_resmgr.view import Input
from tests.examples import resources, sandbox_config, table

DEFAULTS = ["default_vcpus = 1 (default)", "default_memory = 2048 MiB (default)"]
BOOT = "boot: 1 vCPUs, rounded up once: 1; 2048 MiB"
NO_MEMORY = "memory: 2048 MiB + limits and huge pages of 0 MiB = 2048 MiB, within the boot size: 2048 MiB"


def _lines(
    containers: ContainerTable,
    declared: bytes | None = None,
    resized: bytes | None = None,
    annotations: dict[str, str] | None = None,
    machine_max: int | None = None,
    held: int | None = None,
    **config: Any,  # noqa: ANN401 - each field has its own type
) -> list[str]:
    made = sandbox_config(**config)
    declaration = declare(made, annotations or {}, declared)
    now = None if resized is None else declared_now(made, declaration, resized)
    boot, _ = sizing.boot_size(made, declaration.size)
    if machine_max is not None:
        boot = replace(boot, max_vcpus=machine_max)
    sums = containers.sums()
    target = sizing.target(made, boot, declaration.size, sums, resized=None if now is None else now.size, held=held)
    return list(explain.lines(made, boot, declaration, containers.records, sums, target, resized=now))


def test_one_pods_life() -> None:
    life = table(resources(quota=150_000, shares=1536, limit=512 * MIB))
    assert _lines(life) == [
        *DEFAULTS,
        BOOT,
        "c0: quota 150000 / period 100000 = 1.5, 512 MiB",
        "1 + 1.5 = 2.5, rounded up once: 3",
        "memory: 2048 MiB + limits and huge pages of 512 MiB = 2560 MiB, from the boot size in steps of 128 MiB: "
        "2560 MiB",
    ]
    life.set("c0", None)
    assert _lines(life) == [*DEFAULTS, BOOT, "no containers: the boot size, 1", NO_MEMORY]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (resources(quota=10_000), "quota 10000 / period 100000 = 0.1"),
        (resources(quota=1, period=3), "quota 1 / period 3 = 1/3"),
        (resources(quota=50_000, cpus="0-3"), "quota 50000 / period 100000 = 0.5"),
        (resources(cpus="0-3"), "cpuset of 4"),
        (resources(cpus="0-3", limit=1), "cpuset of 4, 1 bytes"),
        (resources(cpus="0-3", shares=2), "cpuset of 4 does not count: 2 shares ask for less"),
        (resources(quota=-1), "no vCPUs asked for"),
        (resources(limit=MIB, hugepages={"2MB": 2 * MIB}), "no vCPUs asked for, 3 MiB"),
    ],
)
def test_a_container(text: bytes, line: str) -> None:
    assert _lines(table(text))[3] == f"c0: {line}"


@pytest.mark.parametrize(
    ("texts", "config", "lines"),
    [
        ([resources(cpus="0-3")], {}, ["4, rounded up once: 4"]),
        ([resources(quota=-1)], {}, ["0, at least default_vcpus = 1, rounded up once: 1"]),
        (
            [resources(cpus="0")],
            {"default_vcpus": Fraction(5, 2)},
            ["1, at least default_vcpus = 2.5, rounded up once: 3"],
        ),
        ([resources(quota=50_000), resources(cpus="0-3")], {}, ["1 + 0.5 + 4 = 5.5, rounded up once: 6"]),
        ([resources(quota=10_000)] * 10, {"default_vcpus": Fraction(1, 10)}, ["0.1 + 1 = 1.1, rounded up once: 2"]),
        ([resources(quota=1, period=3)], {}, ["1 + 1/3 = 4/3, rounded up once: 2"]),
        # base max
        ([resources(quota=150_000)], {"base": Base.MAX}, ["1.5, rounded up once: 2"]),
        (
            [resources(quota=50_000)],
            {"base": Base.MAX},
            ["0.5, at least default_vcpus = 1, rounded up once: 1"],
        ),
        (
            [resources(quota=50_000), resources(cpus="0-3")],
            {"base": Base.MAX},
            ["0.5 + 4 = 4.5, rounded up once: 5"],
        ),
        # Floor and clamp
        (
            [resources(quota=50_000)],
            {"declared": resources(quota=500_000)},
            ["1 + 0.5 = 1.5, rounded up once: 2", "never below the boot size: 5"],
        ),
        (
            [resources(quota=50_000)],
            {"declared": resources(quota=50_000), "base": Base.MAX},
            ["0.5, rounded up once: 1"],
        ),
        (
            [resources()],
            {"declared": resources(quota=50_000), "base": Base.MAX},
            ["0, rounded up once: 0", "never below the boot size: 1"],
        ),
        (
            [resources(quota=750_000)],
            {},
            ["1 + 7.5 = 8.5, rounded up once: 9", "above default_maxvcpus = 8: 9 cut to 8"],
        ),
        (
            [resources(quota=250_000)],
            {"machine_max": 2},
            ["1 + 2.5 = 3.5, rounded up once: 4", "above the machine's maximum = 2: 4 cut to 2"],
        ),
    ],
)
def test_the_vcpus(texts: list[bytes], config: dict[str, Any], lines: list[str]) -> None:
    told = _lines(table(*texts), **config)
    after_the_containers = max(number for number, line in enumerate(told) if line.startswith("c")) + 1
    assert told[after_the_containers:-1] == lines


BEYOND, WITHIN = "from the boot size in steps of", "within the boot size:"


@pytest.mark.parametrize(
    ("limit", "config", "demand", "size"),
    [
        (1, {}, "2048 MiB + limits and huge pages of 1 bytes = 2147483649 bytes", f"{BEYOND} 128 MiB: 2176 MiB"),
        (64, {"base": Base.MAX}, "limits and huge pages of 64 bytes", f"{WITHIN} 2048 MiB"),
        (2112 * MIB, {"base": Base.MAX}, "limits and huge pages of 2112 MiB", f"{BEYOND} 128 MiB: 2176 MiB"),
        (
            64 * MIB,
            {"enable_virtio_mem": True},
            "2048 MiB + limits and huge pages of 64 MiB = 2112 MiB",
            f"{BEYOND} 2 MiB: 2112 MiB",
        ),
        (
            1024 * MIB,
            {"declared": resources(limit=4096 * MIB)},
            "2048 MiB + limits and huge pages of 1024 MiB = 3072 MiB",
            f"{WITHIN} 4096 MiB",
        ),
    ],
)
def test_the_memory(limit: int, config: dict[str, Any], demand: str, size: str) -> None:
    assert _lines(table(resources(limit=limit)), **config)[-1] == f"memory: {demand}, {size}"


def test_the_boot_size() -> None:
    assert _lines(table(), declared=resources(quota=220_000, limit=4096 * MIB))[2:5] == [
        "declared: quota 220000 / period 100000 = 2.2 vCPUs (resources)",
        "declared: 4096 MiB (resources)",
        "boot: 2.2 vCPUs, rounded up once: 3; 4096 MiB",
    ]
    assert _lines(table(), declared=resources(quota=850_000))[2:4] == [
        "declared: quota 850000 / period 100000 = 8.5 vCPUs (resources)",
        "boot: 8.5 vCPUs, rounded up once: 9, cut to the maximum of 8; 2048 MiB",
    ]
    assert _lines(table(), default_vcpus=Fraction(1, 10))[2] == "boot: 0.1 vCPUs, rounded up once: 1; 2048 MiB"


def test_a_static_size() -> None:
    config: dict[str, Any] = {"static": True, "overhead_vcpus": Fraction(1, 4), "overhead_memory": 64}
    declared = resources(quota=200_000, limit=1024 * MIB)
    assert _lines(table(resources(quota=250_000)), declared=declared, **config) == [
        *DEFAULTS,
        "declared: quota 200000 / period 100000 = 2 vCPUs (resources)",
        "declared: 1024 MiB (resources)",
        "overhead: 0.25 vCPUs, 64 MiB",
        "boot: 2.25 vCPUs, rounded up once: 3; 1088 MiB",
        "c0: quota 250000 / period 100000 = 2.5",
        "static: the size stays as at boot, 3 vCPUs and 1088 MiB",
    ]
    beyond = _lines(table(resources(quota=300_000)), declared=declared, **config)
    assert beyond[-1] == "the containers ask for 3.25 vCPUs, fixed at 3"
    nothing_declared = _lines(table(), **config)
    assert nothing_declared == [*DEFAULTS, BOOT, "static: the size stays as at boot, 1 vCPUs and 2048 MiB"]


def test_many_containers_are_not_told_one_by_one() -> None:
    told = _lines(table(*[resources(quota=1000)] * (explain.CONTAINERS_SHOWN + 7)))
    assert told[2 + explain.CONTAINERS_SHOWN] == "c99: quota 1000 / period 100000 = 0.01"
    assert told[3 + explain.CONTAINERS_SHOWN :][:2] == [
        "... and 7 more containers",
        "1 + 1.07 = 2.07, rounded up once: 3",
    ]
    exactly = _lines(table(*[resources(quota=1000)] * explain.CONTAINERS_SHOWN))
    assert not any(line.startswith("...") for line in exactly)


@pytest.mark.parametrize(
    ("declared", "annotations", "config", "lines"),
    [
        (resources(cpus="0-3"), {}, {}, ["declared: cpuset of 4: as many vCPUs (resources)"]),
        (
            resources(shares=1536),
            {},
            {"shares_sizing": True},
            ["declared: 1536 shares, 1024 a vCPU, rounded up: 2 vCPUs (resources)"],
        ),
        (
            None,
            {CONTAINERD["quota"]: "220000", CONTAINERD["limit"]: str(513 * MIB)},
            {},
            [
                f"declared: quota 220000 / period 100000 = 2.2 vCPUs ({CONTAINERD['quota']})",
                f"declared: 513 MiB, up to an even number of MiB: 514 MiB ({CONTAINERD['limit']})",
            ],
        ),
        (
            None,
            {CRIO[0]: '{"cpu_quota": 50000}'},
            {"compat": Compat.KATA},
            [
                f"declared: quota 50000 / period 100000 = 0.5 vCPUs ({CRIO[0]})",
                'compat = "kata": the declared vCPUs come with the containers, not at boot',
            ],
        ),
    ],
)
def test_what_is_declared(
    declared: bytes | None, annotations: dict[str, str], config: dict[str, Any], lines: list[str]
) -> None:
    told = _lines(table(), declared=declared, annotations=annotations, **config)
    assert told[2 : 2 + len(lines)] == lines
    assert told[2 + len(lines)].startswith("boot: ")


def test_a_resize() -> None:
    declared = resources(quota=200_000, limit=1024 * MIB)
    resized = resources(quota=450_000, limit=4095 * MIB)
    assert _lines(table(), declared=declared, resized=resized)[4:] == [
        "boot: 2 vCPUs, rounded up once: 2; 2048 MiB",
        "now declared: quota 450000 / period 100000 = 4.5 vCPUs (resize of the sandbox)",
        "now declared: 4095 MiB, up to an even number of MiB: 4096 MiB (resize of the sandbox)",
        "no containers; resized: at least 4.5, rounded up: 5",
        "memory: 2048 MiB + limits and huge pages of 0 MiB = 2048 MiB, resized: at least 4096 MiB, "
        "from the boot size in steps of 128 MiB: 4096 MiB",
    ]
    assert _lines(table(resources(quota=100_000)), resized=resources(quota=900_000))[5:8] == [
        "1 + 1 = 2, rounded up once: 2",
        "resized: at least 9, rounded up: 9",
        "above default_maxvcpus = 8: 9 cut to 8",
    ]
    assert "never below the boot size: 2" in _lines(table(), declared=declared, resized=resources(quota=50_000))
    lifted = _lines(table(), declared=declared, resized=resources(quota=-1, limit=-1))
    assert lifted[5:7] == ["now declared: nothing", "no containers: the boot size, 2"]
    static = _lines(table(), declared=declared, resized=resources(quota=300_000), static=True)
    assert static[-1] == "the containers and the resized sandbox ask for 3 vCPUs, fixed at 2"


def test_kata_compatible_sizes() -> None:
    both = table(resources(quota=50_000), resources(cpus="0-3", shares=2), cpuset_sizing=CpusetSizing.ALWAYS)
    assert _lines(both, compat=Compat.KATA)[4:7] == [
        "c1: cpuset of 4",
        'compat = "kata": beside a quota no cpuset counts',
        "1 + 0.5 = 1.5, rounded up once: 2",
    ]
    held = _lines(table(resources(cpus="0-3")), compat=Compat.KATA, held=2)
    assert held[4:6] == [
        "4, rounded up once: 4",
        'compat = "kata": a container that comes lowers nothing, one that goes raises nothing: 2',
    ]


def test_the_inputs_name_their_sources() -> None:
    config = sandbox_config(origins={**sandbox_config().origins, "default_vcpus": "config.toml:16"})
    listed = explain.inputs(config, {}, declare(config, {}, None), None)
    assert Input("default_vcpus", "1", "config.toml:16") in listed
    assert Input("static_sandbox_resource_mgmt", "false", "default") in listed
    assert Input("default_maxvcpus", "8", "host") in listed
    assert Input("cpuset_sizing", "exclusive", "default") in listed
    assert Input("compat", "not set", "default") in listed
    assert Input("overhead_vcpus", "0", "default") in listed


def test_what_the_pod_says_is_an_input() -> None:
    config = sandbox_config()
    pod = {TYPE_KEYS[1]: "sandbox", CONTAINERD["quota"]: "150000", CONTAINERD["limit"]: str(MIB)}
    declaration = declare(config, pod, None)
    now = declared_now(config, declaration, resources(quota=300_000))
    assert explain.inputs(config, pod, declaration, now)[-5:] == [
        Input("container type", "sandbox", "io.kubernetes.cri.container-type"),
        Input("declared: vCPUs", "1.5", "io.kubernetes.cri.sandbox-cpu-quota"),
        Input("declared: memory", "2 MiB", "io.kubernetes.cri.sandbox-memory"),
        Input("declared now: vCPUs", "3", "resize of the sandbox"),
        Input("declared now: memory", "2 MiB", "io.kubernetes.cri.sandbox-memory"),
    ]


def test_what_the_hypervisor_reports_is_an_input() -> None:
    machine = Machine(identity="", pid=1, max_vcpus=4, vcpu_hotplug=True, accelerator=Accelerator.KVM)
    plugged = Plugged(vcpus=(Vcpu("a", ours=False), Vcpu("b", ours=True)), memory=2048 * MIB)
    assert list(explain.reported(None, None)) == []
    assert list(explain.reported(machine, plugged)) == [
        Input("machine maximum vCPUs", "4", "hypervisor"),
        Input("accelerator", "kvm", "hypervisor"),
        Input("plugged: vCPUs", "2", "hypervisor"),
        Input("plugged: memory", "2048 MiB", "hypervisor"),
    ]
