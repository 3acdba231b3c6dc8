"""What outlives the daemon, and where a sandbox puts it, so that what was answered is not forgotten (SPEC 11).

:class:`Store` is what a sandbox tells; :class:`kata_resmgr.sqlite_store.SqliteStore` keeps it durably. Calls are
synchronous: a commit is shorter than a thread's hand-over, and an answer must come after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias

from hypervisors.base import Machine
from kata_resmgr.config import SandboxConfig
from kata_resmgr.limits import Limits
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem
from kata_resmgr.process import Process
from kata_resmgr.removal import Removal
from kata_resmgr.sizing import BootSize

Changes: TypeAlias = Mapping[str, bytes | None]
"""Containers' resources by id; None: the container is no more."""
NO_CHANGES: Changes = MappingProxyType({})


class StateUnavailable(Problem):
    """The state cannot be written, so nothing has changed. *reason* is the store's own words."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            Code.STATE_UNAVAILABLE,
            f"the state cannot be written ({reason}); nothing was changed: mend [daemon] state's place, then repeat",
            retry_after=1,
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a sandbox's VM is, as the caller said."""

    socket: str
    pid: int | None
    memory_block: int | None
    """Bytes: the guest's block size, where the caller knew it."""

    def may_be(self, other: Attachment) -> bool:
        """Whether both name one VM, as far as they tell."""
        return self.socket == other.socket and (None in (self.pid, other.pid) or self.pid == other.pid)


@dataclass(frozen=True, slots=True)
class KnownVm:
    """The VM that was found there: what has to be the same for it to be driven on after a restart."""

    machine: Machine
    process: Process | None
    """None where neither the hypervisor nor the caller tells it."""


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """All of a sandbox but its containers, removals and devices."""

    id: str
    config: SandboxConfig
    boot: BootSize
    fitted: BootSize
    """With the maxima of the machine that is attached, else *boot*."""
    notes: tuple[Note, ...]
    """The sandbox's own conditions, which hold for good."""
    since: str
    """Since when: the time at which it was registered."""
    resources: bytes | None
    annotations: Mapping[str, str]
    resized: bytes | None
    """What a pod-level resize has made of the declared record; None: never resized."""
    held_vcpus: int | None
    """The vCPUs that ``compat`` holds against the table."""
    monitor: str | None
    """Where QEMU's monitor is to be; None with Cloud Hypervisor."""
    ever_attached: bool
    attachment: Attachment | None
    vm: KnownVm | None
    """None with an attachment: that VM has not been reached yet."""
    removed_any: bool
    """Whether a vCPU has ever been asked to leave this VM (under TCG none may come after that)."""
    held: bool
    """No calls to the hypervisor, for a snapshot or a migration."""
    lost_at: float | None = None
    """The monotonic clock's reading when the VM's process was found gone."""
    groups: Mapping[str, Limits] = field(default_factory=dict)
    """Limits that disks share, which the VM is to be started with."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One sandbox as a restart finds it."""

    record: SandboxRecord
    containers: Mapping[str, bytes] = field(default_factory=dict)
    removals: Mapping[str, Removal] = field(default_factory=dict)
    """Their times are readings of this host's monotonic clock; 0 where the host was started anew since."""
    devices: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    """By kind and id."""
    undone: tuple[str, ...] = ()
    """Operations that were under way: of these nothing was kept."""
    complete: bool = True
    """False when a container's row could not be read: the table asks for less than the sandbox does."""


