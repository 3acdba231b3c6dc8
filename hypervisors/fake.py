"""A VM and its driver in memory, with a knob for every fault: for tests of whatever stands above a driver.

:class:`FakeVm` is the VM. It outlives connections, so that reconnects, foreign changes and removals that complete late
can be played. :class:`FakeHypervisor` is the driver. The two behave as :mod:`hypervisors.qemu` does with a QEMU
(the same behaviour tests run against both); by default the guest cooperates and nothing goes wrong.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from hypervisors.base import (
    FIXED_MEMORY,
    Accelerator,
    Altered,
    Busy,
    Change,
    ConnectionLost,
    Device,
    DeviceKind,
    Dimm,
    GuestReset,
    Listener,
    Machine,
    MemoryHotplug,
    MemoryMethod,
    Plugged,
    Refused,
    RemovalRefused,
    SizeChanged,
    TimedOut,
    Unreachable,
    Unsupported,
    Vcpu,
)
from hypervisors.ch_types import DiskConfig, NetConfig

T = TypeVar("T")

CALLS_KEPT = 10_000
"""How many calls a VM remembers; older ones are forgotten."""

_OURS = "resmgr-vcpu-"
_OUR_DIMM = "resmgr-mem-"


class Guest(StrEnum):
    """What the guest does when it is asked to give a vCPU or a DIMM back, or to come to another size (virtio-mem)."""

    COOPERATE = "cooperate"
    """Gives it back at once, and all those it has ignored before."""
    IGNORE = "ignore"
    """Says nothing. The request stays: :meth:`FakeVm.guest_ejects` completes it, or turning cooperative."""
    REFUSE = "refuse"
    """Says no; the request is forgotten."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a driver received: the method's name, and its argument where it has one."""

    name: str
    argument: int | tuple[str, ...] | None = None
    to: int | None = None
    """Bytes that a shrink of memory is to come to; its *argument* are the DIMMs."""


