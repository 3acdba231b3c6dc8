"""The explanation of a size, line by line, as an operator reads it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from hypervisors.base import Accelerator, Machine
from kata_resmgr import explain, sizing
from kata_resmgr.config import Base
from kata_resmgr.demand import ContainerTable
from kata_resmgr.sizing import MIB, Declared
from kata_resmgr.view import Input
from tests.examples import resources, sandbox_config, table

NONE = Declared()
DEFAULTS = ["default_vcpus = 1 (default)", "default_memory = 2048 MiB (default)"]
BOOT = "boot: 1 vCPUs, rounded up once: 1; 2048 MiB"
NO_MEMORY = "memory: 2048 MiB + limits and huge pages of 0 MiB = 2048 MiB, within the boot size: 2048 MiB"


def _lines(
    containers: ContainerTable,
    declared: Declared = NONE,
    machine_max: int | None = None,
    **config: Any,  # noqa: ANN401 - each field has its own type
) -> list[str]:
    made = sandbox_config(**config)
    boot, _ = sizing.boot_size(made, declared)
    if machine_max is not None:
        boot = replace(boot, max_vcpus=machine_max)
    sums = containers.sums()
    target = sizing.target(made, boot, declared, NONE, sums)
    return list(explain.lines(made, boot, declared, containers.records, sums, target))


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
            {"declared": Declared(vcpus=Fraction(5))},
            ["1 + 0.5 = 1.5, rounded up once: 2", "never below the boot size: 5"],
        ),
        (
            [resources(quota=50_000)],
            {"declared": Declared(vcpus=Fraction(1, 2)), "base": Base.MAX},
            ["0.5, rounded up once: 1"],
        ),
        (
            [resources()],
            {"declared": Declared(vcpus=Fraction(1, 2)), "base": Base.MAX},
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
            {"declared": Declared(memory=4096 * MIB)},
            "2048 MiB + limits and huge pages of 1024 MiB = 3072 MiB",
            f"{WITHIN} 4096 MiB",
        ),
    ],
)
def test_the_memory(limit: int, config: dict[str, Any], demand: str, size: str) -> None:
    assert _lines(table(resources(limit=limit)), **config)[-1] == f"memory: {demand}, {size}"


def test_the_boot_size() -> None:
    assert _lines(table(), declared=Declared(Fraction(11, 5), 4096 * MIB))[2:5] == [
        "declared: 2.2 vCPUs",
        "declared: 4096 MiB",
        "boot: 2.2 vCPUs, rounded up once: 3; 4096 MiB",
    ]
    assert _lines(table(), declared=Declared(Fraction(17, 2)))[2:4] == [
        "declared: 8.5 vCPUs",
        "boot: 8.5 vCPUs, rounded up once: 9, cut to the maximum of 8; 2048 MiB",
    ]
    assert _lines(table(), default_vcpus=Fraction(1, 10))[2] == "boot: 0.1 vCPUs, rounded up once: 1; 2048 MiB"


def test_a_static_size() -> None:
    config: dict[str, Any] = {"static": True, "overhead_vcpus": Fraction(1, 4), "overhead_memory": 64}
    declared = Declared(Fraction(2), 1024 * MIB)
    assert _lines(table(resources(quota=250_000)), declared=declared, **config) == [
        *DEFAULTS,
        "declared: 2 vCPUs",
        "declared: 1024 MiB",
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


def test_the_inputs_name_their_sources() -> None:
    config = sandbox_config(origins={**sandbox_config().origins, "default_vcpus": "config.toml:16"})
    listed = explain.inputs(config, None)
    assert Input("default_vcpus", "1", "config.toml:16") in listed
    assert Input("static_sandbox_resource_mgmt", "false", "default") in listed
    assert Input("default_maxvcpus", "8", "host") in listed
    assert Input("cpuset_sizing", "exclusive", "default") in listed
    machine = Machine(identity="", pid=1, max_vcpus=4, vcpu_hotplug=True, accelerator=Accelerator.KVM)
    assert explain.inputs(config, machine) == [
        *listed,
        Input("machine maximum vCPUs", "4", "hypervisor"),
        Input("accelerator", "kvm", "hypervisor"),
    ]
