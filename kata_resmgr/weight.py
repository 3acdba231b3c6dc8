"""cgroup v2 ``cpu.weight`` and cgroup v1 ``cpu.shares``: there, back, and from Kubernetes' milliCPU (SPEC 11).

Many shares have the same weight, so a weight names a *range* of shares. Who needs the shares again must keep them
beside the weight. This module imports little, for the sake of the command that must start fast.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from enum import StrEnum

MIN_SHARES = 2
MAX_SHARES = 262144
"""The kernel's bounds of ``cpu.shares``; what is outside counts as the bound."""
MAX_WEIGHT = 10000


class Formula(StrEnum):
    """How shares become a weight. A reader of a weight must know which formula wrote it."""

    QUADRATIC = "quadratic"
    """runc >= 1.3.2, crun >= 1.23: 1024 shares are 100, the kernel's default weight."""
    LINEAR = "linear"
    """What they did before: 1024 shares are 39."""


def cpu_weight(shares: int, formula: Formula = Formula.QUADRATIC) -> int | None:
    """The weight (1..10000) of *shares* (0 or more); None for 0, which is unset."""
    return None if shares == 0 else _FUNCTIONS[formula](min(max(shares, MIN_SHARES), MAX_SHARES))


def _quadratic(shares: int) -> int:
    """``ceil(10^((L^2 + 125 L)/612 - 7/34))`` with L = log2(shares): 2 is 1, 1024 is 100, 262144 is 10000."""
    exponent = math.log2(shares)
    # Over one denominator (7/34 is 126/612) the powers for 2, 1024 and 262144 are exactly 0, 2 and 4. No other result
    # comes nearer to a whole number than 1e-6, and a float's error is far below that.
    return math.ceil(math.pow(10, (exponent * exponent + 125 * exponent - 126) / 612))


def _linear(shares: int) -> int:
    return 1 + (shares - MIN_SHARES) * (MAX_WEIGHT - 1) // (MAX_SHARES - MIN_SHARES)


_FUNCTIONS = {Formula.QUADRATIC: _quadratic, Formula.LINEAR: _linear}


def shares_of(milli_cpu: int) -> int:
    """The shares that a kubelet gives to a request of *milli_cpu* (0 or more)."""
    return min(max(milli_cpu * 1024 // 1000, MIN_SHARES), MAX_SHARES)


Range = tuple[int, int | None]
"""The least and the most, both included; None: no upper end."""


def shares_range(weight: int, formula: Formula = Formula.QUADRATIC) -> Range:
    """The shares (1 or more) that have *weight* (1..10000); by both formulas there are some for each."""
    least = 1 if weight == 1 else _least_shares(weight, formula)
    return least, None if weight == MAX_WEIGHT else _least_shares(weight + 1, formula) - 1


def milli_cpu_range(weight: int, formula: Formula = Formula.QUADRATIC) -> Range:
    """The requests to which a kubelet gives *weight* (1..10000), by way of :func:`shares_of`."""
    least = 0 if weight == 1 else _least_milli_cpu(_least_shares(weight, formula))
    return least, None if weight == MAX_WEIGHT else _least_milli_cpu(_least_shares(weight + 1, formula)) - 1


def _least_shares(weight: int, formula: Formula) -> int:
    return bisect_left(range(MAX_SHARES + 1), weight, lo=MIN_SHARES, key=_FUNCTIONS[formula])


def _least_milli_cpu(shares: int) -> int:
    """The least milliCPU with at least these shares (3 or more), by :func:`shares_of`."""
    return -(-shares * 1000 // 1024)


class Unit(StrEnum):
    """What a number given as text is."""

    SHARES = "shares"
    MILLI_CPU = "millicpu"
    WEIGHT = "weight"


_BOUNDS = {
    Unit.SHARES: (0, (1 << 64) - 1, "CPU shares", "1024 are one CPU, 0 is unset"),
    Unit.MILLI_CPU: (0, (1 << 63) - 1, "milliCPU", "1000 are one CPU"),
    Unit.WEIGHT: (1, MAX_WEIGHT, "a CPU weight", "100 is the default; unset has no weight"),
}


def parse(text: str, unit: Unit) -> int:
    """The number that *text* says: ASCII digits, within what *unit* can hold.

    OCI's shares have 64 bits without a sign, Kubernetes' quantities 64 with one. Raises :class:`ValueError` in one line
    with the value, the bound and what to give instead.
    """
    low, high, name, hint = _BOUNDS[unit]
    if text.isascii() and text.isdecimal():
        digits = text.lstrip("0") or "0"
        if len(digits) <= len(str(high)) and low <= int(digits) <= high:
            return int(digits)
    shown = ascii(text if len(text) <= 40 else text[:40] + "...")
    raise ValueError(f"{shown}: {name} must be a whole number from {low} to {high} ({hint})")
