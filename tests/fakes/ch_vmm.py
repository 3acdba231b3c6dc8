"""Cloud Hypervisor's VMM behind its HTTP API: what it stores, checks, answers and shows, and a guest that is slow.

Each ``vcpuN`` is a real thread of this process, so that whoever counts the VMM's threads finds them: one VM a process.
The guest does nothing by itself: a test says when it ejects, plugs or restarts (:meth:`Vmm.eject_vcpus`, ...).
*release* (46, 47, 52, 53, 54) switches what differs between releases: statuses, the form of errors, nulls, the limit of
bodies, repeated removals, and what ``memory_actual_size`` tells.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from tests.fakes.ch_config import ADDS, MIB, VM, BadRequest, Json, VmmError, filled, validate
from tests.fakes.micro_http import METHODS, Raw, Request, Response
from tests.fakes.threads import join, name_this_thread

T = TypeVar("T")

PREFIX: Final = "/api/v1/"
PIECE: Final = 128 * MIB
BLOCK: Final = 2 * MIB
SLOTS: Final = 8
PCI_SLOTS: Final = 31


class _Resize(msgspec.Struct):
    desired_vcpus: int | None = None
    desired_ram: int | None = None
    desired_balloon: int | None = None


class _ResizeDisk(msgspec.Struct):
    id: str
    desired_size: int


class _Remove(msgspec.Struct):
    id: str


class _VcpuThread:
    """A thread with a vCPU's name, and nothing to do."""

    def __init__(self, number: int) -> None:
        self._stop = threading.Event()
        named = threading.Event()

        def run() -> None:
            name_this_thread(f"vcpu{number}")
            named.set()
            self._stop.wait()

        self._thread = threading.Thread(target=run, name=f"vcpu{number}")
        self._thread.start()
        named.wait()

    def end(self) -> None:
        self._stop.set()
        join(self._thread)


