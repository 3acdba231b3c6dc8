"""QEMU, over a QMP monitor of our own.

What this module relies on was measured on QEMU 7.2; answers and events on 10.0 and 11.1 too:

- A slot's number is its place among the machine's possible vCPUs, lowest first: the reverse of
  ``query-hotpluggable-cpus``, the ``slot`` of an ACPI event, and the ``cpu-index`` of a vCPU that is plugged.
- Slots do not change while the VM runs, only who sits in them. So they are read once, on connecting, and
  ``query-cpus-fast`` is the read-back: it costs what is plugged, not what could be.
- ``{}`` in answer to ``device_del`` means that the guest will be asked. That a vCPU has left shows in
  ``DEVICE_DELETED`` for its QOM path or the ``/lapic`` below it (under TCG only the latter comes), or in an ACPI
  status of 0 for its slot; a guest's refusal only in another ACPI status.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from qemu.qmp import (
    ConnectError,
    ExecInterruptedError,
    ExecuteError,
    QMPError,
    Runstate,
    StateError,
)
from qemu.qmp.message import DeserializationError
from qemu.qmp.qmp_client import BadReplyError, GreetingError

from hypervisors import qemu_memory, qmp
from hypervisors.base import (
    Accelerator,
    Busy,
    Change,
    ConnectionLost,
    Device,
    GuestReset,
    Listener,
    Machine,
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
from hypervisors.qemu_memory import Natural

log = logging.getLogger(__name__)

T = TypeVar("T")

OUR_VCPU: Final = "resmgr-vcpu-"
"""What this driver plugs is called this and a number that counts up, so that the order of plugging can be read back."""

_PERIPHERAL: Final = "/machine/peripheral/"
_OUR_PATH: Final = re.compile(re.escape(_PERIPHERAL + OUR_VCPU) + "([1-9][0-9]{0,8})")
_LAPIC: Final = "/lapic"
_NO_UUID: Final = "00000000-0000-0000-0000-000000000000"

_EACH_DEVICE: Final = 0.05
"""Seconds more that a call may take for each device after its first: 239 vCPUs plugged in one call take QEMU 1.4 s on
two idle cores (measured, KVM), and each takes longer than the one before."""
_CLOSING: Final = 1.0
"""Seconds that closing a session may take; it waits for nobody but the event loop."""
_SILENT_CALLS: Final = 2
"""Calls in a row without answer that end a session: what a hung QEMU has not read yet must not pile up."""

_INSERTED: Final = 1
_EJECTING: Final = 3
"""ACPI events that a guest reports on (``source`` of ``ACPI_DEVICE_OST``)."""
_SUCCESS: Final = 0
_IN_PROGRESS: Final = 132
_EJECTION_STATUS: Final = {
    128: "ejection not supported",
    129: "device in use",
    130: "device busy",
    131: "something that depends on it is busy",
}
"""ACPI's words for the status of an ejection that failed (Linux, include/linux/acpi.h)."""


class _Slot(msgspec.Struct, rename="kebab", gc=False):
    """A row of ``query-hotpluggable-cpus``: how a vCPU is plugged into that slot."""

    type: str
    props: dict[str, int]


class _Cpu(msgspec.Struct, rename="kebab", gc=False):
    """A row of ``query-cpus-fast``: a vCPU that is plugged."""

    cpu_index: Natural
    qom_path: str


_Cpus: TypeAlias = Annotated[list[_Cpu], Meta(min_length=1)]


class _Uuid(msgspec.Struct, rename={"uuid": "UUID"}):
    uuid: Annotated[str, Meta(max_length=36)]


class _Kvm(msgspec.Struct):
    enabled: bool


class _Ost(msgspec.Struct, rename="kebab"):
    """``ACPI_DEVICE_OST``: how the guest fared with what is in a slot."""

    slot: str
    slot_type: str
    source: int
    status: int


def _property(path: str, name: str) -> qmp.Command:
    return qmp.command("qom-get", {"path": path, "property": name})


