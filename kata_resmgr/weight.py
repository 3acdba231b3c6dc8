"""cgroup v2 ``cpu.weight`` from cgroup v1 shares, as runc >= 1.3.2 and crun >= 1.23 count it (SPEC 11)."""

from __future__ import annotations

from math import ceil, log2


def cpu_weight(shares: int) -> int | None:
    """The weight (1..10000) of these shares; None for 0, which is unset.

    ``ceil(10^((L^2 + 125 L)/612 - 7/34))`` with L = log2(shares): 2 is 1, 1024 is 100, 262144 is 10000.
    """
    if shares == 0:
        return None
    if shares <= 2:
        return 1
    if shares >= 262144:
        return 10000
    exponent = log2(shares)
    return ceil(10 ** ((exponent * exponent + 125 * exponent) / 612 - 7 / 34))
