"""Disks and nets of a sandbox: what each is to be, and the next step towards that. Pure (SPEC 7, 9, 10).

A device has a record from before it is sent until it has left the machine. A new one is ``adding`` until it was read
back; one that is to go is ``leaving`` until it was read to be gone. Limits of a device that is there cannot be
changed: it leaves, and comes back (``returning``) with the other ones. Times are readings of one monotonic clock, in
seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from hypervisors.base import Device, DeviceKind
from hypervisors.ch_types import DiskConfig, NetConfig, RateLimiterConfig, pairs
from kata_resmgr.config import SandboxConfig
from kata_resmgr.limits import Effective, IdleBurst, IoLimits, LimitRefused, Limits, requested
from kata_resmgr.problem import At, Code, Problem
from kata_resmgr.removal import Removal

AnyConfig: TypeAlias = DiskConfig | NetConfig
C_co = TypeVar("C_co", bound=AnyConfig, covariant=True)


class Spec(msgspec.Struct, Generic[C_co], frozen=True, omit_defaults=True):
    """What a caller asked for. *config* has neither limiter nor group."""

    config: C_co
    limits: Limits | None = None
    """None: those of the configuration, where there is no group."""
    group: str | None = None
    """The limits that it shares with other disks."""


class State(StrEnum):
    """Where a device is on its way."""

    ADDING = "adding"
    """Asked for, and not answered yet: a restart undoes it."""
    PRESENT = "present"
    LEAVING = "leaving"
    """To be taken out; then what is in :attr:`Record.then` comes under its id."""
    RETURNING = "returning"
    """To be added whatever happens: it was there before, with other limits."""


class Record(msgspec.Struct, Generic[C_co], frozen=True, omit_defaults=True):
    """What is kept of a device."""

    spec: Spec[C_co]
    """What is there, or is to be; of one that leaves: what was there."""
    state: State
    asked: Removal | None = None
    """When the machine was last asked to let go of it (returning: to take it)."""
    then: Spec[C_co] | None = None
    fallback: Spec[C_co] | None = None
    """Returning: what it was before, for when the machine does not take it as it is to be."""


AnySpec: TypeAlias = Spec[AnyConfig]
AnyRecord: TypeAlias = Record[AnyConfig]

_DECODERS: Mapping[str, msgspec.json.Decoder[Any]] = {
    DeviceKind.DISK: msgspec.json.Decoder(Record[DiskConfig]),
    DeviceKind.NET: msgspec.json.Decoder(Record[NetConfig]),
}


def read_record(kind: str, text: bytes) -> AnyRecord:
    """A record as it was kept. Raises ValueError."""
    if kind not in _DECODERS:
        raise ValueError(f"there are no devices of the kind {kind!r}")
    record: AnyRecord = _DECODERS[kind].decode(text)
    return record


def kind_of(config: AnyConfig) -> DeviceKind:
    return DeviceKind.DISK if isinstance(config, DiskConfig) else DeviceKind.NET


# What a device is to be


class Formed(NamedTuple):
    """A device as the machine is to get it, and its limits in the units of this API."""

    sent: AnyConfig
    limits: Limits | None
    """None: those of its group."""
    effective: Effective | None
    idle_bursts: tuple[IdleBurst, ...]


def formed(spec: AnySpec, config: SandboxConfig) -> Formed:
    """*spec* with its limiter: the caller's, else the configuration's; or its group.

    The rate holds for the whole device, so a net's is divided among its queue pairs. Raises :class:`Problem`:
    ``invalid_body`` for limits that cannot be kept, ``invalid_config`` where those are the configuration's, and
    ``not_supported`` for limits of a vhost-user device, whose data do not pass through the VMM.
    """
    device = spec.config
    if spec.group is not None and isinstance(device, DiskConfig):
        if device.vhost_user:
            raise Problem(
                Code.NOT_SUPPORTED, f'"{device.id}": the VMM cannot limit a vhost-user device: leave out its group'
            )
        return Formed(msgspec.structs.replace(device, rate_limit_group=spec.group), None, None, ())
    sharers = pairs(device.num_queues) if isinstance(device, NetConfig) else 1
    try:
        asked = config.io_limits(kind_of(device)) if spec.limits is None else requested(spec.limits)
        limiter, effective = asked.limiter(sharers), asked.effective(sharers)
    except LimitRefused as error:
        if spec.limits is None:
            raise Problem(Code.INVALID_CONFIG, f"{error}; or give this device limits of its own") from None
        at = At(f"/limits/{error.name}", str(error))
        raise Problem(Code.INVALID_BODY, f"{at.pointer}: {error}", at=(at,)) from None
    if limiter is not None and device.vhost_user:
        raise Problem(
            Code.NOT_SUPPORTED,
            f'"{device.id}": the VMM cannot limit a vhost-user device: say "limits": {{}}, and limit its back-end',
        )
    sent = msgspec.structs.replace(device, rate_limiter_config=limiter)
    return Formed(sent, _in_force(asked), effective, asked.idle_bursts)


def _in_force(asked: IoLimits) -> Limits:
    bandwidth, ops = asked.bandwidth, asked.ops
    return Limits(
        bytes_per_second=0 if bandwidth is None else bandwidth.size,
        burst_bytes=0 if bandwidth is None else bandwidth.burst,
        ops_per_second=0 if ops is None else ops.size,
        burst_ops=0 if ops is None else ops.burst,
    )


def must_fit(spec: AnySpec, boot_vcpus: int, groups: Collection[str]) -> None:
    """Raise :class:`Problem` (``invalid_body``) where this sandbox's VM could not take it."""
    if spec.config.queues > boot_vcpus:
        member = "num_queues"
        most = boot_vcpus if isinstance(spec.config, DiskConfig) else 2 * boot_vcpus
        raise _at(f"/config/{member}", f"{spec.config.num_queues}: at most {most}, for {boot_vcpus} boot vCPUs")
    if spec.group is None:
        return
    if spec.limits is not None and spec.limits != Limits():
        raise _at("/group", "a disk has limits of its own or a group, not both: leave one out")
    if spec.group not in groups:
        raise _at("/group", f"there is no group {spec.group[:40]!r}: register the sandbox with rateLimitGroups")


