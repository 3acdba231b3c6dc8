"""A host whose daemon can be killed: VMs and state outlive the manager, which is made anew."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from hypervisors.base import Hypervisor
from hypervisors.fake import FakeHypervisor, FakeVm
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.sandbox import Plan
from kata_resmgr.sqlite_store import SqliteStore, Statement
from kata_resmgr.store import StateUnavailable
from tests.sandbox.rig import load


class MortalStore(SqliteStore):
    """The durable store of a daemon that dies: when it is to make one more commit than it has *lives*, or,
    *at_once*, as soon as it has made that many.

    From then on it finds the disk full, which is how a test ends what the dead daemon would go on with: nothing of that
    is kept, and no removal is sent.
    """

    def __init__(self, path: Path) -> None:
        self.lives: int | None = None
        self.at_once = False
        self.dead = False
        super().__init__(path)

    def _write(self, *statements: Statement) -> None:
        if self.lives == 0:
            self._die()
        super()._write(*statements)
        if self.lives is not None:
            self.lives -= 1
            if self.lives == 0 and self.at_once:
                self._die()

    def _die(self) -> NoReturn:
        self.dead = True
        raise StateUnavailable("killed by the test")


class Machines:
    """One host: its directory, its VMs by socket, and the daemon that runs now."""

    def __init__(self, directory: Path, toml: str = "") -> None:
        self.directory = directory
        self._toml = f'{toml}\n[daemon]\nsocket = "{directory}/api.sock"\nvm_roots = ["{directory}"]\n'
        self._toml += f'disk_roots = ["{directory}"]\n'
        self.vms: dict[str, FakeVm] = {}
        self.driver = FakeHypervisor
        self._sockets: list[socket.socket] = []
        self.store: MortalStore
        self.manager: ResourceManager

    def start(self) -> None:
        """A daemon comes up on what is there, without looking at it yet."""
        self.store = MortalStore(self.directory / "state.db")
        self.manager = ResourceManager(load(self._toml), self.store, self._driver)

    async def restart(self) -> None:
        """Kill it, and let the next one adopt."""
        await self.kill()
        self.start()
        await self.manager.adopt()

    async def kill(self) -> None:
        """It is gone, and has done nothing more."""
        self.store.lives = 0
        await self.manager.close()
        for vm in self.vms.values():
            vm.drop()

    async def boot(self, name: str, vm: FakeVm | None = None) -> FakeVm:
        """Register a sandbox, start its VM, and attach it."""
        await self.manager.put_sandbox(name, SandboxSpec("qemu"))
        vm = vm or FakeVm(boot_vcpus=1, max_vcpus=8)
        self.run(name, vm)
        await self.manager.attach(name, None, None, None)
        return vm

    def run(self, name: str, vm: FakeVm) -> None:
        """The VM runs; its monitor is where the sandbox's arguments put it."""
        self.listen(self.directory / "vm" / name / "resmgr.sock", vm)

    def listen(self, path: Path, vm: FakeVm) -> None:
        """The VM runs, and is reached there."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        self._sockets.append(listener)
        self.vms[str(path)] = vm

    def has_directory(self, name: str) -> bool:
        """Whether there is a directory of the daemon's own for the sandbox."""
        return (self.directory / "vm" / name).exists()

    def unlisten(self) -> None:
        """No VM runs any more."""
        for listener in self._sockets:
            Path(listener.getsockname()).unlink(missing_ok=True)
            listener.close()
        self._sockets.clear()
        self.vms.clear()

    def table(self, name: str) -> dict[str, Any]:
        """What each container has."""
        containers = self.manager.containers(name)
        return {name: json.loads(bytes(container.resources)) for name, container in containers.items()}

    def conditions(self, name: str) -> list[tuple[str, str]]:
        return [(condition.type, condition.reason) for condition in self.manager.sandbox(name).conditions]

    def _driver(self, _: Plan, path: str) -> Hypervisor:
        return self.driver(self.vms[path])

    async def close(self) -> None:
        await self.manager.close()
        self.unlisten()


@asynccontextmanager
async def machines(directory: Path, toml: str = "") -> AsyncIterator[Machines]:
    """A host with a daemon; nothing of it runs afterwards."""
    host = Machines(directory, toml)
    host.start()
    try:
        yield host
    finally:
        await host.close()
