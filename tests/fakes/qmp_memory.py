"""The memory of the VM behind the fake monitor, as QEMU 7.2 was seen to answer for it: DIMMs, and virtio-mem.

No wire and no time in here: :class:`Memory` is asked for the answer to one command, and what the guest does is called
by :class:`tests.fakes.qmp_server.QmpServer`. Errors are QEMU's words.
"""

from __future__ import annotations

from typing import Any, Final

Json = dict[str, Any]

PERIPHERAL: Final = "/machine/peripheral/"
BLOCK: Final = 2 << 20


class QmpError(Exception):
    """A command that QEMU refuses, with the class and the words it uses."""

    def __init__(self, desc: str, kind: str = "GenericError") -> None:
        super().__init__(desc)
        self.answer = {"class": kind, "desc": desc}


class Memory:
    """*base* bytes of boot memory, lent by ``pc.ram``; *slots* and *maximum* bytes for DIMMs.

    With *virtio_mem* bytes there is a virtio-mem device of that size, called ``vm0``.
    """

    def __init__(self, base: int, *, maximum: int = 0, slots: int = 0, virtio_mem: int = 0) -> None:
        self.base = base
        self.maximum = maximum
        self.slots = slots
        self.boot: Json = {"id": "pc.ram", "type": "memory-backend-ram"}
        """The boot memory's backend; a test sets what it is like."""
        self.devices: list[Json] = []
        """Rows of ``query-memory-devices``."""
        self.objects: dict[str, Json] = {}
        """The arguments of ``object-add``, by id."""
        self.in_use = 0
        """Bytes of the virtio-mem device that the guest cannot give back."""
        if virtio_mem:
            data = {"id": "vm0", "memdev": "/objects/vmem", "memaddr": 1 << 32, "node": 0}
            sizes = {"requested-size": 0, "size": 0, "max-size": virtio_mem, "block-size": BLOCK}
            self.devices.append({"type": "virtio-mem", "data": data | sizes})
            self.objects["vmem"] = {"id": "vmem", "qom-type": "memory-backend-ram", "size": virtio_mem}

    @property
    def dimms(self) -> list[str]:
        return [row["data"]["id"] for row in self.devices if row["type"] == "dimm"]

    def plug_dimm(self, name: str, size: int, *, memdev: str = "foreign") -> int:
        """A DIMM is in a slot; which."""
        taken = {row["data"].get("slot") for row in self.devices}
        slot = min(set(range(self.slots)) - taken)
        data = {"id": name, "memdev": f"/objects/{memdev}", "size": size, "slot": slot, "addr": 1 << 32, "node": 0}
        self.devices.append({"type": "dimm", "data": data | {"hotplugged": True, "hotpluggable": True}})
        return slot

    def slot_of(self, name: str) -> int:
        return next(int(row["data"]["slot"]) for row in self.devices if row["data"]["id"] == name)

    def remove(self, name: str) -> None:
        self.devices = [row for row in self.devices if row["data"]["id"] != name]

    def move(self) -> bool:
        """The guest comes as near to what is asked of virtio-mem as it can; whether that changed anything."""
        for row in self.devices:
            if row["type"] == "virtio-mem":
                before = row["data"]["size"]
                row["data"]["size"] = max(row["data"]["requested-size"], min(before, self.in_use))
                return bool(row["data"]["size"] != before)
        return False

    # Commands

    def summary(self) -> Json:
        return {"base-memory": self.base, "plugged-memory": sum(row["data"]["size"] for row in self.devices)}

    def memdev(self) -> list[Json]:
        """``query-memdev``."""
        common = {"merge": True, "dump": True, "prealloc": False, "share": False, "reserve": True, "host-nodes": []}
        boot = {"size": self.base, "policy": "default", **self.boot}
        backends = [boot, *({"policy": "default"} | more for more in self.objects.values())]
        return [common | {name: value for name, value in one.items() if name != "qom-type"} for one in backends]

    def get(self, path: str, name: str) -> object:
        """``qom-get``."""
        if path == "/machine":
            configured = {"slots": self.slots, "max-size": self.maximum} if self.maximum else {}
            return {"memory": {"size": self.base, **configured}, "memory-backend": f"/objects/{self.boot['id']}"}[name]
        if path == f"/objects/{self.boot['id']}" and name in self.boot:
            return self.boot[name]
        raise QmpError(f"Property '{self.boot['type']}.{name}' not found")

    def set(self, path: str, name: str, value: int) -> Json:
        """``qom-set``."""
        for row in self.devices:
            if path == PERIPHERAL + row["data"]["id"] and row["type"] == "virtio-mem":
                if value % BLOCK:
                    raise QmpError(f"'{name}' has to be multiples of 'block-size' (0x{BLOCK:x})")
                if value > row["data"]["max-size"]:
                    raise QmpError(f"'{name}' cannot exceed the memory backend size(0x{row['data']['max-size']:x})")
                row["data"][name] = value
                return {}
        raise QmpError(f"Device '{path}' not found", "DeviceNotFound")

    def object_add(self, arguments: Json) -> Json:
        name = arguments["id"]
        if name in self.objects:
            raise QmpError(f"attempt to add duplicate property '{name}' to object (type 'container')")
        self.objects[name] = arguments
        return {}

    def object_del(self, name: str) -> Json:
        if name not in self.objects:
            raise QmpError(f"object '{name}' not found")
        if any(row["data"]["memdev"] == f"/objects/{name}" for row in self.devices):
            raise QmpError(f"object '{name}' is in use, can not be deleted")
        del self.objects[name]
        return {}

    def dimm_add(self, name: str, memdev: str) -> int:
        """``device_add`` of a ``pc-dimm``; its slot."""
        if name in self.dimms:
            raise QmpError(f"Duplicate device ID '{name}'")
        if memdev not in self.objects:
            raise QmpError(f"Device '{memdev}' not found", "DeviceNotFound")
        size = self.objects[memdev]["size"]
        room = self.maximum - self.base
        used = sum(row["data"]["size"] for row in self.devices)
        if used + size > room:
            raise QmpError(
                f"not enough space, currently 0x{used:x} in use of total space for memory devices 0x{room:x}"
            )
        if len(self.devices) >= self.slots:
            raise QmpError("no free slots available")
        return self.plug_dimm(name, size, memdev=memdev)
