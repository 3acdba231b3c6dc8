"""The resource manager: sandboxes by id, their life cycle, and the VM that belongs to each."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog

from hypervisors.base import DeviceKind, Hypervisor
from hypervisors.ch_types import DiskConfig
from kata_resmgr import paths, view, vmm
from kata_resmgr.config import Settings
from kata_resmgr.declared import declare
from kata_resmgr.devices import AnySpec, Spec
from kata_resmgr.events import Events, Teller
from kata_resmgr.ledger import registered
from kata_resmgr.limits import Limits
from kata_resmgr.metrics import MeasuredHypervisor, Metrics
from kata_resmgr.plan import DryRun, Planned, Request
from kata_resmgr.problem import At, Code, Problem
from kata_resmgr.sandbox import Outcome, Patience, Plan, Sandbox
from kata_resmgr.store import Attachment, Kept, KnownVm, Store
from kata_resmgr.vm import Goal

SANDBOXES_MAX = 10_000
"""Sandboxes of one daemon: more VMs than a host runs, and a bound on what callers can make it keep."""
ADOPTED_AT_ONCE = 64
"""How many VMs are being reached at the same time at the start."""
ADOPTION = 0.5
"""Seconds in which another VM has to be reached at the start for the rest to be waited for: those that do not answer
hold nobody up, and are served as ``unreachable`` until they do."""
ADOPTION_ROUNDS = 10
"""So many times that at the most, however many there are."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is registered with; *resources* is the OCI object's JSON text, or None."""

    hypervisor: str | None = None
    annotations: Mapping[str, str] | None = None
    resources: bytes | None = None
    directory: str | None = None
    groups: Mapping[str, Limits] | None = None


