"""Conditions: at most one of each kind and reason, each with the time since when it holds (SPEC 13)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest

from kata_resmgr.conditions import Conditions, Kind, timestamp
from kata_resmgr.view import Condition


@pytest.fixture
def conditions() -> Conditions:
    """On a clock that shows 0, 1, 2, ... one reading after the other."""
    readings: Iterator[str] = map(str, count())
    return Conditions(now=lambda: next(readings))


def test_what_is_held_is_listed_oldest_first(conditions: Conditions) -> None:
    conditions.hold(Kind.CLAMPED, "demand", "cut")
    conditions.hold(Kind.SURPLUS, "tcg", "too many")
    assert conditions.listed() == [
        Condition("Clamped", "demand", "cut", "0"),
        Condition("Surplus", "tcg", "too many", "1"),
    ]


def test_another_message_does_not_change_since_when(conditions: Conditions) -> None:
    conditions.hold(Kind.CLAMPED, "demand", "9 vCPUs")
    conditions.hold(Kind.CLAMPED, "boot", "10 vCPUs")
    conditions.hold(Kind.CLAMPED, "demand", "11 vCPUs")
    assert [(held.reason, held.message, held.since) for held in conditions.listed()] == [
        ("demand", "11 vCPUs", "0"),
        ("boot", "10 vCPUs", "1"),
    ]


def test_what_is_over_and_comes_again_is_new(conditions: Conditions) -> None:
    conditions.hold(Kind.HELD, "hold", "held")
    conditions.clear(Kind.HELD, "hold")
    assert conditions.listed() == []
    conditions.clear(Kind.HELD, "hold")
    conditions.hold(Kind.HELD, "hold", "held")
    assert [held.since for held in conditions.listed()] == ["1"]


def test_clearing_one_reason_leaves_the_others(conditions: Conditions) -> None:
    conditions.hold(Kind.CLAMPED, "boot", "cut")
    conditions.hold(Kind.CLAMPED, "demand", "cut")
    conditions.clear(Kind.CLAMPED, "demand")
    assert [held.reason for held in conditions.listed()] == ["boot"]


def test_only_one_reason_of_a_kind(conditions: Conditions) -> None:
    conditions.hold(Kind.HELD, "hold", "held")
    conditions.only(Kind.SURPLUS, "guest-silent", "1 too many")
    conditions.only(Kind.SURPLUS, "guest-refused", "1 too many")
    conditions.only(Kind.SURPLUS, "guest-refused", "2 too many")
    assert conditions.listed() == [
        Condition("Held", "hold", "held", "0"),
        Condition("Surplus", "guest-refused", "2 too many", "2"),
    ]
    conditions.only(Kind.SURPLUS, None)
    assert [held.type for held in conditions.listed()] == ["Held"]


def test_a_message_is_one_line_of_at_most_256_characters(conditions: Conditions) -> None:
    conditions.hold(Kind.GROW_FAILED, "refused", "no\nway\t\x1b[31m" + "x" * 1000)
    (held,) = conditions.listed()
    assert held.message.startswith("no way [31mxxx")
    assert len(held.message) == 256
    assert held.message.endswith("…")


def test_the_time_is_utc_in_milliseconds() -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", timestamp())
