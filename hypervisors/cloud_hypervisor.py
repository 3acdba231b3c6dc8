"""Cloud Hypervisor, over its HTTP API and with its threads as witnesses: the driver.

What is done to the VM is in :mod:`hypervisors.ch_vm`, on one of a few threads; here is when, and for how long. Nothing
is told by the VMM of its own accord but its end, which a pidfd shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from hypervisors.base import (
    ConnectionLost,
    Device,
    GuestReset,
    Listener,
    Machine,
    MemoryMethod,
    Plugged,
    SizeChanged,
    Unreachable,
    Unsupported,
)
from hypervisors.ch_client import Exchange
from hypervisors.ch_pool import CallPool
from hypervisors.ch_types import DiskConfig, NetConfig
from hypervisors.ch_vm import ChVm

T = TypeVar("T")

_CLOSING: Final = 1.0
"""Seconds that closing may take: a call under way has been cut, and ends at once."""


class CloudHypervisor:
    """The driver; see :class:`hypervisors.base.Hypervisor`.

    *socket* is the path of the VMM's API socket; *boot_vcpus* and *boot_memory* (bytes) are what the VM was booted
    with. *timeout* in seconds bounds each call, and before that the wait for one of the threads of *pool*. After
    :meth:`close`, and after a :class:`ConnectionLost`, it may be connected again.
    """

    def __init__(self, socket: str, pool: CallPool, *, boot_vcpus: int, boot_memory: int, timeout: float = 5.0) -> None:
        self._path = socket
        self._pool = pool
        self._boot_vcpus = boot_vcpus
        self._boot_memory = boot_memory
        self._timeout = timeout
        self._listener: Listener | None = None
        self._vm: ChVm | None = None
        self._end = "not connected"
        """Why there is no connection; "" while there is one."""
        self._restarts = 0
        self._exchange: Exchange | None = None
        self._turn = asyncio.Lock()

    async def connect(self, listener: Listener) -> Machine:
        """Connect, learn the machine; see :meth:`hypervisors.base.Hypervisor.connect`."""
        if not self._end:
            raise RuntimeError(f"{self._path}: already connected")
        self._forget_vm()
        made: list[ChVm] = []
        try:
            await self._exchanged(lambda api: made.append(ChVm(api, self._boot_vcpus, self._boot_memory)))
        except BaseException:
            for met in made:  # and nobody waits for it any more
                met.close()
            raise
        self._vm = vm = made[0]
        self._restarts = 0
        self._listener = listener
        self._end = ""
        asyncio.get_running_loop().add_reader(vm.process.descriptor, self._on_end)
        return vm.machine

    async def read(self) -> Plugged:
        """What the VM has now."""
        return await self._call(ChVm.read)

    async def add_vcpus(self, count: int) -> Plugged:
        """Plug *count* vCPUs; see :meth:`hypervisors.base.Hypervisor.add_vcpus`."""
        if count < 1 or (self._vm is not None and count > self._vm.machine.max_vcpus):
            most = "its maximum" if self._vm is None else f"its maximum of {self._vm.machine.max_vcpus}"
            raise ValueError(f"{count} vCPUs cannot be added: a machine takes from 1 to {most}")
        return await self._call(lambda vm, api: vm.add_vcpus(api, count))

    async def start_removing_vcpus(self, ids: Sequence[str]) -> None:
        """Ask the guest for vCPUs, the last one first; see :meth:`hypervisors.base.Hypervisor.start_removing_vcpus`."""
        if not ids:
            raise ValueError("no vCPU is named; at least one must be")
        if not await self._call(lambda vm, api: vm.remove_vcpus(api, ids)):
            self._tell(SizeChanged())

    async def grow_memory(self, to: int) -> Plugged:
        """Ask for *to* bytes in all; see :meth:`hypervisors.base.Hypervisor.grow_memory`."""
        if self._vm is not None:
            memory = self._vm.memory
            comes = self._vm.machine.memory.method is MemoryMethod.VIRTIO_MEM
            self._check_memory(self._vm, to, above=memory.asked - 1 if comes else memory.present)
        return await self._call(lambda vm, api: vm.grow_memory(api, to))

    async def start_shrinking_memory(self, to: int, ids: Sequence[str] = ()) -> None:
        """Ask the guest for memory; see :meth:`hypervisors.base.Hypervisor.start_shrinking_memory`.

        With ACPI the VMM would say yes, and change nothing but what it tells: there it is never sent.
        """
        if self._vm is not None:
            if self._vm.machine.memory.method is MemoryMethod.ACPI:
                raise Unsupported(f"{self._path}: memory added by ACPI stays until the VM is started anew")
            self._check_memory(self._vm, to, above=self._boot_memory - 1)
        await self._call(lambda vm, api: vm.shrink_memory(api, to))

    async def add_device(self, device: DiskConfig | NetConfig) -> Device:
        """Plug a disk or net; see :meth:`hypervisors.base.Hypervisor.add_device`.

        Raises :class:`Refused` also where it has more queues than the VM has boot vCPUs, and :class:`Altered` where the
        VMM accepts it and drops a member, such as a limiter: then it has been asked to take the device out again.
        """
        return await self._call(lambda vm, api: vm.add_device(api, device))

    async def start_removing_device(self, device_id: str) -> None:
        """Ask the guest to let go of it; see :meth:`hypervisors.base.Hypervisor.start_removing_device`."""
        await self._call(lambda vm, api: vm.remove_device(api, device_id))

    async def counters(self) -> Mapping[str, Mapping[str, int]]:
        """As the VMM tells them; they start anew with the guest."""
        return await self._call(ChVm.counters)

    async def close(self) -> None:
        """Let go of the VMM; see :meth:`hypervisors.base.Hypervisor.close`."""
        self._listener = None
        self._end = self._end or "closed"
        if self._exchange is not None:
            self._exchange.cut(Unreachable("closed"))
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING), self._turn:
                    pass
        self._forget_vm()

    # Calls

    async def _call(self, act: Callable[[ChVm, Exchange], T]) -> T:
        vm = self._vm
        if vm is None or self._end:
            raise Unreachable(f"{self._path}: {self._end}")
        try:
            return await self._exchanged(lambda api: act(vm, api))
        finally:
            if vm.restarts != self._restarts:
                self._restarts = vm.restarts
                self._tell(GuestReset())

    async def _exchanged(self, act: Callable[[Exchange], T]) -> T:
        """One at a time for each VM."""
        async with self._turn:
            exchange = self._exchange = Exchange(self._path, self._timeout)

            def call() -> T:
                with exchange:
                    return act(exchange)

            try:
                return await self._pool.run(self._path, call, exchange.cut, self._timeout)
            finally:
                self._exchange = None

    def _check_memory(self, vm: ChVm, to: int, *, above: int) -> None:
        memory = vm.machine.memory
        if memory.method is MemoryMethod.NONE:
            raise Unsupported(f"{self._path}: {vm.why_memory_is_fixed}")
        if not above < to <= memory.maximum or (to - self._boot_memory) % memory.granularity:
            raise ValueError(
                f"{to} bytes of memory cannot be asked for: it must be above {above}, at most {memory.maximum}, and "
                f"differ from the boot memory of {self._boot_memory} by a multiple of {memory.granularity}"
            )

    # The end

    def _on_end(self) -> None:
        """The VMM's process has ended."""
        assert self._vm is not None  # noqa: S101 - for mypy: it is watched only while there is one
        asyncio.get_running_loop().remove_reader(self._vm.process.descriptor)
        self._end = self._end or "the VMM's process has ended"
        self._tell(ConnectionLost(self._end))
        self._listener = None

    def _forget_vm(self) -> None:
        vm, self._vm = self._vm, None
        if vm is not None:
            asyncio.get_running_loop().remove_reader(vm.process.descriptor)
            vm.close()

    def _tell(self, change: ConnectionLost | GuestReset | SizeChanged) -> None:
        if self._listener is not None:
            self._listener(change)