class Vmm:
    """The VMM, with nothing created yet. :meth:`close` ends its threads.

    Faults, which a test may set at any time: while :attr:`hangs`, nothing is answered; what is in :attr:`spoilt`
    answers a call by these bytes, or for None by the end of the connection, and with :attr:`spoils_after` the call is
    carried out before; with :attr:`drops_limiters` a limiter is accepted and forgotten; :attr:`static` is a VM whose
    vCPUs are not dynamic (TDX).
    """

    def __init__(self, release: int = 54, *, pid: int | None = None) -> None:
        self.release = release
        self.pid = pid or os.getpid()
        self.state: str | None = None
        self.config: Json = {}
        self.calls: list[tuple[str, bytes | None]] = []
        self.spoilt: dict[str, bytes | None] = {}
        self.spoils_after = False
        self.drops_limiters = False
        self.static = False
        self.cooperates = False
        """Whether the guest does what it is asked for by itself, before the next request is read."""
        self.called = threading.Condition()
        self._answers = threading.Event()
        self._answers.set()
        self._state = threading.RLock()
        self._vcpus: dict[int, _VcpuThread] = {}
        self._leaving_vcpus: list[int] = []
        self._tree: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._ids = 0
        self._slots_used = 0
        self._ram = self._booted_ram = 0
        self._virtio_asked = 0
        self._virtio_plugged = 0
        self._balloon = 0

    @property
    def limit(self) -> int:
        """Bytes of a body."""
        return 4 << 20 if self.release >= 54 else 51200

    @property
    def methods(self) -> frozenset[str]:
        return METHODS | {"DELETE"} if self.release >= 54 else METHODS

    def close(self) -> None:
        self.resume_answers()
        self._stop_guest()

    # What a test looks at

    def bodies(self, call: str) -> list[Json]:
        """What was sent with the calls of that name."""
        return [json.loads(body) for name, body in self.calls if name == call and body is not None]

    @property
    def vcpus(self) -> int:
        """As many threads as there are."""
        return len(self._vcpus)

    @property
    def leaving(self) -> frozenset[str]:
        """The devices that the guest has been asked to let go of."""
        return frozenset(self._leaving)

    # What a test plays

    def boot(self, config: Json) -> None:
        """Create and boot, as the shim does."""
        self._create(json.dumps(config).encode())
        self._boot()

    def hang(self) -> None:
        """Answer nothing until :meth:`resume_answers`."""
        self._answers.clear()

    def resume_answers(self) -> None:
        self._answers.set()

    def wait_for_call(self, name: str, seconds: float = 5.0) -> None:
        """Until a call of that name has come."""
        with self.called:
            assert self.called.wait_for(lambda: any(call == name for call, _ in self.calls), seconds), name

    def cooperate(self, always: bool) -> None:
        self.cooperates = always

    def drop_limiters(self) -> None:
        self.drops_limiters = True

    def eject_vcpus(self) -> None:
        """The guest gives back the vCPUs that it was asked for."""
        with self._state:
            for number in self._leaving_vcpus:
                self._vcpus.pop(number).end()
            self._leaving_vcpus = []

    def eject_device(self, name: str) -> None:
        """The guest lets go of a device that it was asked for."""
        with self._state:
            self._leaving.remove(name)
            del self._tree[name]
            del self._kinds[name]

    def plug(self, size: int) -> None:
        """The guest has now so many bytes of virtio-mem, whatever it was asked for."""
        with self._state:
            self._virtio_plugged = size

    def balloon_to(self, size: int) -> None:
        """The guest has given so many bytes to the balloon."""
        with self._state:
            self._balloon = size

    def reboot(self) -> None:
        """The guest restarts. A VM that cannot be built anew ends the VMM, which shows as RuntimeError here."""
        with self._state:
            try:
                validate(self.config, self.release)
            except VmmError as error:
                raise RuntimeError(f"the VMM has ended: {error}") from None
            self._start_guest()

    # The API

    def handle(self, request: Request) -> Response | Raw | None:
        """Answers one request: the handler of :class:`tests.fakes.micro_http.MicroHttp`."""
        if not request.path.startswith(PREFIX):
            return self._answer(404, "Not Found")
        call = request.path.removeprefix(PREFIX)
        with self.called:
            self.calls.append((call, request.body))
            self.called.notify_all()
        self._answers.wait()
        if self.cooperates:
            self.eject_vcpus()
            for name in self.leaving:
                self.eject_device(name)
        spoilt = call in self.spoilt
        if spoilt and not self.spoils_after:
            return self._spoil(call)
        with self._state:
            response = self._carry_out(call, request)
        return self._spoil(call) if spoilt else response

    def _spoil(self, call: str) -> Raw | None:
        text = self.spoilt.pop(call)
        return None if text is None else Raw(text)

    def _carry_out(self, call: str, request: Request) -> Response:
        reads: dict[str, Callable[[], Any]] = {
            "vmm.ping": self._ping,
            "vm.info": self._info,
            "vm.counters": self._counters,
        }
        acts: dict[str, Callable[[], None]] = {
            "vm.boot": self._boot,
            "vm.delete": self._delete,
            "vm.shutdown": self._shutdown,
            "vm.reboot": self._reboot,
            "vm.pause": lambda: self._run("Paused", "The VM could not be paused"),
            "vm.resume": lambda: self._run("Running", "The VM could not resume"),
        }
        changes: dict[str, Callable[[bytes], None]] = {
            "vm.create": self._create,
            "vm.resize": self._resize,
            "vm.resize-disk": self._resize_disk,
            "vm.remove-device": self._remove,
        }
        method, body = request.method, request.body
        try:
            if call in reads:
                if method != "GET":
                    raise BadRequest("Bad Request")
                return Response(200, json.dumps(reads[call](), separators=(",", ":")).encode())
            adds = call in ADDS and (call != "vm.add-generic-vhost-user" or self.release >= 52)
            if call not in acts and call not in changes and not adds:
                return self._answer(404, "Not Found")
            if method == "GET" or (method != "PUT" and call == "vm.create"):
                raise BadRequest("Bad Request")
            if method != "PUT":
                raise BadRequest
            if call in acts:
                if body is not None:
                    raise BadRequest("Bad Request")
                acts[call]()
                return Response(204)
            if body is None:
                raise BadRequest if call == "vm.create" else BadRequest("Bad Request")
            if adds:
                return self._add(call, body)
            changes[call](body)
            return Response(204)
        except BadRequest as error:
            return Response(400, error.body)
        except VmmError as error:
            if error.kind == "TooManyRequests":
                return self._answer(429, "Too Many Requests")
            return self._answer(self._status(error.kind), "Error from API", *error.texts)

    def _answer(self, status: int, *texts: str) -> Response:
        if self.release < 47:
            return Response(status, ": ".join(texts).encode())
        return Response(status, json.dumps(texts, separators=(",", ":")).encode())

    def _status(self, kind: str) -> int:
        if self.release >= 53 and kind in ("VmNotCreated", "VmMissingConfig"):
            return 404
        if self.release >= 54:
            if kind in ("NoDeviceToRemove", "UnknownDeviceId"):
                return 404
            if kind in ("IdentifierNotUnique", "DuplicateDevicePath"):
                return 409
            if kind == "ConfigValidation":
                return 400
        return 500

    # Reading

    def _ping(self) -> Json:
        return {
            "build_version": f"v{self.release}.0",
            "version": f"{self.release}.0.0",
            "pid": self.pid,
            "features": ["io_uring", "kvm"],
        }

    def _info(self) -> Json:
        if self.state is None:
            raise VmmError("VmNotCreated", "The VM info is not available", "VM is not created")
        memory = self.config["memory"]
        total = memory["size"] + sum(zone["size"] for zone in memory["zones"] or ())
        told = self._virtio_plugged if self.release >= 52 else memory["hotplugged_size"] or 0
        info = {
            "config": self._printed(self.config),
            "state": self.state,
            "memory_actual_size": max(total - self._balloon + told, 0),
        }
        if self.state != "Created":
            info["device_tree"] = self._printed_tree()
        elif self.release < 53:
            info["device_tree"] = None
        return info

    def _printed(self, value: Any, *, limiter: bool = False) -> Any:  # noqa: ANN401 - what JSON can hold
        """Releases before v53 print what is not set as null; in a limiter all of them do."""
        if isinstance(value, dict):
            return {
                name: self._printed(member, limiter=limiter or name == "rate_limiter_config")
                for name, member in value.items()
                if member is not None or limiter or self.release < 53
            }
        if isinstance(value, list):
            return [self._printed(member, limiter=limiter) for member in value]
        return value

    def _printed_tree(self) -> Json:
        tree: Json = {}
        for name, bdf in self._tree.items():
            above = f"_virtio-pci-{name}"
            tree[name] = self._printed({"id": name, "resources": [], "parent": above, "children": [], "pci_bdf": None})
            bar = {"index": 0, "base": 1 << 40, "size": 1 << 19, "type_": "Memory64", "prefetchable": False}
            tree[above] = self._printed(
                {"id": above, "resources": [{"PciBar": bar}], "parent": None, "children": [name], "pci_bdf": bdf}
            )
        return tree

    def _counters(self) -> Json:
        self._must_run("The VM counters are not available")
        never = (1 << 64) - 1
        disk = {"read_bytes": 0, "write_bytes": 0, "read_ops": 0, "write_ops": 0, "read_latency_min": never}
        net = {"rx_bytes": 0, "rx_frames": 0, "tx_bytes": 0, "tx_frames": 0}
        counted = {"disks": disk, "net": net}
        return {name: counted[kind] for name, kind in self._kinds.items() if kind in counted}

    # The VM's life

    def _create(self, body: bytes) -> None:
        given = _decoded(body)
        if self.state is not None:
            raise VmmError("VmAlreadyCreated", "The VM could not be created", "VM is already created")
        config = copy.deepcopy(VM)
        for name, value in given.items():
            if name in ("cpus", "memory"):
                config[name] |= value
            elif name in ("disks", "net", "fs"):
                config[name] = [filled(name, device, self.release) for device in value or ()]
            else:
                config[name] = value
        self.config, self.state = config, "Created"

    def _boot(self) -> None:
        if self.state is None:
            raise VmmError("VmMissingConfig", "The VM could not boot", "VM config is missing")
        if self.state != "Created":
            raise VmmError("VmAlreadyCreated", "The VM could not boot", "VM is already created")
        try:
            validate(self.config, self.release)
        except VmmError as error:
            raise VmmError(error.kind, "The VM could not boot", *error.texts) from None
        self._start_guest()

    def _delete(self) -> None:
        self._stop_guest()
        self.state, self.config = None, {}

    def _shutdown(self) -> None:
        self._must_run("The VM could not shutdown")
        self._stop_guest()
        self.state = "Created"

    def _reboot(self) -> None:
        if self.state not in ("Running", "Paused"):
            raise VmmError("VmNotCreated", "The VM could not reboot", "VM is not created")
        self._start_guest()

    def _run(self, state: str, failure: str) -> None:
        self._must_run(failure)
        self.state = state

    def _must_run(self, failure: str) -> None:
        if self.state not in ("Running", "Paused"):
            raise VmmError("VmNotRunning", failure, "VM is not running")

    def _start_guest(self) -> None:
        self._stop_guest()
        memory = self.config["memory"]
        self.state = "Running"
        self._slots_used = 0
        self._ram = self._booted_ram = memory["size"]
        self._virtio_asked = self._virtio_plugged = memory["hotplugged_size"] or 0
        for number in range(self.config["cpus"]["boot_vcpus"]):
            self._vcpus[number] = _VcpuThread(number)
        for kind, prefix, _ in ADDS.values():
            devices = self.config.get(kind) or []
            for device in devices if isinstance(devices, list) else [devices]:
                self._build(kind, prefix, device)

    def _stop_guest(self) -> None:
        for thread in self._vcpus.values():
            thread.end()
        self._vcpus, self._leaving_vcpus = {}, []
        self._tree, self._kinds, self._leaving = {}, {}, set()
        self._balloon = 0

    # Sizes

    def _resize(self, body: bytes) -> None:
        wanted = _converted(body, _Resize)
        if wanted.desired_vcpus is not None and self.release < 48 and wanted.desired_vcpus > 255:
            raise BadRequest("Failed to deserialize JSON", "invalid value: integer, expected u8 at line 1 column 1")
        if self.state is None:
            raise VmmError("VmNotCreated", "The VM could not be resized", "VM is not created")
        if self.state == "Created":
            if wanted.desired_vcpus is not None:
                self.config["cpus"]["boot_vcpus"] = wanted.desired_vcpus
            if wanted.desired_ram is not None:
                self.config["memory"]["size"] = wanted.desired_ram
            if wanted.desired_balloon is not None and self.config["balloon"]:
                self.config["balloon"]["size"] = wanted.desired_balloon
            return
        try:
            if wanted.desired_vcpus is not None:
                self._resize_vcpus(wanted.desired_vcpus)
            if wanted.desired_ram is not None:
                self._resize_memory(wanted.desired_ram)
            if wanted.desired_balloon is not None:
                if not self.config["balloon"]:
                    text = "Missing virtio-balloon, can't proceed as expected"
                    raise VmmError("MissingVirtioBalloon", "Error from device manager", text)
                self.config["balloon"]["size"] = wanted.desired_balloon
        except VmmError as error:
            raise VmmError(error.kind, "The VM could not be resized", *error.texts) from None

    def _resize_vcpus(self, count: int) -> None:
        cpus = self.config["cpus"]
        if count == len(self._vcpus) or self.static:
            cpus["boot_vcpus"] = count  # a removal under way goes on
            return
        if count == 0:
            raise VmmError("VcpuZero", "Error from CPU manager", "Requested zero vCPUs")
        if self._leaving_vcpus:
            if self.release >= 46:
                raise VmmError("TooManyRequests")
            raise VmmError("VcpuPending", "Error from CPU manager", "Still pending removed vCPU")
        if count > cpus["max_vcpus"]:
            raise VmmError("VcpuMax", "Error from CPU manager", "Requested vCPUs exceed maximum")
        for number in range(len(self._vcpus), count):
            self._vcpus[number] = _VcpuThread(number)
        self._leaving_vcpus = list(range(count, len(self._vcpus)))
        cpus["boot_vcpus"] = count

    def _resize_memory(self, size: int) -> None:
        memory = self.config["memory"]
        if memory["zones"]:
            text = "Impossible to resize guest memory if it is backed by user defined memory regions"
            raise VmmError("InvalidResizeWithMemoryZones", "Memory manager error", text)
        if memory["hotplug_method"] == "Acpi":
            self._grow_by_acpi(memory, size)
        else:
            self._resize_virtio_mem(memory, size)

    def _grow_by_acpi(self, memory: Json, size: int) -> None:
        by = size - self._ram
        if by > 0:
            if self._slots_used == SLOTS:
                raise VmmError("NoSlotAvailable", "Memory manager error", "No ACPI slot available")
            if by % PIECE:
                text = "The requested hotplug memory addition is not a valid size"
                raise VmmError("InvalidSize", "Memory manager error", text)
            if size > self._booted_ram + (memory["hotplug_size"] or 0):
                text = "Not enough space in the hotplug RAM region"
                raise VmmError("InsufficientHotplugRam", "Memory manager error", text)
            self._slots_used += 1
            self._ram = size
        memory["size"] = size  # a smaller one too, though nothing has changed

    def _resize_virtio_mem(self, memory: Json, size: int) -> None:
        if size < memory["size"]:
            if self.release < 53:
                return
            text = f"Invalid resize request: desired_size = {size} below boot size = {memory['size']}"
            raise VmmError("InvalidResize", "Memory manager error", text)
        if not memory["hotplug_size"]:
            text = "No virtio-mem resizing handler found"
            raise VmmError("MissingVirtioMemHandler", "Memory manager error", text)
        asked = size - memory["size"]
        failures = {
            f"new size {asked:#x} is bigger than region_size {memory['hotplug_size']:#x}": asked
            > memory["hotplug_size"],
            f"new size {asked:#x} is not aligned on block_size {BLOCK:#x}": bool(asked % BLOCK),
            f"new size {asked:#x} and requested_size are identical": asked == self._virtio_asked,
        }
        for text, fails in failures.items():
            if fails:
                raise VmmError(
                    "VirtioMemResizeFail",
                    "Memory manager error",
                    "Failed to virtio-mem resize",
                    "Resize invalid argument",
                    f"Failed to update virtio configuration: ResizeError({text})",
                )
        self._virtio_asked = asked
        memory["hotplugged_size"] = asked or None

    def _resize_disk(self, body: bytes) -> None:
        if self.release < 50:
            raise VmmError("NotFound", "The disk could not be resized", "no such call in this release")
        wanted = _converted(body, _ResizeDisk)
        failure = "The disk could not be resized"
        if self.state is None:
            raise VmmError("VmNotCreated", failure, "VM is not created")
        if self.state == "Created":
            raise VmmError("ResizeDisk", failure, "Failed resizing a disk image")
        if not any(disk["id"] == wanted.id for disk in self.config["disks"] or ()):
            text = f"Failed to find device corresponding to the given identifier: {wanted.id}"
            raise VmmError("UnknownDeviceId", failure, "Error from device manager", text)
        if wanted.desired_size % 512:
            text = "Disk image size is not a multiple of 512"
            raise VmmError("DiskResize", failure, "Error from device manager", "Disk resize error", text)

    # Devices

    def _add(self, call: str, body: bytes) -> Response:
        kind, prefix, failure = ADDS[call]
        device = filled(kind, _decoded(body), self.release)
        if self.drops_limiters and "rate_limiter_config" in device:
            device["rate_limiter_config"] = None
        if self.state is None:
            raise VmmError("VmNotCreated", failure, "VM is not created")
        if kind == "vsock":
            if self.config["vsock"]:
                raise VmmError("TooManyVsockDevices", failure, "Too many virtio-vsock devices")
            self.config["vsock"] = device
            return Response(204)
        changed = copy.deepcopy(self.config)
        changed[kind] = [*(changed.get(kind) or []), device]
        try:
            validate(changed, self.release)
            if self.state != "Created":
                if device["id"] in self._tree:
                    text = f"Invalid identifier as it is not unique: {device['id']}"
                    raise VmmError("IdentifierNotUniqueInTree", "Error from device manager", text)
                if len(self._tree) >= PCI_SLOTS:
                    text = "Failed to find an available PCI device ID"
                    raise VmmError("NextPciDeviceId", "Error from device manager", text)
                self._build(kind, prefix, device)
        except VmmError as error:
            raise VmmError(error.kind, failure, *error.texts) from None
        self.config[kind] = [*changed[kind][:-1], device]
        if self.state == "Created":
            return Response(204)
        told = {"id": device["id"], "bdf": self._tree[device["id"]]}
        return Response(200, json.dumps(told, separators=(",", ":")).encode())

    def _build(self, kind: str, prefix: str, device: Json) -> None:
        if device["id"] is None:
            device["id"] = f"_{prefix}{self._ids}"
            self._ids += 1
        taken = set(self._tree.values())
        free = (f"0000:00:{slot:02x}.0" for slot in range(1, PCI_SLOTS + 2))
        self._tree[device["id"]] = next(bdf for bdf in free if bdf not in taken)
        self._kinds[device["id"]] = kind

    def _remove(self, body: bytes) -> None:
        name = _converted(body, _Remove).id
        failure = "The device could not be removed from the VM"
        if self.state is None:
            raise VmmError("VmNotCreated", failure, "VM is not created")
        if self.state != "Created":
            self._ask_to_leave(name, failure)
        for kind, _, _ in ADDS.values():
            devices = self.config.get(kind) or []
            if isinstance(devices, list) and any(device["id"] == name for device in devices):
                self.config[kind] = [device for device in devices if device["id"] != name]
                return
        if self.state == "Created":
            raise VmmError("NoDeviceToRemove", failure, f"No device to remove: {name}")

    def _ask_to_leave(self, name: str, failure: str) -> None:
        if name.startswith("__"):
            text = f"Not allowed to remove this type of device from the VM: {name[2:]}"
            raise VmmError("RemovalNotAllowed", failure, "Error from device manager", text)
        if name not in self._tree:
            text = f"Failed to find device corresponding to the given identifier: {name}"
            raise VmmError("UnknownDeviceId", failure, "Error from device manager", text)
        if name in self._leaving and self.release == 53:
            raise VmmError("AlreadyRemoving", failure, "Error from device manager", "Device is being removed")
        self._leaving.add(name)


def _decoded(body: bytes) -> Json:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise BadRequest("Failed to deserialize JSON", str(error)) from None
    if not isinstance(value, dict):
        raise BadRequest("Failed to deserialize JSON", "invalid type, expected struct at line 1 column 1")
    return value


def _converted(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BadRequest("Failed to deserialize JSON", str(error)) from None
