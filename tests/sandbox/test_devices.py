"""Disks and nets of one sandbox: added, compared, taken out, replaced; and what a failure leaves (SPEC 9, 10)."""

from __future__ import annotations

import msgspec
import pytest

from hypervisors.base import Device, DeviceKind
from hypervisors.ch_types import DiskConfig, NetConfig
from hypervisors.fake import FakeHypervisor, FakeVm, Guest
from kata_resmgr.devices import Spec, State, read_record
from kata_resmgr.limits import Limits
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.store import Attachment
from tests.sandbox.rig import NO_PATIENCE, Rig, rig
from tests.virtual_time import virtual

DISK = DeviceKind.DISK


def spec(ops: int = 1000, name: str = "d1") -> Spec[DiskConfig]:
    return Spec(DiskConfig(id=name, path="/disks/a"), Limits(ops_per_second=ops))


def clh_vm(guest: Guest = Guest.COOPERATE) -> FakeVm:
    vm = FakeVm()
    vm.tells_changes, vm.guest = False, guest
    return vm


async def refused(r: Rig, ops: int = 1000, patience: Patience = NO_PATIENCE) -> Problem:
    with pytest.raises(Problem) as error:
        await r.sandbox.put_device(spec(ops), patience)
    return error.value


def kept(r: Rig) -> State | None:
    text = r.store.devices.get("s1", {}).get(("disk", "d1"))
    return None if text is None else read_record("disk", text).state


def sent(r: Rig) -> list[str]:
    return [call.name for call in r.vm.calls if call.name in ("add_device", "start_removing_device")]


@virtual
async def test_a_disk_comes_stays_and_goes() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        shown, created = await r.sandbox.put_device(spec(), NO_PATIENCE)
        assert (created, shown.address, kept(r)) == (True, "0000:00:01.0", State.PRESENT)
        assert await r.sandbox.put_device(spec(), NO_PATIENCE) == (shown, False)
        assert (await refused(r, 2000)).code is Code.CONFLICT
        assert (await r.sandbox.counted_device(DISK, "d1")).counters == {"read_bytes": 0}
        await r.sandbox.delete_device(DISK, "d1", Patience(wait=5))
        assert (r.vm.devices, kept(r), r.state.counts.disks) == ({}, None, 0)
        await r.sandbox.delete_device(DISK, "d1", NO_PATIENCE)
        assert sent(r) == ["add_device", "start_removing_device"]


@virtual
async def test_a_removal_is_repeated_until_the_guest_lets_go() -> None:
    async with rig(vm=clh_vm(Guest.IGNORE), hypervisor="clh") as r:
        await r.sandbox.put_device(spec(), NO_PATIENCE)
        await r.sandbox.delete_device(DISK, "d1", NO_PATIENCE)
        await r.pass_time(9)  # after 1, 2 and 5 s
        assert r.vm.called("start_removing_device") == r.vm.called("start_removing_device")[:1] * 4
        problem = await refused(r)
        assert (problem.code, problem.retryable, r.state.converged) == (Code.SHRINK_PENDING, True, False)
        r.vm.guest_ejects()
        await r.pass_time(10)
        assert (kept(r), r.state.converged) == (None, True)


@virtual
async def test_what_is_refused_leaves_nothing() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        r.vm.refuses_devices = True
        assert (await refused(r)).code is Code.HYPERVISOR_REFUSED
        assert (kept(r), r.vm.devices, r.state.counts.disks) == (None, {}, 0)


@virtual
async def test_a_dropped_limiter_is_an_error_and_the_disk_goes() -> None:
    async with rig(vm=clh_vm(Guest.IGNORE), hypervisor="clh") as r:
        r.vm.drops_limiters = True
        assert (await refused(r)).code is Code.HYPERVISOR_REFUSED
        assert kept(r) is State.LEAVING
        r.vm.guest_ejects()
        await r.pass_time(10)
        assert (kept(r), r.vm.devices) == (None, {})


