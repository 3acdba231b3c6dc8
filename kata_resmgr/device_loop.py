"""The disks and nets of one VM, for the one loop that talks to its hypervisor, and for operations that wait for it.

Operations write a record and wait; the loop carries out what :func:`kata_resmgr.devices.next_step` says. A record is
kept before anything is sent, so that a restart knows of every device that may be there by our doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from hypervisors.base import Altered, Device, DeviceKind, Hypervisor, Plugged, Refused, Unsupported
from kata_resmgr import devices
from kata_resmgr.conditions import Conditions, Kind
from kata_resmgr.config import SandboxConfig
from kata_resmgr.devices import Add, AnyRecord, AnySpec, LookForEnd, Record, Remove, State, formed, kind_of
from kata_resmgr.events import Teller
from kata_resmgr.problem import Code, Problem
from kata_resmgr.removal import REMEMBER_AGAIN, Removal
from kata_resmgr.store import StateUnavailable

Counters = Mapping[str, Mapping[str, int]]


@dataclass(slots=True, eq=False)
class _Waiter:
    """An operation that waits until its device is there as it is to be."""

    id: str
    future: asyncio.Future[None]


class Devices:
    """The records of one VM's devices. All methods belong to the event loop's thread.

    *keep* writes a device's record, or None when it is no more, and raises :class:`StateUnavailable`.
    """

    def __init__(
        self,
        name: str,
        config: SandboxConfig,
        conditions: Conditions,
        keep: Callable[[DeviceKind, str, bytes | None], None],
        tell: Teller,
    ) -> None:
        self._config = config
        self._conditions = conditions
        self._keep = keep
        self._tell = tell
        self._log = structlog.get_logger().bind(sandbox=name)
        self._loop = asyncio.get_running_loop()
        self._records: dict[str, AnyRecord] = {}
        self._there: dict[str, Device] = {}
        self._read_at = 0.0
        self._not_before = 0.0
        self._sent: set[str] = set()
        """Additions of which it is not known what has become."""
        self._waiters: dict[_Waiter, None] = {}
        self._gone: dict[asyncio.Future[None], str] = {}
        self._counting: list[asyncio.Future[Counters | None]] = []
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something for the loop to do."""

    # What is

    @property
    def records(self) -> Mapping[str, AnyRecord]:
        """By id: disks and nets share the machine's names."""
        return self._records

    @property
    def there(self) -> Mapping[str, Device]:
        """What the machine has, as last read, by whomever."""
        return self._there

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way."""
        return not self._records or all(record.state is State.PRESENT for record in self._records.values())

    def count(self, kind: DeviceKind) -> int:
        return sum(kind_of(record.spec.config) is kind for record in self._records.values())

    def find(self, kind: DeviceKind, device_id: str) -> AnyRecord | None:
        record = self._records.get(device_id)
        return record if record is not None and kind_of(record.spec.config) is kind else None

    # Operations

    async def add(self, device_id: str, spec: AnySpec, end: float) -> None:
        """Returns when it is there. Raises :class:`Problem` with everything as it was, or on its way to that."""
        self._write(device_id, Record(spec, State.ADDING))
        await self._until_there(device_id, end)

    async def replace(self, device_id: str, spec: AnySpec, end: float) -> None:
        """Take it out, and add it as *spec* says. Returns when it is there; raises as :meth:`add`."""
        record = self._records[device_id]
        if record.state is State.PRESENT:
            self._write(device_id, Record(record.spec, State.LEAVING, then=spec))
        elif record.state is State.RETURNING:
            self._write(device_id, Record(spec, State.RETURNING, fallback=record.spec))
        else:
            self._write(device_id, msgspec.structs.replace(record, then=spec))
        await self._until_there(device_id, end)

    def remove(self, device_id: str) -> None:
        """It is to go; asked again at once where it has been asked to."""
        record = self._records[device_id]
        if record.state is State.RETURNING and device_id not in self._sent:
            self._gone_now(device_id, record)
            return
        asked = None if record.asked is None else record.asked.hurried()
        self._write(device_id, Record(record.spec, State.LEAVING, asked))
        self.wake()

    def drop(self, device_id: str) -> None:
        """It is forgotten, whatever the machine has."""
        self._gone_now(device_id, self._records[device_id])

    async def wait_gone(self, device_id: str, end: float) -> None:
        """Until it has left, or until that time."""
        gone: asyncio.Future[None] = self._loop.create_future()
        self._gone[gone] = device_id
        try:
            await asyncio.wait([gone], timeout=max(end - self._loop.time(), 0))
        finally:
            del self._gone[gone]

    async def counters(self, end: float) -> Counters | None:
        """What the machine counts; None where it cannot be asked by then."""
        told: asyncio.Future[Counters | None] = self._loop.create_future()
        self._counting.append(told)
        self.wake()
        done, _ = await asyncio.wait([told], timeout=max(end - self._loop.time(), 0))
        if not done:
            self._counting.remove(told)
            return None
        return told.result()

    async def _until_there(self, device_id: str, end: float) -> None:
        waiter = _Waiter(device_id, self._loop.create_future())
        self._waiters[waiter] = None
        timer = self._loop.call_at(end, self._late, waiter)
        self.wake()
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._undo(device_id)
            raise
        finally:
            timer.cancel()
            del self._waiters[waiter]

    # For the loop

    def restore(self, records: Mapping[str, AnyRecord]) -> None:
        """After a restart."""
        now = self._loop.time()
        self._records = {name: devices.restored(record, now) for name, record in records.items()}
        for name, record in self._records.items():
            if record.state is State.PRESENT:
                self._say_what_counts_for_nothing(name, record.spec)

    def due(self, now: float) -> float | None:
        """When there is something for :meth:`step` to do; None: not as far as is known."""
        if self._counting:
            return now
        if not self._records:
            return None
        when = devices.next_time(self._records, self._there, self._read_at)
        return None if when is None else max(when, self._not_before)

    async def step(self, driver: Hypervisor) -> Plugged | None:
        """Take the step that is due. Returns what was read after it; None where there was nothing to read."""
        if self._counting:
            await self._count(driver)
            return None
        step = devices.next_step(self._loop.time(), self._records, self._there, self._read_at)
        match step:
            case Add(id=name):
                return await self._add(driver, name)
            case Remove(id=name):
                return await self._ask_to_leave(driver, name)
            case LookForEnd():
                return await driver.read()
        return None

    def observe(self, plugged: Plugged) -> None:
        """What the machine has now. Only what was read to be gone is struck out."""
        self._there = {device.id: device for device in plugged.devices}
        self._read_at = self._loop.time()
        for name, record in tuple(self._records.items()):
            after = devices.settled(record, name in self._there)
            if after is None:
                if record.state is State.PRESENT:
                    self._taken(name, record)
                self._gone_now(name, record)
            elif after is not record:
                self._keep_if_possible(name, after)
                if after.state is State.PRESENT:
                    self._present(name, record)
            if (now := self._records.get(name)) is not None and now.state is State.PRESENT:
                self._compare(name, now)

    def hurry(self) -> None:
        """Repeat what was asked for at once."""
        for name, record in self._records.items():
            if record.asked is not None:
                self._records[name] = msgspec.structs.replace(record, asked=record.asked.hurried())

    def fail(self, problem: Callable[[], Problem]) -> None:
        """Operations that wait fail, and leave nothing behind."""
        for waiter in tuple(self._waiters):
            if not waiter.future.done():
                self._fail(waiter, problem())
        self._sent.clear()
        for told in self._counting:
            told.set_result(None)
        self._counting.clear()

    def forget(self) -> None:
        """There is no VM any more whose they would be."""
        for name, record in tuple(self._records.items()):
            self._gone_now(name, record, left=False)
        self._there = {}

    # Steps

    async def _add(self, driver: Hypervisor, name: str) -> Plugged:
        plugged = await driver.read()
        record = self._records.get(name)
        if record is None or record.state not in (State.ADDING, State.RETURNING):
            return plugged  # undone meanwhile
        if name in {device.id for device in plugged.devices}:
            if record.state is State.ADDING:  # it came after the operation was let in
                self._refused(name, record, Problem(Code.CONFLICT, f'the VM has a device "{name}" that is not ours'))
            return plugged
        self._sent.add(name)
        refusal: Problem | None = None
        ours = True
        try:
            await driver.add_device(formed(record.spec, self._config).sent)
        except Unsupported as error:
            refusal = Problem(Code.NOT_SUPPORTED, str(error))
        except Refused as error:
            refusal = Problem(Code.HYPERVISOR_REFUSED, f"the hypervisor refused: {error}")
            ours = isinstance(error, Altered)  # else what is there came from somebody else just now
        plugged = await driver.read()
        self._sent.discard(name)
        is_there = name in {device.id for device in plugged.devices}
        if refusal is None and not is_there:
            refusal = Problem(Code.HYPERVISOR_REFUSED, f'"{name}" was accepted, and is not there')
        now = self._records.get(name)
        if now is not record:  # its time was over meanwhile: what is there by now goes again
            return plugged
        if refusal is not None:
            self._refused(name, record, refusal, is_there and ours)
        elif record.state is State.ADDING:
            try:
                self._write(name, Record(record.spec, State.PRESENT))
            except StateUnavailable as problem:
                self._refused(name, record, problem, is_there)
            else:
                self._present(name, record)
        return plugged

    async def _ask_to_leave(self, driver: Hypervisor, name: str) -> Plugged | None:
        record, now = self._records[name], self._loop.time()
        asked = Removal(now, now) if record.asked is None else record.asked.again(now)
        try:
            self._write(name, msgspec.structs.replace(record, asked=asked))
        except StateUnavailable as problem:
            self._not_before = now + REMEMBER_AGAIN
            self._log.warning("a removal cannot be recorded, and is not sent", device=name, reason=problem.detail)
            return None
        self._log.debug("removing a device", device=name, attempts=asked.attempts)
        try:
            await driver.start_removing_device(name)
        except (Refused, Unsupported) as error:
            self._log.info("removal refused", device=name, reason=str(error))
            self._keep_if_possible(name, msgspec.structs.replace(self._records[name], asked=asked.told_no(str(error))))
        return await driver.read()

    async def _count(self, driver: Hypervisor) -> None:
        try:
            counters = await driver.counters()
        except (Refused, Unsupported):
            counters = {}
        for told in self._counting:
            told.set_result(counters)
        self._counting.clear()

    # What becomes of it

    def _present(self, name: str, before: AnyRecord) -> None:
        """It is there as it is to be."""
        spec = self._records[name].spec
        kind = kind_of(spec.config)
        if before.state is State.ADDING:
            self._tell("device.added", kind=kind, device=name)
        elif before.fallback is not None:
            self._tell("device.limits", kind=kind, device=name)
        self._say_what_counts_for_nothing(name, spec)
        for waiter in self._waiters:
            if waiter.id == name and not waiter.future.done():
                waiter.future.set_result(None)

    def _say_what_counts_for_nothing(self, name: str, spec: AnySpec) -> None:
        kind = kind_of(spec.config)
        bursts = formed(spec, self._config).idle_bursts if spec.limits is not None else ()
        if bursts:
            message = f"{kind} {name}: " + "; ".join(burst.message for burst in bursts)
            self._conditions.hold(Kind.BURST_WITHOUT_RATE, f"{kind}/{name}", message)
        else:
            self._conditions.clear(Kind.BURST_WITHOUT_RATE, f"{kind}/{name}")

    def _refused(self, name: str, record: AnyRecord, problem: Problem, is_there: bool = False) -> None:
        """The machine does not take it. One that it has all the same was asked to leave again."""
        now = self._loop.time()
        if record.state is State.ADDING:
            after = Record(record.spec, State.LEAVING, Removal(now, now)) if is_there else None
        else:
            spec = record.spec if record.fallback is None else record.fallback
            asked = Removal(now, now) if record.asked is None else record.asked.again(now)
            if is_there:
                after = Record(record.spec, State.LEAVING, Removal(now, now), then=spec)
            else:
                after = Record(spec, State.RETURNING, None if record.fallback is not None else asked)
            text = f"{name} was taken out for other limits, and is not taken back: {problem.detail}"
            self._conditions.hold(Kind.LIMITS_DIFFER, f"{kind_of(spec.config)}/{name}", text)
        if after is None:
            self._gone_now(name, record, told=False)
        else:
            self._keep_if_possible(name, after)
        for waiter in self._waiters:
            if waiter.id == name and not waiter.future.done():
                waiter.future.set_exception(problem)

    def _taken(self, name: str, record: AnyRecord) -> None:
        message = f"changed by somebody else: the {kind_of(record.spec.config)} {name} is gone"
        self._conditions.hold(Kind.FOREIGN_CHANGE, "devices", message)
        self._log.warning("foreign change", went=[name])

    def _compare(self, name: str, record: AnyRecord) -> None:
        reason = f"{kind_of(record.spec.config)}/{name}"
        difference = devices.differs(formed(record.spec, self._config).sent, self._there[name])
        if difference is None:
            self._conditions.clear(Kind.LIMITS_DIFFER, reason)
        else:
            self._conditions.hold(Kind.LIMITS_DIFFER, reason, f"{name}: {difference}")

    def _gone_now(self, name: str, record: AnyRecord, *, told: bool = True, left: bool = True) -> None:
        """It is no more. *told*: it had been there; *left*: the machine has let go of it."""
        kind = kind_of(record.spec.config)
        self._keep_if_possible(name, None)
        for about in (Kind.LIMITS_DIFFER, Kind.BURST_WITHOUT_RATE):
            self._conditions.clear(about, f"{kind}/{name}")
        if told and left:
            self._tell("device.removed", kind=kind, device=name)
        for gone, of in self._gone.items():
            if of == name and not gone.done():
                gone.set_result(None)

    # Failing

    def _late(self, waiter: _Waiter) -> None:
        if waiter.future.done():
            return
        record = self._records.get(waiter.id)
        if record is not None and record.state is State.LEAVING and record.asked is not None:
            problem = being_removed(waiter.id, record, self._loop.time())
        else:
            problem = Problem(
                Code.HYPERVISOR_TIMEOUT,
                f'"{waiter.id}" is not there by the deadline, and is undone: repeat, or allow a longer deadline',
            )
        self._fail(waiter, problem)

    def _fail(self, waiter: _Waiter, problem: Problem) -> None:
        waiter.future.set_exception(problem)
        self._undo(waiter.id)

    def _undo(self, name: str) -> None:
        record = self._records.get(name)
        if record is None:
            return
        after = devices.taken_back(record, name in self._sent)
        if after is None:
            self._gone_now(name, record, told=False)
        elif after is not record:
            self._keep_if_possible(name, after)
        self.wake()

    # Keeping

    def _write(self, name: str, record: AnyRecord) -> None:
        """Raises :class:`StateUnavailable` with all as it was."""
        self._keep(kind_of(record.spec.config), name, msgspec.json.encode(record))
        self._records[name] = record

    def _keep_if_possible(self, name: str, record: AnyRecord | None) -> None:
        """It is so, whether it can be kept or not: a restart finds it by reading back."""
        before = self._records.pop(name) if record is None else self._records[name]
        if record is not None:
            self._records[name] = record
        try:
            text = None if record is None else msgspec.json.encode(record)
            self._keep(kind_of(before.spec.config), name, text)
        except StateUnavailable as problem:
            self._log.warning("what became of a device is not kept", device=name, reason=problem.detail)


def being_removed(name: str, record: AnyRecord, now: float) -> Problem:
    """Its id is not free yet, nor is it a device any more that could be had as it is."""
    age = 0.0 if record.asked is None else now - record.asked.first
    return Problem(
        Code.SHRINK_PENDING,
        f'"{name}" is being removed, for {age:.1f} s, and the guest has not let go of it yet: repeat later',
        retry_after=1,
    )
