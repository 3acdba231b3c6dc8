"""Weights both ways and by both formulas, to the last share (SPEC 11)."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path

import pytest

from kata_resmgr.weight import (
    MAX_SHARES,
    MAX_WEIGHT,
    Formula,
    Unit,
    cpu_weight,
    milli_cpu_range,
    parse,
    shares_of,
    shares_range,
)

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "weights.json").read_text())
LINEAR = Formula.LINEAR


@pytest.mark.parametrize(("shares", "weight", "old"), KNOWN["shares"])
def test_shares(shares: int, weight: int | None, old: int) -> None:
    assert cpu_weight(shares) == weight
    # The old code took what is outside 2..262144 as it came; here it counts as the bound.
    expected = None if shares == 0 else min(old, MAX_WEIGHT) if shares > 1 else 1
    assert cpu_weight(shares, LINEAR) == expected


@pytest.mark.parametrize(("shares", "weight"), KNOWN["upstream"])
def test_what_runc_and_crun_assert(shares: int, weight: int | None) -> None:
    assert cpu_weight(shares) == weight


@pytest.mark.parametrize(("milli_cpu", "shares", "weight", "old"), KNOWN["milli_cpu"])
def test_milli_cpu(milli_cpu: int, shares: int, weight: int, old: int) -> None:
    assert shares_of(milli_cpu) == shares
    assert cpu_weight(shares) == weight
    assert cpu_weight(shares, LINEAR) == old


@pytest.mark.parametrize(("weight", "lowest", "highest"), KNOWN["ranges"])
def test_the_shares_of_a_weight(weight: int, lowest: int, highest: int) -> None:
    # Outside 2..262144 shares count as the bound, so the first and the last range are wider.
    widened = (1 if weight == 1 else lowest, None if weight == MAX_WEIGHT else highest)
    assert shares_range(weight) == widened


def test_no_share_is_weighed_wrongly() -> None:
    """Against 28 decimal digits: for each weight, the most shares that still have it."""
    weights: list[int] = []
    with localcontext(prec=28):
        log2 = Decimal(2).ln()
        for weight in range(1, MAX_WEIGHT + 1):
            power = Decimal(weight).log10() + Decimal(7) / 34
            exponent = ((125 * 125 + 4 * 612 * power).sqrt() - 125) / 2
            most = (exponent * log2).exp()
            if abs(most - most.to_integral_value()) < Decimal("1e-18"):
                most = most.to_integral_value()
                assert (weight, int(most)) in [(1, 2), (100, 1024), (10000, 262144)]  # there, both sides are rational
            weights += [weight] * (int(most) - len(weights))
    assert len(weights) == MAX_SHARES
    assert [cpu_weight(shares) for shares in range(1, MAX_SHARES + 1)] == weights


def milli_cpu_weight(milli_cpu: int, formula: Formula) -> int | None:
    return cpu_weight(shares_of(milli_cpu), formula)


@pytest.mark.parametrize("formula", Formula)
@pytest.mark.parametrize(
    ("range_of", "weigh", "first"), [(shares_range, cpu_weight, 1), (milli_cpu_range, milli_cpu_weight, 0)]
)
def test_the_ranges_of_all_weights_leave_no_gap(
    formula: Formula,
    range_of: Callable[[int, Formula], tuple[int, int | None]],
    weigh: Callable[[int, Formula], int | None],
    first: int,
) -> None:
    follows = first
    for weight in range(1, MAX_WEIGHT):
        least, most = range_of(weight, formula)
        assert most is not None
        assert least == follows <= most
        assert weigh(least, formula) == weigh(most, formula) == weight
        follows = most + 1
    assert range_of(MAX_WEIGHT, formula) == (follows, None)
    assert weigh(follows, formula) == MAX_WEIGHT


@pytest.mark.parametrize(
    ("weight", "formula", "shares", "milli_cpu"),
    [
        (1, Formula.QUADRATIC, (1, 2), (0, 2)),
        (17, Formula.QUADRATIC, (95, 102), (93, 100)),
        (100, Formula.QUADRATIC, (1012, 1024), (989, 1000)),
        (10000, Formula.QUADRATIC, (262115, None), (255972, None)),
        (1, LINEAR, (1, 28), (0, 28)),
        (39, LINEAR, (999, 1024), (976, 1000)),
        (10000, LINEAR, (262144, None), (256000, None)),
    ],
)
def test_ranges(
    weight: int, formula: Formula, shares: tuple[int, int | None], milli_cpu: tuple[int, int | None]
) -> None:
    assert shares_range(weight, formula) == shares
    assert milli_cpu_range(weight, formula) == milli_cpu


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("0", Unit.SHARES, 0),
        ("01024", Unit.SHARES, 1024),
        ("0" * 5000 + "7", Unit.SHARES, 7),
        ("18446744073709551615", Unit.SHARES, 2**64 - 1),
        ("9223372036854775807", Unit.MILLI_CPU, 2**63 - 1),
        ("1", Unit.WEIGHT, 1),
        ("10000", Unit.WEIGHT, 10000),
    ],
)
def test_numbers_are_read(text: str, unit: Unit, value: int) -> None:
    assert parse(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit", "bounds"),
    [
        ("-1", Unit.SHARES, "from 0 to 18446744073709551615"),
        ("1.5", Unit.SHARES, "from 0 to 18446744073709551615"),
        ("18446744073709551616", Unit.SHARES, "from 0 to 18446744073709551615"),
        ("1e3", Unit.SHARES, "1024 are one CPU"),
        ("-1", Unit.MILLI_CPU, "from 0 to 9223372036854775807"),
        ("0.1", Unit.MILLI_CPU, "1000 are one CPU"),
        ("9223372036854775808", Unit.MILLI_CPU, "from 0 to 9223372036854775807"),
        ("0", Unit.WEIGHT, "from 1 to 10000"),
        ("10001", Unit.WEIGHT, "from 1 to 10000"),
        ("", Unit.SHARES, "a whole number"),
        (" 1", Unit.SHARES, "a whole number"),
        ("+1", Unit.SHARES, "a whole number"),
        ("1_000", Unit.SHARES, "a whole number"),
        ("0x10", Unit.SHARES, "a whole number"),
        ("\u0661", Unit.SHARES, "a whole number"),
        ("\u00b2", Unit.SHARES, "a whole number"),
    ],
)
def test_other_texts_are_refused(text: str, unit: Unit, bounds: str) -> None:
    with pytest.raises(ValueError, match=bounds) as caught:
        parse(text, unit)
    assert str(caught.value).startswith(ascii(text))


@pytest.mark.parametrize("text", ["9" * 100_000, "1\n" * 5000])
def test_a_refusal_is_one_short_line(text: str) -> None:
    with pytest.raises(ValueError, match="a whole number") as caught:
        parse(text, Unit.SHARES)
    assert len(str(caught.value)) <= 256
    assert "\n" not in str(caught.value)
