"""A QMP monitor on the wire: real bytes on a Unix socket, and behind them a VM that answers as QEMU 7.2 was seen to.

Answers, errors and the order of events are those of a q35 machine with a guest that handles ACPI hot-plug. For what a
sound QEMU never does there is :meth:`QmpServer.spoil`, which replaces the answer to a command by any bytes, and
:meth:`QmpServer.send`. :meth:`QmpServer.behave` ends what was spoilt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from hypervisors.fake import Guest
from tests.fakes.qmp_memory import PERIPHERAL, Memory, QmpError

Json = dict[str, Any]

CPU_TYPE: Final = "host-x86_64-cpu"
UUID: Final = "5b2f2f0e-7a31-4d0c-9d0a-4c1b7f4f2b11"
GREETING: Final = (
    b'{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}\r\n'
)
ID: Final = b"@ID@"
"""In a spoilt answer: the id of the command."""
CONNECTING: Final = "(connecting)"
"""To :meth:`QmpServer.spoil`: the command whose answer is the greeting."""

_ANONYMOUS: Final = "/machine/peripheral-anon/"
_LINE_LIMIT: Final = 1 << 20
_PATIENCE: Final = 5.0
_REFUSED: Final = 129
_IN_PROGRESS: Final = 132


def refusal(desc: str, kind: str = "GenericError") -> bytes:
    """An error, for :meth:`QmpServer.spoil`."""
    return json.dumps({"error": QmpError(desc, kind).answer}).encode()[:-1] + b', "id": ' + ID + b"}\r\n"


class _Spoilt(NamedTuple):
    answer: bytes
    hang_up: bool
    repeat: bool
    always: bool


class QmpServer:
    """The monitor and its VM; ``async with`` it. One client is served at a time, others wait without a greeting."""

    def __init__(
        self,
        path: Path,
        *,
        boot_vcpus: int = 1,
        max_vcpus: int = 4,
        memory: Memory | None = None,
        kvm: bool = True,
        topology: Mapping[str, int] | None = None,
    ) -> None:
        """*topology*: how many of each there are in the one before, by the name of its id; as many as *max_vcpus*."""
        self.path = path
        self.max_vcpus = max_vcpus
        levels = topology or {"socket-id": 1, "core-id": max_vcpus, "thread-id": 1}
        places = itertools.product(*(range(count) for count in levels.values()))
        self._props = [dict(zip(levels, place, strict=True)) for place in places]
        assert len(self._props) == max_vcpus
        self.memory = memory or Memory(32 << 20)
        self.kvm = kvm
        self.uuid = UUID
        self.protected_by = ""
        """The QOM path of what makes the guest a confidential one."""
        self.migrating = False
        self.greeting = GREETING
        self._greeted = asyncio.Event()
        self.connections = 0
        """How many clients were served so far."""
        self.says_each_reply = 1
        """How many times."""
        self.commands: list[Json] = []
        self.acknowledges_at_once = False
        """Whether the guest tells of an insertion before QEMU reads the next command, and not a little later."""
        self._seats = {slot: f"/machine/unattached/device[{2 * slot}]" for slot in range(boot_vcpus)}
        self._guest = Guest.COOPERATE
        self._asked_to_leave: dict[str, None] = {}
        self._spoilt: dict[str, _Spoilt] = {}
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._client: asyncio.StreamWriter | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self.path, limit=_LINE_LIMIT)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.kill()

    # What a test plays

    @property
    def guest(self) -> Guest:
        return self._guest

    @guest.setter
    def guest(self, guest: Guest) -> None:
        """A guest that turns cooperative carries out what it was asked for before."""
        self._guest = guest
        if guest is Guest.COOPERATE:
            asked, self._asked_to_leave = self._asked_to_leave, {}
            for path in asked:
                self._eject(path)
            self.guest_moves_memory()

    def guest_moves_memory(self) -> None:
        """The guest comes nearer to what is asked of virtio-mem, and QEMU tells of it."""
        if self.memory.move():
            self.event("MEMORY_DEVICE_SIZE_CHANGE", {"id": "vm0", "qom-path": f"{PERIPHERAL}vm0", "size": 0})

    def plug_foreign(self, name: str | None, *, slot: int | None = None, told: bool = True) -> None:
        """A client of another monitor plugs a vCPU into *slot*, or the highest free one; the guest acknowledges it.

        *name* is its id, None: it gave none.
        """
        if slot is None:
            slot = max(set(range(self.max_vcpus)) - set(self._seats))
        anonymous = sum(path.startswith(_ANONYMOUS) for path in self._seats.values())
        self._seats[slot] = f"{_ANONYMOUS}device[{anonymous}]" if name is None else f"{PERIPHERAL}{name}"
        if told:
            self._acknowledge(slot)

    def unplug_foreign(self, device: str) -> None:
        """A client of another monitor asks for a vCPU, by its id or QOM path."""
        self._device_del(device)

    def free_unseen(self, name: str) -> None:
        """A vCPU has gone, and no event told."""
        del self._seats[self._slot_of(f"{PERIPHERAL}{name}")]

    def reset(self) -> None:
        self.event("RESET", {"guest": False, "reason": "host-qmp-system-reset"})

    async def received(self, name: str) -> None:
        """Wait until a command of that name has come since :meth:`sent` was last asked."""
        async with asyncio.timeout(_PATIENCE):
            while not any(command["execute"] == name for command in self.commands):
                self._news.clear()
                await self._news.wait()

    def sent(self) -> list[str]:
        """The names of the commands that have come since this was last asked."""
        names = [command["execute"] for command in self.commands]
        self.commands.clear()
        return names

    def spoil(
        self, command: str, answer: bytes, *, hang_up: bool = False, repeat: bool = False, always: bool = False
    ) -> None:
        """Answer the next *command*, not carried out, with these bytes; none are silence. Then *hang_up*.

        *command* is its name, and for ``qom-get`` also the property's: "qom-get memory". *repeat* says the bytes again
        and again, for as long as the client is there; *always* means every such command from now on.
        """
        self._spoilt[command] = _Spoilt(answer, hang_up, repeat, always)

    def behave(self) -> None:
        """From now on everything is answered as it should be, and the present client is sent away."""
        self._spoilt.clear()
        self.drop()

    def drop(self) -> None:
        """Hang up on the present client."""
        if self._client is not None:
            self._client.transport.abort()

    def event(self, name: str, data: Json | None = None) -> None:
        message: Json = {"timestamp": {"seconds": 1796000000, "microseconds": 4711}, "event": name}
        self._say(message if data is None else message | {"data": data})

    def send(self, raw: bytes) -> None:
        """Send these bytes to the client, if there is one."""
        if self._client is not None:
            self._client.write(raw)

    async def write(self, raw: bytes) -> None:
        """As :meth:`send`, as fast as the client reads."""
        if self._client is not None:
            self._client.write(raw)
            await self._client.drain()

    async def gone(self) -> None:
        """Wait until no client is left."""
        async with asyncio.timeout(_PATIENCE):
            while self._clients:
                await asyncio.wait(set(self._clients))

    async def kill(self) -> None:
        """The end of QEMU: connections are closed, and the socket is left behind, refusing new ones."""
        if self._server is not None:
            self._server.close()
            for task in self._clients:
                task.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def greeted(self) -> None:
        """Wait until the first client has been sent the greeting."""
        await self._greeted.wait()

    # The monitor

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._turn:
                self._client = writer
                self.connections += 1
                if CONNECTING in self._spoilt:
                    if await self._misbehave(writer, CONNECTING, None):
                        return
                else:
                    self.send(self.greeting)
                self._greeted.set()
                text = ""
                while received := await reader.read(_LINE_LIMIT):
                    messages, text = _messages(text + received.decode())
                    for message in messages:
                        if await self._answer(writer, message):
                            return
        except ConnectionError:
            pass
        finally:
            self._client = None
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, writer: asyncio.StreamWriter, message: Json) -> bool:
        """Answer a command; whether to hang up then."""
        self.commands.append(message)
        self._news.set()
        name = message["execute"]
        spoilt = f"{name} {message['arguments']['property']}" if name == "qom-get" else name
        if spoilt in self._spoilt:
            return await self._misbehave(writer, spoilt, message.get("id"))
        try:
            reply: Json = {"return": self._carry_out(name, message.get("arguments", {}))}
        except QmpError as error:
            reply = {"error": error.answer}
        for _ in range(self.says_each_reply):
            self._say(reply | {key: message[key] for key in ("id",) if key in message})
        return False

    async def _misbehave(self, writer: asyncio.StreamWriter, command: str, number: object) -> bool:
        """The spoilt answer to *command*; whether to hang up then."""
        spoilt = self._spoilt[command]
        if not spoilt.always:
            del self._spoilt[command]
        answer = spoilt.answer.replace(ID, json.dumps(number).encode())
        writer.write(answer)
        while spoilt.repeat:
            await writer.drain()  # as fast as it is read; ends with the connection
            await asyncio.sleep(0)
            writer.write(answer)
        return spoilt.hang_up

    def _say(self, message: Json) -> None:
        self.send(json.dumps(message).encode() + b"\r\n")

    def _carry_out(self, name: str, arguments: Json) -> object:
        match name:
            case "qmp_capabilities":
                return {}
            case "query-uuid":
                return {"UUID": self.uuid}
            case "query-kvm":
                return {"enabled": self.kvm, "present": True}
            case "query-memory-size-summary":
                return self.memory.summary()
            case "query-memory-devices":
                return self.memory.devices
            case "query-memdev":
                return self.memory.memdev()
            case "qom-get" if arguments["property"] == "confidential-guest-support":
                return self.protected_by
            case "qom-get":
                return self.memory.get(arguments["path"], arguments["property"])
            case "qom-set":
                answer = self.memory.set(arguments["path"], arguments["property"], arguments["value"])
                if self._guest is Guest.COOPERATE:
                    asyncio.get_running_loop().call_soon(self.guest_moves_memory)
                return answer
            case "object-add":
                return self.memory.object_add(arguments)
            case "object-del":
                return self.memory.object_del(arguments["id"])
            case "query-hotpluggable-cpus":
                return [self._possible(slot) for slot in reversed(range(self.max_vcpus))]
            case "query-cpus-fast":
                return [
                    {"cpu-index": slot, "qom-path": path, "thread-id": 1000 + slot, "props": self._props[slot]}
                    for slot, path in self._seats.items()
                ]
            case "device_add":
                return self._device_add(**arguments)
            case "device_del":
                return self._device_del(arguments["id"])
        raise QmpError(f"The command {name} has not been found", "CommandNotFound")

    def _possible(self, slot: int) -> Json:
        seat = {"qom-path": self._seats[slot]} if slot in self._seats else {}
        return {"props": self._props[slot], "vcpus-count": 1, "type": CPU_TYPE, **seat}

    def _device_add(self, driver: str, id: str, **props: Any) -> Json:  # noqa: A002, ANN401
        if self.migrating:
            raise QmpError("device_add not allowed while migrating")
        if driver == "pc-dimm":
            slot = self.memory.dimm_add(id, props["memdev"])
            asyncio.get_running_loop().call_soon(partial(self._ost, slot, id, kind="DIMM", source=1, status=0))
            return {}
        if driver != CPU_TYPE:
            raise QmpError(f"Invalid CPU type, expected cpu type: '{CPU_TYPE}'")
        path = f"{PERIPHERAL}{id}"
        if path in self._seats.values():
            raise QmpError(f"Duplicate device ID '{id}'")
        if props not in self._props:
            raise QmpError(f"Invalid CPU {props}")
        slot = self._props.index(props)
        if slot in self._seats:
            raise QmpError(f"CPU[{slot}] with APIC ID {slot} exists")
        self._seats[slot] = path
        if self.acknowledges_at_once:
            self._acknowledge(slot)
        else:
            asyncio.get_running_loop().call_soon(self._acknowledge, slot)
        return {}

    def _device_del(self, device: str) -> Json:
        if self.migrating:
            raise QmpError("device_del not allowed while migrating")
        path = device if device.startswith("/") else f"{PERIPHERAL}{device}"
        if device in self.memory.dimms:
            asyncio.get_running_loop().call_soon(self._ask_to_leave, path)
            return {}
        if path not in self._seats.values():
            raise QmpError(f"Device '{device}' not found", "DeviceNotFound")
        if path == self._seats[0]:
            raise QmpError("Boot CPU is unpluggable")
        asyncio.get_running_loop().call_soon(self._ask_to_leave, path)
        return {}

    # The guest

    def _acknowledge(self, slot: int) -> None:
        self._ost(slot, self._name_in(slot), source=1, status=0)

    def _ask_to_leave(self, path: str) -> None:
        match self._guest:
            case Guest.COOPERATE:
                self._eject(path)
            case Guest.IGNORE:
                self._asked_to_leave[path] = None
            case Guest.REFUSE:
                name = path.rpartition("/")[2]
                if name in self.memory.dimms:
                    self._ost(self.memory.slot_of(name), name, kind="DIMM", source=3, status=_REFUSED)
                else:
                    self._ost(self._slot_of(path), name, source=3, status=_REFUSED)

    def _eject(self, path: str) -> None:
        name = path.rpartition("/")[2]
        if name in self.memory.dimms:
            slot = self.memory.slot_of(name)
            self._ost(slot, name, kind="DIMM", source=3, status=_IN_PROGRESS)
            self.memory.remove(name)
            self.event("DEVICE_DELETED", {"device": name, "path": path})
            self._ost(slot, "", kind="DIMM", source=3, status=0)
            return
        slot = self._slot_of(path)
        self._ost(slot, self._name_in(slot), source=3, status=_IN_PROGRESS)
        del self._seats[slot]
        self.event("DEVICE_DELETED", {"path": f"{path}/lapic"})
        if self.kvm:  # under TCG, QEMU never gets to tell of the device itself
            device = {"device": name} if path.startswith(PERIPHERAL) else {}
            self.event("DEVICE_DELETED", device | {"path": path})
        self._ost(slot, "", source=3, status=0)

    def _slot_of(self, path: str) -> int:
        return next(slot for slot, seated in self._seats.items() if seated == path)

    def _name_in(self, slot: int) -> str:
        path = self._seats[slot]
        return path.removeprefix(PERIPHERAL) if path.startswith(PERIPHERAL) else ""

    def _ost(self, slot: int, name: str, *, kind: str = "CPU", source: int, status: int) -> None:
        device = {"device": name} if name else {}
        info = {"slot": str(slot), "slot-type": kind, "source": source, "status": status, **device}
        self.event("ACPI_DEVICE_OST", {"info": info})


def _messages(text: str) -> tuple[list[Json], str]:
    """The JSON objects that *text* begins with, and the rest: QMP's stream need not be cut into lines."""
    decoder, messages = json.JSONDecoder(), []
    with suppress(json.JSONDecodeError):
        while text:
            message, end = decoder.raw_decode(text)
            messages.append(message)
            text = text[end:].lstrip()
    return messages, text
