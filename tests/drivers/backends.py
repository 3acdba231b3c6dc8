"""What the behaviour tests run against: the fake in memory, the driver on a fake wire, the driver on a real QEMU."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from qemu.qmp import QMPClient

from hypervisors import qemu_args
from hypervisors.base import Accelerator, Change, Hypervisor
from hypervisors.fake import FakeHypervisor, FakeVm, Guest
from hypervisors.qemu import QemuHypervisor
from kata_resmgr.guest.machine import FirmwareGuest, Mode
from kata_resmgr.guest.qemus import Qemu
from tests.fakes.qmp_memory import Memory
from tests.fakes.qmp_server import QmpServer

MIB: Final = 1 << 20
BOOT_VCPUS: Final = 1
MAX_VCPUS: Final = 4
MEMORY: Final = 32 * MIB
GREETING_TIMEOUT: Final = 0.2
PATIENCE: Final = 5.0
"""Seconds to wait for what must come: long, for slow machines; nothing waits this long when all is well."""

C = TypeVar("C", bound=Change)


class Hints:
    """A listener that keeps what it hears until it is taken by :meth:`next`."""

    def __init__(self) -> None:
        self.heard: list[Change] = []
        self._news = asyncio.Event()

    def __call__(self, change: Change) -> None:
        self.heard.append(change)
        self._news.set()

    async def next(self, kind: type[C]) -> C:
        """The next hint, which must be of that kind."""
        async with asyncio.timeout(PATIENCE):
            while not self.heard:
                self._news.clear()
                await self._news.wait()
        change = self.heard.pop(0)
        assert isinstance(change, kind), f"{change} instead of {kind.__name__}"
        return change


class Backend(ABC):
    """One VM with :data:`BOOT_VCPUS` of :data:`MAX_VCPUS` vCPUs, and everything that may happen to it."""

    def vcpu(self, number: int) -> str:
        """The id of the vCPU that a driver plugs as its *number*-th, from 1."""
        return f"resmgr-vcpu-{number}"

    @abstractmethod
    def driver(self) -> Hypervisor:
        """A new driver of this VM, not connected."""

    @abstractmethod
    async def guest(self, guest: Guest) -> None:
        """From now on the guest meets removals in that way."""

    @abstractmethod
    async def plug_foreign(self, *, named: bool = True) -> None:
        """Somebody else plugs a vCPU, and gives it an id or not."""

    @abstractmethod
    async def unplug_foreign(self, vcpu: str) -> None:
        """Somebody else asks for a vCPU, by the name by which drivers know it."""

    @abstractmethod
    async def reset(self) -> None:
        """The guest is reset."""

    @abstractmethod
    async def kill(self) -> None:
        """The VMM is killed."""


class InMemory(Backend):
    def __init__(self) -> None:
        self.vm = FakeVm(boot_vcpus=BOOT_VCPUS, max_vcpus=MAX_VCPUS, memory=MEMORY)

    def driver(self) -> Hypervisor:
        return FakeHypervisor(self.vm)

    async def guest(self, guest: Guest) -> None:
        self.vm.guest = guest

    async def plug_foreign(self, *, named: bool = True) -> None:
        self.vm.plug_foreign()

    async def unplug_foreign(self, vcpu: str) -> None:
        self.vm.unplug_foreign(vcpu)

    async def reset(self) -> None:
        self.vm.reset()

    async def kill(self) -> None:
        self.vm.die()


@asynccontextmanager
async def in_memory(_directory: Path, _qemu: Qemu) -> AsyncIterator[Backend]:
    yield InMemory()


class OnTheWire(Backend):
    def __init__(self, server: QmpServer) -> None:
        self.server = server

    def driver(self) -> Hypervisor:
        return QemuHypervisor(self.server.path, greeting_timeout=GREETING_TIMEOUT)

    async def guest(self, guest: Guest) -> None:
        self.server.guest = guest

    async def plug_foreign(self, *, named: bool = True) -> None:
        self.server.plug_foreign("foreign" if named else None)

    async def unplug_foreign(self, vcpu: str) -> None:
        self.server.unplug_foreign(vcpu)

    async def reset(self) -> None:
        self.server.reset()

    async def kill(self) -> None:
        await self.server.kill()


@asynccontextmanager
async def on_the_wire(directory: Path, _qemu: Qemu) -> AsyncIterator[Backend]:
    memory = Memory(MEMORY)
    async with QmpServer(directory / "m", boot_vcpus=BOOT_VCPUS, max_vcpus=MAX_VCPUS, memory=memory) as server:
        yield OnTheWire(server)


class RealQemu(Backend):
    """A second monitor is the somebody else."""

    _MODES: Final[dict[Guest, Mode]] = {Guest.COOPERATE: "c", Guest.IGNORE: "i", Guest.REFUSE: "r"}

    def __init__(self, machine: FirmwareGuest, directory: Path) -> None:
        self._machine = machine
        self._directory = directory

    def driver(self) -> Hypervisor:
        return QemuHypervisor(self._directory / "m", greeting_timeout=GREETING_TIMEOUT)

    async def guest(self, guest: Guest) -> None:
        await asyncio.to_thread(self._machine.mode, self._MODES[guest])

    async def plug_foreign(self, *, named: bool = True) -> None:
        async with self._other_client() as client:
            slots = await client.execute("query-hotpluggable-cpus")
            assert isinstance(slots, list)
            free = next(slot for slot in slots if "qom-path" not in slot)
            name = {"id": "foreign"} if named else {}
            await client.execute("device_add", {"driver": free["type"], **name, **free["props"]})

    async def unplug_foreign(self, vcpu: str) -> None:
        async with self._other_client() as client:
            await client.execute("device_del", {"id": vcpu})

    async def reset(self) -> None:
        async with self._other_client() as client:
            await client.execute("system_reset")

    @asynccontextmanager
    async def _other_client(self) -> AsyncIterator[QMPClient]:
        client = QMPClient()
        await client.connect(str(self._directory / "other"))
        try:
            yield client
        finally:
            await client.disconnect()

    async def kill(self) -> None:
        await asyncio.to_thread(self._machine.kill)


@asynccontextmanager
async def real_qemu(directory: Path, qemu: Qemu) -> AsyncIterator[Backend]:
    megabytes = MEMORY // MIB
    arguments = qemu_args.vmm_arguments(BOOT_VCPUS, MAX_VCPUS, megabytes, megabytes, 0, str(directory / "m"))
    arguments += ["-qmp", f"unix:{directory / 'other'},server=on,wait=off"]
    machine = await asyncio.to_thread(FirmwareGuest, arguments, accelerator=Accelerator.KVM, qemu=qemu)
    try:
        await asyncio.to_thread(machine.ready)
        yield RealQemu(machine, directory)
    finally:
        await asyncio.to_thread(machine.close)
