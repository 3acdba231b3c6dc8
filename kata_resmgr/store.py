"""Where a sandbox's state is kept, so that what was answered is not forgotten.

:class:`Store` is what a sandbox tells; the durable store fills the same interface. Calls are synchronous: a commit is
shorter than a thread's hand-over, and an answer must come after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kata_resmgr.config import SandboxConfig
from kata_resmgr.sizing import BootSize
from kata_resmgr.step import Removal


@dataclass(frozen=True, slots=True)
class Attachment:
    """Which VM a sandbox drives."""

    socket: str
    pid: int | None
    """As the caller gave it."""
    memory_block: int | None
    """Bytes: the guest's block size, where the caller knew it."""

    def may_be(self, other: Attachment) -> bool:
        """Whether both name one VM, as far as they tell."""
        return self.socket == other.socket and (None in (self.pid, other.pid) or self.pid == other.pid)


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """All of a sandbox but its containers and removals."""

    id: str
    config: SandboxConfig
    boot: BootSize
    resources: bytes | None
    annotations: Mapping[str, str]
    resized: bytes | None
    """What a pod-level resize has made of the declared record; None: never resized."""
    held_vcpus: int | None
    """The vCPUs that ``compat`` holds against the table."""
    monitor: str
    attachment: Attachment | None
    held: bool
    """No calls to the hypervisor, for a snapshot or a migration."""


class Store(Protocol):
    """Each call is one transaction, kept when it returns."""

    def save_sandbox(self, record: SandboxRecord, containers: Mapping[str, bytes | None]) -> None:
        """Keep *record* in place of what was kept under its id, and with it these changes of its containers."""

    def forget_sandbox(self, sandbox_id: str) -> None:
        """Drop the sandbox with its containers and removals."""

    def save_containers(self, sandbox_id: str, changes: Mapping[str, bytes | None]) -> None:
        """Keep these containers' resources; None: the container is no more."""

    def save_removals(self, sandbox_id: str, removals: Mapping[str, Removal]) -> None:
        """Keep these removals, in place of all that were kept for the sandbox."""

    @property
    def quarantined(self) -> int:
        """How many rows and files could not be read, and were put aside, since the start."""

    def last_event(self) -> int:
        """The highest number that an event may have had; 0 at first."""

    def reserve_events(self, last: int) -> None:
        """Events may have numbers up to *last*."""


class MemoryStore:
    """Kept as long as the process lives."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, SandboxRecord] = {}
        self.containers: dict[str, dict[str, bytes]] = {}
        self.removals: dict[str, dict[str, Removal]] = {}
        self.events = 0
        self.quarantined = 0

    def save_sandbox(self, record: SandboxRecord, containers: Mapping[str, bytes | None]) -> None:
        self.sandboxes[record.id] = record
        self.save_containers(record.id, containers)

    def forget_sandbox(self, sandbox_id: str) -> None:
        for kept in (self.sandboxes, self.containers, self.removals):
            kept.pop(sandbox_id, None)

    def save_containers(self, sandbox_id: str, changes: Mapping[str, bytes | None]) -> None:
        table = self.containers.setdefault(sandbox_id, {})
        for container_id, text in changes.items():
            if text is None:
                table.pop(container_id, None)
            else:
                table[container_id] = text

    def save_removals(self, sandbox_id: str, removals: Mapping[str, Removal]) -> None:
        self.removals[sandbox_id] = dict(removals)

    def last_event(self) -> int:
        return self.events

    def reserve_events(self, last: int) -> None:
        self.events = last
