"""How soon a VM is looked at that goes on saying that something changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kata_resmgr.heed import FIRST, FREE, LONGEST, Heed


def looks(heed: Heed, seconds: float, *, found: bool = False, began: float = 0.0) -> int:
    """How many looks a VM causes that never stops asking for one; each takes a millisecond."""
    now, count = began, 0
    while now < began + seconds:
        now = max(now, heed.not_before) + 0.001
        heed.looked(now, found=found)
        count += 1
    return count


def test_what_changes_each_time_is_looked_at_each_time() -> None:
    assert looks(Heed(), 1, found=True) >= 999


def test_what_never_changes_is_looked_at_once_a_second_in_the_end() -> None:
    heed = Heed()
    assert looks(heed, 10) < FREE + 20
    assert looks(heed, 100, began=10) <= 101


def test_a_few_for_nothing_are_free_and_the_next_waits_a_little() -> None:
    heed = Heed()
    for number in range(1, FREE):
        heed.looked(1.0, found=False)
        assert heed.not_before == 0.0, number
    heed.looked(1.0, found=False)
    assert heed.not_before == 1.0 + FIRST


def test_a_find_ends_the_waiting_and_so_does_quiet_and_who_may_ask() -> None:
    heeds = [Heed(), Heed(), Heed()]
    for heed in heeds:
        looks(heed, 10)
        assert heed.not_before > 10
    heeds[0].looked(10.5, found=True)
    heeds[1].looked(20.0, found=False)
    heeds[2].end()
    assert [heed.not_before for heed in heeds] == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans())))
def test_no_look_waits_longer_than_the_longest(steps: list[tuple[float, bool]]) -> None:
    heed, now = Heed(), 0.0
    for passed, found in steps:
        now += passed
        heed.looked(now, found=found)
        assert heed.not_before <= now + LONGEST
