"""Memory: by DIMMs, by virtio-mem, and where it only grows; and what is said meanwhile (SPEC 5, 7 to 9)."""

from __future__ import annotations

import asyncio
import json

import pytest

from hypervisors.base import MemoryHotplug, MemoryMethod, Plugged
from hypervisors.fake import FakeHypervisor, FakeVm, Guest
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.store import Attachment
from kata_resmgr.vm import Goal
from tests.sandbox.rig import Rig, cpus, rig
from tests.virtual_time import virtual

MIB = 1 << 20
GIB = 1 << 30
BOOT = 2 * GIB
VIRTIO_MEM = "[hypervisor.qemu]\nenable_virtio_mem = true\n"


def memory(mib: int, *, cpus: float | None = None) -> bytes:
    """Resources with that limit, and a quota of so many CPUs."""
    cpu = {} if cpus is None else {"cpu": {"quota": round(cpus * 100_000), "period": 100_000}}
    return json.dumps({"memory": {"limit": mib * MIB}, **cpu}).encode()


def dimm_vm(slots: int | None = 10, maximum: int = 64 * GIB) -> FakeVm:
    return FakeVm(memory_hotplug=MemoryHotplug(MemoryMethod.DIMM, 128 * MIB, maximum), memory_slots=slots)


def virtio_vm() -> FakeVm:
    return FakeVm(memory_hotplug=MemoryHotplug(MemoryMethod.VIRTIO_MEM, 2 * MIB, 64 * GIB))


def acpi_vm(slots: int = 8) -> FakeVm:
    return FakeVm(memory_hotplug=MemoryHotplug(MemoryMethod.ACPI, 128 * MIB, 64 * GIB), memory_slots=slots)


def silent_vm(method: MemoryMethod) -> FakeVm:
    """One that does not tell what changes, and carries out one resize at a time (Cloud Hypervisor)."""
    vm = FakeVm(memory_hotplug=MemoryHotplug(method, 2 * MIB, 64 * GIB))
    vm.tells_changes, vm.one_resize = False, True
    return vm


def grows(r: Rig) -> list[int]:
    return [call.argument for call in r.vm.called("grow_memory") if isinstance(call.argument, int)]


def shrinks(r: Rig) -> list[tuple[int | None, object]]:
    return [(call.to, call.argument) for call in r.vm.called("start_shrinking_memory")]


def sizes(r: Rig) -> tuple[int, int, int]:
    """Desired, plugged and pending, in MiB above boot (pending: in MiB)."""
    shown = r.state.memory
    return (shown.desired - BOOT) // MIB, (shown.plugged - BOOT) // MIB, shown.pending // MIB


# DIMMs


@virtual
async def test_memory_comes_as_one_dimm_and_leaves_whole() -> None:
    async with rig(vm=dimm_vm()) as r:
        await r.put("c1", memory(512))
        assert ([dimm.size for dimm in r.vm.dimms], sizes(r)) == ([512 * MIB], (512, 512, 0))
        assert r.state.satisfied
        outcome = await r.delete("c1", Patience(wait=1))
        assert (outcome.settled, sizes(r), r.state.converged) == (True, (0, 0, 0), True)
        await asyncio.sleep(0.001)  # recorded after the answer
        assert r.store.removals["s1"] == {}


@virtual
async def test_a_shrink_of_memory_waits_for_the_delay_as_vcpus_do() -> None:
    async with rig('[resmgr]\nshrink_delay = "5s"\n', vm=dimm_vm()) as r:
        await r.put("c1", memory(512))
        await r.delete("c1")
        assert (r.state.surplus.memory_bytes, r.state.surplus.reason) == (512 * MIB, "grace")
        await r.pass_time(4.9)
        assert sizes(r) == (0, 512, 0)
        await r.pass_time(0.2)
        assert (sizes(r), r.state.converged) == ((0, 0, 0), True)


