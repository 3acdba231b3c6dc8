"""cgroup v2 weights against values computed with 60 decimal digits (SPEC 11)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kata_resmgr.weight import cpu_weight

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "weight.json").read_text())


@pytest.mark.parametrize(("shares", "weight"), KNOWN["weights"])
def test_weight(shares: int, weight: int | None) -> None:
    assert cpu_weight(shares) == weight


@pytest.mark.parametrize(("weight", "lowest", "highest"), KNOWN["ranges"])
def test_a_weight_names_a_range_of_shares(weight: int, lowest: int, highest: int) -> None:
    assert cpu_weight(lowest) == cpu_weight(highest) == weight
    assert cpu_weight(lowest - 1) != weight
    assert cpu_weight(highest + 1) != weight


def test_more_shares_never_weigh_less() -> None:
    weights = [cpu_weight(shares) or 0 for shares in range(262_200)]
    assert weights == sorted(weights)
    assert weights[-1] == cpu_weight(2**70) == 10000
