"""One sandbox: its containers, what they ask for, and the operations that change them.

An operation edits the table, is refused before anything has changed or becomes the VM's new aim, and where it needs
more than there is it waits for the VM. A failed one puts its own record back, at the moment it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from hypervisors.base import DeviceKind, Hypervisor, MemoryMethod
from kata_resmgr import devices, explain, oci, sizing, view
from kata_resmgr.conditions import Conditions, Kind, timestamp
from kata_resmgr.config import SandboxConfig
from kata_resmgr.declared import Declaration
from kata_resmgr.device_loop import Devices, being_removed
from kata_resmgr.devices import AnyRecord, AnySpec, State
from kata_resmgr.events import Teller
from kata_resmgr.lanes import Lanes
from kata_resmgr.ledger import Edit, Ledger, Made
from kata_resmgr.limits import Limits
from kata_resmgr.metrics import Measures
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem
from kata_resmgr.removal import Removal
from kata_resmgr.sizing import BootSize, exact_text
from kata_resmgr.store import NO_CHANGES, Attachment, Changes, Kept, KnownVm, SandboxRecord, StateUnavailable, Store
from kata_resmgr.vm import Adoption, Goal, Phase, Resource, Vm
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
    vmm: view.Vmm | view.ClhVmm
    groups: Mapping[str, Limits] = field(default_factory=dict)
    """Limits that disks share."""

    @property
    def monitor(self) -> str | None:
        """Where QEMU's monitor is to be; None with Cloud Hypervisor, whose API socket its starter names."""
        return self.vmm.monitor if isinstance(self.vmm, view.Vmm) else None


THE_SANDBOX = ""
"""The lane of operations on the sandbox itself: no container has this id."""
LOST_KEPT = 3600.0
"""Seconds for which a sandbox is kept whose VM's process is gone."""
INCOMPLETE_GRACE = 3600.0
"""Seconds for which a VM keeps what it has where a part of its table could not be read: the shim may say it again."""


def _never() -> None:
    """Nobody to tell."""


def _anybody(_: KnownVm) -> None:
    """No VM is somebody else's."""


