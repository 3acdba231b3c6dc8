"""Memory: by DIMMs, by virtio-mem, and where it only grows; and what is said meanwhile (SPEC 5, 7 to 9)."""

from __future__ import annotations

import json

import pytest

from hypervisors.base import MemoryHotplug, MemoryMethod
from hypervisors.fake import FakeVm, Guest
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.vm import Goal
from tests.sandbox.rig import Rig, rig
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