@virtual
async def test_vcpus_and_memory_of_one_operation_are_asked_for_apart_and_both_waited_for() -> None:
    async with rig(vm=dimm_vm()) as r:
        outcome = await r.put("c1", memory(512, cpus=2))
        assert outcome.sandbox.satisfied
        assert [call.name for call in r.vm.calls][2:] == ["add_vcpus", "grow_memory"]


# virtio-mem


@virtual
async def test_virtio_mem_is_looked_at_until_it_has_come() -> None:
    vm = virtio_vm()
    vm.memory_seconds = 0.5
    async with rig(VIRTIO_MEM, vm=vm) as r:
        growing = asyncio.create_task(r.put("c1", memory(512)))
        await r.pass_time(0.3)
        assert (sizes(r), growing.done()) == ((512, 0, 0), False)
        assert (await growing).sandbox.satisfied
        assert (sizes(r), grows(r)) == ((512, 512, 0), [BOOT + 512 * MIB])
        looks = len(vm.called("read"))
        assert looks < 10
        await r.pass_time(1000)
        assert len(vm.called("read")) == looks  # at rest nobody looks


@virtual
async def test_a_blocked_shrink_says_how_much_came_back_and_ends_when_the_memory_is_freed() -> None:
    vm = virtio_vm()
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(1024))
        vm.memory_used = BOOT + 900 * MIB
        outcome = await r.delete("c1", Patience(wait=0.9))
        assert (outcome.settled, sizes(r)) == (False, (0, 900, 900))
        assert (r.state.satisfied, r.state.converged, r.state.surplus.reason) == (True, False, None)
        await r.pass_time(1)
        assert r.state.surplus.reason == "guest-silent"
        vm.memory_used = 0
        await r.pass_time(60)
        assert (sizes(r), r.state.converged, r.condition("Surplus")) == ((0, 0, 0), True, None)
        assert r.store.removals["s1"] == {}


# Memory that only grows


@virtual
async def test_acpi_memory_is_never_asked_back() -> None:
    async with rig(vm=acpi_vm()) as r:
        await r.put("c1", memory(512))
        await r.delete("c1", Patience(wait=1))
        assert (sizes(r), shrinks(r), r.state.converged) == ((0, 512, 0), [], True)
        assert (r.state.surplus.memory_bytes, r.state.surplus.reason) == (512 * MIB, "acpi-memory")


@virtual
async def test_acpi_memory_grows_eight_times() -> None:
    async with rig(vm=acpi_vm()) as r:
        for number in range(8):
            await r.put(f"c{number}", memory(128))
        with pytest.raises(Problem) as failure:
            await r.put("c8", memory(128))
        assert (failure.value.code, sizes(r)) == (Code.MEMORY_SLOTS_EXHAUSTED, (1024, 1024, 0))


# What cannot be had


@virtual
async def test_without_a_slot_the_boot_memory_that_would_have_done_is_named() -> None:
    async with rig(vm=dimm_vm(slots=1)) as r:
        await r.put("c1", memory(128))
        with pytest.raises(Problem) as failure:
            await r.put("c2", memory(512))
        assert failure.value.code is Code.MEMORY_SLOTS_EXHAUSTED
        assert "2688 MiB" in failure.value.detail
        assert (sizes(r), sorted(r.sandbox.containers()), len(grows(r))) == ((128, 128, 0), ["c1"], 1)


@virtual
async def test_a_refused_grow_of_memory_undoes_the_record_and_the_vcpus_are_surplus() -> None:
    async with rig(vm=dimm_vm()) as r:
        r.vm.grows_until_refusal = 0
        with pytest.raises(Problem) as failure:
            await r.put("c1", memory(512, cpus=2))
        assert failure.value.code is Code.HYPERVISOR_REFUSED
        assert (sizes(r), r.state.vcpus.desired, r.state.surplus.vcpus) == ((0, 0, 0), 1, 2)
        await r.pass_time(10)
        assert (r.state.converged, r.plugged) == (True, 1)


