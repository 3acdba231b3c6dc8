"""The knobs of the fake: each fault is what it says. What it does when all is well is in the behaviour tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hypervisors.base import (
    Accelerator,
    Busy,
    ConnectionLost,
    Refused,
    SizeChanged,
    TimedOut,
    Unreachable,
    Unsupported,
)
from hypervisors.fake import Call, FakeHypervisor, FakeVm, Guest
from tests.drivers.backends import Hints


@pytest.fixture
def vm() -> FakeVm:
    return FakeVm()


@pytest.fixture
def hints() -> Hints:
    return Hints()


@pytest.fixture
async def driver(vm: FakeVm, hints: Hints) -> AsyncIterator[FakeHypervisor]:
    driver = FakeHypervisor(vm)
    await driver.connect(hints)
    yield driver
    await driver.close()
    assert not vm.connected


async def test_calls_are_remembered(vm: FakeVm, driver: FakeHypervisor) -> None:
    await driver.add_vcpus(2)
    await driver.start_removing_vcpus(["resmgr-vcpu-2"])
    await driver.read()

    assert list(vm.calls) == [
        Call("connect"),
        Call("add_vcpus", 2),
        Call("start_removing_vcpus", ("resmgr-vcpu-2",)),
        Call("read"),
    ]
    assert vm.called("add_vcpus") == [Call("add_vcpus", 2)]


async def test_a_stalled_call_goes_on_when_it_is_resumed(vm: FakeVm, driver: FakeHypervisor) -> None:
    vm.stall()
    call = asyncio.create_task(driver.add_vcpus(1))

    assert await vm.stalled() == Call("add_vcpus", 1)
    assert len(vm.vcpus) == 1
    vm.resume()

    assert len((await call).vcpus) == 2


@pytest.mark.parametrize("carry_out_first", [False, True])
async def test_a_stalled_call_times_out_and_may_have_been_carried_out(vm: FakeVm, carry_out_first: bool) -> None:
    driver = FakeHypervisor(vm, timeout=0.01)
    await driver.connect(Hints())
    vm.stall(carry_out_first=carry_out_first)

    with pytest.raises(TimedOut):
        await driver.add_vcpus(1)

    vm.resume()
    assert len((await driver.read()).vcpus) == 1 + carry_out_first


async def test_two_calls_at_a_time_are_a_defect(vm: FakeVm, driver: FakeHypervisor) -> None:
    vm.stall()
    first = asyncio.create_task(driver.read())
    await vm.stalled()

    with pytest.raises(RuntimeError, match="another call was under way"):
        await driver.read()

    vm.resume()
    await first


async def test_some_are_plugged_before_the_refusal(vm: FakeVm, driver: FakeHypervisor) -> None:
    vm.vcpus_until_refusal = 2
    with pytest.raises(Refused):
        await driver.add_vcpus(3)
    assert len((await driver.read()).vcpus) == 3

    with pytest.raises(Refused):
        await driver.add_vcpus(1)

    vm.vcpus_until_refusal = None
    assert len((await driver.add_vcpus(1)).vcpus) == 4


async def test_an_addition_that_adds_nothing(vm: FakeVm, driver: FakeHypervisor) -> None:
    vm.lying_adds = True

    assert len((await driver.add_vcpus(1)).vcpus) == 1


async def test_a_removal_that_removes_nothing(vm: FakeVm, driver: FakeHypervisor, hints: Hints) -> None:
    await driver.add_vcpus(1)
    vm.lying_removals = True

    await driver.start_removing_vcpus(["resmgr-vcpu-1"])

    await hints.next(SizeChanged)
    assert len((await driver.read()).vcpus) == 2


async def test_the_guest_ejects_when_the_test_says_so(vm: FakeVm, driver: FakeHypervisor, hints: Hints) -> None:
    await driver.add_vcpus(3)
    vm.guest = Guest.IGNORE
    await driver.start_removing_vcpus(["resmgr-vcpu-3", "resmgr-vcpu-2"])
    assert vm.asked_to_leave == ("resmgr-vcpu-3", "resmgr-vcpu-2")

    vm.guest_ejects("resmgr-vcpu-2")

    await hints.next(SizeChanged)
    assert vm.vcpus[1:] == ("resmgr-vcpu-1", "resmgr-vcpu-3")

    vm.guest_forgets()
    vm.guest_ejects()
    assert vm.vcpus[1:] == ("resmgr-vcpu-1", "resmgr-vcpu-3")


async def test_somebody_else_takes_vcpus_out(vm: FakeVm, driver: FakeHypervisor, hints: Hints) -> None:
    await driver.add_vcpus(2)

    vm.unplug_foreign("resmgr-vcpu-1")

    await hints.next(SizeChanged)
    assert [vcpu.id for vcpu in (await driver.read()).vcpus if vcpu.ours] == ["resmgr-vcpu-2"]


async def test_a_vm_that_died_can_come_back_as_it_was(vm: FakeVm, driver: FakeHypervisor, hints: Hints) -> None:
    plugged = await driver.add_vcpus(1)
    vm.stall()
    call = asyncio.create_task(driver.read())
    await vm.stalled()

    vm.die()

    with pytest.raises(Unreachable):
        await call
    await hints.next(ConnectionLost)
    with pytest.raises(Unreachable):
        await driver.connect(hints)
    vm.back()
    await driver.connect(hints)
    assert await driver.read() == plugged


async def test_a_broken_connection_can_be_made_again(vm: FakeVm, driver: FakeHypervisor, hints: Hints) -> None:
    vm.drop("the test cut it")

    assert (await hints.next(ConnectionLost)).reason == "the test cut it"
    await driver.connect(hints)


async def test_a_busy_monitor(vm: FakeVm) -> None:
    vm.busy = True

    with pytest.raises(Busy):
        await FakeHypervisor(vm).connect(Hints())


async def test_a_machine_without_hotplug() -> None:
    vm = FakeVm(boot_vcpus=2, vcpu_hotplug=False)
    driver = FakeHypervisor(vm)

    machine = await driver.connect(Hints())

    assert (machine.max_vcpus, machine.vcpu_hotplug) == (2, False)
    with pytest.raises(Unsupported):
        await driver.add_vcpus(1)


async def test_under_tcg_a_plug_after_a_removal_kills_the_vm(hints: Hints) -> None:
    vm = FakeVm(accelerator=Accelerator.TCG)
    driver = FakeHypervisor(vm)
    await driver.connect(hints)
    await driver.add_vcpus(2)
    await driver.start_removing_vcpus(["resmgr-vcpu-2"])
    await hints.next(SizeChanged)

    with pytest.raises(Unreachable):
        await driver.add_vcpus(1)

    await hints.next(ConnectionLost)
    with pytest.raises(Unreachable):
        await driver.connect(hints)
