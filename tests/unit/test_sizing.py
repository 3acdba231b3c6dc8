"""Boot size, demand and target by value: SPEC 5 and 6. On the example host: 8 CPUs, 16384 MiB, D = 1, 2048 MiB."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kata_resmgr import demand, sizing
from kata_resmgr.config import Base, Compat, OverMax
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sizing import MIB, BootSize, Change, Declared, Note, Target
from tests.examples import resources, sandbox_config, table

NONE = Declared()


def _boot(declared: Declared = NONE, **config: Any) -> BootSize:  # noqa: ANN401 - each field has its own type
    boot, notes = sizing.boot_size(sandbox_config(**config), declared)
    assert notes == []
    return boot


def _target(*texts: bytes, declared: Declared = NONE, resized: Declared | None = None, **config: Any) -> Target:  # noqa: ANN401
    """The target of a table of these containers."""
    made = sandbox_config(**config)
    boot, _ = sizing.boot_size(made, declared)
    return sizing.target(made, boot, declared, table(*texts).sums(), resized=resized)


# Boot, dynamic


@pytest.mark.parametrize(
    ("d", "declared", "exact", "vcpus"),
    [
        (Fraction(1), None, Fraction(1), 1),
        (Fraction(1, 10), None, Fraction(1, 10), 1),
        (Fraction(5, 2), None, Fraction(5, 2), 3),
        (Fraction(8), None, Fraction(8), 8),
        (Fraction(1), Fraction(11, 5), Fraction(11, 5), 3),
        (Fraction(4), Fraction(1, 100), Fraction(1, 100), 1),
        (Fraction(1), Fraction(8), Fraction(8), 8),
    ],
)
def test_vcpus_at_boot_are_the_declared_ones_else_the_default(
    d: Fraction, declared: Fraction | None, exact: Fraction, vcpus: int
) -> None:
    boot = _boot(Declared(vcpus=declared), default_vcpus=d)
    assert (boot.exact, boot.vcpus, boot.max_vcpus, boot.static) == (exact, vcpus, 8, False)


@pytest.mark.parametrize(("declared", "memory"), [(None, 2048), (2, 2048), (2048, 2048), (2050, 2050), (16384, 16384)])
def test_memory_at_boot_is_the_larger_of_default_and_declared(declared: int | None, memory: int) -> None:
    boot = _boot(Declared(memory=None if declared is None else declared * MIB))
    assert (boot.memory, boot.max_memory) == (memory * MIB, 16384 * MIB)


def test_memory_slots_are_none_where_nothing_can_be_added() -> None:
    assert _boot(memory_slots=7).memory_slots == 7
    assert _boot(Declared(memory=16384 * MIB), memory_slots=7).memory_slots == 0


@pytest.mark.parametrize(("virtio_mem", "granularity"), [(False, 128 * MIB), (True, 2 * MIB)])
def test_granularity_is_that_of_the_way_memory_is_added(virtio_mem: bool, granularity: int) -> None:
    assert _boot(enable_virtio_mem=virtio_mem).granularity == granularity


def test_vcpus_at_boot_above_the_maximum_are_cut_and_told() -> None:
    boot, notes = sizing.boot_size(sandbox_config(), Declared(vcpus=Fraction(81, 10)))
    assert (boot.vcpus, boot.exact) == (8, Fraction(81, 10))
    text = "9 vCPUs to boot with are above the maximum of 8; booting with 8"
    assert notes == [Note("Clamped", "boot", text)]


def test_vcpus_at_boot_above_the_maximum_are_refused_where_the_configuration_says_so() -> None:
    with pytest.raises(Problem, match=r"9 vCPUs .* maximum of 8: declare less or raise default_maxvcpus") as refusal:
        _boot(Declared(vcpus=Fraction(81, 10)), over_max_vcpus=OverMax.REFUSE)
    assert refusal.value.code is Code.VCPU_LIMIT_EXCEEDED
    assert _boot(Declared(vcpus=Fraction(8)), over_max_vcpus=OverMax.REFUSE).vcpus == 8


@pytest.mark.parametrize("over_max", OverMax)
def test_memory_at_boot_above_the_maximum_is_refused(over_max: OverMax) -> None:
    with pytest.raises(Problem, match=r"16386 MiB .* maximum of 16384 MiB") as refusal:
        _boot(Declared(memory=16386 * MIB), over_max_vcpus=over_max)
    assert refusal.value.code is Code.MEMORY_LIMIT_EXCEEDED


def test_when_vcpus_and_memory_both_fail_vcpus_are_named() -> None:
    with pytest.raises(Problem) as refusal:
        _boot(Declared(Fraction(9), 16386 * MIB), over_max_vcpus=OverMax.REFUSE)
    assert refusal.value.code is Code.VCPU_LIMIT_EXCEEDED


# Target, dynamic: vCPUs

CPU_1_5 = resources(quota=150_000)
EXCLUSIVE_4 = resources(quota=-1, shares=4096, cpus="2-5")
SIDECAR = resources(quota=50_000, shares=512, cpus="0-1")


@pytest.mark.parametrize(
    ("texts", "config", "exact", "vcpus"),
    [
        # base add: D is the floor, and is added as soon as there is a quota
        ([], {}, Fraction(1), 1),
        ([resources()], {}, Fraction(1), 1),
        ([resources(quota=-1, shares=2)], {"default_vcpus": Fraction(5, 2)}, Fraction(5, 2), 3),
        ([CPU_1_5], {}, Fraction(5, 2), 3),
        ([resources(quota=1000)], {}, Fraction(101, 100), 2),
        ([resources(quota=10_000)] * 10, {}, Fraction(2), 2),
        ([resources(quota=10_000)] * 10, {"default_vcpus": Fraction(1, 10)}, Fraction(11, 10), 2),
        ([resources(quota=10_000)] * 9, {"default_vcpus": Fraction(1, 10)}, Fraction(1), 1),
        ([resources(quota=5_000)] * 20, {}, Fraction(2), 2),
        ([resources(quota=1, period=3)] * 3, {}, Fraction(2), 2),
        ([resources(quota=1001, period=100)], {"default_maxvcpus": 16}, Fraction(1101, 100), 12),
        ([resources(cpus="0")], {"default_vcpus": Fraction(3)}, Fraction(3), 3),
        ([resources(cpus="0-3")], {"default_vcpus": Fraction(3)}, Fraction(4), 4),
        ([resources(cpus="0-3"), resources(cpus="2-5")], {}, Fraction(6), 6),
        ([resources(cpus="0-3", shares=1024)], {}, Fraction(1), 1),
        ([EXCLUSIVE_4], {}, Fraction(4), 4),
        ([EXCLUSIVE_4, SIDECAR], {}, Fraction(11, 2), 6),
        # base max: D is a floor where nothing is declared
        ([], {"base": Base.MAX}, Fraction(1), 1),
        ([CPU_1_5], {"base": Base.MAX}, Fraction(3, 2), 2),
        ([resources(quota=1000)], {"base": Base.MAX}, Fraction(1), 1),
        ([resources(quota=5_000)] * 20, {"base": Base.MAX}, Fraction(1), 1),
        ([CPU_1_5], {"base": Base.MAX, "default_vcpus": Fraction(3)}, Fraction(3), 3),
        ([EXCLUSIVE_4, SIDECAR], {"base": Base.MAX}, Fraction(9, 2), 5),
    ],
)
def test_the_target_is_the_demand_rounded_up_once(
    texts: list[bytes], config: dict[str, Any], exact: Fraction, vcpus: int
) -> None:
    target = _target(*texts, **config)
    assert (target.exact, target.vcpus, target.excess) == (exact, vcpus, 0)


@pytest.mark.parametrize(
    ("declared", "texts", "base", "exact", "vcpus"),
    [
        (Fraction(5), [], Base.ADD, Fraction(1), 5),
        (Fraction(5), [CPU_1_5], Base.ADD, Fraction(5, 2), 5),
        (Fraction(2), [CPU_1_5], Base.ADD, Fraction(5, 2), 3),
        (Fraction(3, 2), [CPU_1_5], Base.MAX, Fraction(3, 2), 2),
        (Fraction(1, 2), [resources(quota=50_000)], Base.MAX, Fraction(1, 2), 1),
        (Fraction(1, 2), [], Base.MAX, Fraction(0), 1),
        (Fraction(1, 2), [resources()], Base.MAX, Fraction(0), 1),
        (Fraction(5), [CPU_1_5], Base.MAX, Fraction(3, 2), 5),
    ],
)
def test_the_target_is_never_below_the_boot_size(
    declared: Fraction, texts: list[bytes], base: Base, exact: Fraction, vcpus: int
) -> None:
    target = _target(*texts, declared=Declared(vcpus=declared), base=base)
    assert (target.exact, target.vcpus, target.excess) == (exact, vcpus, 0)


def test_without_containers_the_target_is_the_boot_size_however_large_the_default() -> None:
    declared = Declared(vcpus=Fraction(1, 2))
    target = _target(declared=declared, default_vcpus=Fraction(4))
    assert (target.exact, target.vcpus) == (Fraction(4), 1)
    assert _target(resources(), declared=declared, default_vcpus=Fraction(4)).vcpus == 4


def test_without_a_declared_size_the_default_stays_a_floor_below_the_boot_size() -> None:
    target = _target(default_vcpus=Fraction(5, 2), base=Base.MAX)
    assert (target.exact, target.vcpus) == (Fraction(5, 2), 3)


@pytest.mark.parametrize(
    ("quota", "exact", "vcpus", "excess"),
    [(700_000, Fraction(8), 8, 0), (700_001, Fraction(800_001, 100_000), 8, 1), (2**63 - 1, None, 8, 92233720368541)],
)
def test_a_demand_above_the_maximum_is_cut(quota: int, exact: Fraction | None, vcpus: int, excess: int) -> None:
    target = _target(resources(quota=quota))
    assert (target.vcpus, target.excess) == (vcpus, excess)
    assert target.exact == (exact or 1 + Fraction(2**63 - 1, 100_000))


def test_the_maximum_is_the_boot_sizes_which_the_machine_may_have_cut() -> None:
    config = sandbox_config()
    boot = replace(_boot(), max_vcpus=2)
    target = sizing.target(config, boot, NONE, table(CPU_1_5).sums())
    assert (target.vcpus, target.excess) == (2, 1)


@pytest.mark.parametrize(
    ("resized", "texts", "base", "exact", "vcpus", "excess"),
    [
        (Fraction(4), [], Base.ADD, Fraction(1), 4, 0),
        (Fraction(7, 2), [CPU_1_5], Base.ADD, Fraction(5, 2), 4, 0),
        (Fraction(2), [CPU_1_5], Base.ADD, Fraction(5, 2), 3, 0),
        (Fraction(1, 2), [], Base.ADD, Fraction(1), 3, 0),
        (Fraction(4), [CPU_1_5], Base.MAX, Fraction(3, 2), 4, 0),
        (Fraction(9), [], Base.ADD, Fraction(1), 8, 1),
        (Fraction(9), [resources(quota=900_000)], Base.ADD, Fraction(10), 8, 2),
    ],
)
def test_a_resized_pod_has_at_least_that_size(
    resized: Fraction, texts: list[bytes], base: Base, exact: Fraction, vcpus: int, excess: int
) -> None:
    declared = Declared(vcpus=Fraction(3) if base is Base.ADD else Fraction(1))
    target = _target(*texts, declared=declared, resized=Declared(vcpus=resized), base=base)
    assert (target.exact, target.vcpus, target.excess) == (exact, vcpus, excess)


def test_a_size_that_is_declared_only_now_takes_the_place_of_the_default() -> None:
    assert _target(CPU_1_5, base=Base.MAX, default_vcpus=Fraction(3)).exact == 3
    resized = Declared(vcpus=Fraction(1))
    target = _target(CPU_1_5, resized=resized, base=Base.MAX, default_vcpus=Fraction(3))
    assert (target.exact, target.vcpus) == (Fraction(3, 2), 3)


# Target, dynamic: memory


@pytest.mark.parametrize(
    ("declared", "limits", "config", "memory"),
    [
        (None, [], {}, 2048),
        (None, [1], {}, 2048 + 128),
        (None, [128 * MIB], {}, 2048 + 128),
        (None, [128 * MIB + 1], {}, 2048 + 256),
        (None, [MIB, MIB, MIB], {}, 2048 + 128),
        (None, [MIB, MIB, MIB], {"enable_virtio_mem": True}, 2048 + 4),
        (None, [-1, 0], {}, 2048),
        # Counted from the boot size, whatever that is: 2050 + 128, not 2176
        (2050, [128 * MIB], {}, 2050 + 128),
        (2050, [2 * MIB], {}, 2050),
        (4096, [2048 * MIB], {}, 4096),
        (4096, [2048 * MIB + 1], {}, 4096 + 128),
        # base max: default_memory is not added
        (None, [2048 * MIB], {"base": Base.MAX}, 2048),
        (None, [2049 * MIB], {"base": Base.MAX}, 2048 + 128),
    ],
)
def test_memory_beyond_boot_comes_in_steps(
    declared: int | None, limits: list[int], config: dict[str, Any], memory: int
) -> None:
    size = Declared(memory=None if declared is None else declared * MIB)
    target = _target(*(resources(limit=limit) for limit in limits), declared=size, **config)
    assert target.memory == memory * MIB


def test_memory_above_the_maximum_is_cut_and_the_rest_told() -> None:
    target = _target(resources(limit=15000 * MIB))
    assert (target.memory, target.memory_excess) == (16384 * MIB, (2048 + 15104 - 16384) * MIB)
    assert target.memory_asked == (2048 + 15104) * MIB


def test_a_cut_is_a_whole_number_of_steps_above_boot() -> None:
    boot = replace(_boot(), max_memory=(2048 + 200) * MIB)
    target = sizing.target(sandbox_config(), boot, NONE, table(resources(limit=200 * MIB)).sums())
    assert (target.memory, target.memory_asked) == ((2048 + 128) * MIB, (2048 + 256) * MIB)


def test_huge_pages_are_memory() -> None:
    assert _target(resources(limit=MIB, hugepages={"2MB": 128 * MIB})).memory == (2048 + 256) * MIB


def test_the_guests_own_granularity_counts() -> None:
    boot = replace(_boot(), granularity=1024 * MIB)
    target = sizing.target(sandbox_config(), boot, NONE, table(resources(limit=1)).sums())
    assert target.memory == (2048 + 1024) * MIB


@pytest.mark.parametrize(("resized", "memory"), [(2048, 2048), (2050, 2176), (4096, 4096)])
def test_a_resized_pod_has_at_least_that_memory(resized: int, memory: int) -> None:
    assert _target(resized=Declared(memory=resized * MIB)).memory == memory * MIB
    assert _target(resources(limit=MIB), resized=Declared(memory=resized * MIB)).memory == max(memory, 2176) * MIB


# compat = "kata"


@pytest.mark.parametrize(
    ("declared", "d", "exact", "vcpus"),
    [(None, Fraction(5, 2), Fraction(5, 2), 3), (Fraction(4), Fraction(1), Fraction(1), 1)],
)
def test_kata_boots_with_the_default_whatever_is_declared(
    declared: Fraction | None, d: Fraction, exact: Fraction, vcpus: int
) -> None:
    boot = _boot(Declared(declared, 4096 * MIB), default_vcpus=d, compat=Compat.KATA)
    assert (boot.exact, boot.vcpus, boot.memory) == (exact, vcpus, 4096 * MIB)
    assert _boot(Declared(Fraction(4), 64 * MIB), static=True, compat=Compat.KATA).vcpus == 4


@pytest.mark.parametrize("base", Base)
@pytest.mark.parametrize(
    ("texts", "exact", "vcpus"),
    [
        ([], Fraction(2), 2),
        ([resources()], Fraction(2), 2),
        ([resources(cpus="0", shares=2)], Fraction(1), 2),
        ([resources(cpus="0-3", shares=2), resources(cpus="2-5")], Fraction(6), 6),
        ([resources(cpus="0-3"), resources(quota=50_000)], Fraction(5, 2), 3),
        ([resources(quota=-1), resources(quota=150_000)], Fraction(7, 2), 4),
    ],
)
def test_katas_demand(texts: list[bytes], exact: Fraction, vcpus: int, base: Base) -> None:
    config = sandbox_config(default_vcpus=Fraction(2), compat=Compat.KATA, base=base)
    boot, _ = sizing.boot_size(config, NONE)
    sums = table(*texts, cpuset_sizing=demand.counting(config)).sums()
    target = sizing.target(config, boot, NONE, sums)
    assert (target.exact, target.vcpus) == (exact, vcpus)
    asked = table(*texts, resources(limit=128 * MIB), cpuset_sizing=demand.counting(config)).sums()
    memory = sizing.target(config, boot, NONE, asked).memory  # which is what base is for
    assert memory == (2176 if base is Base.ADD else 2048) * MIB


@pytest.mark.parametrize(
    ("change", "before", "after", "held"),
    [
        (Change.ADD, 4, 2, 4),
        (Change.ADD, 4, 4, None),
        (Change.ADD, 4, 6, None),
        (Change.DELETE, 4, 6, 4),
        (Change.DELETE, 4, 2, None),
        (Change.UPDATE, 4, 2, None),
        (Change.UPDATE, 4, 6, None),
    ],
)
def test_what_kata_holds(change: Change, before: int, after: int, held: int | None) -> None:
    targets = [Target(Fraction(number), number, 2048 * MIB, 0) for number in (before, after)]
    assert sizing.held_vcpus(sandbox_config(compat=Compat.KATA), change, *targets) == held
    assert sizing.held_vcpus(sandbox_config(), change, *targets) is None


@pytest.mark.parametrize(("held", "vcpus"), [(1, 3), (5, 5), (9, 8)])
def test_what_is_held_lies_between_boot_and_maximum(held: int, vcpus: int) -> None:
    config = sandbox_config(compat=Compat.KATA, default_vcpus=Fraction(3))
    boot, _ = sizing.boot_size(config, NONE)
    target = sizing.target(config, boot, NONE, table(resources(cpus="0-6")).sums(), held=held)
    assert (target.exact, target.vcpus, target.held, target.excess) == (Fraction(7), vcpus, True, 0)


# What may be


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ((8, 0), (9, 0), Code.VCPU_LIMIT_EXCEEDED),
        ((9, 0), (10, 0), Code.VCPU_LIMIT_EXCEEDED),
        ((10, 0), (9, 0), None),
        ((9, 0), (9, 0), None),
        ((7, 0), (8, 0), None),
        ((1, 8), (1, 9), Code.VCPU_LIMIT_EXCEEDED),
        ((1, 9), (1, 9), None),
        ((1, 9), (2, 9), None),
        ((10, 1), (10, 9), Code.VCPU_LIMIT_EXCEEDED),
        ((10, 1), (10, 8), None),
    ],
)
def test_what_would_pass_the_maximum_is_refused_where_it_is_more_than_before(
    before: tuple[int, int], after: tuple[int, int], refused: Code | None
) -> None:
    """In vCPUs: what the containers ask for, and what a resize does."""
    config = sandbox_config(over_max_vcpus=OverMax.REFUSE)
    boot, _ = sizing.boot_size(config, NONE)
    was, becomes = (
        sizing.target(
            config, boot, NONE, table(resources(quota=(asked - 1) * 100_000)).sums(), resized=Declared(Fraction(floor))
        )
        for asked, floor in (before, after)
    )
    clamping = sandbox_config(over_max_vcpus=OverMax.CLAMP)
    sizing.must_be_allowed(clamping, boot, was, becomes)
    if refused is None:
        sizing.must_be_allowed(config, boot, was, becomes)
    else:
        with pytest.raises(Problem) as refusal:
            sizing.must_be_allowed(config, boot, was, becomes)
        assert refusal.value.code is refused


@pytest.mark.parametrize(
    ("declared", "resized", "message"),
    [
        (Declared(Fraction(2), 1024 * MIB), Declared(Fraction(5, 2), 1024 * MIB), None),
        (
            Declared(Fraction(2), 1024 * MIB),
            Declared(Fraction(3), 1024 * MIB),
            "the containers and the resized sandbox ask for 3.5 vCPUs, fixed at 3",
        ),
        (
            Declared(Fraction(2), 1024 * MIB),
            Declared(Fraction(2), 1026 * MIB),
            "the containers and the resized sandbox ask for 1142947840 bytes, fixed at 1140850688",
        ),
        (NONE, Declared(Fraction(1, 2)), None),
        (
            NONE,
            Declared(Fraction(1)),
            "the containers and the resized sandbox ask for 1.5 vCPUs, fixed at 1",
        ),
        (Declared(Fraction(2), 1024 * MIB), NONE, None),
    ],
)
def test_a_resize_beyond_the_static_size_is_told(declared: Declared, resized: Declared, message: str | None) -> None:
    config = sandbox_config(static=True, overhead_vcpus=Fraction(1, 2), overhead_memory=64)
    boot, _ = sizing.boot_size(config, declared)
    note = sizing.static_excess(config, boot, declared, table().sums(), resized)
    assert note == (None if message is None else Note("DemandExceedsSize", "static", message))


# Static


@pytest.mark.parametrize(
    ("declared", "overhead", "exact", "vcpus"),
    [
        (Fraction(2), Fraction(0), Fraction(2), 2),
        (Fraction(2), Fraction(1, 4), Fraction(9, 4), 3),
        (Fraction(1, 4), Fraction(1, 4), Fraction(1), 1),
        (Fraction(20), Fraction(0), Fraction(20), 20),
        (None, Fraction(3, 2), Fraction(3, 2), 2),
    ],
)
def test_static_vcpus_are_overhead_and_declared(
    declared: Fraction | None, overhead: Fraction, exact: Fraction, vcpus: int
) -> None:
    size = Declared(declared, 4096 * MIB)
    boot, _ = sizing.boot_size(sandbox_config(static=True, overhead_vcpus=overhead), size)
    assert (boot.exact, boot.vcpus, boot.max_vcpus, boot.static, boot.memory_slots) == (exact, vcpus, vcpus, True, 0)


@pytest.mark.parametrize(
    ("declared", "overhead", "memory", "floored"),
    [(1024, 0, 1024, False), (1024, 100, 1124, False), (2, 0, 64, True), (2, 61, 64, True), (2, 62, 64, False)],
)
def test_static_memory_is_overhead_and_declared(declared: int, overhead: int, memory: int, floored: bool) -> None:
    config = sandbox_config(static=True, overhead_memory=overhead)
    boot, notes = sizing.boot_size(config, Declared(memory=declared * MIB))
    assert (boot.vcpus, boot.memory, boot.max_memory) == (1, memory * MIB, 16384 * MIB)
    text = f"{declared + overhead} MiB are too few to boot with; 64 MiB instead"
    assert notes == ([Note("MemoryFloor", "memory", text)] if floored else [])


@pytest.mark.parametrize(("d", "vcpus"), [(Fraction(1), 1), (Fraction(5, 2), 3), (Fraction(1, 10), 1)])
def test_static_without_a_declared_size_takes_the_defaults_and_no_overhead(d: Fraction, vcpus: int) -> None:
    boot = _boot(static=True, default_vcpus=d, overhead_vcpus=Fraction(3), overhead_memory=512)
    assert (boot.exact, boot.vcpus, boot.max_vcpus, boot.memory) == (d, vcpus, vcpus, 2048 * MIB)


@pytest.mark.parametrize(
    "declared", [NONE, Declared(vcpus=Fraction(2))], ids=["nothing declared", "CPU alone declared"]
)
def test_static_with_no_memory_is_refused(declared: Declared) -> None:
    with pytest.raises(Problem, match="set a limit, default_memory or overhead_memory") as refusal:
        _boot(declared, static=True, default_memory=0)
    assert refusal.value.code is Code.NO_MEMORY


def test_a_static_size_above_the_host_is_told_and_not_cut() -> None:
    config = sandbox_config(static=True, default_maxvcpus=4, default_maxmemory=4096)
    boot, notes = sizing.boot_size(config, Declared(Fraction(9), 16386 * MIB))
    assert (boot.vcpus, boot.memory, boot.max_memory) == (9, 16386 * MIB, 16386 * MIB)
    assert notes == [Note("AboveHost", "boot", "9 vCPUs, the host has 8; 16386 MiB, the host has 16384")]
    within, none = sizing.boot_size(config, Declared(Fraction(8), 16384 * MIB))
    assert (within.vcpus, within.memory, none) == (8, 16384 * MIB, [])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"machine_type": "microvm"}, "machine type microvm"),
        ({"confidential_guest": True}, "a confidential guest"),
        ({"confidential_guest": True, "machine_type": "microvm"}, "a confidential guest"),
    ],
)
def test_a_machine_that_cannot_hot_plug_is_static(config: dict[str, Any], why: str) -> None:
    declared = Declared(Fraction(3, 2), 1024 * MIB)
    boot, notes = sizing.boot_size(sandbox_config(**config), declared)
    assert (boot.static, boot.vcpus, boot.max_vcpus, boot.memory) == (True, 2, 2, 1024 * MIB)
    assert notes == [Note("HotplugUnsupported", "vcpus", f"{why} cannot hot-plug: sized once, at boot")]
    assert _boot(declared, static=True, **config) == boot  # asked for static: nothing to tell


def test_a_static_target_is_the_boot_size_whatever_is_asked_for() -> None:
    declared = Declared(Fraction(3, 2), 1024 * MIB)
    target = _target(EXCLUSIVE_4, resources(limit=1 << 40), declared=declared, static=True)
    assert target == Target(exact=Fraction(3, 2), vcpus=2, memory=1024 * MIB, excess=0)


@pytest.mark.parametrize(
    ("declared", "texts", "message"),
    [
        (Declared(Fraction(2), 1024 * MIB), [], None),
        (Declared(Fraction(2), 1024 * MIB), [resources(quota=200_000, limit=1024 * MIB)], None),
        (
            Declared(Fraction(2), 1024 * MIB),
            [resources(quota=250_001)],
            "the containers ask for 3.00001 vCPUs, fixed at 3",
        ),
        (
            Declared(Fraction(2), 1024 * MIB),
            [resources(quota=100_000, cpus="0"), EXCLUSIVE_4, resources(limit=1024 * MIB, hugepages={"2MB": 1})],
            "the containers ask for 5.5 vCPUs, fixed at 3; 1140850689 bytes, fixed at 1140850688",
        ),
        (NONE, [resources(quota=100_000, limit=2048 * MIB)], None),
        (NONE, [resources(quota=100_001)], "the containers ask for 1.00001 vCPUs, fixed at 1"),
        (NONE, [resources(limit=2048 * MIB + 1)], "the containers ask for 2147483649 bytes, fixed at 2147483648"),
    ],
)
def test_a_demand_beyond_the_static_size_is_told(declared: Declared, texts: list[bytes], message: str | None) -> None:
    config = sandbox_config(static=True, overhead_vcpus=Fraction(1, 2), overhead_memory=64)
    boot, _ = sizing.boot_size(config, declared)
    note = sizing.static_excess(config, boot, declared, table(*texts).sums())
    assert note == (None if message is None else Note("DemandExceedsSize", "static", message))


def test_what_a_static_size_is_held_against_is_katas_demand_where_kata_is_followed() -> None:
    """Beside a quota no cpuset counts; without one, each does."""
    config = sandbox_config(static=True, compat=Compat.KATA)
    boot, _ = sizing.boot_size(config, Declared(Fraction(2), 1024 * MIB))
    shared_pool = resources(cpus="0-3", shares=2)

    def excess(*texts: bytes) -> Note | None:
        return sizing.static_excess(config, boot, NONE, table(*texts, cpuset_sizing=demand.counting(config)).sums())

    assert excess(shared_pool, resources(quota=50_000)) is None
    assert excess(shared_pool) == Note("DemandExceedsSize", "static", "the containers ask for 4 vCPUs, fixed at 2")


# Numbers


@pytest.mark.parametrize(
    ("amount", "unit", "rounded"),
    [(0, 128, 0), (1, 128, 128), (128, 128, 128), (129, 128, 256), (2**70 + 1, 2, 2**70 + 2)],
)
def test_round_up(amount: int, unit: int, rounded: int) -> None:
    assert sizing.round_up(amount, unit) == rounded


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(3), "3"),
        (Fraction(5, 2), "2.5"),
        (Fraction(1, 10), "0.1"),
        (Fraction(1001, 100), "10.01"),
        (Fraction(1, 1_000_000), "0.000001"),
        (Fraction(1, 3), "1/3"),
        (Fraction(4, 3), "4/3"),
        (Fraction(1, 10_000_000), "1/10000000"),
    ],
)
def test_numbers_as_people_write_them(value: Fraction, text: str) -> None:
    assert sizing.number(value) == text


def test_a_fraction_of_very_many_digits_is_shown_rounded() -> None:
    """Periods without a common factor multiply; Python writes no number of more than 4300 digits."""
    assert sizing.number(Fraction(10**5000 + 1, 10**5000 * 3)) == "about 0.333333"
    assert sizing.number(2 + Fraction(1, 10**5000)) == "about 2"
