"""OCI resources: what is taken, what is refused and where, and how an update is laid over a record (SPEC 1 and 4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kata_resmgr import oci
from kata_resmgr.oci import NESTING_MAX, Resources
from kata_resmgr.problem import Code, Problem

NOTHING = Resources(quota=0, period=100_000, shares=0, cpus=frozenset(), memory=0, hugepages=0)
INT64_MAX, UINT64_MAX = 2**63 - 1, 2**64 - 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", {}),
        ('{"cpu": null, "memory": null, "hugepageLimits": null, "unified": null}', {}),
        ('{"cpu": {}, "memory": {}, "hugepageLimits": []}', {}),
        ('{"cpu": {"quota": null, "period": null, "shares": null, "cpus": null, "mems": null}}', {}),
        ('{"cpu": {"quota": 0, "period": 0, "shares": 0, "cpus": "", "mems": ""}, "memory": {"limit": 0}}', {}),
        ('{"cpu": {"quota": 150000, "period": 50000}}', {"quota": 150_000, "period": 50_000}),
        ('{"cpu": {"quota": 1001, "period": 100}}', {"quota": 1001, "period": 100}),
        ('{"cpu": {"quota": -1}}', {"quota": -1}),
        ('{"cpu": {"quota": -9223372036854775808}}', {"quota": -(2**63)}),
        (f'{{"cpu": {{"quota": {INT64_MAX}}}}}', {"quota": INT64_MAX}),
        (
            f'{{"cpu": {{"shares": {UINT64_MAX}, "period": {UINT64_MAX}}}}}',
            {"shares": UINT64_MAX, "period": UINT64_MAX},
        ),
        ('{"cpu": {"cpus": " 0-1,4 ", "mems": "0"}}', {"cpus": frozenset({0, 1, 4})}),
        ('{"cpu": {"cpus": " "}}', {}),
        ('{"memory": {"limit": 1073741824}}', {"memory": 1 << 30}),
        ('{"memory": {"limit": -1}}', {}),
        ('{"hugepageLimits": [{"pageSize": "2MB", "limit": 4}, {"pageSize": "1GB", "limit": 8}]}', {"hugepages": 12}),
        ('{"hugepageLimits": [{"pageSize": "2MB", "limit": 4}, {"pageSize": "2MB", "limit": 6}]}', {"hugepages": 6}),
        ('{"hugepageLimits": [{"pageSize": "2MB", "limit": 4}, {"pageSize": "2MB", "limit": 0}]}', {}),
        ('{"hugepageLimits": [{"pageSize": "2MB", "limit": null}, {"pageSize": "1GB"}]}', {}),
        ('{"memory": {"reservation": 1, "swap": 2}, "pids": {"limit": 3}, "cpu": {"realtimeRuntime": 4}}', {}),
        ('{"unified": {"memory.max": "1048576", "cpu.max": "100 1000"}}', {}),
        ('{"devices": [{"allow": false}], "cpu": {"new": 1e3}, "x": 123456789012345678901234567890}', {}),
        ('{"cpu": {"quota": 1, "quota": 2}}', {"quota": 2}),
    ],
)
def test_what_bears_on_the_size(text: str, expected: dict[str, Any]) -> None:
    decoded = oci.decode(text.encode())
    stated = {name: getattr(decoded, name) for name in expected}
    assert stated == expected
    assert decoded == Resources(**{name: expected.get(name, getattr(NOTHING, name)) for name in NOTHING.__slots__})


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ('{"cpu": {"quota": "1"}}', "/cpu/quota"),
        ('{"cpu": {"quota": 100000.0}}', "/cpu/quota"),
        ('{"cpu": {"quota": 1e5}}', "/cpu/quota"),
        ('{"cpu": {"quota": true}}', "/cpu/quota"),
        ('{"cpu": {"quota": [1]}}', "/cpu/quota"),
        ('{"cpu": {"quota": 9223372036854775808}}', "/cpu/quota"),
        ('{"cpu": {"quota": -9223372036854775809}}', "/cpu/quota"),
        ('{"cpu": {"period": -1}}', "/cpu/period"),
        ('{"cpu": {"period": 18446744073709551616}}', "/cpu/period"),
        ('{"cpu": {"shares": -1}}', "/cpu/shares"),
        ('{"cpu": {"shares": 18446744073709551616}}', "/cpu/shares"),
        ('{"cpu": {"burst": 18446744073709551616}}', "/cpu/burst"),
        ('{"cpu": {"realtimePeriod": 18446744073709551616}}', "/cpu/realtimePeriod"),
        ('{"cpu": {"cpus": 3}}', "/cpu/cpus"),
        ('{"cpu": {"cpus": "0-"}}', "/cpu/cpus"),
        ('{"cpu": {"cpus": "8192"}}', "/cpu/cpus"),
        ('{"cpu": {"mems": "x"}}', "/cpu/mems"),
        ('{"cpu": {"idle": "1"}}', "/cpu/idle"),
        ('{"cpu": []}', "/cpu"),
        ('{"cpu": "1"}', "/cpu"),
        ('{"memory": {"limit": "1G"}}', "/memory/limit"),
        ('{"memory": {"limit": 9223372036854775808}}', "/memory/limit"),
        ('{"memory": {"swappiness": 18446744073709551616}}', "/memory/swappiness"),
        ('{"memory": {"kernelTCP": 0.5}}', "/memory/kernelTCP"),
        ('{"memory": {"disableOOMKiller": 1}}', "/memory/disableOOMKiller"),
        ('{"hugepageLimits": {}}', "/hugepageLimits"),
        ('{"hugepageLimits": [null]}', "/hugepageLimits/0"),
        ('{"hugepageLimits": [{"pageSize": "2MB"}, {"limit": 1}]}', "/hugepageLimits/1"),
        ('{"hugepageLimits": [{"pageSize": null}]}', "/hugepageLimits/0/pageSize"),
        ('{"hugepageLimits": [{"pageSize": "2MB", "limit": -1}]}', "/hugepageLimits/0/limit"),
        (
            '{"hugepageLimits": [{"pageSize": "1GB"}, {"pageSize": "2MB", "limit": 18446744073709551616}]}',
            "/hugepageLimits/1/limit",
        ),
        ('{"pids": {"limit": "max"}}', "/pids/limit"),
        ('{"unified": {"cpu.max": 1}}', "/unified"),
        ("[]", ""),
        ("null", ""),
        ("1", ""),
    ],
)
def test_what_is_refused_is_named(text: str, pointer: str) -> None:
    with pytest.raises(Problem) as refusal:
        oci.decode(text.encode(), "/containers/a/resources")
    problem = refusal.value
    assert problem.code is Code.INVALID_RESOURCES
    assert [at.pointer for at in problem.at] == ["/containers/a/resources" + pointer]
    assert problem.detail == f"{problem.at[0].pointer}: {problem.at[0].detail}"


def test_a_refusal_stays_short_whatever_the_value() -> None:
    with pytest.raises(Problem, match=r"^/resources/cpu/shares: 9999") as refusal:
        oci.decode(b'{"cpu": {"shares": ' + b"9" * 4000 + b"}}")
    assert len(refusal.value.detail) <= 256
    assert [len(at.detail) <= 256 for at in refusal.value.at] == [True]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{} {}",
        b"\xef\xbb\xbf{}",
        b'{"x": NaN}',
        b'{"x": 1e400}',
        b'{"x": ' + b"9" * 5000 + b"}",
        b'{"\xff": 1}',
        b'{"x": "\xff"}',
        b'{"x": "\\ud800"}',
        b'{"cpu": {"cpus": "\xc0\x80"}}',
        b'{"x": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(Problem) as refusal:
        oci.decode(text)
    assert refusal.value.code is Code.INVALID_RESOURCES
    assert [at.pointer for at in refusal.value.at] == ["/resources"]
    assert "\n" not in refusal.value.detail


def _nested(levels: int) -> bytes:
    """An object with so many levels, objects and arrays in turn."""
    inner = b"1"
    for level in range(levels, 1, -1):
        inner = b'{"a": ' + inner + b"}" if level % 2 else b"[" + inner + b"]"
    return b'{"x": ' + inner + b"}"


def test_nesting_has_a_bound_that_does_not_depend_on_the_caller() -> None:
    deepest = _nested(NESTING_MAX)
    assert oci.decode(deepest) == NOTHING
    assert oci.same(oci.merge(deepest, deepest), deepest)
    with pytest.raises(Problem, match=f"nest more than {NESTING_MAX} levels deep"):
        oci.decode(_nested(NESTING_MAX + 1))


def test_many_objects_side_by_side_are_not_deep() -> None:
    assert oci.decode(b'{"devices": [' + b",".join([b'{"allow": true}'] * 1000) + b"]}") == NOTHING


@pytest.mark.parametrize(
    ("old", "update", "merged"),
    [
        # What keeps the old value
        ({"cpu": {"quota": 5, "period": 7}}, {}, {"cpu": {"quota": 5, "period": 7}}),
        ({"cpu": {"quota": 5}}, {"cpu": None, "memory": None}, {"cpu": {"quota": 5}}),
        ({"cpu": {"quota": 5}}, {"cpu": {}}, {"cpu": {"quota": 5}}),
        (
            {"cpu": {"quota": 5, "period": 7, "shares": 9, "cpus": "0", "mems": "1"}, "memory": {"limit": 11}},
            {"cpu": {"quota": 0, "period": 0, "shares": 0, "cpus": "", "mems": ""}, "memory": {"limit": 0}},
            {"cpu": {"quota": 5, "period": 7, "shares": 9, "cpus": "0", "mems": "1"}, "memory": {"limit": 11}},
        ),
        (
            {"cpu": {"quota": 5, "shares": 9, "cpus": "0"}, "memory": {"limit": 11, "swap": 3}},
            {"cpu": {"quota": None, "shares": None, "cpus": None}, "memory": {"limit": None, "swap": None}},
            {"cpu": {"quota": 5, "shares": 9, "cpus": "0"}, "memory": {"limit": 11, "swap": 3}},
        ),
        ({"cpu": {"cpus": "0-1"}}, {"cpu": {"cpus": " \t"}}, {"cpu": {"cpus": "0-1"}}),
        # What replaces it
        ({"cpu": {"quota": 5, "period": 7}}, {"cpu": {"quota": 6}}, {"cpu": {"quota": 6, "period": 7}}),
        ({"cpu": {"quota": 5}}, {"cpu": {"quota": -1}}, {"cpu": {"quota": -1}}),
        ({"memory": {"limit": 5}}, {"memory": {"limit": -1}}, {"memory": {"limit": -1}}),
        ({"cpu": {"quota": 5}}, {"cpu": {"cpus": "0-3"}}, {"cpu": {"quota": 5, "cpus": "0-3"}}),
        ({"memory": {"limit": 5, "swap": 9}}, {"memory": {"swap": 0}}, {"memory": {"limit": 5, "swap": 0}}),
        ({"cpu": {"burst": 4}}, {"cpu": {"burst": 0}}, {"cpu": {"burst": 0}}),
        ({}, {"cpu": {"quota": 5}, "memory": {"limit": 1}}, {"cpu": {"quota": 5}, "memory": {"limit": 1}}),
        ({"cpu": None}, {"cpu": {"quota": 5}}, {"cpu": {"quota": 5}}),
        ({"cpu": {"quota": None}}, {"cpu": {"quota": 5}}, {"cpu": {"quota": 5}}),
        # What this program does not know
        ({"x": 1, "cpu": {"y": 2}}, {"cpu": {"quota": 5}}, {"x": 1, "cpu": {"y": 2, "quota": 5}}),
        ({"x": {"a": 1, "b": {"c": 2}}}, {"x": {"b": {"d": 3}}}, {"x": {"a": 1, "b": {"c": 2, "d": 3}}}),
        ({"x": {"a": 1}}, {"x": None}, {"x": {"a": 1}}),
        ({"x": 1}, {"x": 0}, {"x": 0}),
        ({"x": [1, 2]}, {"x": [3]}, {"x": [3]}),
        ({"x": {"a": 1}}, {"x": [1]}, {"x": [1]}),
        ({"x": [1]}, {"x": {"a": 1}}, {"x": {"a": 1}}),
        ({"x": "text"}, {"x": {"a": 1}}, {"x": {"a": 1}}),
        ({"unified": {"a": "1", "b": "2"}}, {"unified": {"b": "3"}}, {"unified": {"a": "1", "b": "3"}}),
        # A name of the keeping ones in another object is no keeping one
        ({"pids": {"limit": 5}}, {"pids": {"limit": 0}}, {"pids": {"limit": 0}}),
    ],
)
def test_an_update_is_laid_over_member_by_member(
    old: dict[str, Any], update: dict[str, Any], merged: dict[str, Any]
) -> None:
    text = oci.merge(msgspec.json.encode(old), msgspec.json.encode(update))
    assert msgspec.json.decode(text) == merged


def _pages(*entries: tuple[str, int | None]) -> bytes:
    return msgspec.json.encode({"hugepageLimits": [{"pageSize": size, "limit": limit} for size, limit in entries]})


@pytest.mark.parametrize(
    ("old", "update", "entries"),
    [
        (_pages(("2MB", 4)), _pages(("2MB", 6)), {"2MB": 6}),
        (_pages(("2MB", 4)), _pages(("1GB", 8)), {"2MB": 4, "1GB": 8}),
        (_pages(("2MB", 4), ("1GB", 8)), _pages(("2MB", 0)), {"1GB": 8}),
        (_pages(("2MB", 4), ("1GB", 8)), _pages(("1GB", None)), {"2MB": 4}),
        (_pages(("2MB", 4)), _pages(("2MB", 0)), {}),
        (_pages(("2MB", 4)), _pages(("1GB", 0)), {"2MB": 4}),
        (_pages(("2MB", 4)), _pages(("2MB", 6), ("2MB", 0)), {}),
        (_pages(("2MB", 4)), _pages(("2MB", 0), ("2MB", 6)), {"2MB": 6}),
        (_pages(("2MB", 4), ("2MB", 5)), _pages(("1GB", 8)), {"2MB": 5, "1GB": 8}),
        (_pages(("2MB", 4), ("2MB", 5)), _pages(("2MB", 0)), {}),
        (_pages(("2MB", 4)), b'{"hugepageLimits": [{"pageSize": "2MB"}]}', {}),
        (_pages(("2MB", 4), ("1GB", 8)), _pages(("2MB", 0), ("2MB", 6)), {"2MB": 6, "1GB": 8}),
        (_pages(("2MB", 4)), b'{"hugepageLimits": []}', {"2MB": 4}),
        (_pages(("2MB", 4)), b'{"hugepageLimits": null}', {"2MB": 4}),
        (b'{"hugepageLimits": null}', _pages(("2MB", 6)), {"2MB": 6}),
        (b"{}", _pages(("2MB", 6)), {"2MB": 6}),
        (b"{}", _pages(("2MB", 0)), {}),
    ],
)
def test_huge_page_entries_replace_those_of_their_size(old: bytes, update: bytes, entries: dict[str, int]) -> None:
    merged = oci.merge(old, update)
    listed = msgspec.json.decode(merged)["hugepageLimits"]
    assert [(entry["pageSize"], entry["limit"]) for entry in listed] == list(entries.items())
    assert oci.decode(merged).hugepages == sum(entries.values())


@pytest.mark.parametrize(
    "old", [b'{"hugepageLimits": null}', _pages(("2MB", 4), ("2MB", 5)), _pages(("2MB", 0)), b'{"hugepageLimits": []}']
)
def test_an_update_without_huge_pages_leaves_them_as_they_were_written(old: bytes) -> None:
    assert oci.same(oci.merge(old, b"{}"), old)
    assert oci.same(oci.merge(old, b'{"hugepageLimits": null}'), old)


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        (b'{"a": 1, "b": {"c": 2, "d": 3}}', b'{"b":{"d":3,"c":2},"a":1}', True),
        (b'{"a": "\\u0041"}', b'{"a": "A"}', True),
        (b'{"a": 1}', b'{"a": 2}', False),
        (b'{"a": 1}', b'{"a": true}', False),
        (b'{"a": 0}', b'{"a": false}', False),
        (b'{"a": 0}', b'{"a": null}', False),
        (b'{"a": null}', b"{}", False),
        (b'{"a": [1, 2]}', b'{"a": [2, 1]}', False),
    ],
)
def test_texts_are_the_same_when_they_say_the_same(text: bytes, other: bytes, same: bool) -> None:
    assert oci.same(text, other) is same
    assert oci.same(other, text) is same