@virtual
async def test_a_partial_grow_ends_with_its_numbers_at_the_deadline() -> None:
    vm = virtio_vm()
    vm.memory_takes = BOOT + 100 * MIB
    async with rig(VIRTIO_MEM, vm=vm) as r:
        with pytest.raises(Problem) as failure:
            await r.put("c1", memory(512), Patience(deadline=3.5))
        assert failure.value.code is Code.HYPERVISOR_TIMEOUT
        assert f"{BOOT + 100 * MIB} of {BOOT + 512 * MIB} bytes" in failure.value.detail
        assert len(grows(r)) == 3  # at 0, 1 and 3 seconds
        vm.guest = Guest.COOPERATE
        await r.pass_time(10)
        assert (sizes(r), r.state.converged) == ((0, 0, 0), True)


@virtual
async def test_for_satisfied_means_both() -> None:
    vm = virtio_vm()
    vm.memory_seconds = 2.0
    async with rig(VIRTIO_MEM, vm=vm) as r:
        outcome = await r.put("c1", memory(512, cpus=1), Patience(wait=0.5))
        assert (outcome.settled, outcome.sandbox.satisfied, outcome.sandbox.vcpus.plugged) == (False, False, 2)
        assert (await r.sandbox.wait_for(Goal.SATISFIED, 5)).satisfied


# DIMMs, further


@virtual
async def test_a_dimm_that_is_too_big_stays_and_a_smaller_one_leaves() -> None:
    async with rig(vm=dimm_vm()) as r:
        await r.put("c1", memory(128))
        await r.put("c2", memory(1024))
        await r.put("c2", memory(896), Patience(wait=1))
        assert [dimm.size // MIB for dimm in r.vm.dimms] == [1024]  # the last one does not fit, the one before does
        await r.put("c2", memory(512), Patience(wait=1))
        assert (sizes(r), r.state.surplus.reason, r.state.converged) == ((640, 1024, 0), "granularity", True)
        assert r.state.surplus.memory_bytes == 384 * MIB


@virtual
async def test_at_most_48_times_the_present_memory_comes_at_once() -> None:
    toml = "[hypervisor.qemu]\ndefault_memory = 64\n"
    vm = FakeVm(memory=64 * MIB, memory_hotplug=MemoryHotplug(MemoryMethod.DIMM, 128 * MIB, 64 * GIB), memory_slots=10)
    async with rig(toml, vm=vm) as r:
        await r.put("c1", memory(8192))
        assert grows(r) == [(64 + 3072) * MIB, (64 + 8192) * MIB]


@virtual
async def test_a_silent_guest_keeps_its_dimm_and_is_asked_again_in_the_rhythm_of_removals() -> None:
    async with rig(vm=dimm_vm()) as r:
        await r.put("c1", memory(512))
        r.vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.5))
        assert (sizes(r), r.state.surplus.reason) == ((0, 512, 512), None)
        kept = r.store.removals["s1"]["resmgr-mem-1"]
        assert (kept.attempts, kept.size) == (1, 512 * MIB)
        await r.pass_time(100)
        assert (len(shrinks(r)), r.state.surplus.reason) == (6, "guest-silent")  # at 0, 1, 3, 8, 23 and 83 seconds
        r.vm.guest_ejects()
        await r.pass_time(0.1)
        await asyncio.sleep(0.001)  # recorded after the answer
        assert (sizes(r), r.state.converged, r.store.removals["s1"]) == ((0, 0, 0), True, {})


@virtual
async def test_a_refused_dimm_is_told_at_once() -> None:
    async with rig(vm=dimm_vm()) as r:
        await r.put("c1", memory(512))
        r.vm.guest = Guest.REFUSE
        await r.delete("c1", Patience(wait=0.1))
        assert r.state.surplus.reason == "guest-refused"
        condition = r.condition("Surplus")
        assert condition is not None
        assert f"{BOOT + 512 * MIB} bytes of memory plugged" in condition.message