class Store(Protocol):
    """Each call is one transaction, kept when it returns; :class:`StateUnavailable` with all as it was when it raises.

    An operation that acts on a hypervisor before it is kept says so first (:meth:`begin`): where nothing can be
    written, nothing is sent. What a restart finds begun was not answered, and is undone.
    """

    @property
    def quarantined(self) -> int:
        """How many rows and files this process could not read and has put aside."""

    def load(self) -> list[Kept]:
        """All that is kept, in id order. Called once, before anything is saved."""

    def set_aside(self, sandbox_id: str, reason: str) -> None:
        """Of this sandbox nothing can be made: it is put aside whole, and counted."""

    def begin(self, sandbox_id: str, operation: str) -> None:
        """*operation* (a container's id, or "" for all of the sandbox) is going to act."""

    def end(self, sandbox_id: str, operation: str) -> None:
        """It has failed, and has changed nothing."""

    def save_sandbox(self, record: SandboxRecord, containers: Changes = NO_CHANGES, ends: str | None = None) -> None:
        """Keep *record* in place of what was kept under its id, and with it these changes of its containers.

        *ends* names the operation that has come to its end with this. Without a VM no removals and devices are kept.
        """

    def forget_sandbox(self, sandbox_id: str) -> None:
        """Drop the sandbox with all that belongs to it."""

    def save_containers(self, sandbox_id: str, changes: Changes, ends: str | None = None) -> None:
        """Keep these containers' resources. *ends* as for :meth:`save_sandbox`."""

    def save_removals(self, sandbox_id: str, removals: Mapping[str, Removal]) -> None:
        """Keep these removals, in place of all that were kept for the sandbox."""

    def last_event(self) -> int:
        """The highest number that an event may have had; 0 at first."""

    def reserve_events(self, last: int) -> None:
        """Events may have numbers up to *last*."""

    def save_device(self, sandbox_id: str, kind: str, device_id: str, text: bytes | None) -> None:
        """Keep a device's JSON text; None: it is no more."""

    def close(self) -> None:
        """Let go of it; what is kept stays."""


class MemoryStore:
    """Kept as long as the process lives."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, SandboxRecord] = {}
        self.containers: dict[str, dict[str, bytes]] = {}
        self.removals: dict[str, dict[str, Removal]] = {}
        self.events = 0
        self.devices: dict[str, dict[tuple[str, str], bytes]] = {}
        self.begun: dict[str, dict[str, None]] = {}
        self.quarantined = 0

    def load(self) -> list[Kept]:
        begun, self.begun = self.begun, {}
        return [
            Kept(
                record,
                dict(self.containers.get(name, {})),
                dict(self.removals.get(name, {})),
                dict(self.devices.get(name, {})),
                tuple(begun.get(name, {})),
            )
            for name, record in sorted(self.sandboxes.items())
        ]

    def set_aside(self, sandbox_id: str, reason: str) -> None:
        self.forget_sandbox(sandbox_id)
        self.quarantined += 1

    def begin(self, sandbox_id: str, operation: str) -> None:
        self.begun.setdefault(sandbox_id, {})[operation] = None

    def end(self, sandbox_id: str, operation: str) -> None:
        self.begun.get(sandbox_id, {}).pop(operation, None)

    def save_sandbox(self, record: SandboxRecord, containers: Changes = NO_CHANGES, ends: str | None = None) -> None:
        self.sandboxes[record.id] = record
        if record.vm is None:
            self.removals.pop(record.id, None)
            self.devices.pop(record.id, None)
        self.save_containers(record.id, containers, ends)

    def forget_sandbox(self, sandbox_id: str) -> None:
        for kept in (self.sandboxes, self.containers, self.removals, self.devices, self.begun):
            kept.pop(sandbox_id, None)

    def save_containers(self, sandbox_id: str, changes: Changes, ends: str | None = None) -> None:
        table = self.containers.setdefault(sandbox_id, {})
        for container_id, text in changes.items():
            if text is None:
                table.pop(container_id, None)
            else:
                table[container_id] = text
        if ends is not None:
            self.end(sandbox_id, ends)

    def save_removals(self, sandbox_id: str, removals: Mapping[str, Removal]) -> None:
        self.removals[sandbox_id] = dict(removals)

    def last_event(self) -> int:
        return self.events

    def reserve_events(self, last: int) -> None:
        self.events = last

    def save_device(self, sandbox_id: str, kind: str, device_id: str, text: bytes | None) -> None:
        devices = self.devices.setdefault(sandbox_id, {})
        if text is None:
            devices.pop((kind, device_id), None)
        else:
            devices[kind, device_id] = text

    def close(self) -> None:
        """Nothing to let go of."""
