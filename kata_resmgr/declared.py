"""The size that a pod or a single container declares of itself (SPEC 3)."""

from __future__ import annotations

from fractions import Fraction

from kata_resmgr import demand, oci
from kata_resmgr.config import CpusetSizing
from kata_resmgr.sizing import MIB, Declared, round_up


def of_resources(resources: oci.Resources, cpuset_sizing: CpusetSizing) -> Declared:
    """What a single container's resources declare: its quota, else its counting cpuset; limit and huge pages.

    Memory is rounded up to an even number of MiB, which huge pages need.
    """
    asked = demand.of(resources, cpuset_sizing)
    vcpus: Fraction | None = None
    if asked.quota:
        vcpus = Fraction(asked.quota, asked.period)
    elif asked.cpus:
        vcpus = Fraction(len(asked.cpus))
    return Declared(vcpus=vcpus, memory=round_up(asked.memory, 2 * MIB) if asked.memory else None)
