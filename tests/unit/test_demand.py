"""One container's demand, and the table's sums (SPEC 4 and 5)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kata_resmgr import demand, oci
from kata_resmgr.config import CpusetSizing
from kata_resmgr.demand import ContainerTable, Sums
from tests.examples import record, resources, table

GIB = 1 << 30


def _cpus(text: bytes, cpuset_sizing: CpusetSizing = CpusetSizing.EXCLUSIVE) -> int:
    """How many CPUs of its cpuset count."""
    return len(demand.of(oci.decode(text), cpuset_sizing).cpus)


@pytest.mark.parametrize(
    ("text", "quota", "period"),
    [
        (resources(quota=150_000), 150_000, 100_000),
        (resources(quota=150_000, period=50_000), 150_000, 50_000),
        (resources(quota=1001, period=100), 1001, 100),
        (resources(quota=0, period=50_000), 0, 50_000),
        (resources(quota=-1), 0, 100_000),
        (resources(quota=-(2**63), period=1), 0, 1),
    ],
)
def test_only_a_positive_quota_counts(text: bytes, quota: int, period: int) -> None:
    asked = demand.of(oci.decode(text), CpusetSizing.EXCLUSIVE)
    assert (asked.quota, asked.period) == (quota, period)


@pytest.mark.parametrize("cpuset_sizing", CpusetSizing)
def test_beside_a_positive_quota_the_cpuset_counts_for_nothing(cpuset_sizing: CpusetSizing) -> None:
    assert _cpus(resources(quota=1, cpus="0-3", shares=8192), cpuset_sizing) == 0
    assert _cpus(resources(quota=-1, cpus="0-3", shares=8192), cpuset_sizing) == 4


@pytest.mark.parametrize(
    ("cpus", "shares", "counting"),
    [
        ("0", None, 1),
        ("0", 0, 1),
        ("0", 1023, 0),
        ("0", 1024, 1),
        ("0", 1025, 1),
        ("0", 2, 0),
        ("0-3", 1024, 0),
        ("0-3", 4095, 0),
        ("0-3", 4096, 4),
        ("2,2,2", 1024, 1),
        ("0-255", 262143, 0),
        ("0-255", 262144, 256),
        ("0-256", 262143, 0),
        ("0-256", 262144, 257),
        ("0-8191", 262144, 8192),
        ("", 1024, 0),
    ],
)
def test_a_cpuset_counts_where_the_container_asked_for_all_of_it(cpus: str, shares: int, counting: int) -> None:
    text = resources(cpus=cpus, shares=shares)
    assert _cpus(text) == counting
    assert _cpus(text, CpusetSizing.ALWAYS) == len(oci.decode(text).cpus)


def test_memory_is_limit_and_huge_pages() -> None:
    text = resources(limit=GIB, hugepages={"2MB": 2 << 20, "1GB": 2 * GIB})
    assert demand.of(oci.decode(text), CpusetSizing.EXCLUSIVE).memory == 3 * GIB + (2 << 20)
    unlimited = resources(limit=-1, hugepages={"1GB": GIB})
    assert demand.of(oci.decode(unlimited), CpusetSizing.EXCLUSIVE).memory == GIB


@pytest.mark.parametrize(
    ("texts", "vcpus"),
    [
        ([resources(quota=10_000)] * 10, Fraction(1)),
        ([resources(quota=5_000)] * 20, Fraction(1)),
        ([resources(quota=1, period=3)] * 3, Fraction(1)),
        ([resources(quota=1001, period=100), resources(quota=-1)], Fraction(1001, 100)),
        ([resources(quota=2**63 - 1, period=2**64 - 1)], Fraction(2**63 - 1, 2**64 - 1)),
        ([resources(quota=1, period=period) for period in (2, 3, 5, 7)], Fraction(247, 210)),
    ],
)
def test_quotas_are_summed_exactly(texts: list[bytes], vcpus: Fraction) -> None:
    assert table(*texts).sums().quota_vcpus == vcpus


def test_cpusets_count_as_their_union() -> None:
    shared = table(resources(cpus="0-3"), resources(cpus="2-5"), resources(cpus="5"))
    assert shared.sums().cpuset_vcpus == 6
    shared.set("c1", None)
    assert shared.sums().cpuset_vcpus == 5  # 4 goes; 2, 3 and 5 are still asked for by others
    shared.set("c0", record(resources(cpus="9")))
    assert shared.sums().cpuset_vcpus == 2
    shared.set("c2", record(resources(quota=1, cpus="5")))
    assert shared.sums().cpuset_vcpus == 1


def test_setting_returns_what_was_there_so_that_it_can_be_put_back() -> None:
    first, second = record(resources(quota=1, shares=2, limit=3)), record(resources(cpus="0"))
    made = ContainerTable()
    assert made.set("a", first) is None
    before = made.sums()
    undone = made.set("a", second)
    assert undone is first
    assert made.get("a") is second
    assert made.set("a", undone) is second
    assert made.sums() == before
    assert made.set("a", None) is first
    assert made.set("a", None) is None
    assert made.get("a") is None
    assert made.sums() == ContainerTable().sums() == Sums(0, Fraction(0), 0, 0, 0)


def test_the_table_shows_its_containers() -> None:
    made = table(resources(shares=2), resources(shares=1024), resources())
    assert (len(made), list(made), list(made.records)) == (3, ["c0", "c1", "c2"], ["c0", "c1", "c2"])
    assert made.sums().containers == 3
    assert made.sums().shares == 1026


def test_a_container_that_fails_a_hundred_times_leaves_nothing_behind() -> None:
    made = table(resources(quota=7, period=3, cpus="0"), resources(cpus="1-2", limit=5))
    before = made.sums()
    for _ in range(100):
        made.set("x", made.set("x", record(resources(quota=9, period=11, limit=4, shares=3))))
        made.set("y", record(resources(cpus="2-4")))
        made.set("y", None)
    assert made.sums() == before
