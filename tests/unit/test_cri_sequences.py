"""What kubelets, containerd and CRI-O really send, in their order, through the rules alone: by value."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest

from kata_resmgr import demand, oci, sizing
from kata_resmgr.annotations import CONTAINERD, CRIO, TYPE_KEYS
from kata_resmgr.config import Base
from kata_resmgr.declared import declare
from kata_resmgr.demand import ContainerTable
from kata_resmgr.sizing import MIB
from tests.examples import record, resources, sandbox_config

GIB = 1024 * MIB
POOL = "2-63"
"""The 62 CPUs that a kubelet with the static CPU manager shares among containers without exclusive ones."""


@dataclass(frozen=True)
class Step:
    """One call of a runtime, and what is wanted after it. *memory* in MiB."""

    op: str
    container: str
    text: bytes
    vcpus: int
    memory: int
    exact: Fraction | None = None


@dataclass(frozen=True)
class Sequence:
    steps: list[Step]
    config: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    boot: tuple[int, int] = (1, 2048)


def _containerd(*, cpus: str, **members: Any) -> bytes:  # noqa: ANN401
    """As containerd writes a container's spec: period, shares and quota are always there."""
    return resources(**{"quota": -1, "period": 100_000, "shares": 1024, **members}, cpus=cpus)


EXCLUSIVE_POD = [
    ("create", "app", resources(quota=-1, period=100_000, shares=4096, cpus="2-5", limit=4 * GIB)),
    ("create", "sidecar", resources(quota=50_000, period=100_000, shares=512, cpus=POOL, limit=128 * MIB)),
]

