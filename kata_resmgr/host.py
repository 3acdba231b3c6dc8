"""What this host has: the bounds of every size.

The CPUs are those that are online, not this process's affinity mask: the VMs do not run in the daemon's cgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """Online CPUs, and RAM in MiB."""

    cpus: int
    memory: int


def this_host(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> Host:
    """Ask the kernel. Raises :class:`OSError` where ``/sys`` or ``/proc`` is not what it is on Linux."""
    online = (sys / "devices/system/cpu/online").read_text().strip()
    bounds = [[int(cpu) for cpu in part.split("-")] for part in online.split(",")]
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return Host(cpus=sum(part[-1] - part[0] + 1 for part in bounds), memory=int(line.split()[1]) // 1024)
    raise OSError(f"{proc / 'meminfo'} has no MemTotal")
