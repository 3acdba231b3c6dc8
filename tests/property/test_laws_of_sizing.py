"""Laws of the sizes: floors, ceilings, and which way they move (SPEC 5 and 6)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from kata_resmgr import explain, sizing
from kata_resmgr.config import SandboxConfig
from kata_resmgr.declared import Declaration, declare
from kata_resmgr.sizing import MIB, BootSize, Declared, Target
from tests.examples import resources, table
from tests.property.strategies import DECLARED, configs, containers

TABLES = st.lists(containers(), max_size=6)
STATIC = configs(static=True, overhead_memory=64)
"""With memory for a pod that declares none: without it no VM boots."""


def _sizes(
    config: SandboxConfig, declared: Declared, texts: list[bytes], resized: Declared | None = None
) -> tuple[BootSize, Target]:
    boot, _ = sizing.boot_size(config, declared)
    sums = table(*texts, cpuset_sizing=config.cpuset_sizing).sums()
    return boot, sizing.target(config, boot, declared, sums, resized=resized)


@given(configs(), DECLARED, TABLES, st.none() | DECLARED)
def test_a_target_lies_between_the_boot_size_and_the_maximum(
    config: SandboxConfig, declared: Declared, texts: list[bytes], resized: Declared | None
) -> None:
    boot, target = _sizes(config, declared, texts, resized)
    assert 1 <= boot.vcpus <= target.vcpus <= boot.max_vcpus == config.default_maxvcpus
    assert boot.memory <= target.memory
    assert (target.memory - boot.memory) % boot.granularity == 0
    assert target.excess == 0 or target.vcpus == boot.max_vcpus


@given(configs(), DECLARED, TABLES)
def test_a_target_covers_the_demand_and_no_whole_vcpu_more(
    config: SandboxConfig, declared: Declared, texts: list[bytes]
) -> None:
    boot, target = _sizes(config, declared, texts)
    assert target.vcpus + target.excess >= target.exact or not texts
    assert target.vcpus < target.exact + 1 or target.vcpus == boot.vcpus
    sums = table(*texts, cpuset_sizing=config.cpuset_sizing).sums()
    assert target.exact >= sums.quota_vcpus + sums.cpuset_vcpus
    need = sizing.demand_memory(config, sums)
    assert need <= target.memory
    assert target.memory < need + boot.granularity or target.memory == boot.memory


@given(configs(), DECLARED, TABLES, containers(), st.none() | DECLARED)
def test_adding_a_container_never_lowers_a_target_and_deleting_one_never_raises_it(
    config: SandboxConfig, declared: Declared, texts: list[bytes], another: bytes, resized: Declared | None
) -> None:
    _, without = _sizes(config, declared, texts, resized)
    _, with_it = _sizes(config, declared, [*texts, another], resized)
    assert without.exact <= with_it.exact
    assert without.vcpus <= with_it.vcpus
    assert without.excess <= with_it.excess
    assert without.memory <= with_it.memory


@given(configs(), DECLARED, TABLES.flatmap(lambda texts: st.tuples(st.just(texts), st.permutations(texts))))
def test_a_target_does_not_depend_on_the_order(
    config: SandboxConfig, declared: Declared, orders: tuple[list[bytes], list[bytes]]
) -> None:
    assert _sizes(config, declared, orders[0]) == _sizes(config, declared, orders[1])


@given(STATIC, DECLARED, TABLES)
def test_a_static_size_never_changes(config: SandboxConfig, declared: Declared, texts: list[bytes]) -> None:
    boot, target = _sizes(config, declared, texts)
    assert boot.vcpus == boot.max_vcpus == target.vcpus == max(ceil(boot.exact), 1)
    assert boot.memory == target.memory >= sizing.STATIC_MEMORY_FLOOR
    assert (target.exact, target.excess) == (boot.exact, 0)


@given(STATIC, DECLARED, TABLES)
def test_a_demand_beyond_a_static_size_is_told_if_and_only_if_it_is(
    config: SandboxConfig, declared: Declared, texts: list[bytes]
) -> None:
    boot, _ = sizing.boot_size(config, declared)
    sums = table(*texts, cpuset_sizing=config.cpuset_sizing).sums()
    overhead = (config.overhead_vcpus, config.overhead_memory * MIB) if declared else (Fraction(0), 0)
    fits = sums.quota_vcpus + sums.cpuset_vcpus + overhead[0] <= boot.vcpus and sums.memory + overhead[1] <= boot.memory
    assert (sizing.static_excess(config, boot, declared, sums) is None) is fits


def _declaration(config: SandboxConfig, size: Declared) -> Declaration:
    vcpus = (None, None) if size.vcpus is None else (size.vcpus.numerator, size.vcpus.denominator)
    made = declare(config, {}, resources(quota=vcpus[0], period=vcpus[1], limit=size.memory))
    assert made.size == size
    return made


@given(configs(), DECLARED, TABLES, st.none() | DECLARED)
def test_every_size_can_be_explained_in_lines_that_end_with_it(
    config: SandboxConfig, declared: Declared, texts: list[bytes], resized: Declared | None
) -> None:
    boot, target = _sizes(config, declared, texts, resized)
    made = table(*texts, cpuset_sizing=config.cpuset_sizing)
    declaration = _declaration(config, declared)
    now = None if resized is None else _declaration(config, resized)
    *_, vcpus, memory = explain.lines(config, boot, declaration, made.records, made.sums(), target, resized=now)
    assert vcpus.endswith(f" {target.vcpus}")
    assert memory.endswith(f" {target.memory // MIB} MiB")


@given(st.fractions(0, 10**12))
def test_a_number_is_written_as_what_it_is_or_says_that_it_is_not(value: Fraction) -> None:
    text = sizing.number(value)
    if text.startswith("about "):
        assert abs(Fraction(text.removeprefix("about ")) - value) <= Fraction(1, 10**6)
    else:
        assert Fraction(text) == value
