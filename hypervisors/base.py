"""What every driver offers, and the one error tree by which drivers fail.

A driver speaks to one VM. Its sandbox makes one call at a time, and every call is bounded by a deadline of the
driver's own. A driver never waits for a guest, never retries and never decides: it translates. What the VM does by
itself reaches the sandbox as a :data:`Change`, a hint after which the sandbox reads back; nothing is believed unread.

::

    HypervisorError
    ├── Unreachable     the connection cannot be made, or is gone
    ├── Refused         the hypervisor understood and said no
    │   └── Altered     it said yes, and did something else
    ├── TimedOut        no answer in time; the call may still have been carried out
    ├── Unsupported     this machine has no such thing
    └── Busy            somebody else holds what the call needs (a monitor serves one client)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from hypervisors.ch_types import DiskConfig, NetConfig, RateLimiterConfig


class HypervisorError(Exception):
    """A call failed. The text is one line: what failed, with the value at fault."""


class Unreachable(HypervisorError):
    """There is no connection, or it broke. What was under way may or may not have happened: read back."""


class Refused(HypervisorError):
    """The hypervisor refused the call; the text quotes its words."""


class Altered(Refused):
    """The hypervisor accepted a device and made another one of it. It has been asked to take that out again."""


class TimedOut(HypervisorError):
    """No answer within the driver's deadline. The call may still be carried out: read back before the next."""


class Unsupported(HypervisorError):
    """This machine cannot do it, now or later."""


class Busy(HypervisorError):
    """The resource is held by another client; a later try may succeed."""


class Accelerator(StrEnum):
    """How the VM's instructions run."""

    KVM = "kvm"
    TCG = "tcg"
    OTHER = "other"


class MemoryMethod(StrEnum):
    """How a machine's memory changes while it runs."""

    NONE = "none"
    """Not at all."""
    DIMM = "dimm"
    """Piece by piece: each is there at once, and leaves whole when the guest gives it back."""
    VIRTIO_MEM = "virtio-mem"
    """One size is asked for; the guest comes to it in its own time, in both directions, and perhaps only in part."""
    ACPI = "acpi"
    """One size is asked for and is there at once; it never falls while the machine runs (Cloud Hypervisor)."""


@dataclass(frozen=True, slots=True)
class MemoryHotplug:
    """What a machine's memory can do."""

    method: MemoryMethod
    granularity: int = 1
    """Bytes: what is above the boot memory is a multiple of it."""
    maximum: int = 0
    """Bytes that the machine can ever have, boot memory included."""


FIXED_MEMORY = MemoryHotplug(MemoryMethod.NONE)


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while the VM runs, as the hypervisor told it on connecting."""

    identity: str
    """The VM's UUID, or "" where there is none."""
    pid: int | None
    """The VMM's process, where the connection tells."""
    max_vcpus: int
    """How many vCPUs this machine can ever have: 1 or more."""
    vcpu_hotplug: bool
    """Whether vCPUs can be added and removed at all."""
    accelerator: Accelerator
    memory: MemoryHotplug = FIXED_MEMORY
    tells_changes: bool = True
    """Whether the hypervisor speaks when something changes. Otherwise what is under way has to be looked at."""
    one_resize: bool = False
    """Whether nothing may be added while a removal of vCPUs is under way (Cloud Hypervisor)."""


class Vcpu(msgspec.Struct, frozen=True, gc=False):
    """One vCPU that the hypervisor has."""

    id: str
    """The name by which :meth:`Hypervisor.start_removing_vcpus` knows it; stable while it is plugged."""
    ours: bool
    """Plugged through a driver of this project. Others (boot vCPUs, somebody else's) are never asked to leave."""


class Dimm(msgspec.Struct, frozen=True, gc=False):
    """One piece of memory that was plugged."""

    id: str
    """The name by which :meth:`Hypervisor.start_shrinking_memory` knows it; stable while it is plugged."""
    size: int
    """Bytes."""
    ours: bool
    """Plugged through a driver of this project. Others are never asked to leave."""


class DeviceKind(StrEnum):
    """What kinds of device can be added and removed."""

    DISK = "disk"
    NET = "net"


class Device(msgspec.Struct, frozen=True, gc=False):
    """One disk or net that the machine has."""

    id: str
    kind: DeviceKind
    address: str
    """Where it sits (PCI)."""
    limiter: RateLimiterConfig | None = None
    """As the hypervisor shows it."""
    group: str | None = None