class Sandbox:
    """One sandbox. All methods belong to the event loop's thread and raise :class:`Problem`."""

    def __init__(
        self,
        sandbox_id: str,
        plan: Plan,
        store: Store,
        tell: Teller,
        kept: Kept | None = None,
        expire: Callable[[], None] = _never,
        claim: Callable[[KnownVm], None] = _anybody,
    ) -> None:
        """A new one, or as it was *kept*. *expire* is called when its VM has been lost for :data:`LOST_KEPT`.

        *claim* raises :class:`Problem` where a VM, just reached, is another sandbox's.
        """
        self.id = sandbox_id
        self._tell = tell
        self._store = store
        self._log = structlog.get_logger().bind(sandbox=sandbox_id)
        self._lanes = Lanes()
        self._device_lanes = Lanes()
        self._life_cycle = asyncio.Lock()
        self._generation = 0
        self._forgotten = False
        self._expire = expire
        self._claim = claim
        self._expiry: asyncio.TimerHandle | None = None
        if kept is None:
            self._register(plan, {})
        else:
            self._restore(plan, kept)

    # Life cycle

    @property
    def plan(self) -> Plan:
        """What it was registered with, and the boot size that followed."""
        return self._plan

    @property
    def socket(self) -> str | None:
        """Where the attached VM is."""
        attachment = self._kept.attachment
        return None if attachment is None else attachment.socket

    @property
    def vm(self) -> KnownVm | None:
        """The VM that is attached, also while it cannot be reached."""
        return self._kept.vm

    @property
    def phase(self) -> Phase:
        return self._vm.phase

    async def register_again(self, plan: Plan) -> None:
        """Take *plan* in place of the present one; :class:`Problem` ``conflict`` once a VM has been attached."""
        async with self._life_cycle:
            self._must_be_known()
            if self._kept.ever_attached:
                raise Problem(
                    Code.CONFLICT,
                    "a VM has been attached, so the size stays: repeat the PUT as it was, or delete the sandbox first",
                )
            self._register(plan, {name: record.text for name, record in self._ledger.table.records.items()})

    def _register(self, plan: Plan, containers: Mapping[str, bytes]) -> None:
        ledger = Ledger(plan.config, plan.declared, plan.boot, containers)
        record = SandboxRecord(
            id=self.id,
            config=plan.config,
            boot=plan.boot,
            fitted=plan.boot,
            notes=plan.notes,
            since=timestamp(),
            resources=plan.resources,
            annotations=plan.annotations,
            resized=None,
            held_vcpus=None,
            monitor=plan.monitor,
            ever_attached=False,
            attachment=None,
            vm=None,
            removed_any=False,
            held=False,
            groups=plan.groups,
        )
        self._save(record)
        self._begin(plan, ledger)
        self._tell("sandbox.created", vcpus=plan.boot.vcpus, memoryBytes=plan.boot.memory)
        self._conditions.tell_to(self._tell)

    def _restore(self, plan: Plan, kept: Kept) -> None:
        record = kept.record
        if record.vm is None:  # an attachment that came to no end, and was not answered
            record = replace(record, attachment=None)
        self._kept = record
        asked = Ledger(
            plan.config, plan.declared, record.fitted, kept.containers, resized=record.resized, held=record.held_vcpus
        )
        self._begin(plan, asked)
        if record.vm is not None:
            records = {name: devices.read_record(kind, text) for (kind, name), text in kept.devices.items()}
            self._devices.restore(records)
        self._conditions.tell_to(self._tell)

    def _begin(self, plan: Plan, ledger: Ledger) -> None:
        """Without a VM yet."""
        self._plan, self._ledger = plan, ledger
        self._conditions = Conditions()
        for note in plan.notes:
            self._conditions.hold(Kind(note.type), note.reason, note.message, self._kept.since)
        self._devices = Devices(self.id, plan.config, self._conditions, self._keep_device, self._tell)
        self._vm = Vm(
            self.id,
            plan.config,
            self._conditions,
            self._learn_machine,
            self._keep_removals,
            self._note_lost,
            self._tell,
            self._devices,
        )
        self._aim()
        self._generation += 1

    def adopt(
        self, kept: Kept, open_driver: Callable[[], Hypervisor], gate: asyncio.Semaphore
    ) -> asyncio.Future[None] | None:
        """After a restart: go on with the VM that was driven before, if it still is that one.

        Returned is what is done when the VM has been reached, or could not be at the first attempt; None where there
        is nothing to wait for.
        """
        record = self._kept
        if record.held:
            self._vm.stay_held()
        if record.vm is None:
            return None
        if record.fitted.static and not record.boot.static:
            self._say_static()
        if record.lost_at is not None or not (record.vm.process is None or record.vm.process.lives()):
            self._vm.find_lost(record.vm)
            return None
        self._vm.resizes = not record.fitted.static
        grace = self._plan.config.shrink_delay if kept.complete else INCOMPLETE_GRACE
        adoption = Adoption(record.vm, kept.removals, record.removed_any, self._now() + grace)
        return self._vm.adopt(open_driver, adoption, gate)

    async def attach(self, attachment: Attachment, open_driver: Callable[[], Hypervisor]) -> view.Sandbox:
        """Drive this VM: connect, read back; converging goes on. The same VM again only reads back."""
        async with self._life_cycle:
            self._must_be_known()
            if self._vm.held:
                raise Problem(Code.HELD, "the sandbox is held: release it first, then attach", retry_after=1)
            present = self._kept.attachment
            if self._vm.phase in (Phase.RUNNING, Phase.UNREACHABLE) and present is not None:
                if not present.may_be(attachment):
                    raise Problem(Code.CONFLICT, f"the VM at {present.socket} is attached: detach it first (DELETE vm)")
                await self._vm.read_back(self._end(Patience()))
                self._save(replace(self._kept, attachment=attachment))
                self._learn_machine()
            else:
                await self._attach(attachment, open_driver)
            self._aim()
            return self.state()

    async def _attach(self, attachment: Attachment, open_driver: Callable[[], Hypervisor]) -> None:
        self._save(replace(self._without_vm(), attachment=attachment))
        self._devices.forget()
        self._stop_expiry()
        try:
            await self._vm.attach(open_driver, attachment.pid)
        except Problem:
            with suppress(StateUnavailable):  # a restart undoes what has never been reached
                self._save(self._without_vm())
            await self._drop_vm()
            raise

    async def detach(self) -> None:
        """Let go of the VM, which runs on."""
        async with self._life_cycle:
            self._must_be_known()
            if (record := self._without_vm()) != self._kept:
                self._save(record)
            await self._drop_vm()

    async def forget(self, forgotten: Callable[[], None] = _never) -> None:
        """The sandbox is no more; the VM is left alone. *forgotten* is called when that is kept, before it returns."""
        async with self._life_cycle:
            if self._forgotten:
                return
            self._store.forget_sandbox(self.id)
            self._forgotten = True
            forgotten()
            await self._drop_vm()
            self._tell("sandbox.deleted")

    async def close(self) -> None:
        """The daemon ends: let go of the VM, forget nothing."""
        self._stop_expiry()
        await self._vm.detach()

    async def hold(self) -> view.Sandbox:
        """No more calls to the hypervisor, from when this returns."""
        self._must_be_known()
        await self._vm.hold(self._end(Patience()))
        self._must_be_known()
        if not self._kept.held:
            try:
                self._save(replace(self._kept, held=True))
            except StateUnavailable:
                self._vm.release()
                raise
        return self.state()

    def release(self) -> None:
        """The end of the hold: read back and converge."""
        if self._vm.held:
            self._save(replace(self._kept, held=False))
            self._vm.release()

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
            settled = await self._carry_out(container_id, self._ledger.put(container_id, record), patience, end)
            return self.container(container_id), Outcome(self.state(), settled, created)

    async def patch(self, container_id: str, text: bytes, patience: Patience) -> tuple[view.Container, Outcome]:
        """Merge *text* into what the container has."""
        oci.decode(text)
        end = self._end(patience)
        async with self._lanes.one(container_id, end):
            settled = await self._carry_out(container_id, self._ledger.patch(container_id, text), patience, end)
            return self.container(container_id), Outcome(self.state(), settled)

    async def put_all(self, texts: Mapping[str, msgspec.Raw], patience: Patience) -> Outcome:
        """These containers and no others, in one resize."""
        records = {
            name: self._ledger.record(bytes(text), f"/containers/{name}/resources") for name, text in texts.items()
        }
        end = self._end(patience)
        async with self._lanes.all(end):
            settled = await self._carry_out(THE_SANDBOX, self._ledger.put_all(records), patience, end)
            return Outcome(self.state(), settled)

    async def delete(self, container_id: str, patience: Patience) -> bool:
        """Remove one container; whether the wanted size is reached.

        It never fails for want of anything, and removing what is absent is done already.
        """
        end = self._end(patience)
        async with self._lanes.one(container_id, end):
            return await self._carry_out(container_id, self._ledger.delete(container_id), patience, end)

    async def resize(self, text: bytes, patience: Patience) -> Outcome:
        """A pod-level resize: merge *text* into what the sandbox declares. The boot size stays."""
        oci.decode(text)
        end = self._end(patience)
        async with self._lanes.one(THE_SANDBOX, end):
            self._must_be_known()
            settled = await self._carry_out(THE_SANDBOX, self._ledger.resize(text), patience, end)
            return Outcome(self.state(), settled)

    def container(self, container_id: str) -> view.Container:
        """One container, as given."""
        return view.Container(container_id, msgspec.Raw(self._ledger.must_have(container_id).text))

    def containers(self) -> dict[str, view.Container]:
        """All containers."""
        records = self._ledger.table.records
        return {name: view.Container(name, msgspec.Raw(record.text)) for name, record in records.items()}

    # Devices

    async def put_device(self, spec: AnySpec, patience: Patience) -> tuple[view.Device, bool]:
        """Add a disk or net; whether it is a new one. What is there as asked for already stays as it is."""
        self._must_drive_devices()
        name, kind = spec.config.id, devices.kind_of(spec.config)
        devices.must_fit(spec, self._plan.boot.vcpus, self._plan.groups)
        wanted = devices.formed(spec, self._plan.config).sent
        end = self._end(patience)
        async with self._device_lanes.one(name, end):
            self._must_be_known()
            present = self._devices.records.get(name)
            if present is not None:
                self._must_stay(name, present)
                if devices.formed(present.spec, self._plan.config).sent != wanted:
                    raise Problem(
                        Code.CONFLICT, f'there is another device "{name}": remove it first, or use another id'
                    )
                return self._device(kind, name, present), False
            self._must_be_ours(name)
            self._must_be_reached()
            await self._devices.add(name, spec, end)
            self._must_be_known()
            return self.device(kind, name), True

    async def delete_device(self, kind: DeviceKind, device_id: str, patience: Patience) -> None:
        """Take it out. With a wait the answer comes when it is gone, or at its end; what is absent is gone already."""
        self._must_drive_devices()
        end = self._end(patience)
        async with self._device_lanes.one(device_id, end):
            self._must_be_known()
            if self._devices.find(kind, device_id) is None:
                shown = self._devices.there.get(device_id)
                if shown is not None and shown.kind is kind:
                    self._must_be_ours(device_id)
                return
            if self._vm.phase is Phase.LOST:
                self._devices.drop(device_id)
            else:
                self._devices.remove(device_id)
        if patience.wait is not None and device_id in self._devices.records:
            await self._devices.wait_gone(device_id, min(self._now() + patience.wait, end))

    async def limit_device(
        self, kind: DeviceKind, device_id: str, limits: Limits, replacing: bool, patience: Patience
    ) -> view.Device:
        """Other limits for a device that is there, which has to be taken out and added again for them (*replacing*)."""
        self._must_drive_devices()
        end = self._end(patience)
        async with self._device_lanes.one(device_id, end):
            self._must_be_known()
            record = self._must_have_device(kind, device_id)
            self._must_stay(device_id, record)
            spec = msgspec.structs.replace(record.spec, limits=limits, group=None)
            wanted = devices.formed(spec, self._plan.config).sent
            same = devices.formed(record.spec, self._plan.config).sent == wanted
            if not same or record.state is not State.PRESENT:
                if not replacing:
                    raise Problem(
                        Code.NOT_SUPPORTED_LIVE,
                        f'the VMM cannot change the limits of "{device_id}" while it is there: say "replace": true to '
                        "take it out and add it again, which the guest sees",
                    )
                self._must_be_reached()
                await self._devices.replace(device_id, spec, end)
                self._must_be_known()
            return self.device(kind, device_id)

    def device(self, kind: DeviceKind, device_id: str) -> view.Device:
        """One device, without its counters."""
        return self._device(kind, device_id, self._must_have_device(kind, device_id))

    async def counted_device(self, kind: DeviceKind, device_id: str) -> view.Device:
        """One device, with what the VMM counts for it, where it can be asked."""
        self._must_have_device(kind, device_id)
        counters = None
        if self._vm.machine is not None and self._vm.cannot_grow() is None:
            counters = await self._devices.counters(self._end(Patience()))
        shown = self.device(kind, device_id)
        counted = None if counters is None else counters.get(device_id)
        return msgspec.structs.replace(shown, counters=None if counted is None else dict(counted))

    def devices(self, kind: DeviceKind) -> dict[str, view.Device]:
        """All of that kind that were added here."""
        records = self._devices.records.items()
        return {name: self._device(kind, name, r) for name, r in records if devices.kind_of(r.spec.config) is kind}

    def _device(self, kind: DeviceKind, device_id: str, record: AnyRecord) -> view.Device:
        formed = devices.formed(record.spec, self._plan.config)
        config = msgspec.to_builtins(record.spec.config)
        del config["id"]
        shown = self._devices.there.get(device_id)
        return view.Device(
            id=device_id,
            config=config,
            limits=formed.limits,
            effective=formed.effective,
            group=record.spec.group,
            address=None if shown is None else shown.address,
        )

    def _must_have_device(self, kind: DeviceKind, device_id: str) -> AnyRecord:
        record = self._devices.find(kind, device_id)
        if record is None:
            raise Problem(Code.NOT_FOUND, f'no {kind} "{device_id}" was added here: add it with PUT first')
        return record

    def _must_drive_devices(self) -> None:
        if self._plan.config.hypervisor != "clh":
            raise Problem(Code.NOT_SUPPORTED, "disks and nets are driven with Cloud Hypervisor only (hypervisor clh)")

    def _must_be_reached(self) -> None:
        """A device can be added now."""
        if self._vm.machine is None:
            raise Problem(Code.CONFLICT, "no VM is attached: attach one first (PUT vm)")
        if (problem := self._vm.cannot_grow()) is not None:
            raise problem

    def _must_be_ours(self, name: str) -> None:
        if name in self._devices.there:
            raise Problem(
                Code.CONFLICT, f'the VM has a device "{name}" that was not added here, and stays: use another id'
            )

    def _must_stay(self, name: str, record: AnyRecord) -> None:
        if record.state is State.LEAVING and record.then is None:
            raise being_removed(name, record, self._now())

    # What it tells

    def state(self) -> view.Sandbox:
        """The present state."""
        vm, ledger = self._vm, self._ledger
        boot, shares = ledger.boot, ledger.now.sums.shares
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
                memory_bytes=vm.memory_surplus,
                reason=vm.surplus_reason,
            ),
            shares=shares,
            cpu_weight=cpu_weight(shares),
            conditions=self._conditions.listed(),
            counts=view.Counts(
                containers=len(ledger.table),
                disks=self._devices.count(DeviceKind.DISK),
                nets=self._devices.count(DeviceKind.NET),
            ),
        )

    def measures(self) -> Measures:
        """The present state, as metrics show it."""
        vm, now = self._vm, self._ledger.now
        return Measures(
            sandbox=self.id,
            vcpus=(now.target.vcpus, len(vm.plugged.vcpus), vm.pending),
            memory=(now.target.memory, vm.plugged.memory, vm.memory_pending),
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
        vm = self._vm
        return view.Memory(desired=self._ledger.now.target.memory, plugged=vm.plugged.memory, pending=vm.memory_pending)

    # Changing the table

    async def _carry_out(self, operation: str, edit: Edit | None, patience: Patience, end: float) -> bool:
        """Make *edit* and, where it grows, wait for the VM; whether the wanted size is reached is returned.

        It is kept when it is there. Raises with all as it was. *operation* is its lane.
        """
        if edit is None:
            return await self._linger(patience, end)
        self._must_be_known()
        ledger = self._ledger
        made = ledger.make(edit)
        needs = self._needs(made)
        try:
            if not needs:
                self._keep_edit(edit)
            elif (problem := self._vm.cannot_grow(needs, ledger.now.target.memory)) is not None:
                raise problem
            else:  # it acts before it is kept: where nothing can be written, nothing is sent
                self._store.begin(self.id, operation)
        except Problem:
            ledger.take_back(made)
            raise
        self._generation += 1

        def undo() -> None:
            ledger.take_back(made)
            self._generation += 1
            self._aim()
            self._keep_undone(operation)

        if not needs:
            self._aim()
            self._tell_edit(made)
            return await self._linger(patience, end) if patience.wait is not None else True
        self._vm.try_again()
        self._aim()
        keeps = patience.wait is not None and self._now() + patience.wait < end
        until = self._now() + patience.wait if patience.wait is not None and keeps else end
        try:
            settled = await self._vm.until(Goal.SATISFIED, until, undo, keeps, needs)
        except asyncio.CancelledError:
            undo()
            raise
        self._must_be_known()
        try:
            self._keep_edit(edit, ends=operation)
        except StateUnavailable:
            undo()
            raise
        self._tell_edit(made)
        return settled

    def _needs(self, made: Made) -> tuple[Resource, ...]:
        """What the operation has to wait for: what it raises, and the VM has too little of."""
        vm, target = self._vm, self._ledger.now.target
        if vm.machine is None or not vm.resizes:
            return ()
        vcpus, memory = vm.has(target.vcpus, target.memory)
        return (
            *((Resource.VCPUS,) if not vcpus and made.rises else ()),
            *((Resource.MEMORY,) if not memory and made.memory_rises else ()),
        )

    async def _linger(self, patience: Patience, end: float) -> bool:
        """The answer to what needs nothing more: at once, or with a wait when what is surplus has gone as well."""
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
        machine, memory = self._vm.machine, self._vm.plugged.memory
        fixed = machine is not None and machine.memory.method is MemoryMethod.NONE
        if fixed and target.memory > memory > 0:  # 0: nothing has been read yet
            text = f"{target.memory} bytes are asked for, {memory} are there; this machine cannot add memory"
            conditions.hold(Kind.HOTPLUG_UNSUPPORTED, "memory", text)
        else:
            conditions.clear(Kind.HOTPLUG_UNSUPPORTED, "memory")
        self._vm.aim(target.vcpus, target.memory)

    def _tell_edit(self, made: Made) -> None:
        """It stands: tell of each container that it concerns."""
        for name, record in made.edit.records.items():
            kind = "deleted" if record is None else "created" if made.undone[name] is None else "updated"
            self._tell(f"container.{kind}", container=name)

    # The VM's side

    def _learn_machine(self) -> None:
        """A machine is attached: cut the maximum to its own; one that cannot hot-plug is static from now on.

        Raises :class:`Problem` where it is not the VM that was named, or cannot be kept.
        """
        machine, attachment = self._vm.machine, self._kept.attachment
        if machine is None or attachment is None:
            return
        if attachment.pid is not None and machine.pid not in (None, attachment.pid):
            raise Problem(
                Code.CONFLICT, f"pid {attachment.pid} was given, pid {machine.pid} answers: name the VMM's own"
            )
        vm = KnownVm(machine, self._vm.process)
        self._claim(vm)
        boot = self._plan.boot
        if not boot.static and not machine.vcpu_hotplug:
            boot = replace(boot, static=True, max_vcpus=boot.vcpus)
            self._say_static()
        elif not boot.static:
            boot = replace(boot, max_vcpus=min(boot.max_vcpus, machine.max_vcpus))
        boot = sizing.fit_memory(boot, machine.memory, attachment.memory_block)
        record = replace(self._kept, ever_attached=True, fitted=boot, vm=vm)
        if record != self._kept:
            self._save(record)
        self._vm.memory_granularity = boot.granularity
        self._ledger.fit(boot)
        self._vm.resizes = not boot.static
        self._aim()

    def _say_static(self) -> None:
        text = "the machine has no vCPU hot-plug: it keeps its boot size"
        self._conditions.hold(Kind.HOTPLUG_UNSUPPORTED, "vcpus", text)

    def _note_lost(self) -> None:
        """The VM's process is gone: the sandbox is kept for a while, counted from when that was first seen."""
        if self._kept.lost_at is None:
            try:
                self._save(replace(self._kept, lost_at=self._now()))
            except StateUnavailable as problem:
                self._log.warning("that the VM is lost is not kept", reason=problem.detail)
        since = self._now() if self._kept.lost_at is None else min(self._kept.lost_at, self._now())
        self._stop_expiry()
        self._expiry = asyncio.get_running_loop().call_at(since + LOST_KEPT, self._expire)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    # Keeping

    def _save(self, record: SandboxRecord, changes: Changes = NO_CHANGES, ends: str | None = None) -> None:
        """From now on *record* is what outlives this process: never what an operation that still waits has put in
        place. Raises :class:`StateUnavailable` with all as it was.
        """
        self._store.save_sandbox(record, changes, ends)
        self._kept = record

    def _keep_edit(self, edit: Edit, ends: str | None = None) -> None:
        texts = {name: None if record is None else record.text for name, record in edit.records.items()}
        held = self._ledger.now.held
        resized = self._kept.resized if edit.resized is None else edit.resized.text
        if (held, resized) == (self._kept.held_vcpus, self._kept.resized):
            self._store.save_containers(self.id, texts, ends)
        else:
            self._save(replace(self._kept, held_vcpus=held, resized=resized), texts, ends)

    def _keep_undone(self, operation: str) -> None:
        """An operation has failed and left nothing. Where that cannot be kept, a restart undoes it all the same."""
        if self._forgotten:
            return
        held = self._ledger.now.held
        try:
            if held == self._kept.held_vcpus:
                self._store.end(self.id, operation)
            else:
                self._save(replace(self._kept, held_vcpus=held), ends=operation)
        except StateUnavailable as problem:
            self._log.warning("that an operation has failed is not kept", reason=problem.detail)

    def _keep_removals(self, removals: Mapping[str, Removal]) -> None:
        if self._vm.removed_any != self._kept.removed_any:
            self._save(replace(self._kept, removed_any=self._vm.removed_any))
        self._store.save_removals(self.id, removals)

    def _keep_device(self, kind: DeviceKind, device_id: str, text: bytes | None) -> None:
        if not self._forgotten:
            self._store.save_device(self.id, kind, device_id, text)

    def _without_vm(self) -> SandboxRecord:
        return replace(self._kept, fitted=self._plan.boot, attachment=None, vm=None, removed_any=False, lost_at=None)

    # Small things

    async def _drop_vm(self) -> None:
        self._stop_expiry()
        await self._vm.detach()
        self._devices.forget()
        if not self._plan.boot.static:
            self._conditions.clear(Kind.HOTPLUG_UNSUPPORTED, "vcpus")
        self._ledger.fit(self._plan.boot)
        self._aim()

    def _must_be_known(self) -> None:
        if self._forgotten:
            raise Problem(Code.NOT_FOUND, f'sandbox "{self.id}" was deleted meanwhile')

    def _end(self, patience: Patience) -> float:
        """The loop time at which the operation's time is over, counted from now."""
        return self._now() + (self._plan.config.deadline if patience.deadline is None else patience.deadline)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
