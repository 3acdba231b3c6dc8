"""Decimal text as exact fractions: 0.1 is 1/10, not the binary number nearest to it (SPEC 1)."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction

PLACES = 1000
"""Decimal places of one number. The exact value of ``1e-999999999`` would fill the memory."""

_HUGE = 18


def exact(text: str) -> Fraction:
    """The number that *text* says, with or without an exponent.

    A magnitude of 10^19 or more becomes 10^19: every bound of this program is far below it. :class:`ValueError` where
    *text* is no number, not finite, or has more than :data:`PLACES` decimal places.
    """
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise ValueError("it is not a number") from error
    if not number.is_finite():
        raise ValueError("it is not finite")
    if number and number.adjusted() > _HUGE:
        return Fraction(10 ** (_HUGE + 1)) * (-1 if number < 0 else 1)
    exponent = number.as_tuple().exponent
    if number and isinstance(exponent, int) and exponent < -PLACES:
        raise ValueError(f"it has more than {PLACES} decimal places")
    return Fraction(number) if number else Fraction(0)


def decimal_text(number: Fraction) -> str:
    """The inverse of :func:`exact`: *number* in decimal digits, of which it must have finitely many."""
    places = 0
    while 10**places % number.denominator:
        if places == PLACES:
            raise ValueError(f"{number} has no decimal text of at most {PLACES} places")
        places += 1
    digits = f"{abs(number.numerator) * (10**places // number.denominator):0{places + 1}d}"
    whole, rest = digits[: len(digits) - places], digits[len(digits) - places :]
    return ("-" if number < 0 else "") + whole + (f".{rest}" if rest else "")
