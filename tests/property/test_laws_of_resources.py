"""Laws of lists and of OCI resources: whatever is sent."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kata_resmgr import cpuset, oci
from kata_resmgr.problem import Code, Problem
from tests.property.strategies import RESOURCES

IDS = st.frozensets(st.integers(0, 40) | st.integers(0, cpuset.HIGHEST_ID), max_size=40)


def _linux_list(ids: frozenset[int]) -> str:
    """As the kernel writes it: ``0-3,7``."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@given(IDS)
def test_what_the_kernel_writes_is_read_back(ids: frozenset[int]) -> None:
    assert cpuset.parse(f" {_linux_list(ids)}\n") == ids


@given(IDS, IDS)
def test_a_list_of_two_lists_is_their_union(ids: frozenset[int], others: frozenset[int]) -> None:
    text = ",".join(filter(None, [_linux_list(ids), _linux_list(others)]))
    assert cpuset.parse(text) == ids | others


@given(st.text("0123456789-, \n", max_size=12) | st.text(max_size=12))
def test_any_text_is_a_list_or_is_refused_in_one_way(text: str) -> None:
    try:
        ids = cpuset.parse(text)
    except ValueError as refusal:
        told = str(refusal)
    else:
        told = f'"{text}"'
        assert all(0 <= number <= cpuset.HIGHEST_ID for number in ids)
    assert told.startswith(f'"{text}"')


@given(st.binary(max_size=40) | RESOURCES.flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])))
def test_any_bytes_are_resources_or_are_refused_in_one_way(text: bytes) -> None:
    problem = None
    try:
        oci.decode(text, "/resources")
    except Problem as refusal:
        problem = refusal
    if problem is not None:
        (at,) = problem.at
        assert problem.code is Code.INVALID_RESOURCES
        assert at.pointer.startswith("/resources")


def _stated(text: bytes, outer: str, inner: str) -> int:
    """A number as it is written; 0 where none is."""
    return int((msgspec.json.decode(text).get(outer) or {}).get(inner) or 0)


def _hugepages(*texts: bytes) -> dict[str, int]:
    """Entry by entry, text by text: the last one for a size wins."""
    sizes: dict[str, int] = {}
    for text in texts:
        for entry in msgspec.json.decode(text).get("hugepageLimits") or []:
            sizes[entry["pageSize"]] = entry.get("limit") or 0
    return sizes


@given(RESOURCES, RESOURCES)
def test_an_update_is_always_taken_and_wins_where_it_states_something(old: bytes, update: bytes) -> None:
    merged, before, stated = oci.decode(oci.merge(old, update)), oci.decode(old), oci.decode(update)
    limit = _stated(update, "memory", "limit") or _stated(old, "memory", "limit")
    assert merged.quota == (stated.quota or before.quota)
    assert merged.period == (_stated(update, "cpu", "period") or before.period)
    assert merged.shares == (stated.shares or before.shares)
    assert merged.cpus == (stated.cpus or before.cpus)
    assert merged.memory == max(limit, 0)
    assert merged.hugepages == sum(_hugepages(old, update).values())


@given(RESOURCES, RESOURCES)
def test_an_update_said_twice_says_no_more(old: bytes, update: bytes) -> None:
    once = oci.merge(old, update)
    assert oci.same(oci.merge(once, update), once)


@given(RESOURCES)
def test_an_update_with_the_present_values_or_none_changes_nothing(text: bytes) -> None:
    assert oci.decode(oci.merge(text, text)) == oci.decode(text)
    assert oci.same(oci.merge(text, b"{}"), text)


@given(RESOURCES, RESOURCES)
def test_members_that_are_not_known_are_kept(old: bytes, update: bytes) -> None:
    before, stated, merged = (msgspec.json.decode(text) for text in (old, update, oci.merge(old, update)))
    for member in ("x", "y"):
        assert merged.get(member) == _overlaid(before.get(member), stated.get(member))


def _overlaid(old: Any, update: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(old, dict) and isinstance(update, dict):
        stated = {key: value for key, value in update.items() if value is not None}  # null states nothing
        return {key: _overlaid(old.get(key), stated.get(key)) for key in old | stated}
    return old if update is None else update


@given(RESOURCES, RESOURCES)
def test_sameness_does_not_depend_on_spaces_or_on_which_is_first(text: bytes, other: bytes) -> None:
    assert oci.same(text, msgspec.json.format(text, indent=3))
    assert oci.same(text, other) is oci.same(other, text)
