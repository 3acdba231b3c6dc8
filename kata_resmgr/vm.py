"""A sandbox's VM and the one loop that talks to its hypervisor: read, compare, one step, again (SPEC 7).

The loop is told how many vCPUs and how much memory are desired and makes it so. Operations never call a driver: they
change what is desired and wait here until it is reached, refused, or their time is over. The rule for what to do next
is :func:`kata_resmgr.step.next_step`; this module only carries it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import inf

import msgspec
import structlog

from hypervisors.base import (
    FIXED_MEMORY,
    Accelerator,
    Busy,
    Change,
    ConnectionLost,
    Dimm,
    GuestReset,
    Hypervisor,
    HypervisorError,
    Machine,
    MemoryMethod,
    Plugged,
    Refused,
    RemovalRefused,
    SizeChanged,
    TimedOut,
    Unreachable,
)
from kata_resmgr import memory_step
from kata_resmgr.aim import Aim
from kata_resmgr.conditions import Conditions, Kind
from kata_resmgr.config import SandboxConfig, TcgUnplug
from kata_resmgr.device_loop import Devices
from kata_resmgr.events import Teller
from kata_resmgr.heed import Heed
from kata_resmgr.memory_step import GrowMemory, MemorySituation, Obstacle, ShrinkMemory, asked
from kata_resmgr.problem import Code, Problem
from kata_resmgr.process import Process
from kata_resmgr.removal import REMEMBER_AGAIN, Removal
from kata_resmgr.sizing import MIB
from kata_resmgr.step import (
    AddVcpus,
    Look,
    RemoveVcpus,
    Situation,
    effective,
    leavable,
    next_step,
    surplus_reason,
)
from kata_resmgr.store import KnownVm, StateUnavailable

RECONNECT_FIRST = 0.1
RECONNECT_LONGEST = 5.0
"""Seconds between attempts to reach a VM again: doubled from the first to the longest."""

NOTHING = Plugged(vcpus=(), memory=0)


class Phase(StrEnum):
    """API.md, ``phase``."""

    SIZED = "sized"
    RUNNING = "running"
    HELD = "held"
    UNREACHABLE = "unreachable"
    LOST = "lost"


class Goal(StrEnum):
    """What a caller waits for."""

    SATISFIED = "satisfied"
    CONVERGED = "converged"


class Resource(Enum):
    """What a VM has some of."""

    VCPUS = "vcpus"
    MEMORY = "memory"


BOTH = (Resource.VCPUS, Resource.MEMORY)


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody who waits for a goal. *undo* makes it an operation that fails when the goal cannot be reached."""

    goal: Goal
    needs: Collection[Resource]
    """What it waits for when it waits to be satisfied."""
    future: asyncio.Future[bool]
    undo: Callable[[], None] | None

    def fail(self, problem: Problem) -> None:
        """Tell the operation why, and put its record back."""
        self.future.set_exception(problem)  # before the undoing, which would find that its goal is reached
        if self.undo is not None:
            self.undo()


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was known of a VM before a restart."""

    vm: KnownVm
    removals: Mapping[str, Removal]
    removed_any: bool
    keep_until: float
    """Nothing that is found surplus is asked to leave before this time."""


def _memory_exhausted(memory: MemorySituation) -> tuple[Code, str] | None:
    """Why the memory that is lacking can never be had on this machine, where that is so."""
    asked_for = f"{memory.desired} bytes of memory are asked for, {memory.plugged.memory} are there"
    match memory_step.obstacle(memory):
        case Obstacle.SLOTS:
            return Code.MEMORY_SLOTS_EXHAUSTED, (
                f"{asked_for}, and no slot is left: booting with {-(-memory.desired // MIB)} MiB (default_memory, the "
                "declared size) would have done; or raise memory_slots for new sandboxes"
            )
        case Obstacle.ROOM:
            return Code.MEMORY_LIMIT_EXCEEDED, (
                f"{asked_for}, and the machine's maximum is {memory.maximum}: ask for less, or start the VM with a "
                "higher one"
            )
    return None


def _left(before: Sequence[Dimm], plugged: Plugged) -> int:
    """Bytes of the DIMMs that were there *before* and are not any more: a removal ended meanwhile."""
    there = {dimm.id for dimm in plugged.dimms}
    return sum(dimm.size for dimm in before if dimm.id not in there)


class Vm:
    """The VM of one sandbox, attached or not. All methods belong to the event loop's thread.

    *on_machine* is called when a machine has been learned, before anything is compared with it, and refuses it by
    raising :class:`Problem`; *keep* when the removals have changed, before they are acted on (it raises
    :class:`StateUnavailable`); *on_lost* when the VM's process has been found gone.
    """

    def __init__(
        self,
        name: str,
        config: SandboxConfig,
        conditions: Conditions,
        on_machine: Callable[[], None],
        keep: Callable[[Mapping[str, Removal]], None],
        on_lost: Callable[[], None],
        tell: Teller,
        devices: Devices,
    ) -> None:
        self._tell = tell
        self._phase_told = Phase.SIZED
        self._config = config
        self._conditions = conditions
        self._on_machine = on_machine
        self._keep = keep
        self._on_lost = on_lost
        self._devices = devices
        devices.wake = self._wake
        self.resizes = True
        """Whether the VM may be resized at all; its sandbox says so."""
        self.memory_granularity = 1
        """Bytes: memory is resized by multiples of it; its sandbox says so."""
        self._log = structlog.get_logger().bind(sandbox=name)
        self._phase = Phase.SIZED
        self._held = False
        self._machine: Machine | None = None
        self._process: Process | None = None
        self._pid: int | None = None
        self._keep_until: float | None = None
        self._plugged = NOTHING
        self._vcpus = Aim()
        self._memory = Aim()
        self._memory_asked: int | None = None  # what a foreign change is told by
        self._removed_any = False
        self._unsatisfied_since: float | None = None
        self._sent_at = self._read_at = 0.0
        self._fresh = False
        self._waiters: dict[_Waiter, None] = {}  # in order of arrival
        self._driver: Hypervisor | None = None
        self._task: asyncio.Task[None] | None = None
        self._stale = True
        self._heed = Heed()
        self._was_reset = False
        self._reads = 0
        self._read_waiters: list[asyncio.Future[None]] = []
        self._lost: str | None = None
        self._told = False
        self._struck_out = False
        self._woken = False
        self._sleeper: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # kept: asking for it is a system call each time
        self._quiet: asyncio.Future[None] | None = None

    # What is

    @property
    def phase(self) -> Phase:
        return Phase.HELD if self._held and self._phase in (Phase.SIZED, Phase.RUNNING) else self._phase

    @property
    def held(self) -> bool:
        return self._held

    @property
    def machine(self) -> Machine | None:
        """The machine that is attached, also while it cannot be reached."""
        return self._machine

    @property
    def removed_any(self) -> bool:
        """Whether a vCPU has ever been asked to leave this VM."""
        return self._removed_any

    @property
    def process(self) -> Process | None:
        """The machine's process, where anybody told its pid."""
        return self._process

    @property
    def plugged(self) -> Plugged:
        """As last read; nothing before a VM is attached."""
        return self._plugged

    @property
    def pending(self) -> int:
        """Removals of vCPUs sent and not seen to end."""
        return len(self._vcpus.pending)

    @property
    def memory_pending(self) -> int:
        """Bytes that were asked to leave and have not been seen to."""
        return self._memory_situation(self._now()).leaving if self._drives_memory else 0

    @property
    def effective(self) -> int:
        return effective(self._plugged, self._vcpus.pending)

    @property
    def _drives_memory(self) -> bool:
        machine = self._machine
        return machine is not None and self.resizes and machine.memory.method is not MemoryMethod.NONE

    def has(self, vcpus: int, memory: int) -> tuple[bool, bool]:
        """Whether so many vCPUs and so much memory are there and will stay. Memory that is not driven is enough."""
        plugged = self._plugged
        enough = not self._drives_memory
        if not enough and plugged.memory >= memory:
            untouched = not self._memory.pending and plugged.memory_asked is None
            enough = untouched or self._memory_situation(self._now()).stays >= memory
        return self.effective >= vcpus, enough

    @property
    def satisfied(self) -> bool:
        return self.has(self._vcpus.desired, self._memory.desired) == (True, True)

    @property
    def unsatisfied(self) -> float:
        """Seconds for which less was there than desired."""
        since = self._unsatisfied_since
        return 0.0 if since is None or self._machine is None else self._now() - since

    @property
    def _at_rest(self) -> bool:
        """What is plugged is what is desired, and nothing is under way: nothing to do, and nothing to say."""
        plugged = self._plugged
        return (
            len(plugged.vcpus) == self._vcpus.desired
            and not self._vcpus.pending
            and (plugged.memory == self._memory.desired or not self._drives_memory)
            and not self._memory.pending
            and plugged.memory_asked is None
            and self._devices.at_rest
        )

    @property
    def converged(self) -> bool:
        if self._at_rest:
            return True
        if not self.satisfied or self._vcpus.pending or self.memory_pending or not self._devices.at_rest:
            return False
        return not leavable(self._situation(self._now()))

    @property
    def surplus(self) -> int:
        """vCPUs above what is desired."""
        return max(0, len(self._plugged.vcpus) - self._vcpus.desired) if self._machine is not None else 0

    @property
    def memory_surplus(self) -> int:
        """Bytes above what is desired."""
        return max(0, self._plugged.memory - self._memory.desired) if self._machine is not None else 0

    @property
    def surplus_reason(self) -> str | None:
        if not self.surplus and not self.memory_surplus:
            return None
        now = self._now()
        return surplus_reason(now, self._situation(now))

    def reached(self, goal: Goal, needs: Collection[Resource] = BOTH) -> bool:
        if goal is Goal.CONVERGED:
            return self.converged
        vcpus, memory = self.has(self._vcpus.desired, self._memory.desired)
        return (vcpus or Resource.VCPUS not in needs) and (memory or Resource.MEMORY not in needs)

    def cannot_grow(self, needs: Collection[Resource] = (), memory: int = 0) -> Problem | None:
        """Why a grow of what is in *needs* (memory: to so many bytes) has to fail now, if it has to."""
        if self._held:
            return Problem(Code.HELD, "the sandbox is held: release it first, then repeat", retry_after=1)
        if self._phase is Phase.LOST:
            return Problem(
                Code.HYPERVISOR_UNREACHABLE, "the VM's process is gone: attach a new VM (PUT vm)", retryable=False
            )
        if self._phase is Phase.UNREACHABLE:
            return Problem(
                Code.HYPERVISOR_UNREACHABLE,
                f"no connection to the VM: {self._lost}; it is being retried",
                retry_after=1,
            )
        if Resource.VCPUS in needs and self._machine is not None and self.resizes and not self._growable():
            return Problem(
                Code.NOT_SUPPORTED,
                "under TCG no vCPU can be plugged after one was removed (it would end QEMU): restart the VM",
            )
        if Resource.MEMORY in needs and self._drives_memory:
            situation = msgspec.structs.replace(self._memory_situation(self._now()), desired=memory)
            if (exhausted := _memory_exhausted(situation)) is not None:
                return Problem(*exhausted)
        return None

    # What is asked of it

    def aim(self, vcpus: int, memory: int) -> None:
        """From now on so many vCPUs and bytes are wanted; where that is less, it is kept for ``shrink_delay``."""
        if vcpus != self._vcpus.desired or memory != self._memory.desired:
            grace_until = self._now() + self._config.shrink_delay
            for aim, desired, kind, unit in (
                (self._vcpus, vcpus, "vcpus", "vcpus"),
                (self._memory, memory, "memory", "memoryBytes"),
            ):
                before = aim.desired
                if aim.move(desired, grace_until) and before:  # else it is the first
                    self._tell(f"{kind}.desired", **{unit: desired, "before": before})
            self._wake()
        self._settle()

    def try_again(self) -> None:
        """An operation asks for more: do not wait out the pause after an earlier refusal."""
        self._vcpus.try_again()
        self._memory.try_again()
        self._wake()

    def shrink_now(self) -> None:
        """Do not wait out ``shrink_delay``, nor the pause before removals are repeated."""
        self._vcpus.shrink_now()
        self._memory.shrink_now()
        self._devices.hurry()
        self._wake()

    async def until(
        self,
        goal: Goal,
        end: float,
        undo: Callable[[], None] | None,
        keeps: bool,
        needs: Collection[Resource] = BOTH,
    ) -> bool:
        """Wait for *goal* until the loop time *end*, to be satisfied as far as *needs* goes; whether it was reached.

        With *undo* this is an operation that grows the VM: a refusal fails it, and so does the end unless *keeps*
        (then the change stands and goes on). *undo* has been called, at that very moment, when it raises
        :class:`Problem`.
        """
        if self.reached(goal, needs):
            return True
        waiter = _Waiter(goal, needs, self._loop.create_future(), undo)
        self._waiters[waiter] = None
        timer = self._loop.call_at(end, self._end_wait, waiter, keeps)
        try:
            return await waiter.future
        finally:
            timer.cancel()
            del self._waiters[waiter]

    async def attach(self, open_driver: Callable[[], Hypervisor], pid: int | None = None) -> None:
        """Connect and read back; from then on the loop converges. Not attached when it raises :class:`Problem`.

        *pid* is the VMM's as the caller gave it.
        """
        await self.detach()
        self._pid = pid
        first: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._run(open_driver, first))
        try:
            await first
        except Problem:
            await self.detach()
            raise
        except HypervisorError as error:
            await self.detach()
            code = Code.MONITOR_BUSY if isinstance(error, Busy) else Code.HYPERVISOR_UNREACHABLE
            raise Problem(code, f"the VM cannot be attached: {error}", retry_after=1) from error

    def adopt(
        self, open_driver: Callable[[], Hypervisor], known: Adoption, gate: asyncio.Semaphore
    ) -> asyncio.Future[None]:
        """Go on with the VM that was driven before a restart; until it is reached it is ``unreachable``.

        *gate* bounds how many are being reached at once. Returned is done after the first attempt, good or bad.
        """
        now = self._now()
        self._know(known.vm)
        self._removed_any = known.removed_any
        self._keep_until = known.keep_until
        for unit, removal in known.removals.items():
            aim = self._memory if removal.size else self._vcpus
            aim.pending[unit] = msgspec.structs.replace(
                removal, first=min(removal.first, now), last=min(removal.last, now)
            )
        self._lost = "not yet reached since the daemon was started"
        self._phase = Phase.RUNNING if self._held else Phase.UNREACHABLE
        first: asyncio.Future[None] = self._loop.create_future()
        if self._held:  # whether it can be reached is seen when the hold ends
            first.set_result(None)
        self._task = asyncio.create_task(self._run(open_driver, first, gate))
        return first

    def find_lost(self, vm: KnownVm) -> None:
        """After a restart: the process of the VM that was driven before is gone."""
        self._know(vm)
        self._set_lost("the VM's process is gone")

    def stay_held(self) -> None:
        """After a restart: a hold goes on."""
        self._held = True
        self._conditions.only(Kind.HELD, "hold", "no calls to the hypervisor until the hold ends")

    def _know(self, vm: KnownVm) -> None:
        self._machine, self._process = vm.machine, vm.process
        self._pid = None if vm.process is None else vm.process.pid

    async def detach(self) -> None:
        """Let go of the VM, which runs on, and of its removals. Operations that still wait for it fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._fail_growers(
            lambda: Problem(Code.HYPERVISOR_UNREACHABLE, "the VM was detached meanwhile", retryable=False)
        )
        self._phase = Phase.SIZED
        self._tell_phase()
        self._machine = self._process = self._pid = self._keep_until = None
        self._plugged = NOTHING
        self._removed_any = False
        self._lost = None
        self._memory_asked = None
        self._vcpus.pending, self._memory.pending = {}, {}
        for kind in (Kind.UNREACHABLE, Kind.LOST, Kind.SURPLUS, Kind.GROW_FAILED, Kind.FOREIGN_CHANGE):
            self._conditions.only(kind, None)

    async def hold(self, end: float) -> None:
        """No calls to the hypervisor from when this returns; operations that wait for it fail.

        Raises :class:`Problem` ``hypervisor_timeout``, and is not held, where a call under way has not ended by then.
        """
        self._held = True
        self._tell_phase()
        self._conditions.only(Kind.HELD, "hold", "no calls to the hypervisor until the hold ends")
        self._fail_growers(lambda: Problem(Code.HELD, "the sandbox was put on hold meanwhile", retry_after=1))
        if self._task is None or self._phase is Phase.LOST:
            return
        if self._quiet is None:
            self._quiet = self._loop.create_future()
        self._wake()
        done, _ = await asyncio.wait([self._quiet], timeout=max(end - self._now(), 0))
        if not done:
            self.release()
            raise Problem(Code.HYPERVISOR_TIMEOUT, "a call to the hypervisor has not ended in time; not held: repeat")

    def release(self) -> None:
        """Read back and converge again."""
        self._held = False
        self._tell_phase()
        self._quiet = None
        self._conditions.only(Kind.HELD, None)
        self._stale = True
        self._heed.end()
        self._wake()

    async def read_back(self, end: float) -> None:
        """Read what the VM has, and let a foreign change no longer stand in the way.

        Raises :class:`Problem` where it cannot be read by then.
        """
        self._conditions.only(Kind.FOREIGN_CHANGE, None)
        self.try_again()
        if (problem := self.cannot_grow()) is not None:
            raise problem
        self._stale = True
        self._heed.end()
        read: asyncio.Future[None] = self._loop.create_future()
        self._read_waiters.append(read)
        self._wake()
        done, _ = await asyncio.wait([read], timeout=max(end - self._now(), 0))
        if not done:
            self._read_waiters.remove(read)
            raise Problem(Code.HYPERVISOR_TIMEOUT, "the VM could not be read in time: repeat later")

    # The loop

    async def _run(
        self, open_driver: Callable[[], Hypervisor], first: asyncio.Future[None], gate: asyncio.Semaphore | None = None
    ) -> None:
        """*first* is told of the first attempt; without a *gate*, which an adoption has, its failure is the end."""
        between = RECONNECT_FIRST
        while True:
            if self._held:
                await self._pause(0)
            driver = open_driver()
            since = float("inf")
            try:
                async with nullcontext() if gate is None or first.done() else gate:
                    await self._connect(driver)
                since = self._now()
                if not first.done():
                    first.set_result(None)
                await self._converge(driver)
            except (HypervisorError, Problem) as error:
                if gate is None and not first.done():
                    first.set_exception(error)
                    return
                self._unreachable(error if isinstance(error, HypervisorError) else Unreachable(error.detail))
            except Exception as error:
                # A defect of ours must end neither this sandbox nor the daemon: tell, reconnect, read back.
                self._log.exception("the loop failed")
                failure = Unreachable(f"internal error: {error!r}")
                if gate is None and not first.done():
                    first.set_exception(failure)
                    return
                self._unreachable(failure)
            finally:
                self._driver = None
                if not first.done():  # an adoption goes on; any other was cancelled before the VM was reached
                    if gate is None:
                        first.set_exception(Unreachable("detached meanwhile"))
                    else:
                        first.set_result(None)
                await driver.close()
            if self._now() - since >= RECONNECT_LONGEST:  # a session that broke at once is no better than none
                between = RECONNECT_FIRST
            await self._pause(between)
            between = min(2 * between, RECONNECT_LONGEST)
            if self._process is not None and not self._process.lives():
                self._set_lost("the VM's process is gone")
                return

    async def _connect(self, driver: Hypervisor) -> None:
        self._lost = None
        self._driver = driver

        def hear(change: Change) -> None:
            if driver is self._driver:
                self._hear(change)

        machine = await driver.connect(hear)
        pid = machine.pid or self._pid
        process = None if pid is None else Process.of(pid)
        self._stale = self._was_reset  # before the read: what is heard after its answer is news
        plugged = await driver.read()
        if self._machine is not None and (machine.identity, process) != (self._machine.identity, self._process):
            raise Unreachable("another VM answers at this socket")
        self._machine, self._process = machine, process
        self._memory_asked = None
        self._phase = Phase.RUNNING
        self._tell_phase()
        self._conditions.only(Kind.UNREACHABLE, None)
        self._log.info(
            "attached",
            pid=machine.pid,
            vcpus=len(plugged.vcpus),
            max_vcpus=machine.max_vcpus,
            memory=plugged.memory,
            memory_method=machine.memory.method.value,
        )
        self._on_machine()
        if self._keep_until is not None:
            self._vcpus.grace.note(len(plugged.vcpus), self._vcpus.desired, self._keep_until)
            self._memory.grace.note(plugged.memory, self._memory.desired, self._keep_until)
            self._keep_until = None
        self._observe(plugged)

    async def _converge(self, driver: Hypervisor) -> None:
        while True:
            if self._told:  # let those who have what they waited for answer first: nobody waits for what is next
                self._told = False
                await asyncio.sleep(0)
            if self._struck_out:
                self._forget_what_has_left()
            if self._lost is not None:
                raise Unreachable(self._lost)
            if self._held:
                await self._pause(0)
            elif self._stale and self._heed.not_before <= self._now():
                await self._look(driver)
            elif (due := self._devices.due(self._now())) is not None and due <= self._now():
                self._fresh = False
                if (plugged := await self._devices.step(driver)) is not None:
                    self._observe(plugged)
            else:
                if self._at_rest:
                    self._say_why(None, None)
                    await self._sleep(self._next_look())
                    continue
                now = self._now()
                situation = self._situation(now)
                step = next_step(now, situation)
                match step:
                    case AddVcpus(count=count):
                        await self._grow(driver, count)
                    case RemoveVcpus(ids=ids):
                        await self._ask_to_leave(driver, ids)
                    case GrowMemory(to=to):
                        await self._grow_memory(driver, to)
                    case ShrinkMemory():
                        await self._shrink_memory(driver, step)
                    case Look():
                        await self._read(driver)
                    case _:
                        self._say_why(surplus_reason(now, situation), situation.memory)
                        times = (step.until, due, self._next_look())
                        await self._sleep(min((time for time in times if time is not None), default=None))

    async def _look(self, driver: Hypervisor) -> None:
        """Something may have changed, as the hypervisor says."""
        before = self._plugged
        await self._read(driver)
        self._heed.looked(self._now(), found=self._plugged != before)

    async def _read(self, driver: Hypervisor) -> None:
        """Read back."""
        self._stale = False
        if self._was_reset:
            self._was_reset = False
            self._vcpus.hurry()
            self._memory.hurry()
            self._devices.hurry()
            self._log.info("the guest was reset")
        self._observe(await driver.read())

    def _next_look(self) -> float | None:
        """When to look at what may have changed, where that has to wait."""
        return self._heed.not_before if self._stale else None

    async def _grow(self, driver: Hypervisor, count: int) -> None:
        before = {vcpu.id for vcpu in self._plugged.vcpus}
        self._sending()
        try:
            plugged = await driver.add_vcpus(count)
        except Refused as error:
            plugged = await driver.read()
            refusal: str | None = str(error)
        else:
            came = sum(vcpu.id not in before for vcpu in plugged.vcpus)  # others may have left meanwhile
            refusal = None if came >= count else f"{count} vCPUs were accepted, and {came} are there"
        self._log.debug("plugged", asked=count, vcpus=len(plugged.vcpus), refusal=refusal)
        if refusal is None:
            self._conditions.clear(Kind.FOREIGN_CHANGE, "vcpus")  # of before; what this read-back shows is news
            self._vcpus.grown()
        self._observe(plugged)
        if refusal is not None:
            self._refused(Resource.VCPUS, refusal)

    async def _grow_memory(self, driver: Hypervisor, to: int) -> None:
        before = self._plugged.dimms
        self._sending()
        try:
            plugged = await driver.grow_memory(to)
        except Refused as error:
            plugged = await driver.read()
            refusal: str | None = str(error)
        else:
            to -= _left(before, plugged)
            comes = max(asked(plugged), plugged.memory)
            refusal = None if comes >= to else f"{to} bytes of memory were accepted, and {comes} are to be there"
        self._log.debug("memory asked for", to=to, memory=plugged.memory, refusal=refusal)
        if refusal is None:
            self._conditions.clear(Kind.FOREIGN_CHANGE, "memory")
        self._memory_asked = asked(plugged)
        self._observe(plugged)
        if refusal is not None:
            self._refused(Resource.MEMORY, refusal)
        elif plugged.memory >= to:
            self._memory.grown()
        else:  # until it is asked again: a guest that got stuck needs it
            if self._memory.failed() > 1:
                text = f"the guest was asked for {to} bytes of memory and has taken {plugged.memory}; it is asked again"
                self._conditions.only(Kind.GROW_FAILED, "guest-silent", text)
            self._memory.pause(self._now())

    async def _ask_to_leave(self, driver: Hypervisor, ids: tuple[str, ...]) -> None:
        if not await self._remember(Resource.VCPUS, dict.fromkeys(ids, 0)):
            return
        self._log.debug("removing", vcpus=ids)
        self._sending()
        try:
            await driver.start_removing_vcpus(ids)
        except Refused as error:
            for vcpu in ids:
                self._told_no(vcpu, str(error))

    async def _shrink_memory(self, driver: Hypervisor, step: ShrinkMemory) -> None:
        by_pieces = self._machine is not None and self._machine.memory.method is MemoryMethod.DIMM
        if step.units and not await self._remember(Resource.MEMORY, step.units):
            return
        self._log.debug("shrinking memory", to=step.to, units=tuple(step.units))
        self._sending()
        try:
            await driver.start_shrinking_memory(step.to, tuple(step.units) if by_pieces else ())
        except Refused as error:
            for unit in step.units:
                self._told_no(unit, str(error))
            return
        if not by_pieces:  # as it reads from now on, until it is read
            self._memory_asked = step.to
            there = step.to == self._plugged.memory
            self._plugged = msgspec.structs.replace(self._plugged, memory_asked=None if there else step.to)

    def _sending(self) -> None:
        """Something is asked of the hypervisor now: what was read is no longer fresh."""
        self._sent_at = self._now()
        self._fresh = False

    async def _remember(self, resource: Resource, sizes: Mapping[str, int]) -> bool:
        """Record that these are asked to leave, before it is sent: one that nobody remembers would take what is used.

        *sizes* are their bytes, 0 for vCPUs. Where it cannot be recorded, nothing may be sent.
        """
        now = self._now()
        aim, other = self._vcpus, self._memory
        if resource is Resource.MEMORY:
            aim, other = other, aim
        pending = aim.pending_with(sizes, now)
        removed_any, self._removed_any = self._removed_any, self._removed_any or resource is Resource.VCPUS
        try:
            self._keep(pending | other.pending)
        except StateUnavailable as problem:
            self._removed_any = removed_any
            self._log.warning("a removal cannot be recorded, and is not sent", units=[*sizes], reason=problem.detail)
            await self._sleep(now + REMEMBER_AGAIN)
            return False
        aim.pending = pending
        if fresh := sum(pending[unit].attempts == 1 for unit in sizes):
            self._tell(f"{resource.value}.removing", count=fresh)
        return True

    def _forget_what_has_left(self) -> None:
        """Strike it out of the record as well. No answer waits for that: a restart would find it gone as we have."""
        self._struck_out = False
        try:
            self._keep(self._vcpus.pending | self._memory.pending)
        except StateUnavailable as problem:
            self._log.warning("that removals have ended is not recorded", reason=problem.detail)

    def _say_why(self, reason: str | None, memory: MemorySituation | None) -> None:
        """Nothing to do for now: say why what is surplus is still there, and what cannot be had."""
        if reason is None or reason == "grace":
            self._conditions.only(Kind.SURPLUS, None)
        else:
            numbers = (
                f"{len(self._plugged.vcpus)} vCPUs plugged, {self._vcpus.desired} desired, {self.pending} being removed"
            )
            if memory is not None and memory.plugged.memory > memory.desired:
                has, leaving = memory.plugged.memory, memory.leaving
                numbers += f"; {has} bytes of memory plugged, {memory.desired} desired, {leaving} leaving"
            self._conditions.only(Kind.SURPLUS, reason, numbers)
        if memory is not None and (exhausted := _memory_exhausted(memory)) is not None:
            code, text = exhausted
            self._fail_growers(lambda: Problem(code, text), Resource.MEMORY)
            if self._memory.desired == memory.desired:
                self._conditions.only(Kind.GROW_FAILED, code.text, text)
        if self.satisfied:
            self._conditions.only(Kind.GROW_FAILED, None)
        self._settle()

    # What the loop learns

    def _hear(self, change: Change) -> None:
        """Take note. What is known already wakes nobody: a guest may say it as often as it likes."""
        match change:
            case SizeChanged():
                if self._stale:
                    return
                self._stale = True
            case RemovalRefused(id=unit, reason=reason):
                if not self._told_no(unit, reason):
                    return
            case GuestReset():
                if self._stale and self._was_reset:
                    return
                self._stale = self._was_reset = True
            case ConnectionLost(reason=reason):
                self._lost = reason
        self._wake()

    def _told_no(self, unit: str, reason: str) -> bool:
        """Whether that is news: the first no to this attempt."""
        for aim, resource, name in ((self._vcpus, Resource.VCPUS, "vcpu"), (self._memory, Resource.MEMORY, "unit")):
            removal = aim.pending.get(unit)
            if removal is None or removal.refused_attempt == removal.attempts:
                continue
            if removal.refusal is None:  # it may go on saying no for hours
                self._tell(f"{resource.value}.refused", reason=reason, **{name: unit})
            aim.pending[unit] = removal.told_no(reason)
            self._log.info("removal refused", unit=unit, reason=reason)
            return True
        return False

    def _observe(self, plugged: Plugged) -> None:
        """What the VM has now. Removals whose vCPU or memory is gone are proved, and only those are struck out."""
        before, self._plugged = self._plugged, plugged
        self._read_at = self._now()
        self._fresh = True
        ids = {vcpu.id for vcpu in plugged.vcpus}
        if before is not NOTHING:
            self._look_for_foreign_changes(before, plugged, ids)
            if self._drives_memory:
                self._look_for_foreign_memory(before, plugged)
        self._memory_asked = asked(plugged)
        gone = [vcpu for vcpu in self._vcpus.pending if vcpu not in ids]
        memory_gone = self._memory_gone(plugged) if self._memory.pending else []
        if gone or memory_gone:
            self._vcpus.strike_out(gone)
            self._memory.strike_out(memory_gone)
            self._struck_out = True
            self._log.debug("removed", units=gone + memory_gone, vcpus=len(ids), memory=plugged.memory)
        if before is not NOTHING:
            self._tell_changes(before, plugged, gone, memory_gone)
        if before.memory_asked is not None and plugged.memory_asked is None:
            self._memory.grown()
        self._devices.observe(plugged)
        for read in self._read_waiters:
            if not read.done():
                read.set_result(None)
        self._read_waiters.clear()
        self._settle()

    def _tell_changes(self, before: Plugged, after: Plugged, gone: list[str], memory_gone: list[str]) -> None:
        plugged = len(after.vcpus)
        if gone:
            self._tell("vcpus.removed", count=len(gone), plugged=plugged)
        if (added := plugged - len(before.vcpus) + len(gone)) > 0:
            self._tell("vcpus.plugged", added=added, plugged=plugged)
        if memory_gone:
            self._tell("memory.removed", count=len(memory_gone), plugged=after.memory)
        if after.memory > before.memory:
            self._tell("memory.plugged", added=after.memory - before.memory, plugged=after.memory)

    def _memory_gone(self, plugged: Plugged) -> list[str]:
        """The removals of memory that have ended: the DIMM is gone, or the guest has come to what it was asked for."""
        there = {dimm.id for dimm in plugged.dimms}
        whole = self._memory.pending.get(memory_step.WHOLE)
        refused = whole is not None and whole.attempts == whole.refused_attempt  # nothing was asked for, so far
        if plugged.memory > (self._memory.desired if refused else asked(plugged)):
            there.add(memory_step.WHOLE)
        return [unit for unit in self._memory.pending if unit not in there]

    def _look_for_foreign_changes(self, before: Plugged, after: Plugged, ids: set[str]) -> None:
        """What came that is not ours, or went without being asked, is somebody else's doing: taken as it is."""
        known = {vcpu.id for vcpu in before.vcpus}
        came = [vcpu.id for vcpu in after.vcpus if not vcpu.ours and vcpu.id not in known]
        went = [vcpu for vcpu in known if vcpu not in ids and vcpu not in self._vcpus.pending]
        if came or went:
            message = f"changed by somebody else: {len(before.vcpus)} vCPUs before, {len(after.vcpus)} now"
            self._conditions.hold(Kind.FOREIGN_CHANGE, "vcpus", message)
            self._log.warning("foreign change", came=came, went=went)
        # No fight until the next operation or reconcile: what they took is not replaced, and ours do not go for theirs.
        if went:
            self._vcpus.grow_from = inf
        if came:
            self._vcpus.lets_stand = True

    def _look_for_foreign_memory(self, before: Plugged, after: Plugged) -> None:
        """The same for memory: DIMMs that came or went, or another size than we last asked for."""
        if after.dimms == before.dimms and asked(after) == self._memory_asked:
            return
        known = {dimm.id for dimm in before.dimms}
        present = {dimm.id for dimm in after.dimms}
        came = [dimm.id for dimm in after.dimms if not dimm.ours and dimm.id not in known]
        went = [dimm for dimm in known if dimm not in present and dimm not in self._memory.pending]
        by_pieces = self._machine is not None and self._machine.memory.method is MemoryMethod.DIMM
        other_size = not by_pieces and self._memory_asked not in (None, asked(after))
        if came or went or other_size:
            message = f"changed by somebody else: {before.memory} bytes of memory before, {asked(after)} now"
            self._conditions.hold(Kind.FOREIGN_CHANGE, "memory", message)
            self._log.warning("foreign change", came=came, went=went, memory=asked(after))
        if went or other_size:
            self._memory.grow_from = inf
        if came or other_size:
            self._memory.lets_stand = True

    def _refused(self, resource: Resource, refusal: str) -> None:
        """A step was refused: every operation that still waits for more of that than what is plugged fails."""
        if self.reached(Goal.SATISFIED, (resource,)):
            return
        of_memory = resource is Resource.MEMORY
        aim = self._memory if of_memory else self._vcpus
        if aim.failed() == 1:  # of a series that nobody asked to begin anew
            plugged = self._plugged.memory if of_memory else len(self._plugged.vcpus)
            self._tell(f"{resource.value}.refused", desired=aim.desired, plugged=plugged, reason=refusal)
        self._fail_growers(lambda: Problem(Code.HYPERVISOR_REFUSED, f"the hypervisor refused: {refusal}"), resource)
        if not self.reached(Goal.SATISFIED, (resource,)):
            aim.pause(self._now())
            self._conditions.only(Kind.GROW_FAILED, "refused", refusal)

    def _unreachable(self, error: HypervisorError) -> None:
        if self._phase is not Phase.UNREACHABLE:
            self._log.warning("unreachable", reason=str(error))
        self._phase = Phase.UNREACHABLE
        self._tell_phase()
        self._lost = str(error)
        self._conditions.only(Kind.UNREACHABLE, "connection", self._lost)
        late = isinstance(error, TimedOut)
        code = Code.HYPERVISOR_TIMEOUT if late else Code.HYPERVISOR_UNREACHABLE
        self._fail_growers(lambda: Problem(code, f"the VM cannot be reached: {error}", retry_after=1))

    def _set_lost(self, reason: str) -> None:
        self._phase = Phase.LOST
        self._tell_phase()
        self._lost = reason
        self._log.warning("lost", reason=reason)
        self._conditions.only(Kind.UNREACHABLE, None)
        self._conditions.only(Kind.LOST, "process", f"{reason}: attach a new VM, or delete the sandbox")
        self._on_lost()

    def _tell_phase(self) -> None:
        """Whatever may have changed the phase has happened."""
        before, self._phase_told = self._phase_told, self.phase
        self._tell.phase(before, self._phase_told)

    # Waiting

    def _settle(self) -> None:
        """Tell those whose goal is reached."""
        if self.satisfied or self._machine is None:
            self._unsatisfied_since = None
        elif self._unsatisfied_since is None:
            self._unsatisfied_since = self._now()
        for waiter in self._waiters:
            if not waiter.future.done() and self.reached(waiter.goal, waiter.needs):
                waiter.future.set_result(True)
                self._told = True

    def _fail_growers(self, problem: Callable[[], Problem], of: Resource | None = None) -> None:
        """Those who wait for that resource, or all. Each undoes its own record only, here and now: before the loop
        takes its next step.

        The youngest first: what it gives up may be all that an older one lacked.
        """
        if of is None:
            self._devices.fail(problem)
        for waiter in reversed(tuple(self._waiters)):
            if waiter.undo is not None and not waiter.future.done() and (of is None or of in waiter.needs):
                waiter.fail(problem())

    def _end_wait(self, waiter: _Waiter, keeps: bool) -> None:
        if waiter.future.done():
            return
        if waiter.undo is None or keeps:
            waiter.future.set_result(False)
            return
        waiter.fail(self._too_late(waiter.needs))

    def _too_late(self, needs: Collection[Resource]) -> Problem:
        """Why what is in *needs* was not reached by a deadline: that of the vCPUs, where they are lacking too."""
        vcpus, memory = self._vcpus, self._memory
        lacking = vcpus.desired - self.effective if Resource.VCPUS in needs else 0
        if lacking > 0:
            free = (self._machine.max_vcpus if self._machine else 0) - len(self._plugged.vcpus)
            blocked = free < lacking or self._one_resize
            what, reached = f"{lacking} more vCPUs need", f"{self.effective} of {vcpus.desired} vCPUs"
            holders = vcpus.pending if blocked else {}
        else:
            situation = self._memory_situation(self._now())
            blocked = memory_step.obstacle(situation) is Obstacle.REMOVAL
            what = f"{memory.desired - situation.stays} more bytes of memory need"
            reached = f"{situation.stays} of {memory.desired} bytes of memory"
            holders = vcpus.pending if self._one_resize and vcpus.pending else memory.pending if blocked else {}
        if holders:
            age = self._now() - min(removal.first for removal in holders.values())
            return Problem(
                Code.SHRINK_PENDING,
                f"{what} the slots of {len(holders)} whose removal the guest has not finished for {age:.1f} s: "
                "repeat later",
                retry_after=1,
            )
        return Problem(
            Code.HYPERVISOR_TIMEOUT,
            f"{reached} by the deadline; the table is as before: repeat, or allow a longer deadline",
        )

    def _situation(self, now: float) -> Situation:
        aim, machine = self._vcpus, self._machine
        return Situation(
            desired=aim.desired,
            plugged=self._plugged,
            max_vcpus=machine.max_vcpus if machine is not None else 0,
            pending=aim.pending,
            keep=aim.keep(now, len(self._plugged.vcpus)),
            keep_until=aim.keep_until,
            grow_from=aim.grow_from,
            removable=self._removable(),
            growable=self._growable(),
            one_by_one=machine is not None and machine.accelerator is Accelerator.TCG,
            one_resize=self._one_resize,
            tells_changes=machine is None or machine.tells_changes,
            fresh=self._fresh,
            sent_at=self._sent_at,
            read_at=self._read_at,
            memory=self._memory_situation(now) if self._drives_memory else None,
        )

    def _memory_situation(self, now: float) -> MemorySituation:
        aim = self._memory
        machine = self._machine
        able = machine.memory if machine is not None else FIXED_MEMORY
        return MemorySituation(
            desired=aim.desired,
            plugged=self._plugged,
            method=able.method,
            granularity=self.memory_granularity,
            maximum=able.maximum,
            pending=aim.pending,
            keep=aim.keep(now, max(asked(self._plugged), self._plugged.memory)),
            keep_until=aim.keep_until,
            grow_from=aim.grow_from,
        )

    @property
    def _one_resize(self) -> bool:
        return self._machine is not None and self._machine.one_resize

    def _removable(self) -> bool:
        machine = self._machine
        if machine is None or not self.resizes:
            return False
        return machine.accelerator is not Accelerator.TCG or self._config.tcg_unplug is TcgUnplug.ONCE

    def _growable(self) -> bool:
        machine = self._machine
        if machine is None or not self.resizes:
            return False
        return machine.accelerator is not Accelerator.TCG or not self._removed_any

    def _now(self) -> float:
        return self._loop.time()

    def _wake(self) -> None:
        self._woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def _pause(self, seconds: float) -> None:
        """No calls to the hypervisor for so long, and while it is held."""
        end = self._now() + seconds
        while self._held or self._now() < end:
            if self._held and self._quiet is not None and not self._quiet.done():
                self._quiet.set_result(None)
            await self._sleep(None if self._held else end)

    async def _sleep(self, until: float | None) -> None:
        """Until woken (also by what happened while the loop was busy), or until that time."""
        self._fresh = False
        if not self._woken:
            self._sleeper = self._loop.create_future()
            timer = None if until is None else self._loop.call_at(until, self._wake)
            try:
                await self._sleeper
            finally:
                self._sleeper = None
                if timer is not None:
                    timer.cancel()
        self._woken = False