@virtual
async def test_a_grow_while_a_dimm_is_leaving_takes_another_slot_or_waits_for_its_own() -> None:
    async with rig(vm=dimm_vm(slots=2)) as r:
        await r.put("c1", memory(512))
        r.vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.1))
        await r.put("c2", memory(256))
        assert (sizes(r), r.state.satisfied) == ((256, 768, 512), True)
        with pytest.raises(Problem) as failure:
            await r.put("c3", memory(128), Patience(deadline=2))
        assert (failure.value.code, failure.value.retryable) == (Code.SHRINK_PENDING, True)
        growing = asyncio.create_task(r.put("c3", memory(128)))
        await r.pass_time(1)
        r.vm.guest = Guest.COOPERATE
        assert (await growing).sandbox.satisfied
        assert sizes(r) == (384, 384, 0)


@virtual
async def test_slots_come_back_with_the_dimms_that_leave() -> None:
    async with rig(vm=dimm_vm(slots=1)) as r:
        for _ in range(20):
            await r.put("c1", memory(512))
            await r.delete("c1", Patience(wait=1))
        assert (sizes(r), r.vm.grows_left) == ((0, 0, 0), 1)


@virtual
async def test_a_foreign_dimm_is_taken_as_it_is_and_stays() -> None:
    async with rig('[resmgr]\nshrink_delay = "0"\n', vm=dimm_vm()) as r:
        r.vm.plug_foreign_dimm(512 * MIB)
        await r.pass_time(1)
        assert (r.state.surplus.memory_bytes, r.state.surplus.reason) == (512 * MIB, "boot-floor")
        condition = r.condition("ForeignChange")
        assert condition is not None
        assert condition.reason == "memory"
        await r.put("c1", memory(512))  # what is there serves
        assert (grows(r), shrinks(r), r.state.satisfied) == ([], [], True)


@virtual
async def test_a_dimm_that_somebody_takes_out_is_not_put_back_before_it_is_asked_for() -> None:
    async with rig(vm=dimm_vm()) as r:
        await r.put("c1", memory(512))
        r.vm.unplug_foreign("resmgr-mem-1")
        await r.pass_time(100)
        assert (sizes(r), len(grows(r)), r.state.satisfied) == ((512, 0, 0), 1, False)
        await r.sandbox.reconcile(Patience(wait=1))
        assert (sizes(r), r.state.satisfied) == ((512, 512, 0), True)


@virtual
async def test_a_failed_grow_of_memory_leaves_everything_where_it_was_however_often() -> None:
    async with rig('[resmgr]\nshrink_delay = "0"\n', vm=dimm_vm()) as r:
        await r.put("c1", memory(512))
        for _ in range(100):
            r.vm.grows_until_refusal = 0
            with pytest.raises(Problem):
                await r.put("c2", memory(512, cpus=1))
            await r.pass_time(1)
        assert (sizes(r), r.plugged, r.vm.grows_left, r.state.converged) == ((512, 512, 0), 1, 9, True)


@virtual
async def test_accepted_and_not_there_is_a_refusal() -> None:
    for vm in (dimm_vm(), virtio_vm(), acpi_vm()):
        async with rig(vm=vm) as r:
            vm.lying_adds = True
            with pytest.raises(Problem) as failure:
                await r.put("c1", memory(512))
            assert failure.value.code is Code.HYPERVISOR_REFUSED
            assert f"{BOOT + 512 * MIB} bytes of memory were accepted" in failure.value.detail


# virtio-mem, further


