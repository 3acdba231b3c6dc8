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
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
        return None if fields[0] in ("Z", "X") else Process(pid, int(fields[19]))

    def lives(self) -> bool:
        """Whether it still runs."""
        return Process.of(self.pid) == self
