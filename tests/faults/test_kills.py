"""A few of the kills of ``make faults``, each time, on the fakes on the wire; and the oracle itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import Run, broken
from tests.faults.machines import Kind
from tests.faults.model import Change, Resources, Tables, Wrong, desired_memory, desired_vcpus, merged

FAKES = (Kind.QMP, Kind.CLH)


def one(quota: int) -> Resources:
    return {"cpu": {"quota": quota, "period": 100_000}}


def test_killed_a_few_times_nothing_answered_is_lost(short_tmp: Path) -> None:
    run = Run(short_tmp, FAKES)
    run.kill(5)
    total = run.total()
    assert total.kills >= 5
    assert total.answers  # how many depends on the machine


def test_a_daemon_that_answers_before_it_commits_is_caught(short_tmp: Path) -> None:
    with pytest.raises(Wrong, match="under way"):
        Run(short_tmp, FAKES, broken("late")).kill(60)


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ({"a": one(1)}, True),  # none is there
        ({"a": one(1), "b": one(2), "c": one(3)}, True),  # both are
        ({"a": one(1), "b": one(2)}, True),
        ({}, False),  # what was answered is lost
        ({"a": one(1), "b": one(9)}, False),  # nobody asked for that
        ({"a": one(1), "d": one(4)}, False),  # one half of a change
    ],
)
def test_what_may_be_found_after_a_kill(found: dict[str, Resources], fits: bool) -> None:
    tables = Tables()
    changes: list[Change] = [{"a": one(1)}, {"b": one(2)}, {"c": one(3)}, {"d": one(4), "e": one(5)}]
    for change in changes:
        tables.begin(change)
    tables.succeed(changes[0])
    if fits:
        assert tables.settle(found) == len(found) - 1
        assert tables.answered == found
    else:
        with pytest.raises(Wrong):
            tables.settle(found)


def test_what_a_table_asks_for() -> None:
    table = {"a": one(10_000) | {"memory": {"limit": 1}}, "b": one(90_001)}
    assert (desired_vcpus(table, 8), desired_vcpus(table, 2), desired_vcpus({}, 8)) == (3, 2, 1)
    assert (desired_memory(table, 5), desired_memory({}, 5)) == (5 + (128 << 20), 5)
    assert merged(one(1), {"cpu": {"quota": 2}, "note": {"of": 2}}) == one(2) | {"note": {"of": 2}}
