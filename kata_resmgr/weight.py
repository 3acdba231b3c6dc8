"""cgroup v2 ``cpu.weight`` and cgroup v1 ``cpu.shares``: there, back, and from Kubernetes' milliCPU (SPEC 11).

Many shares have the same weight, so a weight names a *range* of shares. Who needs the shares again must keep them
beside the weight. Imports little: a command that must start fast uses it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from enum import StrEnum
from typing import NamedTuple

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


class Range(NamedTuple):
    """From *min* to *max*, both included; None: no upper end."""

    min: int
    max: int | None


class Weighed(NamedTuple):
    """The weight of some shares, and the milliCPU where the shares were made from them. None: unset."""

    shares: int
    milli_cpu: int | None
    cpu_weight: int | None
    formula: Formula

    def json(self) -> dict[str, object]:
        """As the command prints it (API.md)."""
        return {
            "shares": self.shares,
            "milliCpu": self.milli_cpu,
            "cpuWeight": self.cpu_weight,
            "formula": self.formula.value,
        }


class Unweighed(NamedTuple):
    """The shares and the milliCPU that one weight may have come from."""

    cpu_weight: int
    shares: Range
    milli_cpu: Range
    formula: Formula

    def json(self) -> dict[str, object]:
        """As the command prints it (API.md)."""
        return {
            "cpuWeight": self.cpu_weight,
            "shares": self.shares._asdict(),
            "milliCpu": self.milli_cpu._asdict(),
            "formula": self.formula.value,
        }


def weigh(shares: int, formula: Formula = Formula.QUADRATIC) -> Weighed:
    """The weight of *shares* (0 or more)."""
    return Weighed(shares, None, cpu_weight(shares, formula), formula)


def weigh_milli_cpu(milli_cpu: int, formula: Formula = Formula.QUADRATIC) -> Weighed:
    """The weight that a request of *milli_cpu* (0 or more) has under a kubelet."""
    return weigh(shares_of(milli_cpu), formula)._replace(milli_cpu=milli_cpu)


def unweigh(weight: int, formula: Formula = Formula.QUADRATIC) -> Unweighed:
    """Where *weight* (1..10000) may have come from: by both formulas every weight is some shares' and milliCPU's."""
    lowest = 1 if weight == 1 else _least_shares(weight, formula)
    milli_cpu = 0 if weight == 1 else _least_milli_cpu(lowest)
    if weight == MAX_WEIGHT:
        return Unweighed(weight, Range(lowest, None), Range(milli_cpu, None), formula)
    above = _least_shares(weight + 1, formula)
    return Unweighed(weight, Range(lowest, above - 1), Range(milli_cpu, _least_milli_cpu(above) - 1), formula)


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


def answer(value: int, unit: Unit, formula: Formula) -> Weighed | Unweighed:
    """What is to be told about *value*, which :func:`parse` has checked."""
    match unit:
        case Unit.SHARES:
            return weigh(value, formula)
        case Unit.MILLI_CPU:
            return weigh_milli_cpu(value, formula)
        case Unit.WEIGHT:
            return unweigh(value, formula)
