"""The size that a single container declares of itself (SPEC 3)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kata_resmgr import declared, oci
from kata_resmgr.config import Compat, CpusetSizing
from kata_resmgr.sizing import MIB, Declared
from tests.examples import resources, sandbox_config


@pytest.mark.parametrize(
    ("text", "vcpus", "mebibytes"),
    [
        (resources(), None, None),
        (resources(quota=-1, limit=-1), None, None),
        (resources(quota=0, limit=0), None, None),
        (resources(quota=220_000), Fraction(11, 5), None),
        (resources(quota=1, period=3), Fraction(1, 3), None),
        (resources(cpus="0-3"), Fraction(4), None),
        (resources(quota=150_000, cpus="0-3"), Fraction(3, 2), None),
        (resources(quota=-1, cpus="0-3", shares=4096), Fraction(4), None),
        (resources(quota=-1, cpus="0-3", shares=4095), None, None),
        (resources(shares=2048), None, None),
        (resources(limit=1), None, 2),
        (resources(limit=2 * MIB), None, 2),
        (resources(limit=2 * MIB + 1), None, 4),
        (resources(limit=513 * MIB), None, 514),
        (resources(limit=MIB, hugepages={"2MB": 2 * MIB}), None, 4),
        (resources(limit=-1, hugepages={"1GB": 1024 * MIB}), None, 1024),
    ],
)
def test_declared(text: bytes, vcpus: Fraction | None, mebibytes: int | None) -> None:
    size = declared.of_resources(oci.decode(text), sandbox_config())
    assert size == Declared(vcpus, None if mebibytes is None else mebibytes * MIB)
    assert bool(size) is (vcpus is not None or mebibytes is not None)


def test_every_cpuset_declares_where_the_configuration_says_so() -> None:
    shared_pool = oci.decode(resources(cpus="0-3", shares=2))
    assert declared.of_resources(shared_pool, sandbox_config()).vcpus is None
    assert declared.of_resources(shared_pool, sandbox_config(cpuset_sizing=CpusetSizing.ALWAYS)).vcpus == 4


@pytest.mark.parametrize(
    ("text", "vcpus"),
    [
        (resources(shares=2), None),
        (resources(shares=3), 1),
        (resources(quota=-1, shares=1025), 2),
        (resources(quota=150_000, shares=8192), Fraction(3, 2)),
        (resources(cpus="0-3", shares=8192), 4),
        (resources(cpus="0-61", shares=2048), 2),
    ],
)
def test_shares_declare_where_nothing_else_does_and_they_may(text: bytes, vcpus: int | None) -> None:
    assert declared.of_resources(oci.decode(text), sandbox_config(shares_sizing=True)).vcpus == vcpus


def test_every_cpuset_declares_where_kata_is_followed() -> None:
    shared_pool = oci.decode(resources(cpus="0-3", shares=2))
    assert declared.of_resources(shared_pool, sandbox_config(compat=Compat.KATA)).vcpus == 4
