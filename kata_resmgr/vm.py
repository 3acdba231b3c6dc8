"""A sandbox's VM and the one loop that talks to its hypervisor: read, compare, one step, again (SPEC 7).

The loop is told how many vCPUs are desired and makes it so. Operations never call a driver: they change what is
desired and wait here until it is reached, refused, or their time is over. The rule for what to do next is
:func:`kata_resmgr.step.next_step`; this module only carries it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import msgspec
import structlog

from hypervisors.base import (
    Accelerator,
    Busy,
    Change,
    ConnectionLost,
    GuestReset,
    Hypervisor,
    HypervisorError,
    Machine,
    Plugged,
    Refused,
    RemovalRefused,
    SizeChanged,
    TimedOut,
    Unreachable,
)
from kata_resmgr.conditions import Conditions, Kind
from kata_resmgr.config import SandboxConfig, TcgUnplug
from kata_resmgr.events import Teller
from kata_resmgr.heed import Heed
from kata_resmgr.problem import Code, Problem
from kata_resmgr.process import Process
from kata_resmgr.step import (
    AddVcpus,
    Grace,
    Removal,
    RemoveVcpus,
    Situation,
    effective,
    leavable,
    next_step,
    pause,
    surplus_reason,
)
from kata_resmgr.store import KnownVm, StateUnavailable

RECONNECT_FIRST = 0.1
RECONNECT_LONGEST = 5.0
"""Seconds between attempts to reach a VM again: doubled from the first to the longest."""

REMEMBER_AGAIN = 1.0
"""Seconds until a removal that could not be recorded, and so was not sent, is tried again."""

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


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody who waits for a goal. *undo* makes it an operation that fails when the goal cannot be reached."""

    goal: Goal
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
    """No vCPU that is found surplus is asked to leave before this time."""


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
    ) -> None:
        self._tell = tell
        self._phase_told = Phase.SIZED
        self._config = config
        self._conditions = conditions
        self._on_machine = on_machine
        self._keep = keep
        self._on_lost = on_lost
        self.resizes = True
        """Whether the VM may be resized at all; its sandbox says so."""
        self._log = structlog.get_logger().bind(sandbox=name)
        self._phase = Phase.SIZED
        self._held = False
        self._machine: Machine | None = None
        self._process: Process | None = None
        self._pid: int | None = None
        self._keep_until: float | None = None
        self._plugged = NOTHING
        self._desired = 0
        self._pending: dict[str, Removal] = {}
        self._removed_any = False
        self._grace = Grace()
        self._grow_from = 0.0
        self._lets_stand = False
        self._refusals = 0
        self._unsatisfied_since: float | None = None
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
        """Removals sent and not seen to end."""
        return len(self._pending)

    @property
    def effective(self) -> int:
        return effective(self._plugged, self._pending)

    @property
    def satisfied(self) -> bool:
        return self.effective >= self._desired

    @property
    def unsatisfied(self) -> float:
        """Seconds for which less was there than desired."""
        since = self._unsatisfied_since
        return 0.0 if since is None or self._machine is None else self._now() - since

    @property
    def _at_rest(self) -> bool:
        """What is plugged is what is desired, and nothing is under way: nothing to do, and nothing to say."""
        return len(self._plugged.vcpus) == self._desired and not self._pending

    @property
    def converged(self) -> bool:
        if self._at_rest:
            return True
        return self.satisfied and not self._pending and not leavable(self._situation(self._now()))

    @property
    def surplus(self) -> int:
        return max(0, len(self._plugged.vcpus) - self._desired) if self._machine is not None else 0

    @property
    def surplus_reason(self) -> str | None:
        if self.surplus == 0:
            return None
        now = self._now()
        return surplus_reason(now, self._situation(now))

    def reached(self, goal: Goal) -> bool:
        return self.satisfied if goal is Goal.SATISFIED else self.converged

    def cannot_grow(self) -> Problem | None:
        """Why a grow has to fail now, if it has to."""
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
        if self._machine is not None and self.resizes and not self._growable():
            return Problem(
                Code.NOT_SUPPORTED,
                "under TCG no vCPU can be plugged after one was removed (it would end QEMU): restart the VM",
            )
        return None

    # What is asked of it

    def aim(self, desired: int) -> None:
        """From now on *desired* vCPUs are wanted; where that is less, the old size is kept for ``shrink_delay``."""
        if desired != self._desired:
            if self._desired:  # else it is the first
                self._tell("vcpus.desired", vcpus=desired, before=self._desired)
            self._grace.note(self._desired, desired, self._now() + self._config.shrink_delay)
            self._desired = desired
            self._lets_stand = False
            self._wake()
        self._settle()

    def try_again(self) -> None:
        """An operation asks for vCPUs: do not wait out the pause after an earlier refusal."""
        self._grow_from = 0.0
        self._lets_stand = False
        self._refusals = 0
        self._wake()

    def shrink_now(self) -> None:
        """Do not wait out ``shrink_delay``, nor the pause before removals are repeated."""
        self._grace.end()
        self._lets_stand = False
        self._pending = {vcpu: removal.hurried() for vcpu, removal in self._pending.items()}
        self._wake()

    async def until(self, goal: Goal, end: float, undo: Callable[[], None] | None, keeps: bool) -> bool:
        """Wait for *goal* until the loop time *end*; whether it was reached.

        With *undo* this is an operation that grows the VM: a refusal fails it, and so does the end unless *keeps*
        (then the change stands and goes on). *undo* has been called, at that very moment, when it raises
        :class:`Problem`.
        """
        if self.reached(goal):
            return True
        waiter = _Waiter(goal, self._loop.create_future(), undo)
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
        self._pending = {
            name: msgspec.structs.replace(removal, first=min(removal.first, now), last=min(removal.last, now))
            for name, removal in known.removals.items()
        }
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
        self._pending = {}
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
        if (problem := self.cannot_grow()) is not None and problem.code is not Code.NOT_SUPPORTED:
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
        self._phase = Phase.RUNNING
        self._tell_phase()
        self._conditions.only(Kind.UNREACHABLE, None)
        self._log.info("attached", pid=machine.pid, vcpus=len(plugged.vcpus), max_vcpus=machine.max_vcpus)
        self._on_machine()
        if self._keep_until is not None:
            self._grace.note(len(plugged.vcpus), self._desired, self._keep_until)
            self._keep_until = None
        self._observe(plugged)

    async def _converge(self, driver: Hypervisor) -> None:
        while True:
            if self._told:  # let those who have what they waited for answer first: nobody waits for what is next
                self._told = False
                await asyncio.sleep(0)
            if self._lost is not None:
                raise Unreachable(self._lost)
            if self._held:
                await self._pause(0)
            elif self._stale and self._heed.not_before <= self._now():
                await self._look(driver)
            else:
                if self._at_rest:
                    self._say_why(None)
                    await self._sleep(self._next_look())
                    continue
                now = self._now()
                situation = self._situation(now)
                step = next_step(now, situation)
                if isinstance(step, AddVcpus):
                    await self._grow(driver, step.count)
                elif isinstance(step, RemoveVcpus):
                    await self._ask_to_leave(driver, step.ids)
                else:
                    self._say_why(surplus_reason(now, situation))
                    await self._sleep(min((t for t in (step.until, self._next_look()) if t is not None), default=None))

    async def _look(self, driver: Hypervisor) -> None:
        """Read back: something may have changed."""
        self._stale = False
        if self._was_reset:
            self._was_reset = False
            self._pending = {vcpu: removal.hurried() for vcpu, removal in self._pending.items()}
            self._log.info("the guest was reset")
        before = self._plugged
        self._observe(await driver.read())
        self._heed.looked(self._now(), found=self._plugged != before)

    def _next_look(self) -> float | None:
        """When to look at what may have changed, where that has to wait."""
        return self._heed.not_before if self._stale else None

    async def _grow(self, driver: Hypervisor, count: int) -> None:
        before = len(self._plugged.vcpus)
        try:
            plugged = await driver.add_vcpus(count)
        except Refused as error:
            plugged = await driver.read()
            refusal: str | None = str(error)
        else:
            came = len(plugged.vcpus) - before
            refusal = None if came >= count else f"{count} vCPUs were accepted, and {came} are there"
        self._log.debug("plugged", asked=count, vcpus=len(plugged.vcpus), refusal=refusal)
        if refusal is None:
            self._conditions.only(Kind.FOREIGN_CHANGE, None)  # of before; what this read-back shows is news
        self._observe(plugged)
        if refusal is None:
            self._refusals = 0
        else:
            self._refused(refusal)

    async def _ask_to_leave(self, driver: Hypervisor, ids: tuple[str, ...]) -> None:
        now = self._now()
        asked = {}
        for vcpu in ids:
            known = self._pending.get(vcpu)
            asked[vcpu] = Removal(first=now, last=now) if known is None else known.again(now)
        pending = {**self._pending, **asked}
        removed_any, self._removed_any = self._removed_any, True
        try:
            self._keep(pending)  # before it is sent: a removal that nobody remembers would take a vCPU in use
        except StateUnavailable as problem:
            self._removed_any = removed_any
            self._log.warning("a removal cannot be recorded, and is not sent", vcpus=ids, reason=problem.detail)
            await self._sleep(now + REMEMBER_AGAIN)
            return
        self._pending = pending
        if fresh := [vcpu for vcpu in ids if pending[vcpu].attempts == 1]:
            self._tell("vcpus.removing", vcpus=fresh)
        self._log.debug("removing", vcpus=ids)
        try:
            await driver.start_removing_vcpus(ids)
        except Refused as error:
            for vcpu in ids:
                self._told_no(vcpu, str(error))

    def _say_why(self, reason: str | None) -> None:
        """Nothing to do for now: say why what is surplus is still there."""
        if reason is None or reason == "grace":
            self._conditions.only(Kind.SURPLUS, None)
        else:
            numbers = (
                f"{len(self._plugged.vcpus)} vCPUs plugged, {self._desired} desired, {len(self._pending)} being removed"
            )
            self._conditions.only(Kind.SURPLUS, reason, numbers)
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
            case RemovalRefused(id=vcpu, reason=reason):
                if not self._told_no(vcpu, reason):
                    return
            case GuestReset():
                if self._stale and self._was_reset:
                    return
                self._stale = self._was_reset = True
            case ConnectionLost(reason=reason):
                self._lost = reason
        self._wake()

    def _told_no(self, vcpu: str, reason: str) -> bool:
        """Whether that is news: the first no to this attempt."""
        removal = self._pending.get(vcpu)
        news = removal is not None and removal.refused_attempt < removal.attempts
        if removal is not None and news:
            if removal.refusal is None:  # it may go on saying no for hours
                self._tell("vcpus.refused", vcpu=vcpu, reason=reason)
            self._pending[vcpu] = removal.told_no(reason)
            self._log.info("removal refused", vcpu=vcpu, reason=reason)
        return news

    def _observe(self, plugged: Plugged) -> None:
        """What the VM has now. Removals whose vCPU is gone are proved, and only those are struck out."""
        before, self._plugged = self._plugged, plugged
        ids = {vcpu.id for vcpu in plugged.vcpus}
        if before is not NOTHING:
            self._look_for_foreign_changes(before, plugged, ids)
        if gone := [vcpu for vcpu in self._pending if vcpu not in ids]:
            for vcpu in gone:
                del self._pending[vcpu]
            try:
                self._keep(self._pending)
            except StateUnavailable as problem:  # a restart finds them gone as well
                self._log.warning("that removals have ended is not recorded", reason=problem.detail)
            self._tell("vcpus.removed", vcpus=gone, plugged=len(ids))
            self._log.debug("removed", vcpus=gone, left=len(ids))
        if before is not NOTHING and (added := len(ids) - len(before.vcpus) + len(gone)) > 0:
            self._tell("vcpus.plugged", added=added, plugged=len(ids))
        for read in self._read_waiters:
            if not read.done():
                read.set_result(None)
        self._read_waiters.clear()
        self._settle()

    def _look_for_foreign_changes(self, before: Plugged, after: Plugged, ids: set[str]) -> None:
        """What came that is not ours, or went without being asked, is somebody else's doing: taken as it is."""
        known = {vcpu.id for vcpu in before.vcpus}
        came = [vcpu.id for vcpu in after.vcpus if not vcpu.ours and vcpu.id not in known]
        went = [vcpu for vcpu in known if vcpu not in ids and vcpu not in self._pending]
        if came or went:
            message = f"changed by somebody else: {len(before.vcpus)} vCPUs before, {len(after.vcpus)} now"
            self._conditions.only(Kind.FOREIGN_CHANGE, "vcpus", message)
            self._log.warning("foreign change", came=came, went=went)
        # No fight until the next operation or reconcile: what they took is not replaced, and ours do not go for theirs.
        if went:
            self._grow_from = inf
        if came:
            self._lets_stand = True

    def _refused(self, refusal: str) -> None:
        """A step was refused: every operation that still waits for more than what is plugged fails."""
        if self.satisfied:
            return
        self._refusals += 1
        if self._refusals == 1:  # of a series that nobody asked to begin anew
            self._tell("vcpus.refused", desired=self._desired, plugged=len(self._plugged.vcpus), reason=refusal)
        self._fail_growers(lambda: Problem(Code.HYPERVISOR_REFUSED, f"the hypervisor refused: {refusal}"))
        if not self.satisfied:
            self._grow_from = self._now() + pause(self._refusals)
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
            if not waiter.future.done() and self.reached(waiter.goal):
                waiter.future.set_result(True)
                self._told = True

    def _fail_growers(self, problem: Callable[[], Problem]) -> None:
        """Each undoes its own record only, here and now: before the loop takes its next step.

        The youngest first: what it gives up may be all that an older one lacked.
        """
        for waiter in reversed(tuple(self._waiters)):
            if waiter.undo is not None and not waiter.future.done():
                waiter.fail(problem())

    def _end_wait(self, waiter: _Waiter, keeps: bool) -> None:
        if waiter.future.done():
            return
        if waiter.undo is None or keeps:
            waiter.future.set_result(False)
            return
        lacking = self._desired - self.effective
        free = (self._machine.max_vcpus if self._machine else 0) - len(self._plugged.vcpus)
        if self._pending and free < lacking:
            age = self._now() - min(removal.first for removal in self._pending.values())
            problem = Problem(
                Code.SHRINK_PENDING,
                f"{lacking} more vCPUs need the slots of {len(self._pending)} whose removal the guest has not finished "
                f"for {age:.1f} s: repeat later",
                retry_after=1,
            )
        else:
            problem = Problem(
                Code.HYPERVISOR_TIMEOUT,
                f"{self.effective} of {self._desired} vCPUs by the deadline; the table is as before: repeat, or allow "
                "a longer deadline",
            )
        waiter.fail(problem)

    def _situation(self, now: float) -> Situation:
        return Situation(
            desired=self._desired,
            plugged=self._plugged,
            max_vcpus=self._machine.max_vcpus if self._machine is not None else 0,
            pending=self._pending,
            keep=len(self._plugged.vcpus) if self._lets_stand else self._grace.highest(now),
            keep_until=inf if self._lets_stand else self._grace.ends(),
            grow_from=self._grow_from,
            removable=self._removable(),
            growable=self._growable(),
            one_by_one=self._machine is not None and self._machine.accelerator is Accelerator.TCG,
        )

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
