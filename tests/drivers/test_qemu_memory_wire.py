"""The QEMU driver and memory on the wire: what is sent for it, what is told of it, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hypervisors.base import (
    Dimm,
    GuestReset,
    MemoryHotplug,
    MemoryMethod,
    Refused,
    RemovalRefused,
    SizeChanged,
    TimedOut,
    Unreachable,
    Unsupported,
)
from hypervisors.fake import Guest
from hypervisors.qemu import QemuHypervisor
from tests.drivers.backends import Hints
from tests.fakes.qmp_memory import Memory
from tests.fakes.qmp_server import QmpServer, refusal

MIB = 1 << 20
BASE = 256 * MIB
PIECE = 128 * MIB
SHORT = 0.1


class Connected:
    """A driver of a fake machine, connected; what it sent until then is forgotten."""

    def __init__(self, server: QmpServer, driver: QemuHypervisor, hints: Hints) -> None:
        self.server = server
        self.driver = driver
        self.hints = hints
        server.sent()

    @property
    def memory(self) -> Memory:
        return self.server.memory

    def arguments(self, name: str) -> list[dict[str, Any]]:
        """What came with the commands of that name since :meth:`QmpServer.sent` was last asked."""
        return [command["arguments"] for command in self.server.commands if command["execute"] == name]


@asynccontextmanager
async def connected(directory: Path, memory: Memory, patience: float = 5.0) -> AsyncIterator[Connected]:
    hints = Hints()
    async with QmpServer(directory / "m", memory=memory) as server:
        driver = QemuHypervisor(server.path, timeout=patience)
        await driver.connect(hints)
        try:
            yield Connected(server, driver, hints)
        finally:
            await driver.close()


@pytest.fixture
async def dimms(short_tmp: Path) -> AsyncIterator[Connected]:
    async with connected(short_tmp, Memory(BASE, maximum=8192 * MIB, slots=3)) as machine:
        yield machine


@pytest.fixture
async def virtio(short_tmp: Path) -> AsyncIterator[Connected]:
    async with connected(short_tmp, Memory(BASE, maximum=1280 * MIB, slots=3, virtio_mem=1024 * MIB)) as machine:
        yield machine


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (Memory(BASE), MemoryHotplug(MemoryMethod.NONE)),
        (Memory(BASE, maximum=1024 * MIB, slots=3), MemoryHotplug(MemoryMethod.DIMM, PIECE, 1024 * MIB)),
        (
            Memory(BASE, maximum=1280 * MIB, virtio_mem=1024 * MIB),
            MemoryHotplug(MemoryMethod.VIRTIO_MEM, 2 * MIB, 1280 * MIB),
        ),
    ],
    ids=["none", "dimm", "virtio-mem"],
)
async def test_the_method_is_asked_of_qemu(short_tmp: Path, memory: Memory, expected: MemoryHotplug) -> None:
    async with QmpServer(short_tmp / "m", memory=memory) as server:
        driver = QemuHypervisor(server.path)
        assert (await driver.connect(Hints())).memory == expected
        await driver.close()


async def test_a_qemu_that_does_not_tell_its_slots_has_fixed_memory(short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "m", memory=Memory(BASE, maximum=1024 * MIB, slots=3)) as server:
        server.spoil("qom-get memory", refusal("Property 'pc-q35-6.2-machine.memory' not found"))
        driver = QemuHypervisor(server.path)
        assert (await driver.connect(Hints())).memory.method is MemoryMethod.NONE
        with pytest.raises(Unsupported, match="without slots"):
            await driver.grow_memory(BASE + PIECE)
        with pytest.raises(Unsupported, match="fixed"):
            await driver.start_shrinking_memory(BASE)
        await driver.close()


async def test_nobody_is_asked_without_a_connection(short_tmp: Path) -> None:
    driver = QemuHypervisor(short_tmp / "m")
    with pytest.raises(Unreachable):
        await driver.grow_memory(BASE)
    with pytest.raises(Unreachable):
        await driver.start_shrinking_memory(BASE)


# DIMMs


async def test_a_dimm_is_plugged_and_read_back_in_one_exchange(dimms: Connected) -> None:
    await dimms.driver.grow_memory(BASE + PIECE)
    dimms.server.commands.clear()

    plugged = await dimms.driver.grow_memory(BASE + 4 * PIECE)

    assert dimms.arguments("object-add") == [
        {"qom-type": "memory-backend-ram", "share": False, "id": "resmgr-mem-2", "size": 3 * PIECE}
    ]
    assert dimms.arguments("device_add") == [{"driver": "pc-dimm", "id": "resmgr-mem-2", "memdev": "resmgr-mem-2"}]
    assert dimms.server.sent() == [
        "object-add",
        "device_add",
        "query-memory-devices",
        "query-memdev",
        "query-cpus-fast",
    ]
    assert (plugged.memory, plugged.memory_asked, plugged.memory_grows_left) == (BASE + 4 * PIECE, None, 1)
    assert plugged.dimms == (Dimm("resmgr-mem-1", PIECE, ours=True), Dimm("resmgr-mem-2", 3 * PIECE, ours=True))


async def test_the_backend_is_as_the_boot_memorys(dimms: Connected, short_tmp: Path) -> None:
    dimms.memory.boot = {
        "id": "dimm1", "type": "memory-backend-file", "mem-path": str(short_tmp), "share": True, "prealloc": True,
        "prealloc-threads": 2, "host-nodes": [0], "policy": "bind",
    }  # fmt: skip
    dimms.server.event("MEMORY_DEVICE_SIZE_CHANGE")
    await dimms.hints.next(SizeChanged)
    await dimms.driver.read()

    await dimms.driver.grow_memory(BASE + PIECE)

    assert dimms.arguments("object-add") == [
        {
            "qom-type": "memory-backend-file", "mem-path": str(short_tmp), "share": True, "prealloc": True,
            "prealloc-threads": 2, "host-nodes": [0], "policy": "bind", "id": "resmgr-mem-1", "size": PIECE,
        }
    ]  # fmt: skip


async def test_the_insertion_of_ours_is_no_news(dimms: Connected) -> None:
    await dimms.driver.grow_memory(BASE + PIECE)
    await dimms.driver.read()
    dimms.server.reset()
    await dimms.hints.next(GuestReset)


async def test_a_plug_of_vcpus_does_not_ask_for_the_memory(dimms: Connected) -> None:
    await dimms.driver.grow_memory(BASE + PIECE)
    await dimms.driver.read()
    dimms.server.sent()
    await dimms.driver.add_vcpus(1)
    assert dimms.server.sent() == ["device_add", "query-cpus-fast"]


@pytest.mark.parametrize("to", [BASE, BASE + 1, BASE + 8192 * MIB], ids=["nothing", "not whole", "above the maximum"])
async def test_a_size_that_cannot_be_is_a_mistake_before_anything_is_sent(dimms: Connected, to: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        await dimms.driver.grow_memory(to)
    assert dimms.server.sent() == []


async def test_the_backend_goes_when_the_device_is_refused(dimms: Connected) -> None:
    dimms.server.spoil("device_add", refusal("not today"))

    with pytest.raises(Refused, match=r"device_add resmgr-mem-1 of 134217728 bytes: not today"):
        await dimms.driver.grow_memory(BASE + PIECE)

    assert dimms.memory.objects == {}
    assert (await dimms.driver.grow_memory(BASE + PIECE)).dimms == (Dimm("resmgr-mem-2", PIECE, ours=True),)


async def test_a_backend_that_is_refused_is_told_with_its_reason(dimms: Connected) -> None:
    dimms.server.spoil("object-add", refusal("backend memory size must be multiple of 0x200000"))

    with pytest.raises(Refused, match=r"object-add resmgr-mem-1 .* must be multiple of 0x200000"):
        await dimms.driver.grow_memory(BASE + PIECE)

    assert dimms.memory.dimms == []


async def test_slots_that_are_used_up_leave_nothing_behind(dimms: Connected) -> None:
    for count in range(1, 4):
        assert (await dimms.driver.grow_memory(BASE + count * PIECE)).memory_grows_left == 3 - count

    with pytest.raises(Refused, match="no free slots available"):
        await dimms.driver.grow_memory(BASE + 4 * PIECE)

    assert len(dimms.memory.objects) == 3


async def test_a_dimm_that_left_takes_its_backend_along(dimms: Connected) -> None:
    await dimms.driver.grow_memory(BASE + PIECE)
    await dimms.driver.grow_memory(BASE + 2 * PIECE)
    dimms.server.sent()

    await dimms.driver.start_shrinking_memory(BASE + PIECE, ["resmgr-mem-2"])

    assert dimms.arguments("device_del") == [{"id": "resmgr-mem-2"}]
    await dimms.hints.next(SizeChanged)
    plugged = await dimms.driver.read()
    assert (plugged.memory, plugged.memory_grows_left) == (BASE + PIECE, 2)
    assert list(dimms.memory.objects) == ["resmgr-mem-1"]
    dimms.server.reset()
    await dimms.hints.next(GuestReset)  # the guest's last word on it was no news


async def test_what_left_while_nobody_looked_is_cleared_away_on_connecting(short_tmp: Path) -> None:
    memory = Memory(BASE, maximum=8192 * MIB, slots=3)
    memory.object_add({"qom-type": "memory-backend-ram", "id": "resmgr-mem-7", "size": PIECE})
    memory.object_add({"qom-type": "memory-backend-ram", "id": "somebody-elses", "size": PIECE})
    async with connected(short_tmp, memory) as machine:
        assert list(memory.objects) == ["somebody-elses"]
        plugged = await machine.driver.grow_memory(BASE + PIECE)
        assert [dimm.id for dimm in plugged.dimms] == ["resmgr-mem-8"]


async def test_an_orphan_that_cannot_be_removed_is_no_failure(dimms: Connected) -> None:
    dimms.server.spoil("device_add", refusal("not today"))
    dimms.server.spoil("object-del", refusal("object 'resmgr-mem-1' is in use, can not be deleted"))
    with pytest.raises(Refused, match="not today"):
        await dimms.driver.grow_memory(BASE + PIECE)

    await dimms.driver.grow_memory(BASE + PIECE)

    assert list(dimms.memory.objects) == ["resmgr-mem-2"]


async def test_a_guest_that_says_no_is_told_and_one_that_says_wait_is_not(dimms: Connected) -> None:
    await dimms.driver.grow_memory(BASE + PIECE)
    info = {"slot": "0", "slot-type": "DIMM", "source": 3}
    dimms.server.event("ACPI_DEVICE_OST", {"info": {**info, "status": 132}})
    dimms.server.guest = Guest.REFUSE
    await dimms.driver.start_shrinking_memory(BASE, ["resmgr-mem-1"])

    refused = await dimms.hints.next(RemovalRefused)

    assert refused.id == "resmgr-mem-1"
    assert refused.reason == "device in use (ACPI status 129)"
    dimms.server.event("ACPI_DEVICE_OST", {"info": {**info, "status": 130}})
    assert "busy" in (await dimms.hints.next(RemovalRefused)).reason


async def test_a_dimm_that_has_gone_already_is_no_error(dimms: Connected) -> None:
    await dimms.driver.start_shrinking_memory(BASE, ["resmgr-mem-1"])
    await dimms.hints.next(SizeChanged)


async def test_a_dimm_has_to_be_named(dimms: Connected) -> None:
    with pytest.raises(ValueError, match="no DIMM is named"):
        await dimms.driver.start_shrinking_memory(BASE)


async def test_a_foreign_dimm_is_news(dimms: Connected) -> None:
    dimms.memory.plug_dimm("theirs", PIECE)
    dimms.server.event("ACPI_DEVICE_OST", {"info": {"slot": "0", "slot-type": "DIMM", "source": 1, "status": 0}})
    await dimms.hints.next(SizeChanged)

    plugged = await dimms.driver.read()

    assert plugged.dimms == (Dimm("theirs", PIECE, ours=False),)


async def test_a_grow_without_an_answer_is_read_back_later(short_tmp: Path) -> None:
    async with connected(short_tmp, Memory(BASE, maximum=8192 * MIB, slots=3), patience=SHORT) as machine:
        machine.server.spoil("query-memdev", b"")
        with pytest.raises(TimedOut):
            await machine.driver.grow_memory(BASE + PIECE)

        assert (await machine.driver.read()).memory == BASE + PIECE


# virtio-mem


async def test_virtio_mem_is_asked_for_a_size_and_comes_to_it(virtio: Connected) -> None:
    plugged = await virtio.driver.grow_memory(BASE + 512 * MIB)

    assert virtio.arguments("qom-set") == [
        {"path": "/machine/peripheral/vm0", "property": "requested-size", "value": 512 * MIB}
    ]
    assert virtio.server.sent() == ["qom-set", "query-memory-devices", "query-memdev", "query-cpus-fast"]
    assert (plugged.memory, plugged.memory_asked, plugged.dimms) == (BASE, BASE + 512 * MIB, ())
    assert plugged.memory_grows_left is None
    await virtio.hints.next(SizeChanged)
    plugged = await virtio.driver.read()
    assert (plugged.memory, plugged.memory_asked) == (BASE + 512 * MIB, None)


async def test_while_the_guest_is_on_its_way_every_read_looks(virtio: Connected) -> None:
    virtio.server.guest = Guest.IGNORE
    await virtio.driver.grow_memory(BASE + 4 * MIB)
    virtio.memory.move()  # and QEMU, which limits the rate of this event, does not tell

    plugged = await virtio.driver.read()
    assert (plugged.memory, plugged.memory_asked) == (BASE + 4 * MIB, None)
    virtio.server.sent()
    await virtio.driver.read()
    assert virtio.server.sent() == ["query-cpus-fast"]


async def test_a_shrink_that_is_stuck_tells_how_far_it_came_and_can_be_asked_for_again(virtio: Connected) -> None:
    await virtio.driver.grow_memory(BASE + 512 * MIB)
    await virtio.hints.next(SizeChanged)
    virtio.memory.in_use = 128 * MIB
    await virtio.driver.start_shrinking_memory(BASE)
    await virtio.hints.next(SizeChanged)
    plugged = await virtio.driver.read()
    assert (plugged.memory, plugged.memory_asked) == (BASE + 128 * MIB, BASE)

    virtio.memory.in_use = 0
    await virtio.driver.start_shrinking_memory(BASE)
    await virtio.hints.next(SizeChanged)

    plugged = await virtio.driver.read()
    assert (plugged.memory, plugged.memory_asked) == (BASE, None)


async def test_a_shrink_that_is_under_way_goes_less_far(virtio: Connected) -> None:
    await virtio.driver.grow_memory(BASE + 512 * MIB)
    await virtio.hints.next(SizeChanged)
    virtio.server.guest = Guest.IGNORE
    await virtio.driver.start_shrinking_memory(BASE)

    plugged = await virtio.driver.grow_memory(BASE + 128 * MIB)

    assert (plugged.memory, plugged.memory_asked) == (BASE + 512 * MIB, BASE + 128 * MIB)


@pytest.mark.parametrize(
    "to", [BASE - 2 * MIB, BASE + 1, BASE + 1026 * MIB], ids=["less", "not whole", "above the maximum"]
)
async def test_a_grow_of_virtio_mem_that_cannot_be(virtio: Connected, to: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        await virtio.driver.grow_memory(to)
    assert virtio.server.sent() == []


async def test_a_shrink_below_the_boot_memory_cannot_be(virtio: Connected) -> None:
    with pytest.raises(ValueError, match="bytes"):
        await virtio.driver.start_shrinking_memory(BASE - 2 * MIB)
    assert virtio.server.sent() == []


async def test_a_refused_request_quotes_qemu(virtio: Connected) -> None:
    virtio.server.spoil("qom-set", refusal("virtio-mem is busy"))
    with pytest.raises(Refused, match="requested-size 2097152 of vm0: virtio-mem is busy"):
        await virtio.driver.grow_memory(BASE + 2 * MIB)


async def test_after_a_reset_the_memory_is_read_again(virtio: Connected) -> None:
    await virtio.driver.grow_memory(BASE + 512 * MIB)
    await virtio.hints.next(SizeChanged)
    assert (await virtio.driver.read()).memory == BASE + 512 * MIB
    virtio.memory.devices[0]["data"]["size"] = 0
    virtio.server.reset()
    await virtio.hints.next(GuestReset)

    plugged = await virtio.driver.read()

    assert (plugged.memory, plugged.memory_asked) == (BASE, BASE + 512 * MIB)


async def test_a_virtio_mem_device_may_have_no_driver_at_its_other_end(short_tmp: Path) -> None:
    async with connected(short_tmp, Memory(BASE, maximum=1280 * MIB, virtio_mem=1024 * MIB)) as machine:
        machine.server.guest = Guest.IGNORE
        for _ in range(2):
            plugged = await machine.driver.grow_memory(BASE + 2 * MIB)
            assert (plugged.memory, plugged.memory_asked) == (BASE, BASE + 2 * MIB)
