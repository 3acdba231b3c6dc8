"""What annotations say about a pod's kind and size, and which of it counts (SPEC 3)."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from kata_resmgr.annotations import CONTAINERD, CRIO, TYPE_KEYS, ContainerType, container_type
from kata_resmgr.declared import Declaration, declare, resized
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sizing import MIB, Declared
from tests.examples import resources, sandbox_config

QUOTA, PERIOD, SHARES, MEMORY = (CONTAINERD[member] for member in ("quota", "period", "shares", "limit"))
NEW, OLD = CRIO
CRIO_TYPE, CONTAINERD_TYPE, DOCKERSHIM_TYPE = TYPE_KEYS


def _declared(annotations: dict[str, str], text: bytes | None = None, *, shares_sizing: bool = False) -> Declaration:
    return declare(sandbox_config(shares_sizing=shares_sizing), annotations, text)


# Kinds


@pytest.mark.parametrize(
    ("annotations", "kind", "key"),
    [
        ({}, ContainerType.SINGLE, None),
        ({CRIO_TYPE: "sandbox"}, ContainerType.SANDBOX, CRIO_TYPE),
        ({CONTAINERD_TYPE: "sandbox"}, ContainerType.SANDBOX, CONTAINERD_TYPE),
        ({DOCKERSHIM_TYPE: "podsandbox"}, ContainerType.SANDBOX, DOCKERSHIM_TYPE),
        ({CONTAINERD_TYPE: "pod_sandbox"}, ContainerType.SANDBOX, CONTAINERD_TYPE),
        ({CONTAINERD_TYPE: "container"}, ContainerType.CONTAINER, CONTAINERD_TYPE),
        ({CONTAINERD_TYPE: "pod_container"}, ContainerType.CONTAINER, CONTAINERD_TYPE),
        ({CONTAINERD_TYPE: "single_container"}, ContainerType.SINGLE, CONTAINERD_TYPE),
        # The order of the keys, not of the annotations
        ({DOCKERSHIM_TYPE: "podsandbox", CONTAINERD_TYPE: "container"}, ContainerType.CONTAINER, CONTAINERD_TYPE),
        ({CONTAINERD_TYPE: "container", CRIO_TYPE: "sandbox"}, ContainerType.SANDBOX, CRIO_TYPE),
        # A value that nobody knows is like none: the next key counts
        ({CRIO_TYPE: "foo", CONTAINERD_TYPE: "sandbox"}, ContainerType.SANDBOX, CONTAINERD_TYPE),
        ({CRIO_TYPE: "Sandbox", DOCKERSHIM_TYPE: ""}, ContainerType.SINGLE, None),
    ],
)
def test_the_type_of_a_container(annotations: dict[str, str], kind: ContainerType, key: str | None) -> None:
    assert container_type(annotations) == (kind, key)


# containerd's keys


@pytest.mark.parametrize(
    ("annotations", "vcpus", "mebibytes"),
    [
        ({}, None, None),
        ({"io.kubernetes.cri.sandbox-id": "x", "anything": "\0"}, None, None),
        ({QUOTA: "220000"}, Fraction(11, 5), None),
        ({QUOTA: "220000", PERIOD: "50000"}, Fraction(22, 5), None),
        ({QUOTA: "220000", PERIOD: "0"}, Fraction(11, 5), None),
        ({QUOTA: " \t\n\v\f\r007\r\n", PERIOD: " 7 "}, Fraction(1), None),
        ({QUOTA: "", PERIOD: " ", SHARES: "\t", MEMORY: "\n"}, None, None),
        ({QUOTA: "-1", PERIOD: "100000", MEMORY: "-1"}, None, None),
        ({QUOTA: str(-(2**63)), MEMORY: str(-(2**63))}, None, None),
        ({QUOTA: "0", MEMORY: "0"}, None, None),
        ({QUOTA: str(2**63 - 1), PERIOD: str(2**64 - 1)}, Fraction(2**63 - 1, 2**64 - 1), None),
        ({MEMORY: "1"}, None, 2),
        ({MEMORY: str(513 * MIB)}, None, 514),
        ({MEMORY: "0" * 5000 + str(2 * MIB)}, None, 2),
        ({SHARES: "2048"}, None, None),
    ],
)
def test_containerds_keys(annotations: dict[str, str], vcpus: Fraction | None, mebibytes: int | None) -> None:
    said = _declared(annotations)
    assert said.size == Declared(vcpus, None if mebibytes is None else mebibytes * MIB)
    assert said.vcpus_from == ("" if vcpus is None else QUOTA)
    assert said.memory_from == ("" if mebibytes is None else MEMORY)


@pytest.mark.parametrize(
    ("shares", "quota", "vcpus"),
    [
        ("2", "-1", None),
        ("3", "-1", 1),
        ("1024", None, 1),
        ("1025", "0", 2),
        ("8192", "-1", 8),
        ("8192", "50000", None),
    ],
)
def test_shares_declare_where_they_may_and_there_is_no_quota(shares: str, quota: str | None, vcpus: int | None) -> None:
    annotations = {SHARES: shares} | ({} if quota is None else {QUOTA: quota})
    said = _declared(annotations, shares_sizing=True)
    if quota == "50000":
        assert (said.size.vcpus, said.vcpus_from) == (Fraction(1, 2), QUOTA)
    else:
        assert (said.size.vcpus, said.vcpus_from) == (vcpus, "" if vcpus is None else SHARES)
        assert _declared(annotations).size.vcpus is None


WRONG = ["x", "1.0", "1e3", "+1", "0x10", "1 000", "1_000", "--1", "- 1", "-", "\u0661", "\u00a05", "5\u00a0", "1\0"]


@pytest.mark.parametrize("value", [*WRONG, str(2**64), "9" * 5000])
@pytest.mark.parametrize("key", [QUOTA, PERIOD, SHARES, MEMORY])
def test_what_is_no_number_of_its_range_refuses_the_sandbox(key: str, value: str) -> None:
    with pytest.raises(Problem) as refusal:
        _declared({key: value})
    problem = refusal.value
    assert problem.code is Code.INVALID_ANNOTATION
    assert problem.detail.startswith(f"annotation {key}: ")
    assert [at.pointer for at in problem.at] == [f"/annotations/{key}"]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        (QUOTA, str(2**63), f"{-(2**63)} to {2**63 - 1}"),
        (QUOTA, str(-(2**63) - 1), f"{-(2**63)} to {2**63 - 1}"),
        (MEMORY, str(2**63), f"{-(2**63)} to {2**63 - 1}"),
        (PERIOD, "-1", f"0 to {2**64 - 1}"),
        (SHARES, "-1", f"0 to {2**64 - 1}"),
        (SHARES, str(2**64), f"0 to {2**64 - 1}"),
    ],
)
def test_a_refusal_names_value_and_range(key: str, value: str, allowed: str) -> None:
    with pytest.raises(Problem) as refusal:
        _declared({key: value})
    assert value in refusal.value.detail
    assert allowed in refusal.value.detail


@pytest.mark.parametrize("key", [QUOTA, PERIOD, SHARES, MEMORY])
@pytest.mark.parametrize("text", [None, resources(quota=100_000, limit=2 * MIB)])
def test_a_key_that_is_not_used_is_checked(key: str, text: bytes | None) -> None:
    with pytest.raises(Problem, match=key):
        _declared({QUOTA: "100000", MEMORY: "1", key: "x"}, text)


# CRI-O's keys


def _crio(**members: object) -> str:
    return json.dumps(members)


@pytest.mark.parametrize(
    ("annotations", "vcpus", "mebibytes", "source"),
    [
        ({NEW: _crio(cpu_quota=150_000, cpu_period=50_000)}, Fraction(3), None, NEW),
        ({NEW: _crio(memory_limit_in_bytes=513 * MIB)}, None, 514, NEW),
        ({OLD: _crio(cpu_quota=150_000)}, Fraction(3, 2), None, OLD),
        ({NEW: " \n", OLD: " " + _crio(cpu_quota=150_000) + "\n"}, Fraction(3, 2), None, OLD),
        # The old key only where the new one declares neither
        ({NEW: _crio(cpu_quota=50_000), OLD: _crio(cpu_quota=150_000)}, Fraction(1, 2), None, NEW),
        ({NEW: _crio(memory_limit_in_bytes=1), OLD: _crio(cpu_quota=150_000)}, None, 2, NEW),
        ({NEW: _crio(cpu_quota=-1, memory_limit_in_bytes=-1), OLD: _crio(cpu_quota=100_000)}, Fraction(1), None, OLD),
        # Either only where containerd's keys declare neither
        ({QUOTA: "100000", NEW: _crio(cpu_quota=200_000, memory_limit_in_bytes=1)}, Fraction(1), None, QUOTA),
        ({MEMORY: "1", NEW: _crio(cpu_quota=200_000)}, None, 2, MEMORY),
        ({QUOTA: "-1", MEMORY: "", NEW: _crio(cpu_quota=200_000)}, Fraction(2), None, NEW),
        # What does not bear on sizes is left alone
        ({NEW: _crio(cpu_quota=1, cpu_period=1, cpuset_cpus=4, oom_score_adj="x", unified={})}, Fraction(1), None, NEW),
        ({NEW: _crio(cpu_quota=None, cpu_period=None, cpu_shares=None, memory_limit_in_bytes=None)}, None, None, ""),
        ({NEW: _crio(cpu_quota=0, cpu_shares=2048)}, None, None, ""),
        ({NEW: "{}", OLD: "{}"}, None, None, ""),
    ],
)
def test_crios_keys(annotations: dict[str, str], vcpus: Fraction | None, mebibytes: int | None, source: str) -> None:
    said = _declared(annotations)
    assert said.size == Declared(vcpus, None if mebibytes is None else mebibytes * MIB)
    assert {said.vcpus_from, said.memory_from} - {""} == ({source} if source else set())


def test_crios_shares_declare_where_they_may() -> None:
    annotations = {NEW: _crio(cpu_shares=1536), OLD: _crio(cpu_quota=500_000)}
    assert _declared(annotations, shares_sizing=True).size.vcpus == 2
    assert _declared(annotations).size.vcpus == 5


@pytest.mark.parametrize("key", CRIO)
@pytest.mark.parametrize(
    "value",
    [
        "x",
        "[]",
        "null",
        "1",
        '"{}"',
        "{",
        "{} {}",
        '{"cpu_quota": NaN}',
        '{"cpu_quota": 100000.0}',
        '{"cpu_quota": 1e5}',
        '{"cpu_quota": true}',
        '{"cpu_period": "100000"}',
        '{"cpu_shares": []}',
        '{"memory_limit_in_bytes": {}}',
        '{"cpu_period": -1}',
        '{"cpu_shares": -1}',
        '{"cpu_quota": 9223372036854775808}',
        '{"cpu_quota": -9223372036854775809}',
        '{"memory_limit_in_bytes": 9223372036854775808}',
        '{"cpu_period": 18446744073709551616}',
        '{"x": "\udcff"}',
        '{"x":' * 100_000,
    ],
    ids=lambda value: value[:40],
)
def test_crio_json_that_is_not_right_refuses_the_sandbox(key: str, value: str) -> None:
    with pytest.raises(Problem) as refusal:
        _declared({key: value})
    assert refusal.value.code is Code.INVALID_ANNOTATION
    assert key in refusal.value.detail
    assert [at.pointer for at in refusal.value.at] == [f"/annotations/{key}"]


def test_a_refusal_of_crio_json_names_the_member() -> None:
    for value, told in (
        ('{"cpu_quota": 1.5}', '{"cpu_quota": 1.5}: cpu_quota must be a whole number'),
        ('{"cpu_shares": -1}', f"cpu_shares = -1 is out of range: 0 to {2**64 - 1} is allowed"),
        ("[]", "[]: it must be a JSON object"),
    ):
        with pytest.raises(Problem) as refusal:
            _declared({NEW: value})
        assert refusal.value.detail == f"annotation {NEW}: {told}"


def test_a_crio_key_that_need_not_be_read_is_not_read() -> None:
    assert _declared({QUOTA: "100000", NEW: "x", OLD: "x"}).size.vcpus == 1
    assert _declared({NEW: _crio(cpu_quota=100_000), OLD: "x"}).size.vcpus == 1
    with pytest.raises(Problem, match=OLD):
        _declared({NEW: "{}", OLD: "x"})


# Which source counts

POD = {QUOTA: "300000", MEMORY: str(512 * MIB)}


@pytest.mark.parametrize("kind", [{CONTAINERD_TYPE: "sandbox"}, {CRIO_TYPE: "pod_sandbox"}])
def test_a_pods_sandbox_declares_by_its_annotations_alone(kind: dict[str, str]) -> None:
    said = _declared(POD | kind, resources(quota=100_000, limit=1024 * MIB))
    assert (said.size, said.vcpus_from, said.memory_from) == (Declared(Fraction(3), 512 * MIB), QUOTA, MEMORY)
    assert not _declared(kind, resources(quota=100_000, limit=1024 * MIB)).size
    with pytest.raises(Problem) as refusal:
        _declared(POD | kind, b'{"cpu": {"quota": 1.5}}')
    assert refusal.value.code is Code.INVALID_RESOURCES


@pytest.mark.parametrize("kind", [{}, {CONTAINERD_TYPE: "container"}, {CONTAINERD_TYPE: "single_container"}])
@pytest.mark.parametrize(
    ("text", "vcpus", "mebibytes", "sources"),
    [
        (None, 3, 512, (QUOTA, MEMORY)),
        (resources(), 3, 512, (QUOTA, MEMORY)),
        (resources(quota=100_000, limit=1024 * MIB), 1, 1024, ("resources", "resources")),
        (resources(quota=100_000), 1, 512, ("resources", MEMORY)),
        (resources(limit=1024 * MIB), 3, 1024, (QUOTA, "resources")),
        (resources(quota=-1, limit=-1), 3, 512, (QUOTA, MEMORY)),
        (resources(hugepages={"2MB": 1024 * MIB}), 3, 1024, (QUOTA, "resources")),
        (resources(cpus="0-3"), 4, 512, ("resources", MEMORY)),
        (resources(cpus="0-61", shares=2), 3, 512, (QUOTA, MEMORY)),
    ],
)
def test_others_declare_by_their_resources_and_the_annotations_fill_in(
    kind: dict[str, str], text: bytes | None, vcpus: int, mebibytes: int, sources: tuple[str, str]
) -> None:
    said = _declared(POD | kind, text)
    assert said.size == Declared(Fraction(vcpus), mebibytes * MIB)
    assert (said.vcpus_from, said.memory_from) == sources


# A resize


@pytest.mark.parametrize(
    ("annotations", "text", "update", "vcpus", "mebibytes", "sources"),
    [
        (POD, None, resources(quota=450_000), Fraction(9, 2), 512, ("resize of the sandbox", MEMORY)),
        (POD, None, resources(limit=1025 * MIB), Fraction(3), 1026, (QUOTA, "resize of the sandbox")),
        (POD, None, resources(quota=300_000), Fraction(3), 512, (QUOTA, MEMORY)),
        (POD, None, resources(quota=0, limit=0), Fraction(3), 512, (QUOTA, MEMORY)),
        (POD, None, resources(quota=-1, limit=-1), None, None, ("", "")),
        ({QUOTA: "300000", PERIOD: "50000"}, None, resources(quota=100_000), Fraction(2), None, None),
        ({NEW: _crio(cpu_quota=-1, cpu_period=50_000)}, None, resources(quota=100_000), Fraction(2), None, None),
        ({}, resources(quota=100_000, period=50_000), resources(quota=200_000), Fraction(4), None, None),
        ({}, None, resources(quota=100_000), Fraction(1), None, None),
        ({QUOTA: "300000"}, resources(limit=4 * MIB), resources(quota=100_000), Fraction(1), 4, None),
        ({}, resources(hugepages={"2MB": 4 * MIB}), resources(hugepages={"2MB": 8 * MIB}), None, 8, None),
        ({}, None, resources(cpus="0-3"), Fraction(4), None, None),
    ],
)
def test_a_resize_merges_into_the_record_from_wherever_it_came(
    annotations: dict[str, str],
    text: bytes | None,
    update: bytes,
    vcpus: Fraction | None,
    mebibytes: int | None,
    sources: tuple[str, str] | None,
) -> None:
    now = resized(sandbox_config(), _declared(annotations, text), update)
    assert now.size == Declared(vcpus, None if mebibytes is None else mebibytes * MIB)
    if sources is not None:
        assert (now.vcpus_from, now.memory_from) == sources