def _at(pointer: str, detail: str) -> Problem:
    return Problem(Code.INVALID_BODY, f"{pointer}: {detail}", at=(At(pointer, detail),))


def differs(sent: AnyConfig, shown: Device) -> str | None:
    """How the limits that the machine shows for a device differ from what it was given; None: they do not."""
    group = sent.rate_limit_group if isinstance(sent, DiskConfig) else None
    if (group, sent.rate_limiter_config) == (shown.group, shown.limiter):
        return None
    return f"{_told(group, sent.rate_limiter_config)} is recorded, the VMM has {_told(shown.group, shown.limiter)}"


def _told(group: str | None, limiter: RateLimiterConfig | None) -> str:
    if group is not None:
        return f"group {group}"
    return "no limiter" if limiter is None else msgspec.json.encode(limiter).decode()


# The next step

LOOK_FIRST = 0.02
LOOK_LONGEST = 10.0
"""Seconds between looks at a removal, which the VMM does not tell the end of: as long as it has been asked for."""


@dataclass(frozen=True, slots=True)
class Add:
    id: str


@dataclass(frozen=True, slots=True)
class Remove:
    id: str


@dataclass(frozen=True, slots=True)
class LookForEnd:
    """Read back whether what was asked to leave has left."""


Step: TypeAlias = Add | Remove | LookForEnd


def next_step(now: float, records: Mapping[str, AnyRecord], there: Collection[str], read_at: float) -> Step | None:
    """The one thing to do now: *there* is what the machine has, as read at *read_at*."""
    for name, record in records.items():
        due = _due(name, record, there)
        if due is not None and due <= now:
            return Remove(name) if record.state is State.LEAVING else Add(name)
    look = _look_at(records, there, read_at)
    return LookForEnd() if look is not None and look <= now else None


def next_time(records: Mapping[str, AnyRecord], there: Collection[str], read_at: float) -> float | None:
    """When there is something to do, if nothing happens before."""
    times = [due for name, record in records.items() if (due := _due(name, record, there)) is not None]
    look = _look_at(records, there, read_at)
    return min([*times, *(() if look is None else (look,))], default=None)


def _due(name: str, record: AnyRecord, there: Collection[str]) -> float | None:
    if record.state is State.ADDING:
        return 0.0
    if (record.state is State.LEAVING and name in there) or (record.state is State.RETURNING and name not in there):
        return 0.0 if record.asked is None else record.asked.due
    return None


def _look_at(records: Mapping[str, AnyRecord], there: Collection[str], read_at: float) -> float | None:
    return min(_looks(records, there, read_at), default=None)


def _looks(records: Mapping[str, AnyRecord], there: Collection[str], read_at: float) -> Iterator[float]:
    for name, record in records.items():
        if record.state is State.LEAVING and name in there and record.asked is not None:
            yield read_at + min(max(read_at - record.asked.first, LOOK_FIRST), LOOK_LONGEST)


def settled(record: AnyRecord, is_there: bool) -> AnyRecord | None:
    """What becomes of a record by what was read; None: the device is no more."""
    match record.state:
        case State.LEAVING if not is_there:
            then = record.then
            if then is None:
                return None
            return Record(then, State.RETURNING, fallback=None if then == record.spec else record.spec)
        case State.RETURNING if is_there:
            return Record(record.spec, State.PRESENT)
        case State.PRESENT if not is_there:
            return None
    return record


def restored(record: AnyRecord, now: float) -> AnyRecord:
    """As a restart goes on with it: what was not answered is undone."""
    if record.state is State.ADDING:
        return Record(record.spec, State.LEAVING)
    if record.asked is None:
        return record
    asked = msgspec.structs.replace(record.asked, first=min(record.asked.first, now), last=min(record.asked.last, now))
    return msgspec.structs.replace(record, asked=asked)


def taken_back(record: AnyRecord, sent: bool) -> AnyRecord | None:
    """What becomes of a record whose operation has failed; *sent*: it may be that the machine has got it.

    None: nothing is left of it. A removal that was sent cannot be called back: then it returns as it was.
    """
    match record.state:
        case State.ADDING:
            return Record(record.spec, State.LEAVING) if sent else None
        case State.LEAVING if record.then is not None:
            if record.asked is None:
                return Record(record.spec, State.PRESENT)
            return msgspec.structs.replace(record, then=record.spec)
        case State.RETURNING if record.fallback is not None:
            if sent:
                return Record(record.spec, State.LEAVING, then=record.fallback)
            return Record(record.fallback, State.RETURNING)
    return record
