"""One sandbox: its containers, what they ask for, and the operations that change them.

An operation edits the table, is refused before anything has changed or becomes the VM's new aim, and where it needs
more than there is it waits for the VM. A failed one puts its own record back, at the moment it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from hypervisors.base import Hypervisor
from kata_resmgr import explain, oci, view
from kata_resmgr.conditions import Conditions, Kind
from kata_resmgr.config import SandboxConfig
from kata_resmgr.declared import Declaration
from kata_resmgr.demand import Record
from kata_resmgr.events import Teller
from kata_resmgr.lanes import Lanes
from kata_resmgr.ledger import Edit, Ledger, Made
from kata_resmgr.metrics import Measures
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sizing import BootSize, exact_text
from kata_resmgr.step import Removal
from kata_resmgr.store import Attachment, SandboxRecord, Store
from kata_resmgr.vm import Goal, Phase, Vm
from kata_resmgr.weight import cpu_weight


class Patience(msgspec.Struct, frozen=True, gc=False):
    """How long a caller waits, in seconds; None: not given (API.md, ``deadline`` and ``wait``)."""

    deadline: float | None = None
    wait: float | None = None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What became of a change. *settled*: the wanted size is reached (else the answer is 202)."""

    sandbox: view.Sandbox
    settled: bool = True
    created: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a sandbox is to be: what it was registered with, and what follows from that."""

    config: SandboxConfig
    resources: bytes | None
    annotations: Mapping[str, str]
    declared: Declaration
    boot: BootSize
    notes: tuple[Note, ...]
    vmm: view.Vmm


@dataclass(frozen=True, slots=True)
class _Answered:
    """What outlives this process beside the table: never what an operation that still waits has put in place."""

    resized: bytes | None
    held: int | None


NO_CHANGES: Mapping[str, bytes | None] = MappingProxyType({})
THE_SANDBOX = ""
"""The lane of operations on the sandbox itself: no container has this id."""


class Sandbox:
    """One sandbox. All methods belong to the event loop's thread and raise :class:`Problem`."""

    def __init__(self, sandbox_id: str, plan: Plan, store: Store, tell: Teller) -> None:
        self.id = sandbox_id
        self._tell = tell
        self._store = store
        self._lanes = Lanes()
        self._life_cycle = asyncio.Lock()
        self._generation = 0
        self._attachment: Attachment | None = None
        self._ever_attached = False
        self._forgotten = False
        self._register(plan, {})

    # Life cycle

    @property
    def plan(self) -> Plan:
        """What it was registered with, and the boot size that followed."""
        return self._plan

    @property
    def socket(self) -> str | None:
        """Where the attached VM is."""
        return None if self._attachment is None else self._attachment.socket

    @property
    def phase(self) -> Phase:
        return self._vm.phase

    async def register_again(self, plan: Plan) -> None:
        """Take *plan* in place of the present one; :class:`Problem` ``conflict`` once a VM has been attached."""
        async with self._life_cycle:
            self._must_be_known()
            if self._ever_attached:
                raise Problem(
                    Code.CONFLICT,
                    "a VM has been attached, so the size stays: repeat the PUT as it was, or delete the sandbox first",
                )
            self._register(plan, {name: record.text for name, record in self._ledger.table.records.items()})

    def _register(self, plan: Plan, containers: Mapping[str, bytes]) -> None:
        self._plan = plan
        self._ledger = Ledger(plan.config, plan.declared, plan.boot, containers)
        self._answered = _Answered(None, None)
        self._conditions = Conditions()
        for note in plan.notes:
            self._conditions.hold(Kind(note.type), note.reason, note.message)
        self._vm = Vm(self.id, plan.config, self._conditions, self._learn_machine, self._keep_removals, self._tell)
        self._aim()
        self._generation += 1
        self._keep()
        self._tell("sandbox.created", vcpus=plan.boot.vcpus, memoryBytes=plan.boot.memory)
        self._conditions.tell_to(self._tell)

    async def attach(self, attachment: Attachment, open_driver: Callable[[], Hypervisor]) -> view.Sandbox:
        """Drive this VM: connect, read back; converging goes on. The same VM again only reads back."""
        async with self._life_cycle:
            self._must_be_known()
            if self._vm.held:
                raise Problem(Code.HELD, "the sandbox is held: release it first, then attach", retry_after=1)
            if self._vm.phase in (Phase.RUNNING, Phase.UNREACHABLE) and self._attachment is not None:
                if not self._attachment.may_be(attachment):
                    raise Problem(
                        Code.CONFLICT, f"the VM at {self._attachment.socket} is attached: detach it first (DELETE vm)"
                    )
                await self._vm.read_back(self._end(Patience()))
                self._attachment = attachment
                self._learn_machine()
            else:
                await self._attach(attachment, open_driver)
            self._aim()
            self._keep()
            return self.state()

    async def _attach(self, attachment: Attachment, open_driver: Callable[[], Hypervisor]) -> None:
        self._attachment = attachment
        try:
            await self._vm.attach(open_driver)
            machine = self._vm.machine
            if attachment.pid is not None and machine is not None and machine.pid not in (None, attachment.pid):
                raise Problem(
                    Code.CONFLICT, f"pid {attachment.pid} was given, pid {machine.pid} answers: name the VMM's own"
                )
        except Problem:
            await self._let_go()
            raise
        self._ever_attached = True

    async def detach(self) -> None:
        """Let go of the VM, which runs on."""
        async with self._life_cycle:
            await self._let_go()

    async def forget(self) -> None:
        """The sandbox is no more; the VM is left alone."""
        async with self._life_cycle:
            self._forgotten = True
            await self._let_go()
            self._store.forget_sandbox(self.id)
            self._tell("sandbox.deleted")

    async def close(self) -> None:
        """The daemon ends: let go of the VM, forget nothing."""
        await self._vm.detach()

    async def hold(self) -> view.Sandbox:
        """No more calls to the hypervisor, from when this returns."""
        self._must_be_known()
        await self._vm.hold(self._end(Patience()))
        self._keep()
        return self.state()

    def release(self) -> None:
        """The end of the hold: read back and converge."""
        if self._vm.held:
            self._vm.release()
            self._keep()

    async def reconcile(self, patience: Patience) -> Outcome:
        """Read back and converge now, shrinks included; without a wait the answer comes after the read-back."""
        end = self._end(patience)
        if self._vm.held:
            raise Problem(Code.HELD, "the sandbox is held: release it first, then repeat", retry_after=1)
        if self._vm.machine is None:
            raise Problem(Code.CONFLICT, "no VM is attached: attach one first (PUT vm)")
        self._vm.shrink_now()
        await self._vm.read_back(end)
        wait = patience.wait or 0
        settled = await self._vm.until(Goal.CONVERGED, min(self._now() + wait, end), None, keeps=True)
        return Outcome(self.state(), settled)

    async def wait_for(self, goal: Goal, wait: float) -> view.Sandbox:
        """The state once *goal* is reached, or after *wait* seconds with what is."""
        await self._vm.until(goal, self._now() + wait, None, keeps=True)
        return self.state()

    # Containers

    async def put(self, container_id: str, text: bytes, patience: Patience) -> tuple[view.Container, Outcome]:
        """Create or replace one container."""
        record = self._ledger.record(text)
        end = self._end(patience)
        async with self._lanes.one(container_id, end):
            created = self._ledger.table.get(container_id) is None
            settled = await self._carry_out(self._ledger.put(container_id, record), patience, end)
            return self.container(container_id), Outcome(self.state(), settled, created)

    async def patch(self, container_id: str, text: bytes, patience: Patience) -> tuple[view.Container, Outcome]:
        """Merge *text* into what the container has."""
        oci.decode(text)
        end = self._end(patience)
        async with self._lanes.one(container_id, end):
            settled = await self._carry_out(self._ledger.patch(container_id, text), patience, end)
            return self.container(container_id), Outcome(self.state(), settled)

    async def put_all(self, texts: Mapping[str, msgspec.Raw], patience: Patience) -> Outcome:
        """These containers and no others, in one resize."""
        records = {
            name: self._ledger.record(bytes(text), f"/containers/{name}/resources") for name, text in texts.items()
        }
        end = self._end(patience)
        async with self._lanes.all(end):
            settled = await self._carry_out(self._ledger.put_all(records), patience, end)
            return Outcome(self.state(), settled)

    async def delete(self, container_id: str, patience: Patience) -> bool:
        """Remove one container; whether the wanted size is reached.

        It never fails for want of anything, and removing what is absent is done already.
        """
        end = self._end(patience)
        async with self._lanes.one(container_id, end):
            return await self._carry_out(self._ledger.delete(container_id), patience, end)

    async def resize(self, text: bytes, patience: Patience) -> Outcome:
        """A pod-level resize: merge *text* into what the sandbox declares. The boot size stays."""
        oci.decode(text)
        end = self._end(patience)
        async with self._lanes.one(THE_SANDBOX, end):
            self._must_be_known()
            settled = await self._carry_out(self._ledger.resize(text), patience, end)
            return Outcome(self.state(), settled)

    def container(self, container_id: str) -> view.Container:
        """One container, as given."""
        return view.Container(container_id, msgspec.Raw(self._ledger.must_have(container_id).text))

    def containers(self) -> dict[str, view.Container]:
        """All containers."""
        records = self._ledger.table.records
        return {name: view.Container(name, msgspec.Raw(record.text)) for name, record in records.items()}

    # What it tells

    def state(self) -> view.Sandbox:
        """The present state."""
        vm, ledger = self._vm, self._ledger
        boot, target, shares = ledger.boot, ledger.now.target, ledger.now.sums.shares
        plugged = vm.plugged
        attached = vm.machine is not None
        return view.Sandbox(
            id=self.id,
            hypervisor=self._plan.config.hypervisor,
            mode=boot.mode,
            phase=vm.phase,
            generation=self._generation,
            boot=view.Boot.of(boot),
            vmm=self._plan.vmm,
            vcpus=self._vcpus(),
            memory=self._memory(),
            satisfied=attached and vm.satisfied,
            converged=attached and vm.converged,
            surplus=view.Surplus(
                vcpus=vm.surplus,
                memory_bytes=max(0, plugged.memory - target.memory) if attached else 0,
                reason=vm.surplus_reason,
            ),
            shares=shares,
            cpu_weight=cpu_weight(shares),
            conditions=self._conditions.listed(),
            counts=view.Counts(containers=len(ledger.table)),
        )

    def measures(self) -> Measures:
        """The present state, as metrics show it."""
        vm, now = self._vm, self._ledger.now
        return Measures(
            sandbox=self.id,
            vcpus=(now.target.vcpus, len(vm.plugged.vcpus), vm.pending),
            memory=(now.target.memory, vm.plugged.memory, 0),
            unsatisfied=vm.unsatisfied,
            shares=now.sums.shares,
        )

    def explain(self) -> view.Explanation:
        """Every step from the inputs to the present target."""
        plan = self._plan
        attached = self._vm.machine is not None
        return view.Explanation(
            id=self.id,
            inputs=[
                *explain.inputs(plan.config, plan.annotations, plan.declared, self._ledger.resized),
                *explain.reported(self._vm.machine, self._vm.plugged if attached else None),
            ],
            explain=self._ledger.steps(),
            vcpus=self._vcpus(),
            memory=self._memory(),
        )

    def _vcpus(self) -> view.Vcpus:
        target = self._ledger.now.target
        return view.Vcpus(
            exact=exact_text(target.exact),
            desired=target.vcpus,
            plugged=len(self._vm.plugged.vcpus),
            pending=self._vm.pending,
        )

    def _memory(self) -> view.Memory:
        return view.Memory(desired=self._ledger.now.target.memory, plugged=self._vm.plugged.memory, pending=0)

    # Changing the table

    async def _carry_out(self, edit: Edit | None, patience: Patience, end: float) -> bool:
        """Make *edit* and, where it grows, wait for the VM; whether the wanted size is reached is returned.

        It is kept when it is there. Raises with all as it was.
        """
        if edit is None:
            return await self._linger(patience, end)
        self._must_be_known()
        ledger = self._ledger
        made = ledger.make(edit)
        lacks = self._vm.machine is not None and ledger.now.target.vcpus > self._vm.effective and self._vm.resizes
        grows = lacks and made.rises
        if grows and (problem := self._vm.cannot_grow()) is not None:
            ledger.take_back(made)
            raise problem
        self._generation += 1

        def undo() -> None:
            ledger.take_back(made)
            self._generation += 1
            if ledger.now.held != self._answered.held:
                self._keep_containers({})
            self._aim()

        if not grows:
            self._aim()
            self._keep_edit(edit)
            self._tell_edit(made)
            return await self._linger(patience, end) if patience.wait is not None else True
        self._vm.try_again()
        self._aim()
        keeps = patience.wait is not None and self._now() + patience.wait < end
        until = self._now() + patience.wait if patience.wait is not None and keeps else end
        try:
            settled = await self._vm.until(Goal.SATISFIED, until, undo, keeps)
        except asyncio.CancelledError:
            undo()
            raise
        self._keep_edit(edit)
        self._tell_edit(made)
        return settled

    async def _linger(self, patience: Patience, end: float) -> bool:
        """The answer to what needs no vCPUs: at once, or with a wait when what is surplus has gone as well."""
        vm = self._vm
        if vm.machine is None:
            return True
        if patience.wait is None:
            return vm.satisfied
        vm.shrink_now()
        goal = Goal.CONVERGED if vm.satisfied else Goal.SATISFIED
        return await vm.until(goal, min(self._now() + patience.wait, end), None, keeps=True)

    def _aim(self) -> None:
        """Make what is asked for what the VM is to become, and say what there is to say about it."""
        conditions, target = self._conditions, self._ledger.now.target
        excess = self._ledger.excess()
        for kind, reason in ((Kind.CLAMPED, "demand"), (Kind.DEMAND_EXCEEDS_SIZE, "static")):
            if excess is None or excess.type != kind:
                conditions.clear(kind, reason)
            else:
                conditions.hold(kind, reason, excess.message)
        memory = self._vm.plugged.memory
        if self._vm.machine is not None and target.memory > memory:
            text = f"{target.memory} bytes are asked for, {memory} are there; this driver does not add memory"
            conditions.hold(Kind.HOTPLUG_UNSUPPORTED, "memory", text)
        else:
            conditions.clear(Kind.HOTPLUG_UNSUPPORTED, "memory")
        self._vm.aim(target.vcpus)

    def _tell_edit(self, made: Made) -> None:
        """It stands: tell of each container that it concerns."""
        for name, record in made.edit.records.items():
            kind = "deleted" if record is None else "created" if made.undone[name] is None else "updated"
            self._tell(f"container.{kind}", container=name)

    # The VM's side

    def _learn_machine(self) -> None:
        """A machine is attached: cut the maximum to its own; one that cannot hot-plug is static from now on."""
        machine = self._vm.machine
        boot = self._plan.boot
        if machine is None:
            return
        if not boot.static and not machine.vcpu_hotplug:
            boot = replace(boot, static=True, max_vcpus=boot.vcpus)
            self._conditions.hold(
                Kind.HOTPLUG_UNSUPPORTED, "vcpus", "the machine has no vCPU hot-plug: it keeps its boot size"
            )
        elif not boot.static:
            boot = replace(boot, max_vcpus=min(boot.max_vcpus, machine.max_vcpus))
        if self._attachment is not None and self._attachment.memory_block is not None:
            boot = replace(boot, granularity=max(boot.granularity, self._attachment.memory_block))
        self._ledger.fit(boot)
        self._vm.resizes = not boot.static
        self._aim()

    # Keeping

    def _keep(self, changes: Mapping[str, bytes | None] = NO_CHANGES) -> None:
        plan = self._plan
        record = SandboxRecord(
            id=self.id,
            config=plan.config,
            boot=plan.boot,
            resources=plan.resources,
            annotations=plan.annotations,
            resized=self._answered.resized,
            held_vcpus=self._answered.held,
            monitor=plan.vmm.monitor,
            attachment=self._attachment,
            held=self._vm.held,
        )
        self._store.save_sandbox(record, changes)

    def _keep_containers(self, changes: Mapping[str, Record | None]) -> None:
        texts = {name: None if record is None else record.text for name, record in changes.items()}
        if self._ledger.now.held == self._answered.held:
            self._store.save_containers(self.id, texts)
        else:
            self._answered = replace(self._answered, held=self._ledger.now.held)
            self._keep(texts)

    def _keep_edit(self, edit: Edit) -> None:
        if edit.resized is None:
            self._keep_containers(edit.records)
        else:
            self._answered = _Answered(edit.resized.text, self._ledger.now.held)
            self._keep()

    def _keep_removals(self, removals: Mapping[str, Removal]) -> None:
        self._store.save_removals(self.id, removals)

    # Small things

    async def _let_go(self) -> None:
        await self._vm.detach()
        self._attachment = None
        self._ledger.fit(self._plan.boot)
        self._aim()
        if not self._forgotten:
            self._keep()

    def _must_be_known(self) -> None:
        if self._forgotten:
            raise Problem(Code.NOT_FOUND, f'sandbox "{self.id}" was deleted meanwhile')

    def _end(self, patience: Patience) -> float:
        """The loop time at which the operation's time is over, counted from now."""
        return self._now() + (self._plan.config.deadline if patience.deadline is None else patience.deadline)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
