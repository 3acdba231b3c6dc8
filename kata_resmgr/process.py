"""Whether a process is still the one that it was: a pid alone is used again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A process by pid and start time (field 22 of ``/proc/<pid>/stat``, proc(5))."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process | None:
        """The process that has this pid now; None where none has, or only its exit status is left."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold any bytes, parentheses too
        return None if fields[0] in (b"Z", b"X") else Process(pid, int(fields[19]))

    def lives(self) -> bool:
        """Whether it still runs."""
        return Process.of(self.pid) == self
