"""Linux lists by value: SPEC 4."""

from __future__ import annotations

import pytest

from kata_resmgr import cpuset


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", set()),
        (" \t\n\v\f\r", set()),
        ("0", {0}),
        ("0-3,7", {0, 1, 2, 3, 7}),
        ("5-5", {5}),
        ("7,0-1", {0, 1, 7}),
        ("1,1,1-2", {1, 2}),
        ("0-4,2-6", set(range(7))),
        ("007-0000010", {7, 8, 9, 10}),
        ("  0-1\n", {0, 1}),
        ("8191", {8191}),
        ("0-8191", set(range(8192))),
        ("0" * 5000 + "1", {1}),
    ],
)
def test_a_list_names_its_ids(text: str, ids: set[int]) -> None:
    assert cpuset.parse(text) == ids


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "0,",
        ",0",
        "0,,1",
        "0 ,1",
        "0, 1",
        "0 - 1",
        "0\n,1",
        "-1",
        "1-",
        "-",
        "1-2-3",
        "+1",
        "0x1",
        "1.0",
        "1_0",
        "a",
        "all",
        "!0",
        "^1",
        "0-31:2/4",
        "٣",
        "1\u00a0",
        "\u2003" + "1",
        "0\x00",
    ],
)
def test_anything_else_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of ids like 0-3,7") as refusal:
        cpuset.parse(text)
    assert str(refusal.value).startswith(f'"{text}"')


@pytest.mark.parametrize("text", ["8192", "0-8192", "8192-8193", "10000", "9" * 5000, "1,99999999999999999999"])
def test_an_id_above_the_kernels_is_refused_with_the_bound(text: str) -> None:
    with pytest.raises(ValueError, match="at most 8191 is allowed"):
        cpuset.parse(text)


def test_a_range_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match=r'^"0,3-1" has a range that runs backwards: "3-1"$'):
        cpuset.parse("0,3-1")


def test_a_refusal_stays_short_whatever_the_text() -> None:
    with pytest.raises(ValueError, match="is not a list") as refusal:
        cpuset.parse("x" * 1_000_000)
    assert len(str(refusal.value)) < 200


def test_a_mebibyte_of_overlapping_ranges_costs_no_more_than_its_text() -> None:
    ranges = "0-8191," * (1024 * 1024 // 7)
    assert cpuset.parse(ranges + "0") == set(range(8192))
