"""Kata's own test values about sizes: tests/data/kata_sizing.json.

Each entry is what a test of Kata Containers asserts (Go or runtime-rs), or what its code was seen to give
(``derived/``). Where this program departs from Kata on purpose, the entry carries SPEC 12's number (or the rule), and
the result that is asserted is this program's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import cpuset, oci, sizing
from kata_resmgr.annotations import TYPE_KEYS, ContainerType, container_type
from kata_resmgr.config import Base, Compat, CpusetSizing
from kata_resmgr.declared import declare
from kata_resmgr.demand import ContainerTable
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sizing import MIB, Change, Declared, Target
from tests.examples import resources, sandbox_config, table
from tests.sandbox.rig import rig
from tests.virtual_time import virtual

Entry = dict[str, Any]

ENTRIES: dict[str, Entry] = {
    entry["id"]: entry for entry in json.loads((Path(__file__).parent.parent / "data/kata_sizing.json").read_text())
}

WITHOUT_COUNTERPART = {
    "rs/initial_size/setup_config#4": "orig_toml_default_mem alone: the configuration is not written over here",
    "go/sandbox/updateResources#0": "steps of at most 48 times the memory: a rule of the QEMU driver",
    "go/utils/ToBytes#0": "a size with a unit: a rule of the annotations that change the configuration",
    "go/cpuset/String#0": "this program writes no lists of CPUs",
    "go/cpuset/String#1": "this program writes no lists of CPUs",
}

DEPARTURES: dict[str, tuple[str, Any]] = {
    "rs/initial_size/setup_config#1": ("7", {"default_vcpus": 1.2, "default_memory": 512}),
    "go/utils/CalculateCPUsF#1": ("5", 1 / 100_000),
    "go/oci/ContainerType#1": ("runtime-rs", {"type": "single_container"}),
    "go/oci/ContainerType#3": ("runtime-rs", {"type": "single_container"}),
    "go/oci/CalculateContainerSizing#2": ("5", {"cpu": 10 / 100_000, "mem_mb": 0}),
    "go/oci/CalculateSandboxSizing#1": ("runtime-rs", {"cpu": 2, "mem_mb": 2}),
    "go/oci/CalculateSandboxSizing#2": ("15", {"cpu": 200, "mem_mb": 2}),
    "go/oci/CalculateSandboxSizing#3": ("13", {"error": "io.kubernetes.cri.sandbox-cpu-period"}),
    "go/oci/CalculateSandboxSizing#6": ("shares_sizing", {"cpu": 0, "mem_mb": 2}),
    "go/oci/CalculateSandboxSizing#7": ("shares_sizing", {"cpu": 0, "mem_mb": 0}),
    "derived/rs/cpu/calc#1": ("32", {"vcpus": 0.5, "ceil": 1}),
    "derived/rs/cpu/calc#3": ("5", {"vcpus": 2.5, "ceil": 3}),
    "derived/rs/cpu/calc#4": ("16", {"vcpus": 4.0, "ceil": 4}),
    "derived/rs/cpu/calc#6": ("16", {"vcpus": 9.5, "ceil": 10}),
    "derived/rs/cpu/table#0": ("2", {"stored": {"quota": -1, "period": 100_000, "cpus": "0-3"}}),
    "derived/rs/cpu/table#1": ("4", {"stored": {"quota": 200_000, "period": 100_000, "cpus": ""}}),
    "derived/rs/cpu/table#2": ("29", {"error": Code.NOT_FOUND}),
    "derived/rs/cpu/table#3": ("8", {"entry_remains": False}),
    "derived/rs/cpu/do_update#0": ("17", {"returned": 2}),
    "derived/rs/cpu/do_update#1": ("30", {"returned": 4}),
    "derived/rs/mem/total#0": ("15", {"total_mb": 770}),
    "derived/rs/mem/total#2": ("3", {"total_mb": 256}),
    "derived/rs/qemu/resize_memory#3": ("23", {"ok": 2176}),
    "derived/rs/qemu/resize_memory#4": ("9", {"ok": 2176}),
    "derived/rs/qemu/resize_memory#6": ("31", {"ok": 2176}),
    "derived/go/calcHotplugMemMiBSize#1": ("31", 128),
}
"""What this program gives instead, with the number in SPEC 12, or the rule, that says so."""

COMPATIBLE = {"16", "17", "30"}
"""Departures that ``compat = "kata"`` takes back."""


# What this program makes of an entry's input, in the form of its expectation. *config* changes the configuration.


def _containers(entry: Entry, **config: Any) -> Any:  # noqa: ANN401
    given = entry["input"]
    made = sandbox_config(
        default_vcpus=_fraction(given["default_vcpus"]), default_maxvcpus=1000, default_memory=64, **config
    )
    texts = [resources(quota=c["quota"], period=c["period"], cpus=c["cpuset"]) for c in given["containers"]]
    counting = CpusetSizing.ALWAYS if made.compat else made.cpuset_sizing
    exact = sizing.demand_vcpus(made, Declared(), table(*texts, cpuset_sizing=counting).sums())
    return {"vcpus": float(exact), "ceil": -(-exact.numerator // exact.denominator)}


def _container_cpu(entry: Entry) -> Any:  # noqa: ANN401
    given = {key: value for key, value in entry["input"].items() if key != "default_struct"}
    decoded = oci.decode(json.dumps({"cpu": given}).encode())
    sums = table(resources(**{key: given.get(key) for key in ("quota", "period")})).sums()
    return {
        "shares": decoded.shares,
        "cpuset_len": len(decoded.cpus),
        "vcpus": float(sums.quota_vcpus) if sums.quota_vcpus else None,
    }


def _merged(entry: Entry) -> Any:  # noqa: ANN401
    """A sandbox's table that grows container by container."""
    made, seen = ContainerTable(), []
    for number, step in enumerate(entry["input"]):
        if step["op"] == "merge":
            members = {key: value for key, value in step.items() if key not in ("op", "mems")}
            added = table(resources(**members)).get("c0")
            made.set(f"c{number}", added)
        sums = made.sums()
        seen.append({"vcpus": float(sums.quota_vcpus + sums.cpuset_vcpus)})
    return seen