SEQUENCES = {
    "exclusive CPUs with a sidecar, base add": Sequence(
        [
            Step(*EXCLUSIVE_POD[0], vcpus=4, memory=6144, exact=Fraction(4)),
            Step(*EXCLUSIVE_POD[1], vcpus=6, memory=6272, exact=Fraction(11, 2)),
            Step("delete", "sidecar", b"", vcpus=4, memory=6144, exact=Fraction(4)),
        ]
    ),
    "exclusive CPUs with a sidecar, base max": Sequence(
        [
            Step(*EXCLUSIVE_POD[0], vcpus=4, memory=4096, exact=Fraction(4)),
            Step(*EXCLUSIVE_POD[1], vcpus=5, memory=4224, exact=Fraction(9, 2)),
        ],
        config={"base": Base.MAX},
    ),
    "exclusive CPUs, quota beside them": Sequence(  # kubelets that keep CFS quotas on
        [Step("create", "app", resources(quota=400_000, shares=4096, cpus="2-5"), vcpus=5, memory=2048)]
    ),
    "best effort in the shared pool": Sequence(
        [
            Step("create", "app", resources(quota=0, period=100_000, shares=2, cpus=POOL), vcpus=1, memory=2048),
            # The CPU manager's reconcile loop: a pool that shrinks as others take exclusive CPUs
            Step("update", "app", resources(cpus="6-63"), vcpus=1, memory=2048),
        ],
        config={"default_maxvcpus": 64},
    ),
    "burstable in the shared pool": Sequence(
        [
            Step("create", "app", resources(quota=150_000, shares=512, cpus=POOL), vcpus=3, memory=2048),
            Step("update", "app", resources(cpus="6-63"), vcpus=3, memory=2048, exact=Fraction(5, 2)),
        ],
        config={"default_maxvcpus": 64},
    ),
    "a complete spec with a huge page size twice": Sequence(
        [
            Step(
                "create",
                "app",
                b'{"devices": [{"allow": false, "access": "rwm"}], "memory": {"limit": 536870912, "swap": 536870912},'
                b' "cpu": {"shares": 1024, "quota": 100000, "period": 100000},'
                b' "hugepageLimits": [{"pageSize": "2MB", "limit": 4194304}, {"pageSize": "1GB", "limit": 0},'
                b' {"pageSize": "2MB", "limit": 268435456}], "unified": {"memory.oom.group": "1"}}',
                vcpus=2,
                memory=2048 + 512 + 256,
            ),
        ]
    ),
    "containerd updates with a complete spec": Sequence(
        [
            Step("create", "app", _containerd(cpus="", quota=100_000, limit=512 * MIB), vcpus=2, memory=2560),
            Step("update", "app", _containerd(cpus="", quota=250_000, limit=512 * MIB), vcpus=4, memory=2560),
            Step("update", "app", _containerd(cpus="", quota=250_000, limit=1024 * MIB), vcpus=4, memory=3072),
        ]
    ),
    "CRI-O updates in parts": Sequence(
        [
            Step("create", "app", resources(quota=100_000, shares=1024, limit=512 * MIB), vcpus=2, memory=2560),
            Step("update", "app", b'{"cpu": {"quota": 200000}, "memory": {}}', vcpus=3, memory=2560),
            Step("update", "app", b'{"cpu": {"cpus": "0-1"}, "memory": {}}', vcpus=3, memory=2560),
            Step("update", "app", b'{"memory": {"limit": 1073741824}}', vcpus=3, memory=3072),
            Step("update", "app", b'{"cpu": {}, "memory": {}, "pids": {"limit": 0}}', vcpus=3, memory=3072),
        ]
    ),
    "a quota that is lifted": Sequence(
        [
            Step("create", "app", resources(quota=200_000, period=100_000, shares=2048), vcpus=3, memory=2048),
            Step("update", "app", resources(quota=-1), vcpus=1, memory=2048, exact=Fraction(1)),
        ]
    ),
    "a limit of 0 in an update": Sequence(
        [
            Step("create", "app", resources(quota=200_000, limit=512 * MIB), vcpus=3, memory=2560),
            Step("update", "app", resources(quota=0, period=0, shares=0, cpus="", limit=0), vcpus=3, memory=2560),
            Step("update", "app", resources(limit=-1), vcpus=3, memory=2048),
        ]
    ),
    "ten containers of 100m": Sequence(
        [Step("create", f"c{n}", resources(quota=10_000), vcpus=1 if n < 9 else 2, memory=2048) for n in range(10)],
        config={"default_vcpus": Fraction(1, 10)},
    ),
    "twenty containers of 50m": Sequence(
        [Step("create", f"c{n}", resources(quota=5_000), vcpus=2, memory=2048) for n in range(20)]
    ),
    "limits 8, 4 and none": Sequence(
        [
            Step("create", "a", resources(quota=800_000), vcpus=9, memory=2048),
            Step("create", "b", resources(quota=400_000), vcpus=13, memory=2048),
            Step("create", "c", resources(quota=-1, shares=2), vcpus=13, memory=2048, exact=Fraction(13)),
        ],
        config={"default_maxvcpus": 16},
    ),
    "a pod that containerd sized, with its pause container": Sequence(
        [
            Step("create", "pause", resources(shares=2), vcpus=3, memory=2048),
            Step("create", "app", resources(quota=220_000, limit=512 * MIB), vcpus=4, memory=2560),
        ],
        annotations={
            TYPE_KEYS[1]: "sandbox",
            CONTAINERD["quota"]: "220000",
            CONTAINERD["period"]: "100000",
            CONTAINERD["shares"]: "2252",
            CONTAINERD["limit"]: "536870912",
        },
        boot=(3, 2048),
    ),
    "a pod that CRI-O sized, base max": Sequence(
        [
            Step("create", "app", resources(quota=200_000, limit=3 * GIB), vcpus=2, memory=3072),
            Step("create", "debug", resources(), vcpus=2, memory=3072, exact=Fraction(2)),
        ],
        config={"base": Base.MAX},
        annotations={
            TYPE_KEYS[0]: "sandbox",
            CRIO[0]: '{"cpu_period":100000,"cpu_quota":200000,"cpu_shares":2048,"memory_limit_in_bytes":3221225472}',
        },
        boot=(2, 3072),
    ),
    "a container that crashes in a loop": Sequence(
        [
            Step(op, "app", resources(quota=300_000, limit=GIB), vcpus=vcpus, memory=memory)
            for op, vcpus, memory in [("create", 4, 3072), ("delete", 1, 2048)] * 5
        ]
    ),
    "limits under 10m, then 1m and 2m": Sequence(
        [
            Step("create", "app", resources(quota=500, period=100_000, shares=2), vcpus=2, memory=2048),
            Step("update", "app", resources(quota=1000, shares=2), vcpus=2, memory=2048, exact=Fraction(101, 100)),
        ]
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence(name: str) -> None:
    sequence = SEQUENCES[name]
    config = sandbox_config(**sequence.config)
    declared = declare(config, sequence.annotations, None).size
    boot, notes = sizing.boot_size(config, declared)
    assert (boot.vcpus, boot.memory // MIB, notes) == (*sequence.boot, [])
    table = ContainerTable()
    for number, step in enumerate(sequence.steps):
        present = table.get(step.container)
        text = step.text
        if step.op == "update":
            assert present is not None
            text = oci.merge(present.text, step.text)
        table.set(step.container, None if step.op == "delete" else record(text, demand.counting(config)))
        target = sizing.target(config, boot, declared, table.sums())
        assert (number, target.vcpus, target.memory / MIB) == (number, step.vcpus, step.memory)
        assert target.excess == 0
        if step.exact is not None:
            assert (number, target.exact) == (number, step.exact)