class ResourceManager:
    """All sandboxes of this daemon. Every method raises :class:`Problem`, with everything as it was."""

    def __init__(self, settings: Settings, store: Store, open_driver: Callable[[Plan, str], Hypervisor]) -> None:
        self.settings = settings
        """What new sandboxes live by; a reload puts another in its place."""
        self.events = Events(store)
        self.metrics = Metrics(self.events, lambda: store.quarantined)
        self._store = store
        self._drivers = open_driver
        self._sandboxes: dict[str, Sandbox] = {}
        self._seen: dict[str, tuple[str, tuple[int, int] | None]] = {}
        """By sandbox: a path, and the device and inode of the socket that was there."""
        self._expiring: set[asyncio.Task[None]] = set()

    async def adopt(self) -> None:
        """After a restart: take up what is kept, and go on with the VMs that still are those that they were.

        Returns when each VM has been reached or has failed to be, or when those that are left do not answer
        (:data:`ADOPTION`). A sandbox of which nothing can be made is put aside, and holds up nobody. Raises
        :class:`Problem` ``state_unavailable``.
        """
        gate = asyncio.Semaphore(ADOPTED_AT_ONCE)
        waiting: set[asyncio.Future[None]] = set()
        kept_sandboxes = self._store.load()
        for kept in kept_sandboxes:
            name = kept.record.id
            try:
                sandbox = self._restored(kept)
            except Exception as error:
                log.error("a sandbox cannot be restored", sandbox=name, reason=str(error), exc_info=error)
                self._store.set_aside(name, str(error))
                continue
            self._sandboxes[name] = sandbox
            if kept.undone:
                log.info("operations were under way, and are undone", sandbox=name, operations=kept.undone)
            socket = sandbox.socket or ""
            reached = sandbox.adopt(kept, partial(self._open_driver, sandbox.plan, socket), gate)
            if reached is not None:
                waiting.add(reached)
        vms = len(waiting)
        for _ in range(ADOPTION_ROUNDS):
            answered, waiting = await asyncio.wait(waiting, timeout=ADOPTION) if waiting else (set(), set())
            if not answered:
                break
        if kept_sandboxes:
            log.info("adopted", sandboxes=len(self._sandboxes), vms=vms, late=len(waiting))

    # Sandboxes

    async def put_sandbox(self, sandbox_id: str, spec: SandboxSpec) -> Outcome:
        """Register a sandbox and size it; repeated, nothing changes. Another size is taken until a VM is attached."""
        present = self._sandboxes.get(sandbox_id)
        if present is None:
            if len(self._sandboxes) >= SANDBOXES_MAX:
                raise Problem(Code.TOO_MANY, f"there are {SANDBOXES_MAX} sandboxes, the most: delete some first")
            plan = self._plan(sandbox_id, spec, None)
            tell = Teller(self.events, sandbox_id)
            try:
                sandbox = Sandbox(
                    sandbox_id,
                    plan,
                    self._store,
                    tell,
                    expire=partial(self._expire, sandbox_id),
                    claim=partial(self._claim, sandbox_id),
                )
            except Problem:
                self._remove_directory(sandbox_id)
                raise
            self._sandboxes[sandbox_id] = sandbox
            return Outcome(sandbox.state(), created=True)
        if spec != self._spec_of(present, spec):
            await present.register_again(self._plan(sandbox_id, spec, present))
        return Outcome(present.state())

    def sandboxes(self, phase: str | None = None) -> list[view.Sandbox]:
        """All, in id order; of one phase where that is given."""
        return [
            sandbox.state() for _, sandbox in sorted(self._sandboxes.items()) if phase is None or sandbox.phase == phase
        ]

    def sandbox(self, sandbox_id: str) -> view.Sandbox:
        return self._get(sandbox_id).state()

    async def wait_for(self, sandbox_id: str, goal: Goal, wait: float) -> view.Sandbox:
        """The state once the goal is reached, or after *wait* seconds with what is."""
        return await self._get(sandbox_id).wait_for(goal, wait)

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Forget it; the VM is left alone. What is absent is deleted already."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            return

        def forgotten() -> None:
            del self._sandboxes[sandbox_id]
            self._seen.pop(sandbox_id, None)
            self._remove_directory(sandbox_id)  # now: a next one of that name makes it anew

        await sandbox.forget(forgotten)

    async def metrics_text(self) -> bytes:
        """The answer to a scrape by Prometheus."""
        return await self.metrics.text(tuple(self._sandboxes.values()))

    def explain(self, sandbox_id: str) -> view.Explanation:
        return self._get(sandbox_id).explain()

    async def resize(self, sandbox_id: str, resources: bytes, patience: Patience) -> Outcome:
        """A pod-level resize: merge *resources* into what the sandbox declares."""
        return await self._get(sandbox_id).resize(resources, patience)

    # The VM

    async def attach(
        self, sandbox_id: str, socket: str | None, pid: int | None, memory_block: int | None
    ) -> view.Sandbox:
        """Drive the VM at *socket*. The same again reads back.

        The default is where ``vmm.args`` put QEMU's monitor; Cloud Hypervisor's API socket is the caller's to name.
        """
        sandbox = self._get(sandbox_id)
        named = socket or sandbox.plan.monitor
        if named is None:
            what = "a Cloud Hypervisor is reached by its API socket: give the path of its --api-socket"
            raise Problem(Code.INVALID_BODY, f"/socket: {what}", at=(At("/socket", what),))
        path = paths.socket_under_roots(named, self._roots())
        found = paths.must_be_socket(path)
        self._must_be_free(sandbox, path, found)
        plan = sandbox.plan
        return await sandbox.attach(
            Attachment(str(path), pid, memory_block), lambda: self._open_driver(plan, str(path))
        )

    def _must_be_free(self, sandbox: Sandbox, path: Path, found: os.stat_result) -> None:
        """One socket, one sandbox, by whatever name. Each one's is looked at once; a match is looked at again.

        One that was put in its place meanwhile is found out by :meth:`_claim`.
        """
        inode = (found.st_dev, found.st_ino)
        for other in self._sandboxes.values():
            if other is sandbox or other.socket is None:
                continue
            seen = self._seen.get(other.id)
            if seen is None or seen[0] != other.socket:
                seen = self._seen[other.id] = (other.socket, paths.inode(Path(other.socket)))
            if seen[1] == inode and paths.inode(Path(other.socket)) == inode:
                raise Problem(Code.CONFLICT, f'"{path}" belongs to sandbox "{other.id}": one VM, one sandbox')
        self._seen[sandbox.id] = (str(path), inode)

    def _claim(self, sandbox_id: str, vm: KnownVm) -> None:
        """One VM, one sandbox: a second monitor of a VM is another socket, with the same process behind it."""
        if vm.process is None:
            return
        for other in self._sandboxes.values():
            known = other.vm
            if known is None or known.process != vm.process or other.id == sandbox_id:
                continue
            if known.machine.identity == vm.machine.identity:
                raise Problem(
                    Code.CONFLICT,
                    f'the VM of process {vm.process.pid} belongs to sandbox "{other.id}": one VM, one sandbox',
                )

    async def detach(self, sandbox_id: str) -> None:
        await self._get(sandbox_id).detach()

    async def hold(self, sandbox_id: str) -> view.Sandbox:
        return await self._get(sandbox_id).hold()

    async def release(self, sandbox_id: str) -> None:
        self._get(sandbox_id).release()

    async def reconcile(self, sandbox_id: str, patience: Patience) -> Outcome:
        return await self._get(sandbox_id).reconcile(patience)

    # Containers

    async def put_containers(self, sandbox_id: str, table: Mapping[str, msgspec.Raw], patience: Patience) -> Outcome:
        return await self._get(sandbox_id).put_all(table, patience)

    async def put_container(
        self, sandbox_id: str, container_id: str, resources: bytes, patience: Patience
    ) -> tuple[view.Container, Outcome]:
        return await self._get(sandbox_id).put(container_id, resources, patience)

    async def patch_container(
        self, sandbox_id: str, container_id: str, resources: bytes, patience: Patience
    ) -> tuple[view.Container, Outcome]:
        return await self._get(sandbox_id).patch(container_id, resources, patience)

    def container(self, sandbox_id: str, container_id: str) -> view.Container:
        return self._get(sandbox_id).container(container_id)

    def containers(self, sandbox_id: str) -> dict[str, view.Container]:
        return self._get(sandbox_id).containers()

    async def delete_container(self, sandbox_id: str, container_id: str, patience: Patience) -> bool:
        """Whether the wanted size is reached."""
        return await self._get(sandbox_id).delete(container_id, patience)

    # Devices

    async def put_device(self, sandbox_id: str, spec: AnySpec, patience: Patience) -> tuple[view.Device, bool]:
        """Add a disk or net; whether it is a new one."""
        return await self._get(sandbox_id).put_device(self._with_real_paths(spec), patience)

    async def delete_device(self, sandbox_id: str, kind: DeviceKind, device_id: str, patience: Patience) -> None:
        await self._get(sandbox_id).delete_device(kind, device_id, patience)

    async def limit_device(
        self, sandbox_id: str, kind: DeviceKind, device_id: str, limits: Limits, replacing: bool, patience: Patience
    ) -> view.Device:
        """Other limits; *replacing*: by taking it out and adding it again."""
        return await self._get(sandbox_id).limit_device(kind, device_id, limits, replacing, patience)

    async def device(self, sandbox_id: str, kind: DeviceKind, device_id: str) -> view.Device:
        return await self._get(sandbox_id).counted_device(kind, device_id)

    def devices(self, sandbox_id: str, kind: DeviceKind) -> dict[str, view.Device]:
        return self._get(sandbox_id).devices(kind)

    def _with_real_paths(self, spec: AnySpec) -> AnySpec:
        """What it names on this host is under the roots, and named without symbolic links."""
        config = spec.config
        if config.vhost_socket is not None:
            real = str(paths.socket_under_roots(config.vhost_socket, self._roots()))
            config = msgspec.structs.replace(config, vhost_socket=real)
        if isinstance(config, DiskConfig) and config.path is not None:
            real = str(paths.disk_under_roots(config.path, self.settings.daemon.disk_roots))
            config = msgspec.structs.replace(config, path=real)
        return Spec(config, spec.limits, spec.group)

    async def plan(self, request: Request) -> Planned:
        """A dry run. Between its steps everybody else has a turn."""
        run = DryRun(self.settings, request)
        steps = []
        for step in run.steps():
            steps.append(step)
            await asyncio.sleep(0)
        return run.answer(steps)

    async def close(self) -> None:
        """Let go of all VMs, which run on, and of the state, which stays."""
        await asyncio.gather(*(sandbox.close() for sandbox in self._sandboxes.values()), *self._expiring)
        self._store.close()

    def _expire(self, sandbox_id: str) -> None:
        """A VM has been lost for so long that its sandbox is forgotten."""
        task = asyncio.create_task(self._forget_lost(sandbox_id))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    async def _forget_lost(self, sandbox_id: str) -> None:
        try:
            await self.delete_sandbox(sandbox_id)
            log.info("a lost sandbox is forgotten", sandbox=sandbox_id)
        except Problem as problem:
            log.warning("a lost sandbox cannot be forgotten", sandbox=sandbox_id, reason=problem.detail)

    # How a sandbox is to be

    def _plan(self, sandbox_id: str, spec: SandboxSpec, present: Sandbox | None) -> Plan:
        annotations = dict(spec.annotations or {})
        config, declaration, boot, notes = registered(self.settings, spec.hypervisor, annotations, spec.resources)
        if config.hypervisor == "clh":
            if spec.directory is not None:
                raise Problem(
                    Code.INVALID_PATH,
                    f'"{spec.directory}": directory is for QEMU\'s monitor: leave it out, and name the API socket of '
                    "Cloud Hypervisor when the VM is attached (PUT vm)",
                )
            monitor = None
        else:
            monitor = self._monitor(sandbox_id, spec.directory, present)
        groups = dict(spec.groups or {})
        if groups and config.hypervisor != "clh":
            raise Problem(Code.NOT_SUPPORTED, "rateLimitGroups are Cloud Hypervisor's: leave them out, or use clh")
        return Plan(
            config=config,
            groups=groups,
            resources=spec.resources,
            annotations=annotations,
            declared=declaration,
            boot=boot,
            notes=notes,
            vmm=vmm.given(config, boot, monitor, groups),
        )

    def _open_driver(self, plan: Plan, socket: str) -> Hypervisor:
        return MeasuredHypervisor(self._drivers(plan, socket), plan.config.hypervisor, self.metrics)

    def _monitor(self, sandbox_id: str, named: str | None, present: Sandbox | None) -> str:
        """The path of the socket that QEMU shall listen on."""
        monitor = str(self._directory(sandbox_id, named) / vmm.MONITOR)
        for other in self._sandboxes.values():
            if other is not present and other.plan.monitor == monitor:
                raise Problem(Code.CONFLICT, f'"{monitor}" belongs to sandbox "{other.id}": name another directory')
        return monitor

    def _restored(self, kept: Kept) -> Sandbox:
        """Raises :class:`Problem` where what is kept contradicts itself."""
        record = kept.record
        plan = Plan(
            config=record.config,
            resources=record.resources,
            annotations=dict(record.annotations),
            declared=declare(record.config, record.annotations, record.resources),
            boot=record.boot,
            notes=record.notes,
            vmm=vmm.given(record.config, record.boot, record.monitor, record.groups),
            groups=dict(record.groups),
        )
        tell = Teller(self.events, record.id)
        expire, claim = partial(self._expire, record.id), partial(self._claim, record.id)
        return Sandbox(record.id, plan, self._store, tell, kept, expire, claim)

    def _directory(self, sandbox_id: str, named: str | None) -> Path:
        """Where the monitor's socket shall be: the caller's directory, or one made here."""
        if named is None:
            own = self.settings.daemon.vm_directory(sandbox_id)
            paths.socket_under_roots(str(own / vmm.MONITOR), [own.parent])
            try:
                own.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise Problem(Code.INVALID_PATH, f'"{own}": {error.strerror}; name a directory of your own') from None
            return own
        directory = paths.under_roots(named, self._roots())
        paths.must_be_directory(directory)
        paths.socket_under_roots(str(directory / vmm.MONITOR), self._roots())
        return directory

    def _remove_directory(self, sandbox_id: str) -> None:
        with contextlib.suppress(OSError):  # none of ours, or the VM's socket is still in it
            self.settings.daemon.vm_directory(sandbox_id).rmdir()

    def _roots(self) -> tuple[Path, ...]:
        return (*self.settings.daemon.vm_roots, self.settings.daemon.socket.parent)

    def _spec_of(self, sandbox: Sandbox, like: SandboxSpec) -> SandboxSpec:
        """The spec that *sandbox* was registered with, saying as much as *like* does."""
        plan = sandbox.plan
        directory = None if plan.monitor is None else Path(plan.monitor).parent
        named = like.directory is not None and paths.leads_to(like.directory, directory)
        own = like.directory is None and directory in (None, self.settings.daemon.vm_directory(sandbox.id))
        return SandboxSpec(
            hypervisor=like.hypervisor if like.hypervisor in (None, plan.config.hypervisor) else plan.config.hypervisor,
            annotations=like.annotations if dict(like.annotations or {}) == plan.annotations else plan.annotations,
            resources=plan.resources,
            directory=like.directory if named or own else None if directory is None else str(directory),
            groups=like.groups if dict(like.groups or {}) == plan.groups else plan.groups,
        )

    def _get(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise Problem(Code.NOT_FOUND, f'there is no sandbox "{sandbox_id}": register it with PUT first')
        return sandbox
