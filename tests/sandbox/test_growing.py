"""Operations that need more: reached, refused, too late, and what is left of the failed ones."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from hypervisors.fake import FakeVm, Guest
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.vm import Goal
from tests.sandbox.rig import cpus, rig
from tests.virtual_time import virtual


@virtual
async def test_a_container_is_answered_when_its_vcpus_are_there() -> None:
    async with rig() as r:
        outcome = await r.put("c1", cpus("1.5"))
        assert (outcome.settled, outcome.created) == (True, True)
        assert r.plugged == 3
        assert outcome.sandbox.vcpus.exact == "5/2"
        assert (outcome.sandbox.vcpus.desired, outcome.sandbox.vcpus.plugged) == (3, 3)
        assert outcome.sandbox.satisfied
        assert outcome.sandbox.converged
        assert r.store.containers["s1"]["c1"] == cpus("1.5")


@virtual
async def test_an_update_grows_and_a_put_in_its_place_may_shrink() -> None:
    async with rig() as r:
        await r.put("c1", cpus("1.5"))
        assert (await r.patch("c1", cpus("2.5"))).sandbox.vcpus.plugged == 4
        outcome = await r.put("c1", cpus("0.5"))
        assert not outcome.created
        assert (outcome.sandbox.vcpus.desired, outcome.sandbox.surplus.reason) == (2, "grace")
        await r.pass_time(6)
        assert r.plugged == 2


@virtual
async def test_before_a_vm_is_attached_only_the_table_changes_and_attaching_converges() -> None:
    async with rig(attached=False) as r:
        outcome = await r.put("c1", cpus("1.5"))
        assert (outcome.settled, outcome.sandbox.vcpus.plugged, outcome.sandbox.phase) == (True, 0, "sized")
        await r.attach()
        await r.sandbox.wait_for(Goal.SATISFIED, 1)
        assert r.plugged == 3


@virtual
async def test_a_refused_grow_leaves_everything_as_it_was() -> None:
    vm = FakeVm(max_vcpus=8)
    vm.vcpus_until_refusal = 0
    async with rig(vm=vm) as r:
        before = r.state
        with pytest.raises(Problem) as failure:
            await r.put("c1", cpus("2"))
        assert failure.value.code is Code.HYPERVISOR_REFUSED
        assert "refused by the test" in failure.value.detail
        after = r.state
        assert (after.vcpus, after.counts, after.conditions) == (before.vcpus, before.counts, before.conditions)
        assert "c1" not in r.store.containers.get("s1", {})


@virtual
async def test_the_same_container_failing_a_hundred_times_leaves_sums_and_vm_as_they_were() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm) as r:
        await r.put("other", cpus("0.5"))
        before = r.state
        vm.vcpus_until_refusal = 1  # one of two comes, then no more: what came is surplus
        for _ in range(100):
            with pytest.raises(Problem, match="refused"):
                await r.put("c1", cpus("2"))
        await r.pass_time(10)
        assert (r.state.vcpus, r.state.counts, r.state.conditions) == (before.vcpus, before.counts, before.conditions)
        assert r.state.converged


@virtual
async def test_a_vm_that_says_yes_and_adds_nothing_is_a_refusal() -> None:
    vm = FakeVm(max_vcpus=8)
    vm.lying_adds = True
    async with rig(vm=vm) as r:
        with pytest.raises(Problem, match="1 vCPUs were accepted, and 0 are there"):
            await r.put("c1", cpus("1"))
        assert len(vm.called("add_vcpus")) == 1


@virtual
async def test_at_the_deadline_the_table_is_as_before() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=60) as r:
        vm.stall()
        with pytest.raises(Problem) as failure:
            await r.put("c1", cpus("2"), Patience(deadline=2))
        assert failure.value.code is Code.HYPERVISOR_TIMEOUT
        assert r.state.counts.containers == 0
        vm.resume()  # the call is carried out all the same: surplus, under the ordinary rules
        await r.pass_time(1)
        assert r.plugged == 3
        await r.pass_time(6)
        assert r.plugged == 1


@virtual
async def test_a_driver_that_gets_no_answer_fails_the_grow_and_reconnects() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=1) as r:
        vm.stall()
        with pytest.raises(Problem) as failure:
            await r.put("c1", cpus("2"))
        assert failure.value.code is Code.HYPERVISOR_TIMEOUT
        assert r.state.phase == "unreachable"
        vm.resume()
        await r.pass_time(6)
        assert r.state.phase == "running"
        assert r.state.converged


@virtual
async def test_with_a_short_wait_the_change_stands_and_goes_on() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=60) as r:
        vm.stall()
        outcome = await r.put("c1", cpus("2"), Patience(wait=0.5))
        assert (outcome.settled, outcome.sandbox.satisfied) == (False, False)
        assert "c1" in r.store.containers["s1"]
        vm.resume()
        assert (await r.sandbox.wait_for(Goal.SATISFIED, 1)).vcpus.plugged == 3


@virtual
async def test_a_grow_that_fails_after_its_answer_keeps_the_table_and_says_why() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=60) as r:
        vm.vcpus_until_refusal = 0
        vm.stall()
        await r.put("c1", cpus("2"), Patience(wait=0))
        vm.resume()
        await r.pass_time(0.1)
        assert r.state.counts.containers == 1
        condition = r.condition("GrowFailed")
        assert condition is not None
        assert "refused by the test" in condition.message
        vm.vcpus_until_refusal = None
        await r.pass_time(2)
        assert r.plugged == 3
        assert r.condition("GrowFailed") is None


@virtual
async def test_a_refusal_fails_the_youngest_first_and_spares_whom_it_need_not_fail() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=60) as r:
        vm.stall()
        older = asyncio.create_task(r.put("c1", cpus("1")))
        await vm.stalled()
        younger = asyncio.create_task(r.put("c2", cpus("3")))
        await asyncio.sleep(0)
        vm.vcpus_until_refusal = 2  # room for the older one's, boot 1 + 1 by base, not for the younger one's
        vm.resume()
        assert (await older).settled
        with pytest.raises(Problem, match="refused"):
            await younger
        assert list(r.sandbox.containers()) == ["c1"]
        assert (r.state.vcpus.desired, r.plugged) == (2, 3)  # what came for the younger one is surplus for a while


@virtual
async def test_operations_on_one_container_follow_each_other_and_others_overlap() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=60) as r:
        vm.stall()
        first = asyncio.create_task(r.put("c1", cpus("1")))
        await vm.stalled()
        second = asyncio.create_task(r.patch("c1", b'{"cpu": {"shares": 512}}'))
        other = asyncio.create_task(r.put("c2", cpus("0.1")))
        await asyncio.sleep(0)
        assert r.state.counts.containers == 2
        vm.resume()
        await asyncio.gather(first, second, other)
        merged = json.loads(bytes(r.sandbox.container("c1").resources))
        assert merged["cpu"] == {"quota": 100000, "period": 100000, "shares": 512}


@virtual
async def test_an_operation_behind_another_that_waits_has_its_own_deadline() -> None:
    vm = FakeVm(max_vcpus=8)
    async with rig(vm=vm, driver_timeout=60) as r:
        vm.stall()
        first = asyncio.create_task(r.put("c1", cpus("1")))
        await vm.stalled()
        with pytest.raises(Problem, match="an earlier operation on c1"):
            await r.put("c1", cpus("2"), Patience(deadline=1))
        vm.resume()
        assert (await first).settled


@virtual
async def test_above_the_maximum_is_clamped_and_said_with_both_numbers() -> None:
    async with rig("[hypervisor.qemu]\ndefault_maxvcpus = 4\n", vm=FakeVm(max_vcpus=4)) as r:
        outcome = await r.put("c1", cpus("9.5"))
        assert (outcome.sandbox.vcpus.exact, outcome.sandbox.vcpus.desired) == ("21/2", 4)
        condition = r.condition("Clamped")
        assert condition is not None
        assert "11 vCPUs" in condition.message
        assert "4" in condition.message
        await r.delete("c1")
        assert r.condition("Clamped") is None


@virtual
async def test_the_maximum_is_cut_to_the_machines_own() -> None:
    async with rig(vm=FakeVm(max_vcpus=3)) as r:
        assert (await r.put("c1", cpus("7"))).sandbox.vcpus.desired == 3
        assert r.condition("Clamped") is not None


@virtual
async def test_refuse_fails_what_would_pass_the_maximum_and_never_a_delete() -> None:
    toml = '[hypervisor.qemu]\ndefault_maxvcpus = 4\n[resmgr]\nover_max_vcpus = "refuse"\n'
    async with rig(toml, vm=FakeVm(max_vcpus=4)) as r:
        await r.put("c1", cpus("2.5"))
        with pytest.raises(Problem) as failure:
            await r.put("c2", cpus("1"))
        assert failure.value.code is Code.VCPU_LIMIT_EXCEEDED
        assert r.state.counts.containers == 1
        await r.delete("c1")


@virtual
async def test_what_was_refused_is_in_no_sum() -> None:
    toml = '[hypervisor.qemu]\ndefault_maxvcpus = 4\n[resmgr]\nover_max_vcpus = "refuse"\n'
    async with rig(toml, vm=FakeVm(max_vcpus=4)) as r:
        await r.put("c1", json.dumps({"cpu": {"quota": 100000, "shares": 1024}}).encode())
        before = (r.state, r.sandbox.explain())
        with pytest.raises(Problem, match="above the maximum"):
            await r.put("c2", json.dumps({"cpu": {"quota": 900000, "shares": 2048}}).encode())
        assert (r.state, r.sandbox.explain()) == before


@virtual
async def test_a_demand_whose_fraction_nobody_could_write_out_is_told_all_the_same() -> None:
    async with rig(attached=False) as r:
        for number in range(300):  # 300 periods of 63 bits with hardly a factor in common
            period = (1 << 63) - 1 - 2 * number
            await r.put(f"c{number}", json.dumps({"cpu": {"quota": 1, "period": period}}).encode())
        assert r.state.vcpus.exact.startswith("about 1")
        assert r.sandbox.explain().vcpus.desired == 2


@virtual
async def test_memory_above_the_maximum_is_refused_with_the_numbers() -> None:
    async with rig("[hypervisor.qemu]\ndefault_memory = 2048\ndefault_maxmemory = 4096\n") as r:
        with pytest.raises(Problem) as failure:
            await r.put("c1", json.dumps({"memory": {"limit": 3 << 30}}).encode())
        assert failure.value.code is Code.MEMORY_LIMIT_EXCEEDED
        assert str(5 << 30) in failure.value.detail
        assert str(4 << 30) in failure.value.detail
        assert r.state.memory.desired == 2 << 30


@virtual
async def test_memory_that_this_driver_cannot_add_is_said() -> None:
    async with rig() as r:
        await r.put("c1", json.dumps({"memory": {"limit": 1 << 30}}).encode())
        condition = r.condition("HotplugUnsupported")
        assert condition is not None
        assert condition.reason == "memory"
        await r.delete("c1")
        assert r.condition("HotplugUnsupported") is None


@virtual
async def test_a_grow_while_a_removal_is_latched_takes_other_slots() -> None:
    vm = FakeVm(boot_vcpus=1, max_vcpus=6)
    async with rig(vm=vm) as r:
        await r.put("c1", cpus("3"))
        vm.guest = Guest.IGNORE
        await r.put("c1", cpus("1"), Patience(wait=0.1))
        assert (r.state.vcpus.desired, r.state.vcpus.plugged, r.state.vcpus.pending) == (2, 4, 2)
        outcome = await r.put("c1", cpus("3"))
        assert (outcome.sandbox.vcpus.plugged, outcome.sandbox.vcpus.pending) == (6, 2)
        vm.guest_ejects()
        await r.pass_time(0.1)
        assert (r.plugged, r.state.vcpus.pending, r.state.converged) == (4, 0, True)


@virtual
async def test_a_grow_that_needs_the_slots_of_a_removal_waits_and_then_is_refused_as_pending() -> None:
    vm = FakeVm(boot_vcpus=1, max_vcpus=4)
    async with rig(vm=vm) as r:
        await r.put("c1", cpus("3"))
        vm.guest = Guest.IGNORE
        await r.put("c1", cpus("1"), Patience(wait=0.1))
        with pytest.raises(Problem) as failure:
            await r.put("c1", cpus("3"), Patience(deadline=3))
        assert failure.value.code is Code.SHRINK_PENDING
        assert failure.value.retryable
        assert "3.1 s" in failure.value.detail
        growing = asyncio.create_task(r.put("c1", cpus("3")))
        await r.pass_time(1)
        vm.guest = Guest.COOPERATE
        assert (await growing).sandbox.vcpus.plugged == 4


@virtual
async def test_the_whole_table_in_one_resize() -> None:
    async with rig() as r:
        await r.put("old", cpus("1"))
        calls = len(r.vm.called("add_vcpus"))
        table = {"a": msgspec.Raw(cpus("1.5")), "b": msgspec.Raw(cpus("1"))}
        outcome = await r.sandbox.put_all(table, Patience())
        assert sorted(r.sandbox.containers()) == ["a", "b"]
        assert outcome.sandbox.vcpus.plugged == 4
        assert len(r.vm.called("add_vcpus")) == calls + 1
        assert sorted(r.store.containers["s1"]) == ["a", "b"]
