"""The dry run by value: what is booted, what each step makes of it, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kata_resmgr import config, view
from kata_resmgr.annotations import CONTAINERD, TYPE_KEYS
from kata_resmgr.api.bodies import PlanBody, read_body, read_plan
from kata_resmgr.config import Base, ConfigError, Settings
from kata_resmgr.host import Host
from kata_resmgr.plan import Op, Planned, Request, Step, Weight, dry_run
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sizing import MIB
from tests.examples import resources
from tests.unit.test_cri_sequences import SEQUENCES

HOST = Host(cpus=64, memory=65536)
DEFAULTS = ["default_vcpus = 1 (default)", "default_memory = 2048 MiB (default)"]


def settings(text: str, tmp_path: Path) -> Settings:
    file = tmp_path / "configuration.toml"
    file.write_text(text)
    return config.load(file, HOST)


def planned(tmp_path: Path, text: str, *steps: Step, **request: Any) -> Planned:  # noqa: ANN401
    return dry_run(settings(text, tmp_path), Request(steps=steps, **request))


def create(name: str, **members: Any) -> Step:  # noqa: ANN401
    return Step(Op.CREATE, name, resources(**members))


def sizes(plan: Planned) -> list[tuple[str, int, int]]:
    """exact, vCPUs and MiB after each step."""
    return [(step.vcpus.exact, step.vcpus.desired, step.memory.desired // MIB) for step in plan.steps]


# Sizes


def test_ten_containers_of_100m_and_a_tenth(tmp_path: Path) -> None:
    text = "[hypervisor.qemu]\ndefault_vcpus = 0.1"
    plan = planned(tmp_path, text, *(create(f"c{n}", quota=10_000, period=100_000) for n in range(10)))
    assert sizes(plan)[-1] == ("11/10", 2, 2048)
    assert plan.boot.vcpus == 1
    assert plan.explain[-2] == "0.1 + 1 = 1.1, rounded up once: 2"
    assert "default_vcpus = 0.1 (configuration.toml:2)" in plan.explain


def test_twenty_containers_of_50m(tmp_path: Path) -> None:
    plan = planned(tmp_path, "", *(create(f"c{n}", quota=5_000, period=100_000) for n in range(20)))
    assert sizes(plan)[-1] == ("2", 2, 2048)
    assert [vcpus for _, vcpus, _ in sizes(plan)] == [2] * 20


@pytest.mark.parametrize("name", SEQUENCES)
def test_what_cri_runtimes_send(tmp_path: Path, name: str) -> None:
    sequence = SEQUENCES[name]
    lines = {"default_vcpus": "[hypervisor.qemu]\ndefault_vcpus = {}", "base": "[resmgr]\nbase = '{}'"}
    values = {"default_maxvcpus": 8} | sequence.config
    maximum = values.pop("default_maxvcpus")
    text = "\n".join(
        lines[key].format(value.value if isinstance(value, Base) else float(value)) for key, value in values.items()
    )
    steps = [Step(Op(step.op), step.container, step.text) for step in sequence.steps]
    plan = planned(tmp_path, text, *steps, annotations=sequence.annotations, host_cpus=maximum)
    assert (plan.boot.vcpus, plan.boot.memory_bytes // MIB) == sequence.boot
    found = [(vcpus, memory) for _, vcpus, memory in sizes(plan)]
    assert found == [(step.vcpus, step.memory) for step in sequence.steps]
    assert [step.error for step in plan.steps] == [None] * len(steps)


def test_a_pods_life(tmp_path: Path) -> None:
    annotations = {TYPE_KEYS[1]: "sandbox", CONTAINERD["quota"]: "220000", CONTAINERD["period"]: "100000"}
    plan = planned(
        tmp_path,
        "",
        create("a", quota=150_000, period=100_000, shares=1024, limit=512 * MIB),
        Step(Op.UPDATE, "a", resources(quota=250_000)),
        Step(Op.RESIZE, "", resources(quota=450_000)),
        Step(Op.DELETE, "a"),
        Step(Op.DELETE, "a"),
        annotations=annotations,
    )
    assert (plan.mode, plan.boot.vcpus, plan.boot.max_vcpus) == ("dynamic", 3, 64)
    assert sizes(plan) == [("5/2", 3, 2560), ("7/2", 4, 2560), ("7/2", 5, 2560), ("1", 5, 2048), ("1", 5, 2048)]
    assert [step.error for step in plan.steps] == [None] * 5
    assert (plan.weight.shares, plan.weight.cpu_weight) == (0, None)
    assert plan.conditions == []


def test_the_weight_is_that_of_all_shares_after_the_last_step(tmp_path: Path) -> None:
    plan = planned(tmp_path, "", create("a", shares=512), create("b", shares=512), create("c"))
    assert plan.weight == Weight(shares=1024, cpu_weight=100)


def test_the_explanation_names_each_input_with_its_source(tmp_path: Path) -> None:
    text = "[hypervisor.qemu]\ndefault_vcpus = 0.5\ndefault_memory = 1024\n[resmgr]\nhost_memory = 8192\n"
    annotations = {TYPE_KEYS[1]: "sandbox", CONTAINERD["quota"]: "220000", CONTAINERD["limit"]: "536870912"}
    step = create("a", quota=150_000, period=100_000, limit=512 * MIB)
    assert planned(tmp_path, text, step, annotations=annotations, host_cpus=4, hypervisor="qemu").explain == [
        "hypervisor = qemu (sandbox)",
        "host CPUs = 4 (request)",
        "host memory = 8192 MiB (configuration.toml:5)",
        "static_sandbox_resource_mgmt = false (default)",
        "default_maxvcpus = 4 (host)",
        "default_maxmemory = 8192 MiB (host)",
        "base = add (default)",
        "compat = not set (default)",
        "cpuset_sizing = exclusive (default)",
        "shares_sizing = false (default)",
        "over_max_vcpus = clamp (default)",
        "overhead_vcpus = 0 (default)",
        "overhead_memory = 0 MiB (default)",
        "container type = sandbox (io.kubernetes.cri.container-type)",
        "default_vcpus = 0.5 (configuration.toml:2)",
        "default_memory = 1024 MiB (configuration.toml:3)",
        "declared: quota 220000 / period 100000 = 2.2 vCPUs (io.kubernetes.cri.sandbox-cpu-quota)",
        "declared: 512 MiB (io.kubernetes.cri.sandbox-memory)",
        "boot: 2.2 vCPUs, rounded up once: 3; 1024 MiB",
        "a: quota 150000 / period 100000 = 1.5, 512 MiB",
        "0.5 + 1.5 = 2, rounded up once: 2",
        "never below the boot size: 3",
        "memory: 1024 MiB + limits and huge pages of 512 MiB = 1536 MiB, "
        "from the boot size in steps of 128 MiB: 1536 MiB",
    ]


def test_a_static_sandbox_keeps_its_size(tmp_path: Path) -> None:
    text = "[runtime]\nstatic_sandbox_resource_mgmt = true\n[hypervisor.qemu]\noverhead_vcpus = 0.25\n"
    step = create("a", quota=300_000, period=100_000)
    plan = planned(tmp_path, text, step, resources=resources(quota=150_000, limit=512 * MIB))
    assert (plan.mode, plan.boot.vcpus, plan.boot.max_vcpus, plan.boot.memory_slots) == ("static", 2, 2, 0)
    assert sizes(plan) == [("7/4", 2, 512)]
    (condition,) = plan.steps[0].conditions
    assert (condition.type, condition.message) == (
        "DemandExceedsSize",
        "the containers ask for 3.25 vCPUs, fixed at 2",
    )
    assert "overhead_vcpus = 0.25 (configuration.toml:4)" in plan.explain


# Conditions and refusals


def test_a_refused_step_changes_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        "[resmgr]\nover_max_vcpus = 'refuse'",
        create("a", quota=100_000, limit=512 * MIB),
        create("b", quota=800_000),
        create("c", limit=1 << 50),
        Step(Op.UPDATE, "nobody", b"{}"),
        Step(Op.CREATE, "d", b'{"cpu": {"quota": "1"}}'),
        Step(Op.UPDATE, "a", b"null"),
        Step(Op.RESIZE, "", b'{"cpu": {"cpus": "3-"}}'),
        Step(Op.UPDATE, "a", resources(quota=300_000)),
        host_cpus=4,
    )
    errors = [None if step.error is None else step.error.code for step in plan.steps]
    assert errors == [
        None,
        "vcpu_limit_exceeded",
        "memory_limit_exceeded",
        "not_found",
        "invalid_resources",
        "invalid_resources",
        "invalid_resources",
        None,
    ]
    assert sizes(plan) == [("2", 2, 2560)] * 7 + [("4", 4, 2560)]
    refused = plan.steps[1].error
    assert refused is not None
    assert refused.detail == (
        "10 vCPUs are above the maximum of 4: ask for less, or raise default_maxvcpus for new sandboxes"
    )


def test_conditions_are_those_at_boot_and_those_after_each_step(tmp_path: Path) -> None:
    name = "io.katacontainers.config.hypervisor.default_vcpus"
    plan = planned(
        tmp_path,
        "[hypervisor.qemu]\nnet_rate_limiter_ops_one_time_burst = 4",
        create("a", quota=300_000),
        create("b", quota=800_000),
        Step(Op.DELETE, "b"),
        host_cpus=4,
        resources=resources(quota=500_000),
        annotations={name: "2"},
    )
    assert [(told.type, told.reason) for told in plan.conditions] == [
        ("BurstWithoutRate", "net_rate_limiter_ops_one_time_burst"),
        ("AnnotationIgnored", "default_vcpus"),
        ("Clamped", "boot"),
    ]
    assert [[told.message for told in step.conditions] for step in plan.steps] == [
        [],
        ["12 vCPUs are asked for, the maximum is 4"],
        [],
    ]


@pytest.mark.parametrize(
    ("text", "request_", "code", "pointers"),
    [
        ("", {"annotations": {CONTAINERD["quota"]: "x"}}, Code.INVALID_ANNOTATION, ["/sandbox/annotations/"]),
        ("", {"resources": b'{"cpu": {"quota": "1"}}'}, Code.INVALID_RESOURCES, ["/sandbox/resources/cpu/quota"]),
        ("", {"resources": resources(limit=1 << 60)}, Code.MEMORY_LIMIT_EXCEEDED, []),
        ("", {"hypervisor": "xen"}, Code.INVALID_CONFIG, []),
        (
            "[runtime]\nstatic_sandbox_resource_mgmt = true\n[hypervisor.qemu]\ndefault_memory = 0",
            {},
            Code.NO_MEMORY,
            [],
        ),
    ],
)
def test_a_refused_sandbox(
    tmp_path: Path, text: str, request_: dict[str, Any], code: Code, pointers: list[str]
) -> None:
    with pytest.raises(Problem) as refused:
        planned(tmp_path, text, create("a"), **request_)
    assert refused.value.code is code
    assert [at.pointer.startswith(pointer) for at, pointer in zip(refused.value.at, pointers, strict=True)] == [
        True
    ] * len(pointers)


# Hosts


@pytest.mark.parametrize(
    ("text", "request_", "boot"),
    [
        ("", {}, (64, 65536)),
        ("[resmgr]\nhost_cpus = 12\nhost_memory = 4096", {}, (12, 4096)),
        ("[resmgr]\nhost_cpus = 12\nhost_memory = 4096", {"host_cpus": 3}, (3, 4096)),
        ("[resmgr]\nhost_cpus = 12\nhost_memory = 4096", {"host_memory": 8191}, (12, 8191)),
        ("", {"host_cpus": 1000, "host_memory": 1 << 30}, (240, 1 << 30)),
        ("[hypervisor.qemu]\ndefault_maxvcpus = 99", {"host_cpus": 96}, (96, 65536)),
    ],
)
def test_the_host_of_the_request_comes_before_the_configurations(
    tmp_path: Path, text: str, request_: dict[str, int], boot: tuple[int, int]
) -> None:
    plan = planned(tmp_path, text, **request_)
    assert (plan.boot.max_vcpus, plan.boot.max_memory_bytes // MIB) == boot


def test_a_configuration_that_does_not_fit_the_host_is_refused(tmp_path: Path) -> None:
    text = "[hypervisor.qemu]\ndefault_memory = 100000\ndefault_maxmemory = 80000"
    made = settings(text, tmp_path)  # of this host's 65536, both are cut to that
    with pytest.raises(Problem, match="default_memory = 100000: must be at most default_maxmemory") as refused:
        dry_run(made, Request(host_memory=90000))
    assert refused.value.code is Code.INVALID_CONFIG
    assert dry_run(made, Request()).boot.memory_bytes == 65536 * MIB


# What the VMM gets


def test_qemus_arguments(tmp_path: Path) -> None:
    vmm = planned(tmp_path, "", host_cpus=4, host_memory=4096).vmm
    assert isinstance(vmm, view.Vmm)
    assert vmm.args[:4] == ["-smp", "1,maxcpus=4", "-m", "2048M,slots=10,maxmem=4096M"]
    assert vmm.monitor == "/run/kata-resmgr/vm/<id>/resmgr.sock"
    assert vmm.kernel_params == ["memhp_default_state=online_movable"]


@pytest.mark.parametrize(
    ("text", "cpus", "memory"),
    [
        ("", (1, 4), {"size": 2048, "hotplug_method": "Acpi", "hotplug_size": 2048}),
        (
            "[hypervisor.clh]\ndefault_maxmemory = 2303\nenable_virtio_mem = true",
            (1, 4),
            {"size": 2048, "hotplug_method": "VirtioMem", "hotplug_size": 128},
        ),
        ("[hypervisor.clh]\ndefault_maxmemory = 2100", (1, 4), {"size": 2048, "hotplug_method": "Acpi"}),
        (
            "[runtime]\nstatic_sandbox_resource_mgmt = true",
            (1, 1),
            {"size": 2048, "hotplug_method": "Acpi"},
        ),
    ],
)
def test_cloud_hypervisors_configuration(
    tmp_path: Path, text: str, cpus: tuple[int, int], memory: dict[str, Any]
) -> None:
    plan = planned(tmp_path, text, host_cpus=4, host_memory=4096, hypervisor="clh")
    in_bytes = {key: value * MIB if isinstance(value, int) else value for key, value in memory.items()}
    assert msgspec.to_builtins(plan.vmm) == {
        "config": {"cpus": {"boot_vcpus": cpus[0], "max_vcpus": cpus[1]}, "memory": in_bytes},
        "limiters": {},
    }


# Limiters


def test_a_rate_that_never_refills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ops_max_rate = 5: must be .* at least 10 ops/s: .* never refills"):
        planned(tmp_path, "[hypervisor.clh]\ndisk_rate_limiter_ops_max_rate = 5")


def test_the_effective_rate_is_told_where_it_is_another(tmp_path: Path) -> None:
    text = "[hypervisor.{}]\ndisk_rate_limiter_ops_max_rate = 15\nnet_rate_limiter_ops_max_rate = 20"
    limiters = msgspec.to_builtins(planned(tmp_path, text.format("clh")).limiters)
    bucket = {"size": 15, "refill_time": 1000}
    assert limiters["disk"] == {"bandwidth": None, "ops": bucket, "effective": {"opsPerSecond": 10}}
    assert limiters["net"]["effective"] is None
    qemu = msgspec.to_builtins(planned(tmp_path, text.format("qemu")).limiters)
    assert qemu["disk"] == {"bandwidth": None, "ops": bucket, "effective": None}


def test_a_bandwidth_as_kata_has_it(tmp_path: Path) -> None:
    text = (
        "[hypervisor.clh]\ndisk_rate_limiter_bw_max_rate = 838860800\ndisk_rate_limiter_bw_one_time_burst = 419430400"
    )
    plan = planned(tmp_path, text)
    bucket = {"size": 109930072, "one_time_burst": 54965024, "refill_time": 1000}
    limiters = msgspec.to_builtins(plan.limiters)
    assert limiters == {
        "disk": {"bandwidth": bucket, "ops": None, "effective": {"bytesPerSecond": 109930070}},
        "net": None,
    }
    assert msgspec.to_builtins(plan.vmm)["limiters"] == {"disk": {"bandwidth": bucket}}
    exact = planned(tmp_path, text + "\n[resmgr]\nrate_limiter_scaling = 'exact'")
    assert exact.limiters.disk is not None
    assert exact.limiters.disk.bandwidth is not None
    assert (exact.limiters.disk.bandwidth.size, exact.limiters.disk.effective) == (104857600, None)


# On the wire


def test_the_answer_has_the_members_of_the_api(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "hypervisor": "qemu",
            "host": {"cpus": 64, "memoryBytes": 274877906944},
            "sandbox": {"annotations": {}, "resources": {}},
            "steps": [
                {"op": "create", "container": "a", "resources": json.loads(resources(quota=150_000, limit=512 * MIB))},
                {"op": "update", "container": "b", "resources": {}},
                {"op": "resize", "resources": {}},
            ],
        }
    )
    request = read_plan(read_body(msgspec.json.Decoder(PlanBody), text.encode()))
    answer = msgspec.json.decode(msgspec.json.encode(dry_run(settings("", tmp_path), request)))
    assert list(answer) == ["mode", "boot", "vmm", "conditions", "steps", "limiters", "weight", "explain"]
    first, second, third = answer["steps"]
    assert first == {
        "op": "create",
        "container": "a",
        "vcpus": {"exact": "5/2", "desired": 3},
        "memory": {"desired": 2684354560},
        "conditions": [],
        "error": None,
    }
    unknown = {"code": "not_found", "detail": 'there is no container "b": create it with PUT'}
    assert second == {**first, "op": "update", "container": "b", "error": unknown}
    assert third == {key: value for key, value in {**first, "op": "resize"}.items() if key != "container"}
    assert answer["boot"]["maxMemoryBytes"] == 274877906944
    assert answer["limiters"] == {"disk": None, "net": None}
    assert answer["weight"] == {"shares": 0, "cpuWeight": None}
