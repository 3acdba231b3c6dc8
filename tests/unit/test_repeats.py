"""What repeats itself: heard at first, then summed up over longer and longer periods."""

from __future__ import annotations

from kata_resmgr.repeats import FIRST, KINDS, LONGEST, Repeats


def test_a_hundred_times_at_once() -> None:
    repeats: Repeats[str] = Repeats()
    assert [repeats.hears("no", 0.0) for _ in range(100)].count(True) == FIRST
    assert repeats.over(59.9) == []
    assert repeats.over(60.0) == [("no", 95, 60.0)]
    assert repeats.over(60.0) == []


def test_what_is_said_once_and_again_much_later_is_heard() -> None:
    repeats: Repeats[str] = Repeats()
    for day in range(10):
        now = day * 86400.0
        repeats.over(now)
        assert repeats.hears("hello", now)


def test_a_fault_of_a_day_is_told_about_once_an_hour() -> None:
    repeats: Repeats[str] = Repeats()
    heard = dropped = 0
    for minute in range(24 * 60):
        dropped += sum(times for _, times, _ in repeats.over(60.0 * minute))
        heard += repeats.hears("no", 60.0 * minute)
    assert 24 <= heard <= 24 + 10
    dropped += sum(times for _, times, _ in repeats.over(24 * 3600 + LONGEST))
    assert heard + dropped == 24 * 60


def test_others_are_heard_meanwhile() -> None:
    repeats: Repeats[str] = Repeats()
    for _ in range(100):
        repeats.hears("no", 0.0)
    assert repeats.hears("yes", 0.0)


def test_however_many_things_are_said_few_are_remembered() -> None:
    repeats: Repeats[int] = Repeats()
    for _ in range(FIRST + 2):
        repeats.hears(-1, 0.0)
    told = []
    for what in range(3 * KINDS):
        told += repeats.over(1.0)
        repeats.hears(what, 1.0)
    assert told == [(-1, 2, 60.0)]
    assert len(repeats._periods) <= KINDS + 1
