"""One sandbox on one fake VM, as the tests of this folder drive it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from hypervisors.fake import FakeHypervisor, FakeVm
from kata_resmgr import config as configuration
from kata_resmgr import view, vmm
from kata_resmgr.config import Settings
from kata_resmgr.events import Events, Teller
from kata_resmgr.host import Host
from kata_resmgr.ledger import registered
from kata_resmgr.sandbox import Outcome, Patience, Plan, Sandbox
from kata_resmgr.store import Attachment, MemoryStore

NO_PATIENCE = Patience()
HOST = Host(cpus=16, memory=65536)


def cpus(count: float | str, **more: object) -> bytes:
    """Resources with a quota of so many CPUs."""
    return json.dumps({"cpu": {"quota": round(float(count) * 100_000), "period": 100_000}, **more}).encode()


def load(toml: str, host: Host = HOST) -> Settings:
    """The configuration with this text."""
    with tempfile.TemporaryDirectory(prefix="rm-") as directory:
        file = Path(directory, "config.toml")
        file.write_text(toml)
        return configuration.load(file, host)


def make_plan(
    toml: str = "",
    resources: bytes | None = None,
    annotations: Mapping[str, str] | None = None,
    hypervisor: str = "qemu",
) -> Plan:
    """What a sandbox is registered with under this configuration."""
    said = dict(annotations or {})
    config, declared, boot, notes = registered(load(toml), hypervisor, said, resources)
    given = vmm.given(config, boot, "/run/s1.sock" if hypervisor == "qemu" else None)
    return Plan(config, resources, said, declared, boot, notes, given)


class Rig:
    """A sandbox, its VM and its store."""

    def __init__(self, vm: FakeVm, plan: Plan, driver_timeout: float = 5.0) -> None:
        self.vm = vm
        self.store = MemoryStore()
        self.events = Events(self.store)
        self.sandbox = Sandbox("s1", plan, self.store, Teller(self.events, "s1"))
        self._driver_timeout = driver_timeout

    async def attach(self) -> view.Sandbox:
        return await self.sandbox.attach(
            Attachment("/run/s1.sock", None, None), lambda: FakeHypervisor(self.vm, timeout=self._driver_timeout)
        )

    async def put(self, name: str, resources: bytes, patience: Patience = NO_PATIENCE) -> Outcome:
        return (await self.sandbox.put(name, resources, patience))[1]

    async def patch(self, name: str, resources: bytes, patience: Patience = NO_PATIENCE) -> Outcome:
        return (await self.sandbox.patch(name, resources, patience))[1]

    async def delete(self, name: str, patience: Patience = NO_PATIENCE) -> Outcome:
        settled = await self.sandbox.delete(name, patience)
        return Outcome(self.state, settled)

    async def resize(self, resources: bytes, patience: Patience = NO_PATIENCE) -> Outcome:
        return await self.sandbox.resize(resources, patience)

    @property
    def state(self) -> view.Sandbox:
        return self.sandbox.state()

    @property
    def plugged(self) -> int:
        return len(self.vm.vcpus)

    def condition(self, kind: str) -> view.Condition | None:
        return next((condition for condition in self.state.conditions if condition.type == kind), None)

    async def pass_time(self, seconds: float) -> None:
        """Let the virtual clock run on."""
        await asyncio.sleep(seconds)


@asynccontextmanager
async def rig(
    toml: str = "",
    vm: FakeVm | None = None,
    *,
    attached: bool = True,
    resources: bytes | None = None,
    annotations: Mapping[str, str] | None = None,
    driver_timeout: float = 5.0,
    hypervisor: str = "qemu",
) -> AsyncIterator[Rig]:
    """A sandbox with an attached VM; nothing of it is left afterwards."""
    plan = make_plan(toml, resources, annotations, hypervisor)
    made = Rig(vm or FakeVm(boot_vcpus=1, max_vcpus=8), plan, driver_timeout)
    before = asyncio.all_tasks()
    if attached:
        await made.attach()
    try:
        yield made
    finally:
        await made.sandbox.close()
    left = asyncio.all_tasks() - before
    assert not left, f"left behind: {left}"