@virtual
@pytest.mark.parametrize("carried_out", [True, False])
async def test_an_addition_that_is_not_answered_is_undone(carried_out: bool) -> None:
    class Hanging(FakeHypervisor):
        async def add_device(self, device: DiskConfig | NetConfig) -> Device:
            r.vm.stall(carry_out_first=carried_out)
            return await super().add_device(device)

    async with rig(vm=clh_vm(), hypervisor="clh", attached=False) as r:
        await r.sandbox.attach(Attachment("/run/s1.sock", None, None), lambda: Hanging(r.vm, timeout=2))
        assert (await refused(r)).code is Code.HYPERVISOR_TIMEOUT
        assert (kept(r), "d1" in r.vm.devices) == (State.LEAVING, carried_out)
        r.vm.resume()
        await r.pass_time(10)
        assert (kept(r), r.vm.devices, r.state.phase) == (None, {}, "running")


@virtual
async def test_what_is_somebody_elses_stays() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        r.vm.devices["d1"] = Device("d1", DISK, "0000:00:09.0")
        assert (await refused(r)).code is Code.CONFLICT  # found before it is sent
        assert (list(r.vm.devices), sent(r), kept(r)) == (["d1"], [], None)
        with pytest.raises(Problem, match="not added here"):
            await r.sandbox.delete_device(DISK, "d1", NO_PATIENCE)


@virtual
async def test_what_somebody_else_took_is_taken_as_it_is() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        await r.sandbox.put_device(spec(), NO_PATIENCE)
        del r.vm.devices["d1"]
        await r.sandbox.reconcile(NO_PATIENCE)
        assert (kept(r), sent(r), r.condition("ForeignChange") is not None) == (None, ["add_device"], True)


@virtual
async def test_limits_that_differ_are_told_while_they_do() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        await r.sandbox.put_device(spec(), NO_PATIENCE)
        ours = r.vm.devices["d1"]
        r.vm.devices["d1"] = msgspec.structs.replace(ours, limiter=None)
        await r.sandbox.reconcile(NO_PATIENCE)
        condition = r.condition("LimitsDiffer")
        assert condition is not None
        assert (condition.reason, "no limiter" in condition.message) == ("disk/d1", True)
        r.vm.devices["d1"] = ours
        await r.sandbox.reconcile(NO_PATIENCE)
        assert r.condition("LimitsDiffer") is None


@virtual
async def test_a_burst_without_its_rate_is_told() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        await r.sandbox.put_device(Spec(DiskConfig(id="d1", path="/a"), Limits(burst_ops=5)), NO_PATIENCE)
        assert r.condition("BurstWithoutRate") is not None
        await r.sandbox.delete_device(DISK, "d1", Patience(wait=5))
        assert r.condition("BurstWithoutRate") is None


@virtual
async def test_a_replacement_that_is_too_late_comes_back_as_it_was() -> None:
    async with rig(vm=clh_vm(Guest.IGNORE), hypervisor="clh") as r:
        await r.sandbox.put_device(spec(), NO_PATIENCE)
        with pytest.raises(Problem) as error:
            await r.sandbox.limit_device(DISK, "d1", Limits(ops_per_second=50), True, Patience(deadline=1))
        assert error.value.code is Code.SHRINK_PENDING
        r.vm.guest_ejects()
        await r.pass_time(10)
        limiter = r.vm.devices["d1"].limiter
        assert limiter is not None
        assert limiter.ops is not None
        assert (limiter.ops.size, kept(r)) == (1000, State.PRESENT)


@virtual
async def test_a_hold_and_no_vm_refuse_and_qemu_has_none() -> None:
    async with rig(vm=clh_vm(), hypervisor="clh") as r:
        await r.sandbox.hold()
        assert (await refused(r)).code is Code.HELD
        r.sandbox.release()
        await r.sandbox.detach()
        assert (await refused(r)).code is Code.CONFLICT
    async with rig() as r:
        assert (await refused(r)).code is Code.NOT_SUPPORTED