class FakeVm:
    """The VM. Attributes without underscore may be set by a test at any time.

    Faults: while :attr:`busy`, connecting is refused as :class:`~hypervisors.base.Busy`. :attr:`vcpus_until_refusal`
    counts down with every vCPU that is plugged, and at 0 plugging is refused (so 0 refuses all, and 2 lets an
    addition of 3 fail after 2); None never refuses. With :attr:`lying_adds` an addition returns normally and adds
    nothing; with :attr:`lying_removals` a removal is accepted and hinted at, and the vCPU stays. All of this holds for
    memory alike, where :attr:`grows_until_refusal` counts grows.

    virtio-mem never tells that it has moved. The guest takes :attr:`memory_seconds` to come to what it is asked for,
    never gets above :attr:`memory_takes` bytes or below the :attr:`memory_used` that it cannot give back, and then
    gets stuck until it is asked again. One that ignores or refuses does nothing.

    :attr:`tells_changes` and :attr:`one_resize` are what the machine says of itself: one that does not tell is silent
    but for the end of its connection, and one with a single resize refuses any other while vCPUs are to leave.

    Disks and nets are there as soon as they are added, and leave as vCPUs do. With :attr:`refuses_devices` none is
    taken; with :attr:`drops_limiters` one is accepted without its limiter, which the driver finds out, as with Cloud
    Hypervisor.

    As on a real QEMU, a TCG machine dies of a plug that follows a removal.
    """

    def __init__(
        self,
        *,
        boot_vcpus: int = 1,
        max_vcpus: int = 8,
        memory: int = 2 << 30,
        identity: str = "5b2f2f0e-7a31-4d0c-9d0a-4c1b7f4f2b11",
        pid: int | None = None,
        accelerator: Accelerator = Accelerator.KVM,
        vcpu_hotplug: bool = True,
        memory_hotplug: MemoryHotplug = FIXED_MEMORY,
        memory_slots: int | None = None,
    ) -> None:
        self.max_vcpus = max_vcpus if vcpu_hotplug else boot_vcpus
        self.memory_hotplug = memory_hotplug
        self.grows_left = memory_slots
        self.identity = identity
        self.pid = pid
        self.accelerator = accelerator
        self.vcpu_hotplug = vcpu_hotplug
        self.busy = False
        self.vcpus_until_refusal: int | None = None
        self.lying_adds = False
        self.lying_removals = False
        self.grows_until_refusal: int | None = None
        self.memory_seconds = 0.0
        self.memory_takes: int | None = None
        self.memory_used = 0
        self.tells_changes = True
        self.one_resize = False
        self.vcpu_floor = 1
        self.refuses_devices = False
        self.drops_limiters = False
        self.devices: dict[str, Device] = {}
        self.calls: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._boot = [f"/machine/unattached/device[{number}]" for number in range(boot_vcpus)]
        self._foreign: list[str] = []
        self._foreign_seen = 0
        self._ours: list[str] = []
        self._boot_memory = memory
        self._dimms: list[Dimm] = []
        self._foreign_dimms: list[Dimm] = []
        self._dimms_seen = 0
        self._moving = 0  # bytes beyond boot, where memory has no pieces
        self._requested = 0
        self._guest = Guest.COOPERATE
        self._asked_to_leave: dict[str, None] = {}
        self._removed_any = False
        self._running = True
        self._driver: FakeHypervisor | None = None
        self._open: asyncio.Event | None = None
        self._stalls: str | None = None
        self._carries_out_first = False
        self._stalled = asyncio.Event()

    # What a test looks at

    @property
    def vcpus(self) -> tuple[str, ...]:
        """The ids of what is plugged: boot vCPUs, foreign ones, ours, each in the order of plugging."""
        return (*self._boot, *self._foreign, *self._ours)

    @property
    def dimms(self) -> tuple[Dimm, ...]:
        """What is plugged: foreign ones, ours."""
        return (*self._foreign_dimms, *self._dimms)

    @property
    def memory(self) -> int:
        """Bytes that are there, boot memory included."""
        return self._boot_memory + self._moving + sum(dimm.size for dimm in self.dimms)

    @property
    def memory_asked(self) -> int:
        """Bytes that the guest is to come to."""
        return self.memory - self._moving + self._requested

    @property
    def asked_to_leave(self) -> tuple[str, ...]:
        """The removals that the guest has been asked for and has not answered."""
        return tuple(self._asked_to_leave)

    @property
    def connected(self) -> bool:
        """Whether a driver holds the connection."""
        return self._driver is not None

    def called(self, name: str) -> list[Call]:
        """The calls of that name that are remembered, oldest first."""
        return [call for call in self.calls if call.name == name]

    # The guest

    @property
    def guest(self) -> Guest:
        """What the guest does with removals, from now on."""
        return self._guest

    @guest.setter
    def guest(self, guest: Guest) -> None:
        self._guest = guest
        if guest is Guest.COOPERATE:
            self.guest_ejects()

    def guest_ejects(self, *ids: str) -> None:
        """The guest carries out removals now: those of *ids*, or all it has been asked for."""
        for unit in ids or tuple(self._asked_to_leave):
            if unit in self._asked_to_leave:
                self._remove(unit)

    def guest_forgets(self) -> None:
        """The guest drops the removals it was asked for, silently (as a Linux in early boot does)."""
        self._asked_to_leave.clear()

    def refuse(self, vcpu: str, reason: str = "device in use") -> None:
        """The guest says no to a removal, whether it was asked for it or not."""
        self._tell(RemovalRefused(vcpu, reason))

    def reset(self) -> None:
        """The guest is reset. Requests stay, as QEMU keeps them."""
        self._tell(GuestReset())

    # Somebody else

    def plug_foreign(self, count: int = 1) -> None:
        """Another client of the VM plugs *count* vCPUs."""
        for _ in range(count):
            self._foreign_seen += 1
            self._foreign.append(f"/machine/peripheral/foreign-{self._foreign_seen}")
            self._tell(SizeChanged())

    def unplug_foreign(self, *ids: str) -> None:
        """Another client takes these vCPUs out, ours or not, with the guest's consent."""
        for vcpu in ids:
            self._remove(vcpu)

    def plug_foreign_dimm(self, size: int) -> None:
        """Another client of the VM plugs a DIMM."""
        self._dimms_seen += 1
        self._foreign_dimms.append(Dimm(f"foreign-dimm-{self._dimms_seen}", size, ours=False))
        self._use_slot()
        self._tell(SizeChanged())

    def ask_foreign(self, to: int) -> None:
        """Another client asks for *to* bytes in all, where memory has no pieces."""
        self._ask_for(to)
        self._tell(SizeChanged())

    # The connection

    def stall(self, name: str | None = None, *, carry_out_first: bool = False) -> None:
        """From now on no call (or none of that *name*) is answered before :meth:`resume`; each times out after its
        driver's deadline.

        A call is carried out when it is resumed, and not at all when it has timed out before;
        with *carry_out_first* it is carried out at once and only the answer is missing.
        """
        self._open = asyncio.Event()
        self._stalls = name
        self._carries_out_first = carry_out_first

    def resume(self) -> None:
        """End :meth:`stall`: the call that waits goes on, later ones are not held."""
        if self._open is not None:
            self._open.set()
        self._open = None
        self._stalled.clear()

    async def stalled(self) -> Call:
        """Wait until a call is held by :meth:`stall`; the call."""
        await self._stalled.wait()
        return self.calls[-1]

    def drop(self, reason: str = "connection reset by peer") -> None:
        """The connection breaks; the VM runs on and can be connected to again."""
        driver, self._driver = self._driver, None
        self.resume()
        if driver is not None:
            driver._lose(reason)

    def die(self, reason: str = "connection reset by peer") -> None:
        """The VM is gone: the connection breaks and connecting is refused until :meth:`back`."""
        self._running = False
        self.drop(reason)

    def back(self) -> None:
        """Connecting is possible again, with everything as it was."""
        self._running = True

    # For the driver

    def _tell(self, change: Change) -> None:
        if self._driver is not None and self.tells_changes:
            self._driver._tell(change)

    def _must_be_free(self) -> None:
        """With a single resize at a time: whether it is free for another one."""
        leaving = [unit for unit in self._asked_to_leave if unit in self.vcpus]
        if self.one_resize and leaving:
            raise Refused(f"Too Many Requests: {leaving} are being removed")

    def _plug(self, vcpu: str) -> None:
        if self.accelerator is Accelerator.TCG and self._removed_any:
            self.die()
            raise Unreachable("the connection was lost: QEMU died of a plug that followed a removal under TCG")
        if self.vcpus_until_refusal is not None:
            if self.vcpus_until_refusal < 1:
                raise Refused(f"device_add {vcpu}: refused by the test")
            self.vcpus_until_refusal -= 1
        if not self.lying_adds:
            self._ours.append(vcpu)

    def _ask_to_leave(self, unit: str) -> None:
        present = unit in self.devices or unit in self.vcpus or any(dimm.id == unit for dimm in self.dimms)
        if not present or self.lying_removals:
            self._tell(SizeChanged())
        elif unit in self._boot:
            raise Refused(f"device_del {unit}: Boot CPU is unpluggable")
        elif self._guest is Guest.REFUSE and unit in self.devices:
            raise Refused(f"{unit}: the removal was refused by the test")  # by the VMM, which has no events
        elif self._guest is Guest.REFUSE:
            self._tell(RemovalRefused(unit, "the guest refused (status 129)"))
        else:
            self._asked_to_leave[unit] = None
            if self._guest is Guest.COOPERATE:
                asyncio.get_running_loop().call_soon(self.guest_ejects, unit)

    def _remove(self, unit: str) -> None:
        self._asked_to_leave.pop(unit, None)
        if self.devices.pop(unit, None) is not None:
            self._tell(SizeChanged())
            return
        for dimms in (self._dimms, self._foreign_dimms):
            for dimm in [dimm for dimm in dimms if dimm.id == unit]:
                dimms.remove(dimm)
                if self.grows_left is not None:
                    self.grows_left += 1
                self._tell(SizeChanged())
                return
        (self._ours if unit in self._ours else self._foreign).remove(unit)
        self._removed_any = True
        self._tell(SizeChanged())

    def _grow_memory(self, to: int) -> None:
        if self.grows_until_refusal is not None:
            if self.grows_until_refusal < 1:
                raise Refused("object-add: refused by the test")
            self.grows_until_refusal -= 1
        if self.lying_adds:
            return
        match self.memory_hotplug.method:
            case MemoryMethod.DIMM:
                self._use_slot()
                self._dimms_seen += 1
                self._dimms.append(Dimm(f"{_OUR_DIMM}{self._dimms_seen}", to - self.memory, ours=True))
            case MemoryMethod.ACPI:
                self._use_slot()
                self._moving = self._requested = to - self._boot_memory
            case _:
                self._ask_for(to)

    def _use_slot(self) -> None:
        if self.grows_left is not None:
            if self.grows_left < 1:
                raise Refused("no free slots available")
            self.grows_left -= 1

    def _ask_for(self, to: int) -> None:
        """virtio-mem: ask the guest to come to *to* bytes."""
        self._requested = to - self._boot_memory
        if self._guest is Guest.COOPERATE:
            asyncio.get_running_loop().call_later(self.memory_seconds, self._move)

    def _move(self) -> None:
        """The guest comes as near to what it is asked for as it can."""
        granule = self.memory_hotplug.granularity
        least = -(-max(self.memory_used - self._boot_memory, 0) // granule) * granule
        most = self._requested if self.memory_takes is None else self.memory_takes - self._boot_memory
        if self._requested >= self._moving:
            self._moving = max(min(self._requested, most), self._moving)
        else:
            self._moving = min(max(self._requested, least), self._moving)


class FakeHypervisor:
    """The driver of a :class:`FakeVm`; *timeout* in seconds bounds each call.

    Two calls at a time are a defect of the caller and raise :class:`RuntimeError`.
    """

    def __init__(self, vm: FakeVm, *, timeout: float = 5.0) -> None:
        self._vm = vm
        self._timeout = timeout
        self._listener: Listener | None = None
        self._in_call = False
        self._highest = 0

    async def connect(self, listener: Listener) -> Machine:
        """Connect; see :meth:`hypervisors.base.Hypervisor.connect`."""
        vm = self._vm
        vm.calls.append(Call("connect"))
        await asyncio.sleep(0)
        if not vm._running:
            raise Unreachable("cannot connect: connection refused")
        if vm.busy or vm._driver is not None:
            raise Busy("the monitor serves another client")
        vm._driver = self
        self._listener = listener
        self._highest = max([self._highest, *(int(vcpu.removeprefix(_OURS)) for vcpu in vm._ours)])
        return Machine(
            identity=vm.identity,
            pid=vm.pid,
            max_vcpus=vm.max_vcpus,
            vcpu_hotplug=vm.vcpu_hotplug,
            accelerator=vm.accelerator,
            memory=vm.memory_hotplug,
            tells_changes=vm.tells_changes,
            one_resize=vm.one_resize,
        )

    async def read(self) -> Plugged:
        """What the VM has now."""
        return await self._call(Call("read"), self._plugged)

    async def add_vcpus(self, count: int) -> Plugged:
        """Plug *count* vCPUs; see :meth:`hypervisors.base.Hypervisor.add_vcpus`."""
        vm = self._vm
        if not 1 <= count <= vm.max_vcpus:
            raise ValueError(f"count is {count}, and must be from 1 to the machine's maximum of {vm.max_vcpus}")

        def plug() -> Plugged:
            if not vm.vcpu_hotplug:
                raise Unsupported("this machine cannot hot-plug vCPUs")
            vm._must_be_free()
            free = vm.max_vcpus - len(vm.vcpus)
            if count > free:
                raise Refused(f"{count} vCPUs asked for and {free} of {vm.max_vcpus} slots free")
            for _ in range(count):
                self._highest += 1
                vm._plug(f"{_OURS}{self._highest}")
            return self._plugged()

        return await self._call(Call("add_vcpus", count), plug)

    async def start_removing_vcpus(self, ids: Sequence[str]) -> None:
        """Ask the guest for vCPUs; see :meth:`hypervisors.base.Hypervisor.start_removing_vcpus`."""
        if not ids:
            raise ValueError("ids is empty, and must name at least one vCPU")

        vm = self._vm

        def ask() -> None:
            if vm.one_resize and not set(ids) <= set(vm._asked_to_leave):
                vm._must_be_free()
            for vcpu in ids:
                vm._ask_to_leave(vcpu)

        await self._call(Call("start_removing_vcpus", tuple(ids)), ask)

    async def grow_memory(self, to: int) -> Plugged:
        """Ask for more memory; see :meth:`hypervisors.base.Hypervisor.grow_memory`."""
        vm = self._vm
        able = vm.memory_hotplug
        asks = able.method is MemoryMethod.VIRTIO_MEM

        def grow() -> Plugged:
            if able.method is MemoryMethod.NONE:
                raise Unsupported("this machine cannot hot-plug memory")
            least = vm.memory_asked if asks else vm.memory + able.granularity
            if not least <= to <= able.maximum or (to - vm.memory) % able.granularity:
                raise ValueError(
                    f"{to} bytes are asked for, and must be from {least} to the machine's maximum of {able.maximum}, "
                    f"by multiples of {able.granularity}"
                )
            vm._must_be_free()
            vm._grow_memory(to)
            return self._plugged()

        return await self._call(Call("grow_memory", to), grow)

    async def start_shrinking_memory(self, to: int, ids: Sequence[str] = ()) -> None:
        """Ask the guest for memory; see :meth:`hypervisors.base.Hypervisor.start_shrinking_memory`."""
        vm = self._vm
        able = vm.memory_hotplug

        def ask() -> None:
            if able.method not in (MemoryMethod.DIMM, MemoryMethod.VIRTIO_MEM):
                raise Unsupported("this machine's memory does not shrink")
            if able.method is MemoryMethod.DIMM and not ids:
                raise ValueError("ids is empty, and must name at least one DIMM")
            if not self._plugged().memory_floor <= to or (to - vm.memory) % able.granularity:
                raise ValueError(f"{to} bytes are left, and must be multiples of {able.granularity} above the floor")
            vm._must_be_free()
            if able.method is MemoryMethod.DIMM:
                for dimm in ids:
                    vm._ask_to_leave(dimm)
            elif not vm.lying_removals:
                vm._ask_for(to)

        await self._call(Call("start_shrinking_memory", tuple(ids), to), ask)

    async def add_device(self, device: DiskConfig | NetConfig) -> Device:
        """Plug a disk or net; see :meth:`hypervisors.base.Hypervisor.add_device`."""
        vm = self._vm

        def add() -> Device:
            if vm.refuses_devices:
                raise Refused(f"{device.id}: refused by the test")
            if device.id in vm.devices:
                raise Refused(f"Invalid identifier as it is not unique: {device.id}")
            limiter, disk = device.rate_limiter_config, isinstance(device, DiskConfig)
            added = Device(
                id=device.id,
                kind=DeviceKind.DISK if disk else DeviceKind.NET,
                address=f"0000:00:{len(vm.devices) + 1:02x}.0",
                limiter=None if vm.drops_limiters else limiter,
                group=device.rate_limit_group if isinstance(device, DiskConfig) else None,
            )
            if not vm.lying_adds:
                vm.devices[device.id] = added
            if vm.drops_limiters and limiter is not None:
                vm._ask_to_leave(device.id)
                raise Altered(f"{device.id}: accepted without rate_limiter_config, and was asked to take it out again")
            return added

        return await self._call(Call("add_device", (device.id,)), add)

    async def start_removing_device(self, device_id: str) -> None:
        """Ask the guest to let go of it; see :meth:`hypervisors.base.Hypervisor.start_removing_device`."""
        await self._call(Call("start_removing_device", (device_id,)), lambda: self._vm._ask_to_leave(device_id))

    async def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Nothing has gone through any of them."""
        counted = {DeviceKind.DISK: {"read_bytes": 0}, DeviceKind.NET: {"rx_bytes": 0}}
        devices = self._vm.devices
        return await self._call(
            Call("counters"), lambda: {name: counted[device.kind] for name, device in devices.items()}
        )

    async def close(self) -> None:
        """Let go of the VM."""
        self._vm.calls.append(Call("close"))
        self._listener = None
        if self._vm._driver is self:
            self._vm._driver = None

    async def _call(self, call: Call, carry_out: Callable[[], T]) -> T:
        vm = self._vm
        if self._in_call:
            raise RuntimeError(f"{call.name} was called while another call was under way")
        self._in_call = True
        try:
            vm.calls.append(call)
            self._check_connected()
            held = vm._open if vm._stalls in (None, call.name) else None
            if held is None:
                await asyncio.sleep(0)
            elif vm._carries_out_first:
                answer = carry_out()
                await self._wait(held, call)
                self._check_connected()
                return answer
            else:
                await self._wait(held, call)
            self._check_connected()
            return carry_out()
        finally:
            self._in_call = False

    async def _wait(self, held: asyncio.Event, call: Call) -> None:
        self._vm._stalled.set()
        try:
            async with asyncio.timeout(self._timeout):
                await held.wait()
        except TimeoutError:
            raise TimedOut(f"{call.name}: no answer in {self._timeout:g} s") from None
        finally:
            self._vm._stalled.clear()

    def _check_connected(self) -> None:
        if self._vm._driver is not self:
            raise Unreachable("not connected")

    def _plugged(self) -> Plugged:
        vm = self._vm
        others = (*vm._boot, *vm._foreign)
        vcpus = (*(Vcpu(vcpu, ours=False) for vcpu in others), *(Vcpu(vcpu, ours=True) for vcpu in vm._ours))
        asked = vm.memory_asked
        return Plugged(
            vcpus,
            vm.memory,
            memory_asked=None if asked == vm.memory else asked,
            dimms=vm.dimms,
            memory_grows_left=vm.grows_left,
            memory_floor=vm.memory - vm._moving if vm.memory_hotplug.method is MemoryMethod.VIRTIO_MEM else 0,
            vcpu_floor=vm.vcpu_floor,
            devices=tuple(vm.devices.values()),
        )

    def _tell(self, change: Change) -> None:
        """Hand *change* to the listener from the event loop, as an event from outside arrives."""
        listener = self._listener
        if listener is not None:
            asyncio.get_running_loop().call_soon(self._hand_over, listener, change)

    def _hand_over(self, listener: Listener, change: Change) -> None:
        if listener is self._listener:
            listener(change)

    def _lose(self, reason: str) -> None:
        self._tell(ConnectionLost(reason))
        asyncio.get_running_loop().call_soon(self._forget_listener, self._listener)

    def _forget_listener(self, listener: Listener | None) -> None:
        if listener is self._listener:
            self._listener = None
