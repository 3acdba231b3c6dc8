"""The QEMU driver on the wire: what it sends, what it makes of events, and what a failure leaves.

What hostile monitors do is in :mod:`tests.drivers.test_hostile_monitors`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hypervisors.base import (
    Accelerator,
    Busy,
    ConnectionLost,
    GuestReset,
    Refused,
    RemovalRefused,
    SizeChanged,
    TimedOut,
    Unreachable,
    Unsupported,
)
from hypervisors.qemu import QemuHypervisor
from tests.drivers.backends import Hints
from tests.fakes.qmp_memory import Memory
from tests.fakes.qmp_server import GREETING, UUID, QmpServer, refusal

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT = 0.1
"""Seconds: the driver's deadline where a test waits for it to pass."""
LONG = 5.0

NOT_FOUND = refusal("The command has not been found", "CommandNotFound")


@pytest.fixture
async def server(short_tmp: Path) -> AsyncIterator[QmpServer]:
    async with QmpServer(short_tmp / "m", memory=Memory(32 << 20, maximum=1 << 30, slots=2)) as server:
        yield server


@pytest.fixture
def hints() -> Hints:
    return Hints()


@pytest.fixture
async def driver(server: QmpServer, hints: Hints) -> AsyncIterator[QemuHypervisor]:
    """Connected, with a long deadline; what it sent until now is forgotten."""
    driver = QemuHypervisor(server.path, timeout=LONG, greeting_timeout=LONG)
    await driver.connect(hints)
    server.sent()
    yield driver
    await driver.close()


@pytest.fixture
async def impatient(server: QmpServer, hints: Hints) -> AsyncIterator[QemuHypervisor]:
    """Connected, with a short deadline."""
    driver = QemuHypervisor(server.path, timeout=SHORT, greeting_timeout=LONG)
    await driver.connect(hints)
    yield driver
    await driver.close()


# Connecting


async def test_the_machine_is_learnt(server: QmpServer) -> None:
    driver = QemuHypervisor(server.path)
    machine = await driver.connect(Hints())
    await driver.close()

    assert machine.identity == UUID
    assert machine.pid == os.getpid()
    assert server.sent() == [
        "qmp_capabilities",
        "query-uuid",
        "query-kvm",
        "qom-get",
        "query-hotpluggable-cpus",
        "query-memory-size-summary",
        "qom-get",
        "query-memory-devices",
        "query-memdev",
        "query-cpus-fast",
    ]


async def test_a_machine_without_uuid_has_no_identity(server: QmpServer) -> None:
    server.uuid = "00000000-0000-0000-0000-000000000000"
    driver = QemuHypervisor(server.path)

    assert (await driver.connect(Hints())).identity == ""
    await driver.close()


@pytest.mark.parametrize("answer", [None, NOT_FOUND], ids=["off", "not built in"])
async def test_what_is_not_kvm_is_tcg(server: QmpServer, answer: bytes | None) -> None:
    server.kvm = False
    if answer is not None:
        server.spoil("query-kvm", answer)
    driver = QemuHypervisor(server.path)

    assert (await driver.connect(Hints())).accelerator is Accelerator.TCG
    await driver.close()


async def test_a_machine_without_hotplug(short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "m", boot_vcpus=2) as server:
        server.spoil("query-hotpluggable-cpus", NOT_FOUND)
        driver = QemuHypervisor(server.path)

        machine = await driver.connect(Hints())

        assert (machine.max_vcpus, machine.vcpu_hotplug) == (2, False)
        with pytest.raises(Unsupported):
            await driver.add_vcpus(1)
        await driver.close()


async def test_a_confidential_guest_has_no_hotplug_although_it_has_slots(server: QmpServer) -> None:
    server.protected_by = "/objects/sev0"
    driver = QemuHypervisor(server.path)

    machine = await driver.connect(Hints())

    assert (machine.max_vcpus, machine.vcpu_hotplug) == (1, False)
    await driver.close()


async def test_a_qemu_that_knows_no_confidential_guests(server: QmpServer) -> None:
    server.spoil(
        "qom-get confidential-guest-support",
        refusal("Property 'pc-q35-5.0-machine.confidential-guest-support' not found"),
    )
    driver = QemuHypervisor(server.path)

    assert (await driver.connect(Hints())).vcpu_hotplug
    await driver.close()