class Plugged(msgspec.Struct, frozen=True, gc=False):
    """What the hypervisor has, as just read."""

    vcpus: tuple[Vcpu, ...]
    """In the order in which they were plugged: those that are not ours first, then ours, the last plugged last."""
    memory: int
    """Bytes, boot memory included."""
    memory_asked: int | None = None
    """Bytes, boot memory included, that the guest has been asked to come to, where that is not what is there yet."""
    dimms: tuple[Dimm, ...] = ()
    """Pieces of memory in the order in which they were plugged, as for :attr:`vcpus`; none but with DIMMs."""
    memory_grows_left: int | None = None
    """How many more times memory can be added before the machine is started anew; None: not counted."""
    memory_floor: int = 0
    """Bytes: less than this must not be asked for (virtio-mem: the memory beside the device, boot memory included)."""
    vcpu_floor: int = 1
    """Fewer vCPUs than this must not be asked for: devices have that many queues (SPEC 9)."""
    devices: tuple[Device, ...] = ()
    """The disks and nets that the machine has, removals under way included; none where drivers do not tell."""


@dataclass(frozen=True, slots=True)
class SizeChanged:
    """Something about the size may have changed: read back."""


@dataclass(frozen=True, slots=True)
class RemovalRefused:
    """The guest said no to the removal of one vCPU or DIMM. It may still leave later."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GuestReset:
    """The guest was reset: removals under way may have been forgotten or carried out."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection broke. The driver is closed; nothing more will be heard from it."""

    reason: str


Change: TypeAlias = SizeChanged | RemovalRefused | GuestReset | ConnectionLost
Listener: TypeAlias = Callable[[Change], None]
"""Called from the event loop, as often as the hypervisor speaks: it must only take note and return."""


class Hypervisor(Protocol):
    """One VM. All calls but :meth:`close` raise :class:`HypervisorError`; one call at a time."""

    async def connect(self, listener: Listener) -> Machine:
        """Connect and learn the machine; from then on *listener* hears of changes.

        Raises :class:`Busy` when the endpoint serves another client, :class:`Unreachable` when nobody listens there.
        When it raises, nothing is held and *listener* hears nothing of the end. A driver that was closed, or has lost
        its connection, may be connected again.
        """

    async def read(self) -> Plugged:
        """What the VM has now."""

    async def add_vcpus(self, count: int) -> Plugged:
        """Plug *count* vCPUs into free slots, and read back, in one exchange.

        A part of them may have been plugged when it raises. :class:`ValueError` before any I/O when *count* is
        below 1 or passes the machine's maximum.
        """

    async def start_removing_vcpus(self, ids: Sequence[str]) -> None:
        """Ask the guest to give these vCPUs back. Returning means that the request was taken, nothing more.

        An id that has meanwhile gone is not an error, nor is one that was asked for before: it is asked again, or
        left as it is where the hypervisor takes no second request (Cloud Hypervisor). :class:`ValueError` before any
        I/O when *ids* is empty.
        """

    async def grow_memory(self, to: int) -> Plugged:
        """Ask for *to* bytes in all, boot memory included, and read back.

        One piece of the difference with DIMMs. With virtio-mem the guest has yet to come to it
        (:attr:`Plugged.memory_asked`), and a shrink under way ends or goes less far; the same size may be asked for
        again, so that a guest that got stuck tries again. :class:`ValueError` before any I/O when *to* is not above
        what is plugged (virtio-mem: below what is asked for) by whole granules, or passes the machine's maximum.
        """

    async def start_shrinking_memory(self, to: int, ids: Sequence[str] = ()) -> None:
        """Ask the guest to give memory back, until *to* bytes are left. Returning means that the request was taken.

        With DIMMs *ids* names those that are to leave, and *to* is for the log. With virtio-mem the same size may be
        asked for again, as for a grow; a grow that the guest has not come to is taken back. Raises
        :class:`Unsupported` with ACPI, which never shrinks.
        """

    async def add_device(self, device: DiskConfig | NetConfig) -> Device:
        """Plug a disk or net, and read it back.

        Raises :class:`Unsupported` where there is no such thing, :class:`Altered` where it came as another one.
        """

    async def start_removing_device(self, device_id: str) -> None:
        """Ask the guest to let go of a device. It is gone when it has left :attr:`Plugged.devices`, not before."""

    async def counters(self) -> Mapping[str, Mapping[str, int]]:
        """What the hypervisor counts for each device, by the device's id. Raises :class:`Unsupported`."""

    async def close(self) -> None:
        """Let go of the VM, which runs on. Never raises; may be called twice."""