def _sets(entry: Entry) -> Any:  # noqa: ANN401
    sets = {name[-1]: cpuset.parse(_list(ids)) for name, ids in entry["input"].items()}
    pairs = {kind: list(entry["expected"][kind]) for kind in ("equal", "not_equal")}
    return {
        "len1": len(sets["1"]),
        "empty3": not sets["3"],
        "len5": len(sets["5"]),
        "equal": [pair for pair in pairs["equal"] if sets[pair[0]] == sets[pair[1]]],
        "not_equal": [pair for pair in pairs["not_equal"] if sets[pair[0]] != sets[pair[1]]],
    }


def _parsed(entry: Entry) -> Any:  # noqa: ANN401
    """The ids in order; Rust's tests wrap them."""
    try:
        ids = sorted(cpuset.parse(entry["input"]))
    except ValueError:
        return {"error": True}
    return {"ok": ids} if isinstance(entry["expected"], dict) else ids


def _pod(entry: Entry, **config: Any) -> Any:  # noqa: ANN401
    given = entry["input"]
    try:
        size = declare(sandbox_config(**config), {} if isinstance(given, str) else given, None).size
    except Problem as problem:
        return {"error": problem.at[0].pointer.removeprefix("/annotations/")}
    return _size(size)


def _single(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    text = json.dumps(given["linux_resources"]).encode()
    return _size(declare(sandbox_config(), given["annotations"], text).size)


def _supplemented(entry: Entry) -> Any:  # noqa: ANN401
    size = _size(declare(sandbox_config(), entry["input"]["annotations"], b"{}").size)
    return {"vcpu": size["cpu"], "mem_mb": size["mem_mb"]}


def _single_resources(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    if isinstance(given, str):  # three ways to say nothing
        sizes = [declare(sandbox_config(), {}, text).size for text in (None, b"{}", b'{"cpu": {}, "memory": {}}')]
        assert sizes == [Declared()] * 3
        return _size(sizes[0])
    text = resources(quota=given["quota"], period=given["period"], limit=given["memory_limit"])
    return _size(declare(sandbox_config(), {}, text).size)


def _size(size: Declared) -> dict[str, Any]:
    vcpus = size.vcpus or Fraction(0)
    return {
        "cpu": float(vcpus),
        "vcpu_ceil": float(-(-vcpus.numerator // vcpus.denominator)),
        "mem_mb": (size.memory or 0) // MIB,
    }


def _setup(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    config = sandbox_config(
        static=given["static_sandbox_resource_mgmt"],
        default_vcpus=_fraction(given["default_vcpus"]),
        overhead_vcpus=_fraction(given["overhead_vcpus"]),
        **{key: given[key] for key in ("default_maxvcpus", "default_memory", "overhead_memory", "default_maxmemory")},
    )
    declared = Declared(
        _fraction(given["requested_vcpu"]) or None,
        _even(given["requested_mem_mb"]) if given["requested_mem_mb"] else None,
    )
    try:
        boot, _ = sizing.boot_size(config, declared)
    except Problem as problem:
        return {"error": problem.code is Code.NO_MEMORY}
    return {
        "default_vcpus": float(boot.exact),
        "default_memory": boot.memory // MIB,
        "default_maxvcpus": boot.max_vcpus,
    }


def _documented(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    config = sandbox_config(
        static=True,
        default_vcpus=Fraction(given["default_vcpus"]),
        overhead_vcpus=_fraction(given["overhead_vcpus"]),
        **{key: given[key] for key in ("default_memory", "overhead_memory")},
    )
    boot, _ = sizing.boot_size(config, Declared(_fraction(given["req_vcpus"]), given["req_mem"] * MIB or None))
    return {"vm_vcpus": float(boot.vcpus), "vm_memory": boot.memory // MIB}


_TYPES = {
    "PodSandbox": ContainerType.SANDBOX,
    "PodContainer": ContainerType.CONTAINER,
    "SingleContainer": ContainerType.SINGLE,
    "pod_sandbox": ContainerType.SANDBOX,
    "pod_container": ContainerType.CONTAINER,
    "single_container": ContainerType.SINGLE,
}


def _type(entry: Entry) -> Any:  # noqa: ANN401
    """The name, as the entry's side of Kata spells it."""
    kind, _ = container_type(entry["input"])
    names = [name for name, named in _TYPES.items() if named is kind]
    return {"type": names[0] if entry["id"].startswith("rs/") else names[1]}


def _type_name(entry: Entry) -> Any:  # noqa: ANN401
    kinds = {container_type({key: entry["input"]})[0] for key in TYPE_KEYS}
    assert len(kinds) == 1
    return next(name for name, named in _TYPES.items() if named in kinds)


def _collected(entry: Entry) -> Any:  # noqa: ANN401
    sets = [cpuset.parse(text) for _, text in entry["input"]]
    counted = table(*(resources(cpus=text) for _, text in entry["input"])).sums().cpuset_vcpus
    union = sorted(frozenset().union(*sets))
    assert counted == len(union)
    return union


def _go_cpus(entry: Entry) -> Any:  # noqa: ANN401
    sums = table(*(resources(**(members or {})) for members in entry["input"])).sums()
    return float(sums.quota_vcpus + sums.cpuset_vcpus)


def _go_memory(entry: Entry) -> Any:  # noqa: ANN401
    return {"bytes": table(*(resources(limit=limit) for limit in entry["input"]["memory_limits_bytes"])).sums().memory}


def _huge_pages(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    pages = {limit["pagesize"]: limit["limit"] for limit in given["hugepage_limits"]}
    texts = [resources(limit=given["memory_limit"], hugepages=pages)] * given["containers"]
    total = given["containers"] * (given["memory_limit"] + sum(pages.values()))
    return {"no_error": table(*texts).sums().memory == total}


def _go_cpusets(entry: Entry) -> Any:  # noqa: ANN401
    def union(texts: list[str]) -> frozenset[int]:
        return frozenset().union(*(cpuset.parse(text) for text in texts))

    expected = entry["expected"]
    try:
        cpus, mems = union(entry["input"]["cpusets"]), union(entry["input"]["memsets"])
    except ValueError:
        return {"error": True}
    # As ids: this program writes no lists
    same = {"cpus": cpus == cpuset.parse(expected["cpus"]), "mems": mems == cpuset.parse(expected["mems"])}
    return {name: expected[name] if holds else None for name, holds in same.items()}


def _quotient(entry: Entry) -> Any:  # noqa: ANN401
    return float(table(resources(**entry["input"])).sums().quota_vcpus)


def _aligned(entry: Entry) -> Any:  # noqa: ANN401
    return sizing.round_up(entry["input"]["bytes"], entry["input"]["block"])


def _to_mib(entry: Entry) -> Any:  # noqa: ANN401
    return _size(declare(sandbox_config(), {}, resources(limit=entry["input"])).size)["mem_mb"]


def _union(entry: Entry) -> Any:  # noqa: ANN401
    union = frozenset().union(*(cpuset.parse(_list(ids)) for ids in entry["input"]))
    return {"union": sorted(union)} if isinstance(entry["expected"], dict) else sorted(union)


def _count(entry: Entry) -> Any:  # noqa: ANN401
    return table(resources(cpus=_list(entry["input"]))).sums().cpuset_vcpus


def _stored(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    old = json.dumps({"cpu": given["old"]}).encode()
    if given["op"] == "Del":
        made = table(old)
        made.set("c0", None)
        return {"entry_remains": made.get("c0") is not None}
    return {"stored": json.loads(oci.merge(old, json.dumps({"cpu": given["new"]}).encode()))["cpu"]}


def _updated(entry: Entry, **config: Any) -> Any:  # noqa: ANN401
    given = entry["input"]
    change = {"Add": Change.ADD, "Del": Change.DELETE, "Update": Change.UPDATE}[given["op"]]
    before, after = (
        Target(exact=_fraction(given[name]), vcpus=max(-(-_fraction(given[name]) // 1), 1), memory=0, excess=0)
        for name in ("current", "required")
    )
    held = sizing.held_vcpus(sandbox_config(**config), change, before, after)
    return {"returned": after.vcpus if held is None else held}


def _total_memory(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    sums = table(*(resources(limit=limit) for limit in given["limits"])).sums()
    total = sizing.demand_memory(sandbox_config(default_memory=given["default_memory"]), sums)
    mib = sizing.round_up(total, MIB) // MIB
    return {"total_mb": mib, "total_mb_wrapping_u32": mib}


def _resized_memory(entry: Entry) -> Any:  # noqa: ANN401
    given = entry["input"]
    config = sandbox_config(
        base=Base.MAX, default_memory=given["default_mb"], default_maxmemory=given["maxmem_mb"], host_memory=1 << 20
    )
    boot, _ = sizing.boot_size(config, Declared())
    empty, asked = table().sums(), table(resources(limit=given["request_mb"] * MIB)).sums()
    before, after = (sizing.target(config, boot, Declared(), sums) for sums in (empty, asked))
    try:
        sizing.must_be_allowed(config, boot, before, after)
    except Problem as problem:
        return {"error": problem.code}
    return {"ok": after.memory // MIB}


def _even(mebibytes: int) -> int:
    return sizing.round_up(mebibytes, 2) * MIB


def _even_memory(entry: Entry) -> Any:  # noqa: ANN401
    return _size(declare(sandbox_config(), {}, resources(limit=entry["input"])).size)["mem_mb"]


def _hot_plugged(entry: Entry) -> Any:  # noqa: ANN401
    boot, _ = sizing.boot_size(sandbox_config(base=Base.MAX), Declared())
    need = boot.memory + entry["input"]["mem"] * MIB
    target = sizing.target(sandbox_config(base=Base.MAX), boot, Declared(), table(resources(limit=need)).sums())
    return (target.memory - boot.memory) // MIB


def _fraction(number: float) -> Fraction:
    return Fraction(str(number))


def _list(ids: list[int]) -> str:
    return ",".join(map(str, ids))


RULES: dict[str, Callable[..., Any]] = {
    "rs/cpu/calc_cpu_resources": _containers,
    "rs/kata-types/container_cpu": _container_cpu,
    "rs/kata-types/sandbox_cpu_merge": _merged,
    "rs/kata-types/u32set": _sets,
    "rs/kata-types/u32set_parse": _parsed,
    "rs/initial_size/pod_sandbox_annotations": _pod,
    "rs/initial_size/container_spec": _single,
    "rs/initial_size/setup_config": _setup,
    "rs/initial_size/supplement_from_annotations": _supplemented,
    "rs/k8s/container_type_with_id": _type,
    "rs/container/type_from_str": _type_name,
    "rs/cgroups/collect_sandbox_cpuset": _collected,
    "go/sandbox/calculateSandboxCPUs": _go_cpus,
    "go/sandbox/calculateSandboxMemory": _go_memory,
    "go/sandbox/hugepages": _huge_pages,
    "go/sandbox/getSandboxCPUSet": _go_cpusets,
    "go/utils/CalculateCPUsF": _quotient,
    "go/utils/AlignMem": _aligned,
    "go/utils/ToMiB": _to_mib,
    "go/oci/ContainerType": _type,
    "go/oci/CalculateContainerSizing": _single_resources,
    "go/oci/CalculateSandboxSizing": _pod,
    "go/cpuset/Parse": _parsed,
    "go/cpuset/UnionAll": _union,
    "go/cpuset/Size": _count,
    "go/cpuset/union_intersection_difference": _union,
    "docs/overhead_sizing": _documented,
    "derived/rs/cpu/calc": _containers,
    "derived/rs/cpu/table": _stored,
    "derived/rs/cpu/do_update": _updated,
    "derived/rs/mem/total": _total_memory,
    "derived/rs/initial_size/convert_memory_to_mb": _even_memory,
    "derived/rs/qemu/resize_memory": _resized_memory,
    "derived/go/calcHotplugMemMiBSize": _hot_plugged,
}

FOLLOWED = [name for name, entry in ENTRIES.items() if "departure" not in entry and name not in WITHOUT_COUNTERPART]


def _given(entry: Entry, **config: Any) -> Any:  # noqa: ANN401
    return RULES[entry["id"].partition("#")[0]](entry, **config)


def _agree(actual: Any, expected: Any) -> bool:  # noqa: ANN401
    """Whether both say the same in the members that both have; an error's text is Kata's own."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.get("error"):
            return bool(actual.get("error"))
        tolerance = expected.get("tolerance", 0)
        common = expected.keys() & actual.keys()
        assert common, f"nothing to compare in {actual} and {expected}"
        return all(
            abs(actual[name] - expected[name]) <= tolerance
            if isinstance(expected[name], float)
            else actual[name] == expected[name]
            for name in common
        )
    if isinstance(expected, list) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(_same, actual, expected))
    return bool(actual == expected)


def _same(actual: Any, expected: Any) -> bool:  # noqa: ANN401
    return _agree(actual, expected) if isinstance(expected, dict) else bool(actual == expected)


def test_every_entry_has_its_place() -> None:
    departing = {name for name, entry in ENTRIES.items() if "departure" in entry}
    assert departing == set(DEPARTURES)
    assert not departing & set(WITHOUT_COUNTERPART)
    assert set(WITHOUT_COUNTERPART) < set(ENTRIES)
    assert all(ENTRIES[name]["departure"].startswith(number) for name, (number, _) in DEPARTURES.items())


@pytest.mark.parametrize("name", FOLLOWED)
def test_kata_is_followed(name: str) -> None:
    entry = ENTRIES[name]
    actual = _given(entry)
    assert _agree(actual, entry["expected"]), actual


@pytest.mark.parametrize("name", [name for name in DEPARTURES if name != "derived/rs/cpu/table#2"])
def test_kata_is_departed_from(name: str) -> None:
    actual = _given(ENTRIES[name])
    assert _agree(actual, DEPARTURES[name][1]), actual


@virtual
async def test_an_update_creates_nothing() -> None:
    entry = ENTRIES["derived/rs/cpu/table#2"]
    async with rig(attached=False) as r:
        with pytest.raises(Problem) as refusal:
            await r.patch("c1", json.dumps({"cpu": entry["input"]["new"]}).encode())
        assert refusal.value.code is DEPARTURES[entry["id"]][1]["error"]
        assert r.state.counts.containers == 0


@pytest.mark.parametrize(
    "name",
    [name for name, (number, _) in DEPARTURES.items() if number in COMPATIBLE]
    + [name for name in FOLLOWED if RULES[name.partition("#")[0]] in (_containers, _updated)],
)
def test_compat_follows_kata_here_too(name: str) -> None:
    entry = ENTRIES[name]
    actual = _given(entry, compat=Compat.KATA)
    assert _agree(actual, entry["expected"]), actual


@pytest.mark.parametrize("name", ["go/oci/CalculateSandboxSizing#6", "go/oci/CalculateSandboxSizing#7"])
def test_shares_size_as_in_go_where_they_may(name: str) -> None:
    entry = ENTRIES[name]
    expected = {**entry["expected"], "mem_mb": DEPARTURES[name][1]["mem_mb"]}
    assert _agree(_given(entry, shares_sizing=True), expected)
