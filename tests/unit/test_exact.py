"""Decimal text to fractions and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_resmgr.exact import PLACES, decimal_text, exact


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(3), "3"),
        (Fraction(1, 5), "0.2"),
        (Fraction(-1, 8), "-0.125"),
        (Fraction(12345, 100), "123.45"),
        (Fraction(1, 10**PLACES), "0." + "0" * (PLACES - 1) + "1"),
    ],
)
def test_decimal_text(number: Fraction, text: str) -> None:
    assert decimal_text(number) == text


def test_a_number_without_a_decimal_text() -> None:
    with pytest.raises(ValueError, match="1/3 has no decimal text"):
        decimal_text(Fraction(1, 3))


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**18), max_value=10**18, places=9))
def test_there_and_back(number: object) -> None:
    assert exact(decimal_text(exact(str(number)))) == exact(str(number))