@virtual
async def test_a_shrink_under_way_is_taken_back_when_the_memory_is_wanted_again() -> None:
    vm = virtio_vm()
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(1024))
        vm.guest = Guest.IGNORE
        await r.put("c1", memory(256), Patience(wait=0.1))
        assert sizes(r) == (256, 1024, 768)
        outcome = await r.put("c1", memory(512))
        assert (outcome.sandbox.satisfied, sizes(r)) == (True, (512, 1024, 512))
        await r.put("c1", memory(1024))
        await asyncio.sleep(0.001)  # recorded after the answer
        assert (sizes(r), r.state.converged, r.store.removals["s1"]) == ((1024, 1024, 0), True, {})


@virtual
async def test_a_size_that_somebody_else_asks_for_is_taken_as_it_is_until_the_next_operation() -> None:
    vm = virtio_vm()
    async with rig('[resmgr]\nshrink_delay = "0"\n' + VIRTIO_MEM, vm=vm) as r:
        vm.ask_foreign(BOOT + 512 * MIB)
        await r.pass_time(100)
        assert (sizes(r), shrinks(r)) == ((0, 512, 0), [])
        assert r.condition("ForeignChange") is not None
        await r.put("c1", memory(1024))
        await r.delete("c1", Patience(wait=1))
        assert (sizes(r), r.state.converged) == ((0, 0, 0), True)


@virtual
async def test_a_shrink_that_was_accepted_and_not_carried_out_does_not_keep_the_loop_busy() -> None:
    vm = virtio_vm()
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(512))
        vm.lying_removals = True
        await r.delete("c1", Patience(wait=1))
        await r.pass_time(100)
        assert len(vm.calls) < 50
        assert sizes(r) == (0, 512, 0)


@virtual
async def test_a_reset_repeats_a_blocked_shrink_at_once() -> None:
    vm = virtio_vm()
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(512))
        vm.memory_used = BOOT + 512 * MIB
        await r.delete("c1", Patience(wait=0.1))
        await r.pass_time(90)
        vm.memory_used = 0
        vm.reset()
        await r.pass_time(0.5)
        assert (sizes(r), r.state.converged) == ((0, 0, 0), True)


# One resize at a time, and nothing told


@virtual
async def test_nothing_else_is_resized_while_vcpus_leave() -> None:
    vm = silent_vm(MemoryMethod.VIRTIO_MEM)
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(0, cpus=2))
        vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.5))
        for resources in (memory(512), memory(0, cpus=1)):
            with pytest.raises(Problem) as failure:
                await r.put("c2", resources, Patience(deadline=3))
            assert failure.value.code is Code.SHRINK_PENDING
        assert grows(r) == []
        growing = asyncio.create_task(r.put("c2", memory(512)))
        await r.pass_time(1)
        vm.guest = Guest.COOPERATE
        assert (await growing).sandbox.satisfied  # seen by looking


@virtual
async def test_a_machine_that_does_not_tell_is_looked_at_less_and_less_and_not_at_rest() -> None:
    vm = silent_vm(MemoryMethod.VIRTIO_MEM)
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(0, cpus=2))
        vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=1))
        await r.pass_time(3600)
        looks = len(vm.called("read"))
        assert looks < 1200
        vm.guest = Guest.COOPERATE
        await r.pass_time(30)
        assert r.state.converged
        looks = len(vm.called("read"))
        await r.pass_time(3600)
        assert len(vm.called("read")) == looks


@virtual
async def test_queues_are_a_floor_for_vcpus() -> None:
    vm = silent_vm(MemoryMethod.VIRTIO_MEM)
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(0, cpus=3))
        await r.pass_time(1)
        vm.vcpu_floor = 2  # found out by the look before the shrink
        await r.delete("c1", Patience(wait=1))
        assert (r.plugged, r.state.surplus.vcpus, r.state.surplus.reason, r.state.converged) == (
            2,
            1,
            "queue-floor",
            True,
        )


# Limits, and life


