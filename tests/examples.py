"""Values that many tests start from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kata_resmgr import config, demand, oci
from kata_resmgr.config import CpusetSizing, SandboxConfig
from kata_resmgr.demand import ContainerTable, Record
from kata_resmgr.host import Host

HOST = Host(cpus=8, memory=16384)

DEFAULTS = config.load(Path(os.devnull), HOST).for_sandbox(None)
"""What an empty configuration file makes on :data:`HOST`: D = 1, at most 8 vCPUs, 2048 MiB of 16384."""


def sandbox_config(**changes: Any) -> SandboxConfig:  # noqa: ANN401 - each field has its own type
    """:data:`DEFAULTS` with these fields instead."""
    return replace(DEFAULTS, **changes)


def resources(
    *,
    quota: int | None = None,
    period: int | None = None,
    shares: int | None = None,
    cpus: str | None = None,
    limit: int | None = None,
    hugepages: dict[str, int] | None = None,
) -> bytes:
    """The text of a ``linux.resources`` object with these members; None leaves one out."""
    cpu = {"quota": quota, "period": period, "shares": shares, "cpus": cpus}
    stated: dict[str, Any] = {"cpu": {name: value for name, value in cpu.items() if value is not None}}
    if limit is not None:
        stated["memory"] = {"limit": limit}
    if hugepages is not None:
        stated["hugepageLimits"] = [{"pageSize": size, "limit": bytes_} for size, bytes_ in hugepages.items()]
    return msgspec.json.encode(stated)


def record(text: bytes, cpuset_sizing: CpusetSizing = CpusetSizing.EXCLUSIVE) -> Record:
    """A container's record as a sandbox makes it from *text*."""
    return Record(text, demand.of(oci.decode(text), cpuset_sizing))


def table(*texts: bytes, cpuset_sizing: CpusetSizing = CpusetSizing.EXCLUSIVE) -> ContainerTable:
    """A table of the containers c0, c1, ... with these resources."""
    made = ContainerTable()
    for number, text in enumerate(texts):
        made.set(f"c{number}", record(text, cpuset_sizing))
    return made