_QUERY_CPUS: Final = qmp.command("query-cpus-fast")
_QUERY_MEMORY: Final = (qmp.command("query-memory-devices"), qmp.command("query-memdev"))
_QUERY_BASE: Final = qmp.command("query-memory-size-summary")
_QUERY_ROOM: Final = _property("/machine", "memory")
_QUERY_SLOTS: Final = qmp.command("query-hotpluggable-cpus")
_QUERY_UUID: Final = qmp.command("query-uuid")
_QUERY_KVM: Final = qmp.command("query-kvm")
_QUERY_SECRECY: Final = qmp.command("qom-get", {"path": "/machine", "property": "confidential-guest-support"})


class _Seated(msgspec.Struct, frozen=True, gc=False):
    """A vCPU that is plugged: its slot, what it is told as, and the number in its name (0 where it is not ours)."""

    slot: int
    vcpu: Vcpu
    number: int


class QemuHypervisor:
    """The driver; see :class:`hypervisors.base.Hypervisor`.

    *socket* is the monitor's path. *timeout* bounds each call, with a little more for each further device that it plugs
    or removes; *greeting_timeout* how long the monitor may take to greet (one that serves another client does not);
    both in seconds. After :meth:`close`, and after a :class:`ConnectionLost`, it may be connected again.
    """

    _connection: socket.socket | None

    def __init__(self, socket: str | Path, *, timeout: float = 5.0, greeting_timeout: float = 2.0) -> None:
        self._path = str(socket)
        self._timeout = timeout
        self._greeting_timeout = greeting_timeout
        self._listener: Listener | None = None
        self._monitor: qmp.Monitor | None = None
        self._connection = None
        self._watcher: asyncio.Task[None] | None = None
        self._end = "not connected"
        self._silent_calls = 0
        self._machine: Machine | None = None
        self._slots: list[_Slot] = []
        # Who is plugged, by QOM path, and what sits in each slot: None until it has been read who.
        self._present: dict[str, _Seated] = {}
        self._occupied: dict[int, str | None] = {}
        self._highest = 0
        self._adding = False
        # Who was last told to have gone; the events on it go on after that.
        self._departed_path = ""
        self._departed_slot: int | None = None
        # What the machine's memory can do, what was last read of it, and how a DIMM's backend is made (once known).
        self._able = qemu_memory.Ability()
        self._memory = qemu_memory.Memory()
        self._memory_stale = True
        self._memory_devices: list[qemu_memory.MemoryDevice] = []
        self._backends: list[qemu_memory.Backend] = []
        self._another_backend: dict[str, object] | None = None
        self._dimms: dict[int, str] = {}
        self._highest_dimm = 0

    # Calls

    async def connect(self, listener: Listener) -> Machine:
        """Connect, learn the machine and its slots; see :meth:`hypervisors.base.Hypervisor.connect`."""
        if self._monitor is not None:
            raise RuntimeError(f"{self._path}: already connected")
        self._machine = None
        self._memory_stale = True
        self._another_backend = None
        self._connection = await self._dial()
        self._listener = listener
        try:
            self._machine = await self._call("connect", self._learn)
        except BaseException:
            await self.close()
            raise
        return self._machine

    async def read(self) -> Plugged:
        """What QEMU has now."""
        if self._memory.asked is not None:
            self._memory_stale = True  # the guest is on its way: the event for that is too rare to wait for
        _, plugged = await self._call("read", self._exchange)
        return plugged

    async def add_vcpus(self, count: int) -> Plugged:
        """Plug *count* vCPUs into the lowest free slots; see :meth:`hypervisors.base.Hypervisor.add_vcpus`."""
        if count < 1 or (self._machine is not None and count > self._machine.max_vcpus):
            most = "its maximum" if self._machine is None else f"its maximum of {self._machine.max_vcpus}"
            raise ValueError(f"{count} vCPUs cannot be added: a machine takes from 1 to {most}")

        async def plug(monitor: qmp.Monitor) -> Plugged:
            if not self._slots:
                raise Unsupported(f"{self._path}: this machine cannot hot-plug vCPUs")
            if len(self._free_slots(count)) < count:
                await self._exchange(monitor)
            return await self._plug(monitor, count, again=True)

        return await self._call("add_vcpus", plug, devices=count)

    async def start_removing_vcpus(self, ids: Sequence[str]) -> None:
        """Ask the guest for vCPUs; see :meth:`hypervisors.base.Hypervisor.start_removing_vcpus`."""
        if not ids:
            raise ValueError("no vCPU is named; at least one must be")
        await self._ask_to_leave("start_removing_vcpus", ids, lambda: self._tell(SizeChanged()))

    async def grow_memory(self, to: int) -> Plugged:
        """Plug a DIMM, or ask virtio-mem for more; see :meth:`hypervisors.base.Hypervisor.grow_memory`."""
        self._session()
        able, now = self._able, self._memory
        match able.hotplug.method:
            case MemoryMethod.DIMM:
                size = qemu_memory.piece(able, now, to)
                more = qemu_memory.seconds_to_lend(size, self._backends)
                return await self._call("grow_memory", lambda monitor: self._plug_dimm(monitor, size), more=more)
            case MemoryMethod.VIRTIO_MEM:
                if to < (asked := now.total if now.asked is None else now.asked):
                    raise ValueError(f"{to} bytes are no growth: {asked} are asked for already")
                ask = self._request(qemu_memory.requested_size(able, now, to))
                return await self._call("grow_memory", ask)
        raise Unsupported(f"{self._path}: this machine was started without slots for memory and without virtio-mem")

    async def start_shrinking_memory(self, to: int, ids: Sequence[str] = ()) -> None:
        """Ask the guest for memory; see :meth:`hypervisors.base.Hypervisor.start_shrinking_memory`."""
        self._session()
        able = self._able
        match able.hotplug.method:
            case MemoryMethod.DIMM:
                if not ids:
                    raise ValueError("no DIMM is named; at least one must be")
                await self._ask_to_leave("start_shrinking_memory", ids, self._on_memory)
            case MemoryMethod.VIRTIO_MEM:
                ask = self._request(qemu_memory.requested_size(able, self._memory, to))
                await self._call("start_shrinking_memory", ask)
            case _:
                raise Unsupported(f"{self._path}: this machine's memory is fixed")

    async def add_device(self, device: DiskConfig | NetConfig) -> Device:
        raise Unsupported(f"{self._path}: QEMU's devices are not driven")

    async def start_removing_device(self, device_id: str) -> None:
        raise Unsupported(f"{self._path}: QEMU's devices are not driven")

    async def counters(self) -> Mapping[str, Mapping[str, int]]:
        raise Unsupported(f"{self._path}: QEMU's devices are not driven")

    async def close(self) -> None:
        """Let go of QEMU; see :meth:`hypervisors.base.Hypervisor.close`."""
        self._listener = None
        await self._break("closed")

    # The session: from connecting to its one end

    async def _dial(self, *, again: bool = True) -> socket.socket:
        """A session on a new connection, watched from now on."""
        connection = qmp.connected_socket(self._path)
        monitor = qmp.Monitor(self._on_event)
        try:
            async with asyncio.timeout(self._greeting_timeout):
                await monitor.connect(connection)
        except TimeoutError:
            connection.close()
            if monitor.greeting is None:
                silence = f"no greeting in {self._greeting_timeout:g} s"
                raise Busy(f"{self._path}: {silence}: it serves another client, or QEMU hangs") from None
            raise TimedOut(f"{self._path}: no answer in {self._greeting_timeout:g} s") from None
        except ConnectError as error:
            connection.close()
            if again and isinstance(error.exc, GreetingError):
                # What QEMU had still to tell the last client comes before the greeting to the next one.
                return await self._dial(again=False)
            raise Unreachable(f"{self._path}: {qmp.one_line(error)}") from None
        except (QMPError, OSError, EOFError) as error:
            connection.close()
            raise Unreachable(f"{self._path}: {qmp.one_line(error)}") from None
        except AssertionError:
            # qemu.qmp takes for granted that a session outlives its beginning: how this one ended, the watcher finds.
            if monitor.runstate is not Runstate.DISCONNECTING:
                connection.close()
                raise
        except BaseException:
            connection.close()
            raise
        self._end = ""
        self._silent_calls = 0
        self._monitor = monitor
        self._watcher = asyncio.create_task(self._watch(monitor), name=f"watch {self._path}")
        return connection

    async def _watch(self, monitor: qmp.Monitor) -> None:
        """Wait for the end of the session, whoever ends it, and tell it."""
        while monitor.runstate is Runstate.RUNNING:
            await monitor.runstate_changed()
        try:
            await monitor.disconnect()
            reason = "disconnected"
        except EOFError:
            reason = "QEMU closed the connection"
        except DeserializationError as error:
            reason = f"{error.error_message}: {qmp.one_line(error.raw)}"
        except ValueError:  # of the reader of lines
            reason = f"it said a line of more than {qmp.LONGEST_MESSAGE} bytes"
        except Exception as error:  # qemu.qmp re-raises whatever stopped its reader or writer
            reason = f"{type(error).__name__}: {qmp.one_line(error)}"
        self._end = self._end or reason
        self._monitor = None
        if self._machine is not None:
            self._tell(ConnectionLost(self._end))
        self._listener = None

    async def _break(self, reason: str = "") -> None:
        """End the session, if there is one, and wait until it has ended; for *reason*, if it did not end by itself."""
        watcher, connection = self._watcher, self._connection
        if watcher is None or connection is None:
            return
        self._end = self._end or reason
        if not watcher.done():
            # qemu.qmp's own way waits until everything is written, and so for QEMU.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait({watcher}, timeout=_CLOSING)
            watcher.cancel()
            self._monitor = None

    def _session(self) -> qmp.Monitor:
        if self._monitor is None:
            raise Unreachable(f"{self._path}: {self._end}")
        return self._monitor

    async def _call(
        self, name: str, carry_out: Callable[[qmp.Monitor], Awaitable[T]], *, devices: int = 1, more: float = 0.0
    ) -> T:
        """One call, on so many devices: its deadline, and its failures in the words of :mod:`hypervisors.base`.

        *more* are seconds that it may take beyond what the devices' number says.
        """
        timeout = self._timeout + _EACH_DEVICE * (devices - 1) + more
        monitor = self._session()
        monitor.deadline = asyncio.get_running_loop().time() + timeout
        silent_calls, self._silent_calls = self._silent_calls + 1, 0
        try:
            return await carry_out(monitor)
        except qmp.DeadlinePassed:
            self._silent_calls = silent_calls
            if silent_calls == _SILENT_CALLS:
                await self._break(f"no answer to {_SILENT_CALLS} calls in a row")
            raise TimedOut(f"{self._path}: {name}: no answer in {timeout:g} s") from None
        except (ExecInterruptedError, StateError):
            await self._break()
            raise Unreachable(f"{self._path}: {name}: {self._end}") from None
        except (BadReplyError, msgspec.ValidationError) as error:
            await self._break(f"an answer that cannot be understood: {qmp.one_line(error)}")
            raise Unreachable(f"{self._path}: {name}: {self._end}") from None

    # What is read

    async def _learn(self, monitor: qmp.Monitor) -> Machine:
        questions = (_QUERY_UUID, _QUERY_KVM, _QUERY_SECRECY, _QUERY_SLOTS, _QUERY_BASE, _QUERY_ROOM)
        answers, plugged = await self._exchange(monitor, *questions)
        uuid, kvm, secrecy, slots, base, room = answers
        self._able = qemu_memory.ability(
            qmp.value(base, qemu_memory.Summary).base_memory,
            qemu_memory.Configured() if isinstance(room, ExecuteError) else qmp.value(room, qemu_memory.Configured),
            self._memory_devices,
        )
        self._memory = qemu_memory.memory(self._able, self._memory_devices)
        identity = qmp.value(uuid, _Uuid).uuid
        pluggable = not isinstance(slots, ExecuteError) and not _keeps_secrets(secrecy)
        self._slots = qmp.value(slots, list[_Slot])[::-1] if pluggable else []
        return Machine(
            identity="" if identity == _NO_UUID else identity,
            pid=None if self._connection is None else qmp.peer_pid(self._connection),
            max_vcpus=len(self._slots) or len(plugged.vcpus),
            vcpu_hotplug=bool(self._slots),
            accelerator=Accelerator.KVM if _uses_kvm(kvm) else Accelerator.TCG,
            memory=self._able.hotplug,
        )

    async def _exchange(self, monitor: qmp.Monitor, *commands: qmp.Command) -> tuple[list[qmp.Answer], Plugged]:
        """Send *commands* and read back, in one go. The memory is asked for only when something has touched it."""
        ask_memory, self._memory_stale = self._memory_stale, False
        queries = (*_QUERY_MEMORY, _QUERY_CPUS) if ask_memory else (_QUERY_CPUS,)
        try:
            answers = await monitor.pipeline([*commands, *queries])
            if ask_memory:
                await self._take_memory(monitor, answers[-3], answers[-2])
            return answers[: len(commands)], self._seat(qmp.value(answers[-1], _Cpus))
        except BaseException:
            self._memory_stale = self._memory_stale or ask_memory
            raise

    def _seat(self, cpus: list[_Cpu]) -> Plugged:
        """Take note of who sits where."""
        before = self._present
        present = {}
        for cpu in cpus:
            seated = before.get(cpu.qom_path)
            if seated is None or seated.slot != cpu.cpu_index:
                seated = _seated(cpu)
            present[cpu.qom_path] = seated
        self._present = present
        self._occupied = {seated.slot: path for path, seated in present.items()}
        order = sorted(present.values(), key=_number)  # stable: those that are not ours stay in QEMU's order
        if order:
            self._highest = max(self._highest, order[-1].number)
        memory = self._memory
        vcpus = tuple([seated.vcpu for seated in order])
        return Plugged(vcpus, memory.total, memory.asked, memory.dimms, memory.grows_left, memory.beside)

    async def _take_memory(self, monitor: qmp.Monitor, devices: qmp.Answer, backends: qmp.Answer) -> None:
        """Take note of the memory, and remove the backends of ours that nobody uses."""
        self._memory_devices = qmp.value(devices, list[qemu_memory.MemoryDevice])
        self._backends = qmp.value(backends, list[qemu_memory.Backend])
        self._memory = memory = qemu_memory.memory(self._able, self._memory_devices, self._backends)
        self._dimms = dict(memory.slots)
        self._highest_dimm = max(self._highest_dimm, memory.highest)
        if memory.orphans:
            answers = await monitor.pipeline([qmp.command("object-del", {"id": name}) for name in memory.orphans])
            for name, answer in zip(memory.orphans, answers, strict=True):
                if isinstance(answer, ExecuteError):
                    log.warning("%s: object-del %s: %s", self._path, name, qmp.one_line(answer))

    async def _ask_to_leave(self, call: str, ids: Sequence[str], on_gone: Callable[[], None]) -> None:
        """Send ``device_del`` for *ids*. Where one of them had gone already, that is news: *on_gone*."""
        requests = [qmp.command("device_del", {"id": name}) for name in ids]
        answers = await self._call(call, lambda monitor: monitor.pipeline(requests), devices=len(ids))
        errors = [(name, error) for name, error in zip(ids, answers, strict=True) if isinstance(error, ExecuteError)]
        refused = [(name, error) for name, error in errors if error.error_class != "DeviceNotFound"]
        if len(refused) < len(errors):
            on_gone()
        for name, error in refused:
            raise Refused(f"device_del {name}: {qmp.one_line(error)}")

    # Plugging

    def _free_slots(self, count: int) -> list[int]:
        """The lowest *count* free slots, or as many as there are."""
        occupied = self._occupied
        free = (slot for slot in range(len(self._slots)) if slot not in occupied)
        return list(islice(free, count))

    async def _plug(self, monitor: qmp.Monitor, count: int, *, again: bool) -> Plugged:
        slots = self._free_slots(count)
        if len(slots) < count:
            raise Refused(f"{self._path}: {count} vCPUs asked for, {len(slots)} of {len(self._slots)} slots are free")
        names = [f"{OUR_VCPU}{self._highest + n}" for n in range(1, count + 1)]
        self._highest += count
        self._adding = True
        try:
            answers, plugged = await self._exchange(
                monitor,
                *(
                    qmp.command("device_add", {"driver": kind.type, "id": name, **kind.props})
                    for name, kind in zip(names, (self._slots[slot] for slot in slots), strict=True)
                ),
            )
        finally:
            self._adding = False
        refused = [
            (name, slot, answer)
            for name, slot, answer in zip(names, slots, answers, strict=True)
            if isinstance(answer, ExecuteError)
        ]
        # Who sits there, or is called so, although QEMU refused us, came after our last read-back: not a refusal.
        taken = [name for name, slot, _ in refused if slot in self._occupied or _PERIPHERAL + name in self._present]
        if taken and again:
            return await self._plug(monitor, len(refused), again=False)
        for name, slot, answer in refused:
            raise Refused(f"device_add {name} in slot {slot}: {qmp.one_line(answer)}")
        return plugged

    # Memory

    async def _plug_dimm(self, monitor: qmp.Monitor, size: int) -> Plugged:
        """Plug one of *size* bytes; where QEMU refuses it, the read-back finds the backend unused and removes it."""
        if self._another_backend is None:
            self._another_backend = await self._learn_backend(monitor)
        self._highest_dimm += 1
        name = f"{qemu_memory.OUR_DIMM}{self._highest_dimm}"
        answers, plugged = await self._change_memory(
            monitor,
            qmp.command("object-add", {**self._another_backend, "id": name, "size": size}),
            qmp.command("device_add", {"driver": "pc-dimm", "id": name, "memdev": name}),
        )
        for command, answer in zip(("object-add", "device_add"), answers, strict=True):
            if isinstance(answer, ExecuteError):
                raise Refused(f"{command} {name} of {size} bytes: {qmp.one_line(answer)}")
        return plugged

    def _request(self, size: int) -> Callable[[qmp.Monitor], Awaitable[Plugged]]:
        """Ask the virtio-mem device for *size* bytes; the same again wakes a guest that has given up."""

        async def request(monitor: qmp.Monitor) -> Plugged:
            path = _PERIPHERAL + self._able.device
            ask = qmp.command("qom-set", {"path": path, "property": "requested-size", "value": size})
            (answer,), plugged = await self._change_memory(monitor, ask)
            if isinstance(answer, ExecuteError):
                raise Refused(f"requested-size {size} of {self._able.device}: {qmp.one_line(answer)}")
            return plugged

        return request

    async def _change_memory(self, monitor: qmp.Monitor, *commands: qmp.Command) -> tuple[list[qmp.Answer], Plugged]:
        self._memory_stale = self._adding = True
        try:
            return await self._exchange(monitor, *commands)
        finally:
            self._adding = False

    async def _learn_backend(self, monitor: qmp.Monitor) -> dict[str, object]:
        """How a backend is made that is as the boot memory's; asked when the first DIMM is to be plugged."""
        (named,) = await monitor.pipeline([_property("/machine", "memory-backend")])
        boot = qemu_memory.boot_backend(named if isinstance(named, str) else "", self._backends, self._memory_devices)
        if boot is None:
            raise Refused(f"{self._path}: QEMU names no backend of the boot memory, after which a DIMM's is made")
        path = f"/objects/{boot.id}"
        (kind,) = await monitor.pipeline([_property(path, "type")])
        names = qemu_memory.properties(qmp.value(kind, str))
        values = await monitor.pipeline([_property(path, name) for name in names])
        told = {name: value for name, value in zip(names, values, strict=True) if not isinstance(value, ExecuteError)}
        file = told.get("mem-path")
        private_path = isinstance(file, str) and not self._is_directory(file)
        return qemu_memory.another(boot, qmp.value(kind, str), told, private_path=private_path)

    def _is_directory(self, path: str) -> bool:
        """Whether *path* is one where QEMU looks, which may have file systems of its own."""
        pid = None if self._machine is None else self._machine.pid
        root = "" if pid is None else f"/proc/{pid}/root"
        try:
            return Path(f"{root}{path}").is_dir()
        except (OSError, ValueError):
            return False

    # Events

    def _on_event(self, name: object, data: object) -> None:
        if name == "RESET":
            self._memory_stale = True  # virtio-mem starts from nothing again
            self._tell(GuestReset())
        elif name == "MEMORY_DEVICE_SIZE_CHANGE":
            self._on_memory()
        elif isinstance(data, dict):
            if name == "DEVICE_DELETED":
                path = data.get("path")
                self._on_deleted(path.removesuffix(_LAPIC) if isinstance(path, str) else "")
            elif name == "ACPI_DEVICE_OST":
                try:
                    ost = msgspec.convert(data.get("info"), _Ost)
                except msgspec.ValidationError:
                    return
                if ost.slot_type == "CPU":
                    self._on_cpu_status(ost)
                else:
                    self._on_dimm_status(ost)

    def _on_deleted(self, path: str) -> None:
        """A device has gone; a vCPU goes in two steps, the second of which is not news."""
        seated = self._present.pop(path, None)
        if seated is not None:
            self._occupied.pop(seated.slot, None)
            self._departed_path, self._departed_slot = path, seated.slot
            self._tell(SizeChanged())
        elif path != self._departed_path:
            self._on_memory()

    def _on_cpu_status(self, ost: _Ost) -> None:
        slot = int(ost.slot) if ost.slot.isdecimal() and len(ost.slot) < 10 else -1
        path = self._occupied.get(slot)
        if ost.source == _INSERTED:
            # While we add, the read-back that follows shows whatever was inserted, by whomever.
            if 0 <= slot < len(self._slots) and slot not in self._occupied and not self._adding:
                self._occupied[slot] = None
                self._tell(SizeChanged())
        elif ost.source == _EJECTING:
            if ost.status == _SUCCESS:
                if slot == self._departed_slot:
                    self._departed_slot = None  # has been told, and the slot may be somebody else's by now
                elif path is not None:
                    self._tell(SizeChanged())
            elif ost.status != _IN_PROGRESS and path is not None:
                self._tell(RemovalRefused(self._present[path].vcpu.id, _refusal(ost)))

    def _on_dimm_status(self, ost: _Ost) -> None:
        """What the guest says of a DIMM; that it has left, ``DEVICE_DELETED`` has told before."""
        dimm = self._dimms.get(int(ost.slot) if ost.slot.isdecimal() and len(ost.slot) < 10 else -1)
        if ost.source == _INSERTED:
            if dimm is None and not self._adding:
                self._on_memory()
        elif ost.source == _EJECTING and dimm and ost.status not in (_SUCCESS, _IN_PROGRESS):
            self._tell(RemovalRefused(dimm, _refusal(ost)))

    def _on_memory(self) -> None:
        self._memory_stale = True
        self._tell(SizeChanged())

    def _tell(self, change: Change) -> None:
        if self._listener is not None:
            self._listener(change)


def _refusal(ost: _Ost) -> str:
    return f"{_EJECTION_STATUS.get(ost.status, 'no reason told')} (ACPI status {ost.status})"


def _seated(cpu: _Cpu) -> _Seated:
    ours = _OUR_PATH.fullmatch(cpu.qom_path)
    name = cpu.qom_path.removeprefix(_PERIPHERAL) if ours else cpu.qom_path
    return _Seated(cpu.cpu_index, Vcpu(name, ours=ours is not None), int(ours[1]) if ours else 0)


def _number(seated: _Seated) -> int:
    return seated.number


def _uses_kvm(answer: qmp.Answer) -> bool:
    """A QEMU that was built without KVM does not know the question."""
    return not isinstance(answer, ExecuteError) and qmp.value(answer, _Kvm).enabled


def _keeps_secrets(answer: qmp.Answer) -> bool:
    """Whether this is a confidential guest: QEMU lists its slots, but what it is measured with at its start stays.

    The answer is the QOM path of what protects it, "" without; a QEMU that knows no such thing does not know the
    property.
    """
    return not isinstance(answer, ExecuteError) and qmp.value(answer, str) != ""