@pytest.mark.parametrize("name", ["absent", "x" * 200, "nul\0"], ids=["absent", "too long", "nul"])
async def test_nobody_there(short_tmp: Path, name: str) -> None:
    with pytest.raises(Unreachable):
        await QemuHypervisor(short_tmp / name).connect(Hints())


async def test_not_a_socket(short_tmp: Path) -> None:
    (short_tmp / "m").write_text("")

    with pytest.raises(Unreachable):
        await QemuHypervisor(short_tmp / "m").connect(Hints())


async def test_a_monitor_that_others_wait_for_already_is_busy(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as monitor, socket.socket(socket.AF_UNIX) as first:
        monitor.bind(str(short_tmp / "m"))
        monitor.listen(0)
        first.connect(str(short_tmp / "m"))

        with pytest.raises(Busy, match="already waiting"):
            await QemuHypervisor(short_tmp / "m").connect(Hints())


@pytest.mark.parametrize("greeting", [b"", GREETING[:20]], ids=["none", "half"])
async def test_no_greeting_is_a_busy_monitor(server: QmpServer, greeting: bytes) -> None:
    server.greeting = greeting

    with pytest.raises(Busy, match="another client"):
        await QemuHypervisor(server.path, greeting_timeout=SHORT).connect(Hints())


async def test_what_was_meant_for_the_last_client_may_come_before_the_greeting(server: QmpServer) -> None:
    # Seen on QEMU 7.2: an event of the session before, when the next one follows at its heels.
    late = b'{"event": "DEVICE_DELETED", "data": {"path": "/machine/peripheral/resmgr-vcpu-1"}}\r\n'
    server.greeting = late + GREETING
    driver = QemuHypervisor(server.path, timeout=LONG, greeting_timeout=LONG)
    connecting = asyncio.create_task(driver.connect(Hints()))
    await server.greeted()
    server.greeting = GREETING
    assert (await connecting).max_vcpus == 4
    await driver.close()


@pytest.mark.parametrize("command", ["qmp_capabilities", "query-uuid", "query-cpus-fast"])
async def test_silence_while_connecting_lets_go_of_the_monitor(server: QmpServer, command: str) -> None:
    server.spoil(command, b"")
    hints = Hints()
    driver = QemuHypervisor(server.path, timeout=SHORT, greeting_timeout=SHORT)

    with pytest.raises(TimedOut):
        await driver.connect(hints)

    await driver.connect(hints)
    assert len((await driver.add_vcpus(1)).vcpus) == 2
    await driver.close()
    assert hints.heard == []


@pytest.mark.parametrize("command", ["qmp_capabilities", "query-uuid", "query-cpus-fast"])
async def test_a_hang_up_while_connecting_is_an_error_and_no_hint(server: QmpServer, command: str) -> None:
    server.spoil(command, b"", hang_up=True)
    hints = Hints()
    driver = QemuHypervisor(server.path)

    with pytest.raises(Unreachable):
        await driver.connect(hints)

    assert hints.heard == []


async def test_a_hang_up_with_the_very_answer_that_begins_the_session(short_tmp: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readuntil(b"}")
        writer.write(b'{"return": {}}\r\n')
        writer.close()

    path = short_tmp / "m"
    async with await asyncio.start_unix_server(serve, path):
        for _ in range(30):
            hints = Hints()
            driver = QemuHypervisor(path, timeout=LONG, greeting_timeout=LONG)
            with pytest.raises(Unreachable):
                await driver.connect(hints)
            await driver.close()
            assert hints.heard == []


async def test_connecting_twice_is_a_mistake(driver: QemuHypervisor) -> None:
    with pytest.raises(RuntimeError, match="already connected"):
        await driver.connect(Hints())


# What is sent


async def test_a_plug_asks_nothing_before_and_reads_back_in_the_same_breath(
    server: QmpServer, driver: QemuHypervisor
) -> None:
    await driver.add_vcpus(2)

    assert [command.get("arguments") for command in server.commands[:2]] == [
        {"driver": "host-x86_64-cpu", "id": f"resmgr-vcpu-{slot}", "core-id": slot, "thread-id": 0, "socket-id": 0}
        for slot in (1, 2)
    ]
    assert server.sent() == ["device_add", "device_add", "query-cpus-fast"]


async def test_a_read_asks_for_the_memory_only_after_something_touched_it(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    server.memory.plug_dimm("foreign", 32 << 20)
    assert (await driver.read()).memory == 32 << 20
    assert server.sent() == ["query-cpus-fast"]

    server.event("MEMORY_DEVICE_SIZE_CHANGE", {"id": "vm0", "size": 1, "qom-path": "/machine/peripheral/vm0"})
    await hints.next(SizeChanged)

    assert (await driver.read()).memory == 64 << 20
    await driver.read()
    assert server.sent() == ["query-memory-devices", "query-memdev", "query-cpus-fast", "query-cpus-fast"]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("ACPI_DEVICE_OST", {"info": {"slot": "0", "slot-type": "DIMM", "source": 1, "status": 0}}),
        ("DEVICE_DELETED", {"device": "dimm1", "path": "/machine/peripheral/dimm1"}),
    ],
)
async def test_what_may_be_memory_is_hinted_at(
    server: QmpServer, driver: QemuHypervisor, hints: Hints, event: str, data: dict[str, object]
) -> None:
    server.memory.plug_dimm("foreign", 32 << 20)

    server.event(event, data)

    await hints.next(SizeChanged)
    assert (await driver.read()).memory == 64 << 20


async def test_a_failed_question_for_the_memory_is_asked_again(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    server.memory.plug_dimm("foreign", 32 << 20)
    server.event("MEMORY_DEVICE_SIZE_CHANGE")
    await hints.next(SizeChanged)
    server.spoil("query-memory-devices", NOT_FOUND)
    with pytest.raises(Refused, match="query-memory-devices: The command has not been found"):
        await driver.read()

    assert (await driver.read()).memory == 64 << 20


async def test_slots_are_filled_in_qemus_order_with_what_it_says_they_are(short_tmp: Path) -> None:
    topology = {"socket-id": 2, "die-id": 1, "core-id": 2, "thread-id": 2, "node-id": 1}
    async with QmpServer(short_tmp / "m", boot_vcpus=3, max_vcpus=8, topology=topology) as server:
        driver = QemuHypervisor(server.path)
        await driver.connect(Hints())

        await driver.add_vcpus(3)
        await driver.close()

    added = [command["arguments"] for command in server.commands if command["execute"] == "device_add"]
    places = [(place["socket-id"], place["core-id"], place["thread-id"]) for place in added]
    assert places == [(0, 1, 1), (1, 0, 0), (1, 0, 1)]
    assert {(place["die-id"], place["node-id"], place["driver"]) for place in added} == {(0, 0, "host-x86_64-cpu")}


# Refusals, and a cache that has grown old


async def test_a_migration_under_way_refuses_both_and_its_end_allows_them(
    server: QmpServer, driver: QemuHypervisor
) -> None:
    await driver.add_vcpus(1)
    server.migrating = True

    with pytest.raises(Refused, match="device_add not allowed while migrating"):
        await driver.add_vcpus(2)
    with pytest.raises(Refused, match="device_del not allowed while migrating"):
        await driver.start_removing_vcpus(["resmgr-vcpu-1"])
    assert len((await driver.read()).vcpus) == 2

    server.migrating = False
    assert len((await driver.add_vcpus(2)).vcpus) == 4


async def test_a_refused_plug_quotes_qemu_and_keeps_what_was_plugged(server: QmpServer, driver: QemuHypervisor) -> None:
    server.spoil("device_add", refusal("no more today"))

    with pytest.raises(Refused, match="resmgr-vcpu-1 in slot 1: no more today"):
        await driver.add_vcpus(2)

    assert [vcpu.id for vcpu in (await driver.read()).vcpus if vcpu.ours] == ["resmgr-vcpu-2"]


async def test_a_slot_taken_unseen_is_passed_over(server: QmpServer, driver: QemuHypervisor) -> None:
    server.plug_foreign("foreign", slot=1, told=False)

    plugged = await driver.add_vcpus(2)

    assert [vcpu.ours for vcpu in plugged.vcpus] == [False, False, True, True]


async def test_a_name_taken_unseen_is_passed_over(server: QmpServer, driver: QemuHypervisor) -> None:
    server.plug_foreign("resmgr-vcpu-1", slot=3, told=False)

    plugged = await driver.add_vcpus(1)

    assert [vcpu.id for vcpu in plugged.vcpus if vcpu.ours] == ["resmgr-vcpu-1", "resmgr-vcpu-2"]


async def test_slots_freed_unseen_are_found(server: QmpServer, driver: QemuHypervisor) -> None:
    await driver.add_vcpus(3)
    server.free_unseen("resmgr-vcpu-2")

    plugged = await driver.add_vcpus(1)

    assert [vcpu.id for vcpu in plugged.vcpus if vcpu.ours] == ["resmgr-vcpu-1", "resmgr-vcpu-3", "resmgr-vcpu-4"]


async def test_a_refused_removal_quotes_qemu_and_the_others_are_asked(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    await driver.add_vcpus(2)
    server.spoil("device_del", refusal("acpi: device unplug request for not supported"))

    with pytest.raises(Refused, match="device_del resmgr-vcpu-1: acpi: device unplug request for not supported"):
        await driver.start_removing_vcpus(["resmgr-vcpu-1", "resmgr-vcpu-2"])

    await hints.next(SizeChanged)
    assert [vcpu.id for vcpu in (await driver.read()).vcpus if vcpu.ours] == ["resmgr-vcpu-1"]


# Events


async def test_an_insertion_of_ours_acknowledged_before_the_read_back_is_no_hint(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    server.acknowledges_at_once = True

    await driver.add_vcpus(2)

    server.reset()
    await hints.next(GuestReset)


async def test_the_last_word_on_a_removal_does_not_concern_who_sits_there_now(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    await driver.add_vcpus(1)
    server.event("DEVICE_DELETED", {"path": "/machine/peripheral/resmgr-vcpu-1/lapic"})
    server.free_unseen("resmgr-vcpu-1")
    await hints.next(SizeChanged)
    await driver.add_vcpus(1)

    server.event("DEVICE_DELETED", {"device": "resmgr-vcpu-1", "path": "/machine/peripheral/resmgr-vcpu-1"})
    server.event("ACPI_DEVICE_OST", {"info": {"slot": "1", "slot-type": "CPU", "source": 3, "status": 0}})

    server.reset()
    await hints.next(GuestReset)


async def test_under_tcg_the_lapic_is_proof_enough(short_tmp: Path) -> None:
    hints = Hints()
    async with QmpServer(short_tmp / "m", kvm=False) as server:
        driver = QemuHypervisor(server.path)
        await driver.connect(hints)
        await driver.add_vcpus(1)

        await driver.start_removing_vcpus(["resmgr-vcpu-1"])
        await hints.next(SizeChanged)

        assert len((await driver.read()).vcpus) == 1
        await driver.close()


@pytest.mark.parametrize(
    ("status", "words"), [(128, "not supported"), (130, "busy"), (1, "no reason told"), (4711, "no reason told")]
)
async def test_a_refusal_that_names_only_the_slot(
    server: QmpServer, driver: QemuHypervisor, hints: Hints, status: int, words: str
) -> None:
    await driver.add_vcpus(2)

    info = {"slot": "2", "slot-type": "CPU", "source": 3, "status": status}
    server.event("ACPI_DEVICE_OST", {"info": info})

    refusal = await hints.next(RemovalRefused)
    assert refusal.id == "resmgr-vcpu-2"
    assert words in refusal.reason
    assert str(status) in refusal.reason


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ACPI_DEVICE_OST", None),
        ("ACPI_DEVICE_OST", {"info": "none"}),
        ("ACPI_DEVICE_OST", {"info": {"slot": "-1", "slot-type": "CPU", "source": 1, "status": 0}}),
        ("ACPI_DEVICE_OST", {"info": {"slot": "9" * 99, "slot-type": "CPU", "source": 1, "status": 0}}),
        ("ACPI_DEVICE_OST", {"info": {"slot": "0", "slot-type": "CPU", "source": 3, "status": 132}}),
        ("ACPI_DEVICE_OST", {"info": {"slot": "3", "slot-type": "CPU", "source": 3, "status": 0}}),
        ("ACPI_DEVICE_OST", {"info": {"slot": "0", "slot-type": "CPU", "source": 256, "status": 1}}),
        ("STOP", None),
        ("RTC_CHANGE", {"offset": 1}),
        ("NO_SUCH_EVENT", {}),
    ],
)
async def test_events_that_say_nothing_here(
    server: QmpServer, driver: QemuHypervisor, hints: Hints, name: str, data: dict[str, object] | None
) -> None:
    server.event(name, data)
    server.reset()

    await hints.next(GuestReset)
    assert len((await driver.read()).vcpus) == 1


async def test_a_flood_of_events_is_not_kept(server: QmpServer, driver: QemuHypervisor) -> None:
    async def flood(count: int) -> None:
        for _ in range(count):
            server.event("RTC_CHANGE", {"offset": 1})
        await driver.read()

    await flood(1_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(5):
            await flood(1_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 50_000  # ten bytes an event; one that is kept takes 1900


# Calls that are answered badly, or not at all


async def test_silence_is_a_timeout_and_the_next_call_is_right(server: QmpServer, impatient: QemuHypervisor) -> None:
    server.spoil("query-cpus-fast", b"")
    with pytest.raises(TimedOut, match=r"read: no answer in 0\.1 s"):
        await impatient.read()

    assert len((await impatient.add_vcpus(1)).vcpus) == 2


async def test_many_vcpus_may_take_longer(server: QmpServer, impatient: QemuHypervisor) -> None:
    server.spoil("query-cpus-fast", b"")
    with pytest.raises(TimedOut, match=r"add_vcpus: no answer in 0\.2 s"):
        await impatient.add_vcpus(3)


async def test_an_answer_that_comes_too_late_is_dropped(server: QmpServer, impatient: QemuHypervisor) -> None:
    server.spoil("query-cpus-fast", b"")
    with pytest.raises(TimedOut):
        await impatient.read()

    late = server.commands[-1]["id"].encode()
    server.send(b'{"return": [], "id": "' + late + b'"}\r\n')

    assert len((await impatient.read()).vcpus) == 1


async def test_a_plug_that_timed_out_may_have_been_made(server: QmpServer, impatient: QemuHypervisor) -> None:
    server.spoil("query-cpus-fast", b"")
    with pytest.raises(TimedOut):
        await impatient.add_vcpus(1)

    assert [vcpu.id for vcpu in (await impatient.read()).vcpus if vcpu.ours] == ["resmgr-vcpu-1"]


async def test_a_monitor_that_stays_silent_is_given_up(
    server: QmpServer, impatient: QemuHypervisor, hints: Hints
) -> None:
    for _ in range(2):
        server.spoil("query-cpus-fast", b"")
        with pytest.raises(TimedOut):
            await impatient.read()

    assert "2 calls in a row" in (await hints.next(ConnectionLost)).reason
    with pytest.raises(Unreachable, match="2 calls in a row"):
        await impatient.read()


async def test_a_hang_up_with_several_commands_under_way(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    server.spoil("device_add", b"", hang_up=True)

    with pytest.raises(Unreachable):
        await driver.add_vcpus(3)

    await hints.next(ConnectionLost)


@pytest.mark.parametrize("said", [b"nonsense\r\n", b"[]\r\n", b'{"event": '], ids=["garbage", "no object", "half"])
async def test_an_idle_session_that_breaks_is_told(
    server: QmpServer, driver: QemuHypervisor, hints: Hints, said: bytes
) -> None:
    server.send(said)
    if not said.endswith(b"\r\n"):
        await server.kill()

    await hints.next(ConnectionLost)
    assert hints.heard == []


async def test_after_a_loss_the_same_driver_can_connect_again(
    server: QmpServer, driver: QemuHypervisor, hints: Hints
) -> None:
    await driver.add_vcpus(1)
    server.spoil("query-cpus-fast", b"", hang_up=True)
    with pytest.raises(Unreachable):
        await driver.read()

    await driver.connect(hints)

    assert len((await driver.add_vcpus(1)).vcpus) == 3


async def test_a_cancelled_call_does_not_harm_the_next(server: QmpServer, driver: QemuHypervisor) -> None:
    server.spoil("query-cpus-fast", b"")
    call = asyncio.create_task(driver.add_vcpus(2))
    await server.received("query-cpus-fast")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert len((await driver.read()).vcpus) == 3


async def test_closing_ends_a_call_that_hangs(server: QmpServer, driver: QemuHypervisor, hints: Hints) -> None:
    server.spoil("query-cpus-fast", b"")
    call = asyncio.create_task(driver.read())
    await server.received("query-cpus-fast")

    await driver.close()

    with pytest.raises(Unreachable, match="closed"):
        await call
    assert hints.heard == []
