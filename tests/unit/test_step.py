"""The next step, by value: growing, shrinking, repeating, waiting, and why a surplus is still there (SPEC 7)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from hypervisors.base import Plugged, Vcpu
from kata_resmgr.aim import Grace
from kata_resmgr.removal import Removal, pause
from kata_resmgr.step import (
    AddVcpus,
    Idle,
    RemoveVcpus,
    Situation,
    Step,
    effective,
    leavable,
    next_step,
    surplus_reason,
)

NOW = 1000.0
NEVER = float("inf")
FRESH = Removal(first=NOW, last=NOW)
"""Sent just now: due again at NOW + 1."""
REPEATED = Removal(first=NOW - 3, last=NOW - 2, attempts=2)
"""Sent twice: due again now."""


def _plugged(boot: int, ours: int) -> Plugged:
    """Boot vCPUs b0, b1, ..., then ours: v0, v1, ..."""
    return Plugged(
        vcpus=(
            *(Vcpu(f"b{number}", ours=False) for number in range(boot)),
            *(Vcpu(f"v{number}", ours=True) for number in range(ours)),
        ),
        memory=0,
    )


def _situation(
    *,
    desired: int,
    boot: int = 1,
    ours: int = 0,
    max_vcpus: int = 8,
    pending: Mapping[str, Removal] | None = None,
    keep: int = 0,
    keep_until: float | None = None,
    grow_from: float = 0.0,
    removable: bool = True,
    growable: bool = True,
) -> Situation:
    return Situation(
        desired=desired,
        plugged=_plugged(boot, ours),
        max_vcpus=max_vcpus,
        pending=pending or {},
        keep=keep,
        keep_until=keep_until,
        grow_from=grow_from,
        removable=removable,
        growable=growable,
    )


# Growing


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        (_situation(desired=1), Idle(None)),
        (_situation(desired=3), AddVcpus(2)),
        (_situation(desired=8), AddVcpus(7)),
        (_situation(desired=4, ours=2), AddVcpus(1)),
        # Other free slots serve a grow while a removal is under way
        (_situation(desired=4, ours=3, pending={"v2": FRESH}), AddVcpus(1)),
        (_situation(desired=4, ours=3, pending={"v2": REPEATED}), AddVcpus(1)),
        # ... as far as there are any; the rest waits for the removal's end
        (_situation(desired=4, ours=3, max_vcpus=5, pending={"v1": FRESH, "v2": FRESH}), AddVcpus(1)),
        (_situation(desired=4, ours=3, max_vcpus=4, pending={"v2": FRESH}), Idle(NOW + 1)),
        (_situation(desired=4, ours=3, max_vcpus=4, pending={"v2": REPEATED}), RemoveVcpus(("v2",))),
        # After a refusal there is a pause
        (_situation(desired=2, grow_from=NOW), AddVcpus(1)),
        (_situation(desired=2, grow_from=NOW + 0.1), Idle(NOW + 0.1)),
        (_situation(desired=2, grow_from=NEVER), Idle(None)),
        (_situation(desired=2, ours=1, max_vcpus=2, pending={"v0": FRESH}, grow_from=NOW + 0.1), Idle(NOW + 1)),
        # Under TCG, after a removal
        (_situation(desired=2, growable=False), Idle(None)),
    ],
)
def test_growing(situation: Situation, step: Step) -> None:
    assert next_step(NOW, situation) == step


# Shrinking


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        # The last plugged first, and as many as are surplus
        (_situation(desired=3, ours=3), RemoveVcpus(("v2",))),
        (_situation(desired=2, ours=3), RemoveVcpus(("v2", "v1"))),
        (_situation(desired=1, ours=3), RemoveVcpus(("v2", "v1", "v0"))),
        # What is being removed counts, and is not asked again before it is due
        (_situation(desired=2, ours=3, pending={"v2": FRESH}), RemoveVcpus(("v1",))),
        (_situation(desired=2, ours=3, pending={"v1": FRESH}), RemoveVcpus(("v2",))),
        (_situation(desired=2, ours=3, pending={"v2": FRESH, "v1": FRESH}), Idle(NOW + 1)),
        (_situation(desired=2, ours=3, pending={"v2": REPEATED}), RemoveVcpus(("v1", "v2"))),
        (_situation(desired=3, ours=3, pending={"v2": REPEATED}), RemoveVcpus(("v2",))),
        # A lower target must have stood for a while
        (_situation(desired=2, ours=3, keep=4, keep_until=NOW + 5), Idle(NOW + 5)),
        (_situation(desired=2, ours=3, keep=4, keep_until=NEVER), Idle(None)),
        (_situation(desired=1, ours=3, keep=3, keep_until=NOW + 5), RemoveVcpus(("v2",))),
        (_situation(desired=1, ours=3, keep=3, keep_until=NOW + 5, pending={"v2": FRESH}), Idle(NOW + 1)),
        (_situation(desired=1, ours=3, keep=3, keep_until=NOW + 0.5, pending={"v2": FRESH}), Idle(NOW + 0.5)),
        (_situation(desired=2, ours=1, keep=4, keep_until=NOW + 5), Idle(None)),
        # What is not ours is never asked to leave
        (_situation(desired=1, boot=3), Idle(None)),
        (_situation(desired=1, boot=3, ours=1), RemoveVcpus(("v0",))),
        (_situation(desired=1, boot=3, ours=1, pending={"v0": FRESH}), Idle(NOW + 1)),
        # Under TCG nothing is
        (_situation(desired=1, ours=3, removable=False), Idle(None)),
        (_situation(desired=1, ours=3, removable=False, pending={"v2": REPEATED}), Idle(None)),
        (_situation(desired=1, ours=3, removable=False, keep=4, keep_until=NOW + 5), Idle(None)),
    ],
)
def test_shrinking(situation: Situation, step: Step) -> None:
    assert next_step(NOW, situation) == step


def test_a_latched_removal_and_then_a_grow_uses_the_free_slots() -> None:
    """4 -> 2 with a guest that has not answered yet, then 4 again: never more than the machine has."""
    shrinking = _situation(desired=2, boot=2, ours=2)
    assert next_step(NOW, shrinking) == RemoveVcpus(("v1", "v0"))
    latched = {"v1": FRESH, "v0": FRESH}
    assert next_step(NOW, _situation(desired=4, boot=2, ours=2, pending=latched)) == AddVcpus(2)
    full = _situation(desired=4, boot=2, ours=2, max_vcpus=4, pending=latched)
    assert next_step(NOW, full) == Idle(NOW + 1)
    assert next_step(NOW + 1, full) == RemoveVcpus(("v1", "v0"))
    one_gone = _situation(desired=4, boot=2, ours=1, max_vcpus=4, pending={"v0": FRESH})
    assert next_step(NOW + 1, one_gone) == AddVcpus(1)


# Repeating


def test_a_removal_is_repeated_after_longer_and_longer_pauses() -> None:
    removal = Removal(first=NOW, last=NOW)
    sent = [NOW]
    for _ in range(7):
        situation = _situation(desired=1, ours=1, pending={"v0": removal})
        assert next_step(removal.due - 0.001, situation) == Idle(removal.due)
        assert next_step(removal.due, situation) == RemoveVcpus(("v0",))
        removal = removal.again(removal.due)
        sent.append(removal.last)
    assert [later - earlier for earlier, later in pairwise(sent)] == [1, 2, 5, 15, 60, 60, 60]
    assert (removal.first, removal.attempts) == (NOW, 8)


def test_pauses() -> None:
    assert [pause(attempts) for attempts in (1, 2, 3, 4, 5, 6, 1000)] == [1, 2, 5, 15, 60, 60, 60]


def test_an_urgent_removal_is_repeated_at_once_and_then_in_its_order() -> None:
    urgent = Removal(first=NOW - 100, last=NOW - 10, attempts=5, urgent=True)
    assert next_step(NOW, _situation(desired=1, ours=1, pending={"v0": urgent})) == RemoveVcpus(("v0",))
    again = urgent.again(NOW)
    assert (again.urgent, again.attempts, again.due) == (False, 6, NOW + 60)


def test_a_refusal_holds_until_the_next_attempt_is_silent_too() -> None:
    removal = FRESH
    assert not removal.refused
    removal = removal.told_no("the guest is busy")
    assert removal.refused
    removal = removal.again(NOW + 1)
    assert removal.refused  # not answered yet: what was last said counts
    removal = removal.again(NOW + 3)
    assert not removal.refused
    assert removal.told_no("still busy").refused


# Grace


def test_a_lower_target_counts_after_the_delay() -> None:
    grace = Grace()
    grace.note(4, 2, until=5.0)
    assert (grace.highest(0.0), grace.ends()) == (4, 5.0)
    assert (grace.highest(4.999), grace.ends()) == (4, 5.0)
    assert (grace.highest(5.0), grace.ends()) == (0, None)


def test_each_lower_target_stands_for_the_whole_delay() -> None:
    grace = Grace()
    for at, (before, after) in enumerate([(8, 6), (6, 4), (4, 2)]):
        grace.note(before, after, until=at + 5.0)
    assert [grace.highest(now) for now in (2.0, 5.0, 6.0, 7.0)] == [8, 6, 4, 0]


def test_a_target_that_rises_again_drops_what_it_covers() -> None:
    grace = Grace()
    grace.note(4, 2, until=5.0)
    grace.note(2, 4, until=6.0)
    assert grace.ends() is None
    grace.note(4, 2, until=8.0)  # the delay begins anew
    assert (grace.highest(7.9), grace.highest(8.0)) == (4, 0)


def test_a_target_that_rises_a_little_keeps_what_was_higher() -> None:
    grace = Grace()
    grace.note(8, 2, until=5.0)
    grace.note(2, 4, until=6.0)
    assert (grace.highest(1.0), grace.ends()) == (8, 5.0)
    grace.note(4, 3, until=7.0)
    assert [grace.highest(now) for now in (4.9, 5.0, 6.9, 7.0)] == [8, 4, 4, 0]


def test_an_equal_level_counts_until_it_was_last_desired() -> None:
    grace = Grace()
    grace.note(4, 2, until=5.0)
    grace.note(2, 3, until=6.0)
    grace.note(3, 2, until=7.0)
    grace.note(2, 4, until=8.0)
    grace.note(4, 1, until=9.0)
    assert (grace.highest(8.9), grace.ends()) == (4, 9.0)


def test_grace_can_be_ended() -> None:
    grace = Grace()
    grace.note(4, 2, until=5.0)
    grace.end()
    assert (grace.highest(0.0), grace.ends()) == (0, None)


def test_a_delay_of_nothing_keeps_nothing() -> None:
    grace = Grace()
    grace.note(4, 2, until=1.0)
    assert grace.highest(1.0) == 0


# What is told

SILENT = Removal(first=NOW - 3, last=NOW - 1, attempts=2)
REFUSED = FRESH.told_no("busy")


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (_situation(desired=4, ours=3), None),
        (_situation(desired=4, ours=3, pending={"v2": SILENT}), None),
        (_situation(desired=5, ours=3), None),
        (_situation(desired=2, ours=3, keep=4, keep_until=NOW + 1), "grace"),
        (_situation(desired=2, ours=3), None),
        (_situation(desired=2, ours=3, keep=4, keep_until=NOW), None),
        (_situation(desired=3, ours=3, pending={"v2": FRESH}), None),
        (_situation(desired=2, ours=3, pending={"v2": FRESH}, keep=3, keep_until=NOW + 1), None),
        (_situation(desired=3, ours=3, pending={"v2": SILENT}), "guest-silent"),
        (_situation(desired=2, ours=3, pending={"v1": FRESH, "v2": SILENT}), "guest-silent"),
        (_situation(desired=3, ours=3, pending={"v2": REFUSED}), "guest-refused"),
        (_situation(desired=2, ours=3, pending={"v1": SILENT, "v2": REFUSED}), "guest-refused"),
        (_situation(desired=3, ours=3, pending={"v2": REFUSED.again(NOW).again(NOW)}), "guest-silent"),
        (_situation(desired=1, boot=3), "boot-floor"),
        (_situation(desired=1, boot=3, keep=3, keep_until=NOW + 1), "boot-floor"),
        (_situation(desired=1, boot=3, removable=False), "boot-floor"),
        (_situation(desired=1, boot=2, ours=1, pending={"v0": FRESH}), None),
        (_situation(desired=1, ours=2, removable=False), "tcg"),
        (_situation(desired=1, ours=2, removable=False, keep=3, keep_until=NOW + 1), "tcg"),
    ],
)
def test_a_surplus_has_one_reason(situation: Situation, reason: str | None) -> None:
    assert surplus_reason(NOW, situation) == reason


@pytest.mark.parametrize(
    ("situation", "answer"),
    [
        (_situation(desired=2, ours=2), True),
        (_situation(desired=2, ours=2, keep=3, keep_until=NOW + 1), True),
        (_situation(desired=3, ours=2), False),
        (_situation(desired=2, ours=2, pending={"v1": FRESH}), False),
        (_situation(desired=1, ours=2, pending={"v1": FRESH}), True),
        (_situation(desired=1, boot=3), False),
        (_situation(desired=1, boot=3, ours=1, pending={"v0": FRESH}), False),
        (_situation(desired=2, ours=2, removable=False), False),
    ],
)
def test_leavable_is_what_could_still_be_removed(situation: Situation, answer: bool) -> None:
    assert leavable(situation) is answer


def test_effective_is_what_will_stay() -> None:
    assert effective(_plugged(1, 3), {"v2": FRESH, "v1": SILENT}) == 2
