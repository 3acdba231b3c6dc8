"""What a driver does, whichever it is: one set of tests for the fake in memory, the fake wires and the real things.

A real QEMU runs the mini firmware under KVM, and is skipped, saying why, where that cannot be: under TCG it does not
survive a removal that a plug follows. That the fakes pass too is what lets other tests rely on them. What only QEMU
tells, and Cloud Hypervisor does not, is tested where it is told (``told``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hypervisors.base import (
    Accelerator,
    Busy,
    ConnectionLost,
    GuestReset,
    Hypervisor,
    Plugged,
    Refused,
    RemovalRefused,
    SizeChanged,
    Unreachable,
)
from hypervisors.fake import Guest
from kata_resmgr.guest.qemus import Qemu
from tests.drivers.backends import (
    BOOT_VCPUS,
    MAX_VCPUS,
    MEMORY,
    PATIENCE,
    Backend,
    Hints,
    in_memory,
    on_the_wire,
    real_qemu,
)
from tests.drivers.ch_backends import LINUX_MEMORY, fake_ch, real_ch

PLAYED_BY = {
    "memory": in_memory,
    "wire": on_the_wire,
    "qemu": real_qemu,
    "newer qemu": real_qemu,
    "clh wire": fake_ch,
    "cloud-hypervisor": real_ch,
}
TELLING = (
    "memory",
    "wire",
    pytest.param("qemu", marks=pytest.mark.kvm),
    pytest.param("newer qemu", marks=[pytest.mark.kvm, pytest.mark.qemu("backports")]),
)
told = pytest.mark.parametrize("backend", TELLING, indirect=True)
"""For tests of what the hypervisor tells of its own accord, of foreign vCPUs and of slots."""
with_a_guest = pytest.mark.parametrize("backend", [*TELLING, "clh wire"], indirect=True)
"""For tests that tell the guest what to do."""


@pytest.fixture(params=[*TELLING, "clh wire", "cloud-hypervisor"])
async def backend(request: pytest.FixtureRequest, short_tmp: Path, qemu: Qemu) -> AsyncIterator[Backend]:
    async with PLAYED_BY[request.param](short_tmp, qemu) as backend:
        yield backend


@pytest.fixture
def hints() -> Hints:
    return Hints()


@pytest.fixture
async def driver(backend: Backend, hints: Hints) -> AsyncIterator[Hypervisor]:
    """A driver that is connected; :func:`hints` hears it."""
    driver = backend.driver()
    await driver.connect(hints)
    yield driver
    await driver.close()


def ours(plugged: Plugged) -> list[str]:
    return [vcpu.id for vcpu in plugged.vcpus if vcpu.ours]


def others(plugged: Plugged) -> int:
    return sum(not vcpu.ours for vcpu in plugged.vcpus)


async def until_ours(driver: Hypervisor, names: list[str]) -> None:
    """Read until these are ours, in this order."""
    async with asyncio.timeout(PATIENCE):
        while ours(await driver.read()) != names:  # noqa: ASYNC110 - not every hypervisor tells
            await asyncio.sleep(0.005)


# Connecting


async def test_connect_tells_the_machine(backend: Backend, hints: Hints) -> None:
    driver = backend.driver()
    try:
        machine = await driver.connect(hints)
    finally:
        await driver.close()

    assert machine.max_vcpus == MAX_VCPUS
    assert machine.vcpu_hotplug
    assert machine.accelerator is Accelerator.KVM


async def test_boot_vcpus_and_memory_are_read_and_are_not_ours(driver: Hypervisor) -> None:
    plugged = await driver.read()

    assert (others(plugged), ours(plugged)) == (BOOT_VCPUS, [])
    assert plugged.memory in (MEMORY, LINUX_MEMORY)


@told
async def test_a_second_client_finds_the_monitor_busy(backend: Backend, driver: Hypervisor, hints: Hints) -> None:
    second = backend.driver()

    with pytest.raises(Busy):
        await second.connect(Hints())

    await second.close()
    await driver.add_vcpus(1)
    assert hints.heard == []


@told
async def test_a_busy_monitor_can_be_connected_to_once_it_is_free(backend: Backend, driver: Hypervisor) -> None:
    second = backend.driver()
    with pytest.raises(Busy):
        await second.connect(Hints())

    await driver.close()
    await second.connect(Hints())

    assert ours(await second.add_vcpus(1)) == ["resmgr-vcpu-1"]
    await second.close()


async def test_a_new_connection_sees_the_same_vcpus_and_goes_on_counting(backend: Backend, driver: Hypervisor) -> None:
    before = await driver.add_vcpus(2)
    await driver.close()

    again = backend.driver()
    await again.connect(Hints())

    assert await again.read() == before
    assert ours(await again.add_vcpus(1)) == [backend.vcpu(number) for number in (1, 2, 3)]
    await again.close()


async def test_a_closed_driver_is_unreachable_and_may_be_closed_again(driver: Hypervisor, hints: Hints) -> None:
    await driver.close()
    await driver.close()

    with pytest.raises(Unreachable):
        await driver.read()
    assert hints.heard == []


# Plugging


async def test_a_plug_is_read_back_and_keeps_the_order(driver: Hypervisor, backend: Backend) -> None:
    plugged = await driver.add_vcpus(2)

    assert ours(plugged) == [backend.vcpu(1), backend.vcpu(2)]
    assert [vcpu.ours for vcpu in plugged.vcpus] == [False, True, True]
    assert await driver.read() == plugged
    assert plugged.memory in (MEMORY, LINUX_MEMORY)


async def test_up_to_the_maximum_and_no_further(driver: Hypervisor) -> None:
    full = await driver.add_vcpus(MAX_VCPUS - BOOT_VCPUS)

    with pytest.raises(Refused, match="0 of 4"):
        await driver.add_vcpus(1)

    assert await driver.read() == full


@pytest.mark.parametrize("count", [0, -1, MAX_VCPUS + 1])
async def test_a_count_that_no_machine_can_meet_is_a_mistake(driver: Hypervisor, count: int) -> None:
    with pytest.raises(ValueError, match="from 1 to"):
        await driver.add_vcpus(count)


@told
async def test_our_own_plug_is_no_hint(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    await driver.add_vcpus(2)
    await backend.reset()  # whatever the guest had to say about the plug comes before this

    await hints.next(GuestReset)


# Removing


@told
async def test_a_removal_is_hinted_at_and_shows_in_the_next_read(driver: Hypervisor, hints: Hints) -> None:
    await driver.add_vcpus(3)

    await driver.start_removing_vcpus(["resmgr-vcpu-2"])

    await hints.next(SizeChanged)
    assert ours(await driver.read()) == ["resmgr-vcpu-1", "resmgr-vcpu-3"]


@told
async def test_several_leave_in_one_call(driver: Hypervisor, hints: Hints) -> None:
    await driver.add_vcpus(3)

    await driver.start_removing_vcpus(["resmgr-vcpu-3", "resmgr-vcpu-2"])

    await hints.next(SizeChanged)
    await hints.next(SizeChanged)
    assert ours(await driver.read()) == ["resmgr-vcpu-1"]


@told
async def test_one_removal_is_one_hint(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    await driver.add_vcpus(1)

    await driver.start_removing_vcpus(["resmgr-vcpu-1"])
    await hints.next(SizeChanged)
    await driver.read()
    await backend.reset()

    await hints.next(GuestReset)


@told
async def test_a_freed_slot_is_used_again_under_a_new_name(driver: Hypervisor, hints: Hints) -> None:
    await driver.add_vcpus(MAX_VCPUS - BOOT_VCPUS)
    await driver.start_removing_vcpus(["resmgr-vcpu-1"])
    await hints.next(SizeChanged)

    assert ours(await driver.add_vcpus(1)) == ["resmgr-vcpu-2", "resmgr-vcpu-3", "resmgr-vcpu-4"]


@told
async def test_an_ignored_removal_completes_late(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    before = await driver.add_vcpus(2)
    await backend.guest(Guest.IGNORE)

    await driver.start_removing_vcpus(["resmgr-vcpu-2"])
    await driver.start_removing_vcpus(["resmgr-vcpu-2"])  # asking again is harmless
    assert await driver.read() == before
    assert hints.heard == []

    await backend.guest(Guest.COOPERATE)
    await hints.next(SizeChanged)
    assert ours(await driver.read()) == ["resmgr-vcpu-1"]


@told
async def test_a_plug_during_an_ignored_removal_uses_another_slot(driver: Hypervisor, backend: Backend) -> None:
    await driver.add_vcpus(2)
    await backend.guest(Guest.IGNORE)
    await driver.start_removing_vcpus(["resmgr-vcpu-2"])

    assert ours(await driver.add_vcpus(1)) == ["resmgr-vcpu-1", "resmgr-vcpu-2", "resmgr-vcpu-3"]


@told
async def test_a_refusal_is_told_at_once_and_the_vcpu_stays(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    before = await driver.add_vcpus(2)
    await backend.guest(Guest.REFUSE)

    sent = time.monotonic()
    await driver.start_removing_vcpus(["resmgr-vcpu-2"])
    refusal = await hints.next(RemovalRefused)

    assert time.monotonic() - sent < 1.0
    assert refusal.id == "resmgr-vcpu-2"
    assert "129" in refusal.reason
    assert await driver.read() == before


@told
async def test_who_refused_may_still_leave(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    await driver.add_vcpus(1)
    await backend.guest(Guest.REFUSE)
    await driver.start_removing_vcpus(["resmgr-vcpu-1"])
    await hints.next(RemovalRefused)

    await backend.guest(Guest.COOPERATE)
    await driver.start_removing_vcpus(["resmgr-vcpu-1"])

    await hints.next(SizeChanged)
    assert ours(await driver.read()) == []


async def test_removing_one_that_has_gone_only_asks_to_read_back(
    driver: Hypervisor, backend: Backend, hints: Hints
) -> None:
    before = await driver.add_vcpus(1)

    await driver.start_removing_vcpus([backend.vcpu(7)])

    await hints.next(SizeChanged)
    assert await driver.read() == before


async def test_the_boot_vcpu_stays(driver: Hypervisor) -> None:
    boot = (await driver.read()).vcpus[0]

    with pytest.raises(Refused, match="Boot CPU is unpluggable"):
        await driver.start_removing_vcpus([boot.id])


async def test_removing_none_is_a_mistake(driver: Hypervisor) -> None:
    with pytest.raises(ValueError, match="at least one"):
        await driver.start_removing_vcpus([])


@with_a_guest
async def test_a_removal_shows_once_the_guest_has_let_go(driver: Hypervisor, backend: Backend) -> None:
    before = await driver.add_vcpus(3)
    await backend.guest(Guest.IGNORE)
    await driver.start_removing_vcpus([backend.vcpu(3), backend.vcpu(2)])
    assert await driver.read() == before

    await backend.guest(Guest.COOPERATE)

    await until_ours(driver, [backend.vcpu(1)])


@with_a_guest
async def test_who_has_left_can_be_plugged_again(driver: Hypervisor, backend: Backend) -> None:
    await driver.add_vcpus(1)
    await driver.start_removing_vcpus([backend.vcpu(1)])
    await until_ours(driver, [])

    assert len(ours(await driver.add_vcpus(2))) == 2


# What happens by itself


@told
@pytest.mark.parametrize("named", [True, False], ids=["with an id", "without an id"])
async def test_a_foreign_plug_is_hinted_at_and_is_not_ours(
    driver: Hypervisor, backend: Backend, hints: Hints, named: bool
) -> None:
    await driver.add_vcpus(1)

    await backend.plug_foreign(named=named)

    await hints.next(SizeChanged)
    plugged = await driver.read()
    assert others(plugged) == BOOT_VCPUS + 1
    assert [vcpu.ours for vcpu in plugged.vcpus] == [False, False, True]


@told
async def test_a_foreign_vcpu_takes_a_slot(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    await backend.plug_foreign()
    await hints.next(SizeChanged)

    with pytest.raises(Refused, match="2 of 4"):
        await driver.add_vcpus(3)

    assert ours(await driver.add_vcpus(2)) == ["resmgr-vcpu-1", "resmgr-vcpu-2"]


@told
async def test_whatever_somebody_else_takes_out_is_hinted_at(
    driver: Hypervisor, backend: Backend, hints: Hints
) -> None:
    await backend.plug_foreign(named=False)
    await hints.next(SizeChanged)
    foreign = (await driver.read()).vcpus[-1]
    await driver.add_vcpus(1)

    await backend.unplug_foreign("resmgr-vcpu-1")
    await hints.next(SizeChanged)
    assert (others(await driver.read()), ours(await driver.read())) == (BOOT_VCPUS + 1, [])
    await backend.unplug_foreign(foreign.id)
    await hints.next(SizeChanged)

    assert others(await driver.read()) == BOOT_VCPUS
    assert ours(await driver.add_vcpus(3)) == ["resmgr-vcpu-2", "resmgr-vcpu-3", "resmgr-vcpu-4"]


@told
async def test_a_reset_is_told(driver: Hypervisor, backend: Backend, hints: Hints) -> None:
    before = await driver.add_vcpus(1)

    await backend.reset()

    await hints.next(GuestReset)
    assert await driver.read() == before


async def test_a_killed_vmm_is_told_once_and_cannot_be_reached(
    driver: Hypervisor, backend: Backend, hints: Hints
) -> None:
    await driver.add_vcpus(1)

    await backend.kill()

    assert (await hints.next(ConnectionLost)).reason
    with pytest.raises(Unreachable):
        await driver.read()
    with pytest.raises(Unreachable):
        await driver.add_vcpus(1)
    with pytest.raises(Unreachable):
        await backend.driver().connect(Hints())
    await driver.close()
    assert hints.heard == []
