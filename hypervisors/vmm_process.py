"""The process of a VMM, and its vCPUs as the host sees them.

Cloud Hypervisor runs each vCPU in a thread called ``vcpuN``, made when it is plugged and gone when the guest has let go
of it. Its API tells only what was asked for, so these threads are the proof (SPEC 9). A pidfd holds on to the process:
as long as it is not readable, what ``/proc`` says under the pid is about this process and no later one.
"""

from __future__ import annotations

import os
import re
import select
from pathlib import Path
from typing import Final

_VCPU: Final = re.compile(rb"vcpu(0|[1-9][0-9]{0,4})\n?")


class VmmProcess:
    """The process *pid*. Raises :class:`ProcessLookupError` where there is none."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        """Readable once the process has ended."""
        self._tasks = Path(f"/proc/{pid}/task")

    def alive(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return not poll.poll(0)

    def vcpus(self) -> dict[int, int]:
        """The vCPUs' numbers, lowest first, with their threads' ids.

        Raises :class:`ProcessLookupError` where the process has ended.
        """
        found: dict[int, int] = {}
        for task in self._tasks.iterdir():
            try:
                name = _VCPU.fullmatch((task / "comm").read_bytes())
            except OSError:
                continue  # a thread that has just ended
            if name is not None:
                found[int(name[1])] = int(task.name)
        if not self.alive():
            raise ProcessLookupError(f"process {self.pid} has ended")
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Let go of it. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
