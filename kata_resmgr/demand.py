"""What the containers ask for: one container's demand, and the table with its sums.

Every sum is exact and kept up incrementally, so a change of one container costs the same in a table of ten and of a
hundred thousand (SPEC 1): the sum of the fractions, reference counts per CPU id, bytes, shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from kata_resmgr import oci
from kata_resmgr.config import CpusetSizing, SandboxConfig

SHARES_PER_CPU = 1024
SHARES_MAX = 262144
"""The kernel's largest ``cpu.shares``: a container that states it cannot have asked for more."""


class Demand(msgspec.Struct, frozen=True, gc=False):
    """What one container adds to the sums (SPEC 4)."""

    quota: int
    """Microseconds a period; 0: no positive quota."""
    period: int
    cpus: frozenset[int]
    """The cpuset where it counts, else empty."""
    memory: int
    """Bytes: limit and huge pages."""
    shares: int
    """As stated; 0: not stated."""


def counting(config: SandboxConfig) -> CpusetSizing:
    """Whose cpuset counts under *config*: every one's where it sizes as Kata does."""
    return config.cpuset_sizing if config.compat is None else CpusetSizing.ALWAYS


def of(resources: oci.Resources, cpuset_sizing: CpusetSizing) -> Demand:
    """The demand of a container with these resources.

    A positive quota counts, and then the cpuset counts for nothing. Without one the cpuset counts unless the
    container asked for less than its CPUs' worth of shares: a kubelet with the static CPU manager sends containers
    without exclusive CPUs the node's whole shared pool as their cpuset.
    """
    has_quota = resources.quota > 0
    counts = (
        not has_quota
        and bool(resources.cpus)
        and (
            cpuset_sizing is CpusetSizing.ALWAYS
            or resources.shares == 0
            or resources.shares >= min(SHARES_PER_CPU * len(resources.cpus), SHARES_MAX)
        )
    )
    return Demand(
        quota=resources.quota if has_quota else 0,
        period=resources.period,
        cpus=resources.cpus if counts else frozenset(),
        memory=resources.memory + resources.hugepages,
        shares=resources.shares,
    )


class Record(msgspec.Struct, frozen=True, gc=False):
    """One container: its resources as given, and what they ask for.

    Long-lived and many, so not among what the garbage collector walks through.
    """

    text: bytes
    demand: Demand


@dataclass(frozen=True, slots=True)
class Sums:
    """The whole table in four numbers."""

    containers: int
    quota_vcpus: Fraction
    """Q of SPEC 5: the sum of quota/period."""
    cpuset_vcpus: int
    """C of SPEC 5: the CPUs in the union of the counting cpusets."""
    memory: int
    """Bytes."""
    shares: int


class ContainerTable:
    """The containers of one sandbox by id."""

    __slots__ = ("_by_cpu", "_memory", "_quota_vcpus", "_records", "_shares")

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._quota_vcpus = Fraction()
        self._by_cpu: dict[int, int] = {}  # CPU id: how many containers
        self._memory = 0
        self._shares = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def get(self, container_id: str) -> Record | None:
        """The container's record, or None."""
        return self._records.get(container_id)

    @property
    def records(self) -> Mapping[str, Record]:
        """All records by id; not to be changed."""
        return self._records

    def set(self, container_id: str, record: Record | None) -> Record | None:
        """Put *record* in the container's place (None: remove it); what was there before is returned."""
        before = self._records.get(container_id)
        if before is not None:
            self._count(before.demand, -1)
        if record is not None:
            self._records[container_id] = record
            self._count(record.demand, +1)
        elif before is not None:
            del self._records[container_id]
        return before

    def sums(self) -> Sums:
        """The sums as they are now."""
        return Sums(
            containers=len(self._records),
            quota_vcpus=self._quota_vcpus,
            cpuset_vcpus=len(self._by_cpu),
            memory=self._memory,
            shares=self._shares,
        )

    def _count(self, demand: Demand, sign: int) -> None:
        self._memory += sign * demand.memory
        self._shares += sign * demand.shares
        if demand.quota:
            self._quota_vcpus += Fraction(sign * demand.quota, demand.period)
        for cpu in demand.cpus:
            containers = self._by_cpu.get(cpu, 0) + sign
            if containers:
                self._by_cpu[cpu] = containers
            else:
                del self._by_cpu[cpu]