@virtual
async def test_a_table_that_is_above_the_machines_maximum_is_cut_to_it() -> None:
    async with rig(vm=dimm_vm(maximum=3 * GIB), attached=False) as r:
        await r.put("c1", memory(2048))
        await r.attach()
        await r.pass_time(1)
        assert (sizes(r), r.state.satisfied) == ((1024, 1024, 0), True)
        condition = r.condition("Clamped")
        assert condition is not None
        assert str(4 * GIB) in condition.message
        with pytest.raises(Problem) as failure:
            await r.put("c2", memory(1))
        assert failure.value.code is Code.MEMORY_LIMIT_EXCEEDED
        await r.delete("c1", Patience(wait=1))
        assert (sizes(r), r.condition("Clamped")) == ((0, 0, 0), None)


@virtual
async def test_memory_that_a_table_from_before_the_vm_cannot_have_is_said_and_not_asked_for_again() -> None:
    async with rig(vm=dimm_vm(slots=0), attached=False) as r:
        await r.put("c1", memory(512))
        await r.attach()
        await r.pass_time(1)
        condition = r.condition("GrowFailed")
        assert condition is not None
        assert condition.reason == "memory_slots_exhausted"
        calls = len(r.vm.calls)
        await r.pass_time(1000)
        assert len(r.vm.calls) == calls


@virtual
async def test_an_operation_that_needs_memory_does_not_fail_for_vcpus_that_others_lack() -> None:
    async with rig(vm=dimm_vm()) as r:
        r.vm.vcpus_until_refusal = 0
        await r.put("c1", memory(0, cpus=2), Patience(wait=0))
        assert (await r.put("c2", memory(512))).settled
        assert (sizes(r), r.state.satisfied) == ((512, 512, 0), False)


@virtual
async def test_a_held_sandbox_asks_for_no_memory() -> None:
    async with rig(vm=dimm_vm()) as r:
        await r.sandbox.hold()
        with pytest.raises(Problem) as failure:
            await r.put("c1", memory(512))
        assert failure.value.code is Code.HELD
        r.sandbox.release()
        await r.put("c1", memory(512))
        assert sizes(r) == (512, 512, 0)


@virtual
async def test_after_a_reconnect_a_blocked_shrink_goes_on() -> None:
    vm = virtio_vm()
    async with rig(VIRTIO_MEM, vm=vm) as r:
        await r.put("c1", memory(512))
        vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.1))
        vm.drop()
        await r.pass_time(1)
        assert sizes(r) == (0, 512, 512)
        vm.guest = Guest.COOPERATE
        await r.pass_time(60)
        assert (sizes(r), r.state.converged, r.store.removals["s1"]) == ((0, 0, 0), True, {})


class EjectsMeanwhile(FakeHypervisor):
    """Plugging takes a second, and meanwhile the guest ends what it was asked for before."""

    async def add_vcpus(self, count: int) -> Plugged:
        await super().add_vcpus(count)
        await asyncio.sleep(1)
        self._vm.guest_ejects()
        return await self.read()

    async def grow_memory(self, to: int) -> Plugged:
        await super().grow_memory(to)
        await asyncio.sleep(1)
        self._vm.guest_ejects()
        return await self.read()


@pytest.mark.parametrize("resources", [memory(256), cpus(2)], ids=["memory", "vcpus"])
@virtual
async def test_a_removal_that_ends_while_something_is_plugged_is_no_refusal(resources: bytes) -> None:
    async with rig(vm=dimm_vm(), attached=False) as r:
        await r.sandbox.attach(Attachment("/run/s1.sock", None, None), lambda: EjectsMeanwhile(r.vm))
        await r.put("c1", resources)
        r.vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.1))
        growing = asyncio.create_task(r.put("c2", resources))
        await r.pass_time(0.5)
        await r.put("c3", resources)  # waits for more than what is being plugged
        await growing
        assert (r.state.satisfied, r.state.converged, r.vm.asked_to_leave) == (True, True, ())
        assert r.condition("GrowFailed") is None
