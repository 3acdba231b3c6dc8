"""Pod-level resizes, and the target that ``compat`` holds: on a sandbox with a VM."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import Raw

from hypervisors.fake import FakeVm
from kata_resmgr.annotations import CONTAINERD, TYPE_KEYS
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.sizing import MIB
from tests.examples import resources
from tests.sandbox.rig import cpus, rig
from tests.virtual_time import virtual

POD = {TYPE_KEYS[1]: "sandbox", CONTAINERD["quota"]: "200000", CONTAINERD["limit"]: str(1024 * MIB)}
REFUSE = '[hypervisor.qemu]\ndefault_maxvcpus = 4\n[resmgr]\nover_max_vcpus = "refuse"\n'
KATA = '[resmgr]\ncompat = "kata"\nshrink_delay = "0"\n'


@virtual
async def test_a_resize_grows_the_vm_and_boot_stays() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        outcome = await r.resize(cpus(4))
        assert (outcome.settled, r.plugged) == (True, 4)
        assert (outcome.sandbox.boot.vcpus, outcome.sandbox.vcpus.desired, outcome.sandbox.vcpus.exact) == (2, 4, "1")
        assert r.store.sandboxes["s1"].resized is not None
        # It is a floor for what the containers ask for
        assert (await r.put("c1", cpus("1.5"))).sandbox.vcpus.desired == 4
        assert (await r.put("c2", cpus("2.5"))).sandbox.vcpus.desired == 5


@virtual
async def test_an_equal_resize_changes_nothing() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        before = r.state
        for text in (b"{}", resources(quota=200_000), resources(limit=1024 * MIB), resources(quota=0)):
            assert (await r.resize(text)).settled
        assert r.state == before
        assert r.store.sandboxes["s1"].resized is None


@virtual
async def test_a_resize_goes_both_ways_and_never_below_boot() -> None:
    async with rig("[resmgr]\nshrink_delay = '0'\n", FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        await r.resize(cpus(4))
        outcome = await r.resize(cpus(3), Patience(wait=5))
        assert (outcome.settled, r.plugged) == (True, 3)
        outcome = await r.resize(cpus("0.5"), Patience(wait=5))
        assert (outcome.settled, r.plugged, outcome.sandbox.vcpus.desired) == (True, 2, 2)


@virtual
async def test_a_refused_resize_leaves_everything_as_it_was() -> None:
    vm = FakeVm(boot_vcpus=2, max_vcpus=8)
    vm.vcpus_until_refusal = 1
    async with rig(vm=vm, annotations=POD) as r:
        before, explained = r.state, r.sandbox.explain().inputs
        with pytest.raises(Problem) as failure:
            await r.resize(cpus(4))
        assert failure.value.code is Code.HYPERVISOR_REFUSED
        assert r.state.vcpus.desired == before.vcpus.desired
        assert [given for given in r.sandbox.explain().inputs if not given.name.startswith("plugged")] == [
            given for given in explained if not given.name.startswith("plugged")
        ]
        assert r.store.sandboxes["s1"].resized is None


@virtual
async def test_a_resize_that_still_waits_is_not_kept() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        r.vm.stall()
        resizing = asyncio.create_task(r.resize(cpus(4), Patience(deadline=3)))
        await r.vm.stalled()
        await r.put("c1", b"{}")  # keeps what is answered, and nothing else
        r.sandbox.release()
        attaching = asyncio.create_task(r.attach())
        with pytest.raises(Problem) as failure:
            await resizing
        assert failure.value.code is Code.HYPERVISOR_TIMEOUT
        assert r.state.vcpus.desired == 2
        r.vm.resume()
        await attaching
        assert r.store.sandboxes["s1"].resized is None


@virtual
async def test_a_resize_with_a_short_wait_stands_and_goes_on() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        r.vm.stall()
        outcome = await r.resize(cpus(4), Patience(wait=1))
        assert (outcome.settled, outcome.sandbox.vcpus.desired) == (False, 4)
        r.vm.resume()
        await r.pass_time(1)
        assert r.plugged == 4


@virtual
async def test_a_resize_before_a_vm_is_attached_waits_for_it() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD, attached=False) as r:
        outcome = await r.resize(cpus(3))
        assert (outcome.settled, outcome.sandbox.boot.vcpus, outcome.sandbox.vcpus.desired) == (True, 2, 3)
        await r.attach()
        await r.pass_time(1)
        assert r.plugged == 3


@virtual
async def test_resizes_follow_each_other_in_order_of_arrival() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        first, second = asyncio.create_task(r.resize(cpus(4))), asyncio.create_task(r.resize(cpus(3)))
        assert (await first).sandbox.vcpus.desired == 4
        assert (await second).sandbox.vcpus.desired == 3


@virtual
async def test_a_resize_above_the_maximum_is_clamped_or_refused() -> None:
    async with rig(
        "[hypervisor.qemu]\ndefault_maxvcpus = 4\n", FakeVm(boot_vcpus=2, max_vcpus=4), annotations=POD
    ) as r:
        outcome = await r.resize(cpus(6))
        assert (outcome.settled, r.plugged) == (True, 4)
        clamped = r.condition("Clamped")
        assert clamped is not None
        assert clamped.message == "6 vCPUs are asked for, the maximum is 4"
        await r.resize(cpus(4))
        assert r.condition("Clamped") is None
    async with rig(REFUSE, FakeVm(boot_vcpus=2, max_vcpus=4), annotations=POD) as r:
        before = r.state
        with pytest.raises(Problem, match=r"4\.5 vCPUs are above the maximum of 4") as failure:
            await r.resize(cpus("4.5"))
        assert failure.value.code is Code.VCPU_LIMIT_EXCEEDED
        assert r.state == before
        assert (await r.resize(cpus(4))).settled
        assert (await r.resize(resources(limit=1536 * MIB))).settled


@virtual
async def test_memory_of_a_resize_is_at_least_that_and_within_the_maximum() -> None:
    toml = "[hypervisor.qemu]\ndefault_maxmemory = 4096\n"
    async with rig(toml, FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        assert (await r.resize(resources(limit=2047 * MIB))).sandbox.memory.desired == 2048 * MIB
        assert (await r.resize(resources(limit=2049 * MIB))).sandbox.memory.desired == 2176 * MIB
        before = r.state
        with pytest.raises(Problem) as failure:
            await r.resize(resources(limit=4097 * MIB))
        assert failure.value.code is Code.MEMORY_LIMIT_EXCEEDED
        assert r.state == before
        with pytest.raises(Problem) as both:
            await r.resize(b'{"cpu": {"quota": 1.0}}')
        assert both.value.code is Code.INVALID_RESOURCES


@virtual
async def test_in_static_mode_a_resize_is_told_and_changes_no_vm() -> None:
    toml = "[runtime]\nstatic_sandbox_resource_mgmt = true\n[hypervisor.qemu]\noverhead_vcpus = 0.25\n"
    async with rig(toml, FakeVm(boot_vcpus=3, max_vcpus=3), annotations=POD) as r:
        outcome = await r.resize(cpus(3))
        assert (outcome.settled, outcome.sandbox.vcpus.desired, r.plugged) == (True, 3, 3)
        told = r.condition("DemandExceedsSize")
        assert told is not None
        assert told.message == "the containers and the resized sandbox ask for 3.25 vCPUs, fixed at 3"
        await r.resize(cpus("2.75"))
        assert r.condition("DemandExceedsSize") is None


@virtual
async def test_a_sandbox_that_is_registered_anew_is_not_resized() -> None:
    async with rig(annotations=POD, attached=False) as r:
        await r.resize(cpus(4))
        await r.sandbox.register_again(r.sandbox.plan)
        assert r.state.vcpus.desired == 2
        assert r.store.sandboxes["s1"].resized is None


@virtual
async def test_the_explanation_tells_sources_resize_and_what_is_plugged() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8), annotations=POD) as r:
        await r.resize(cpus(4))
        told = r.sandbox.explain()
        sources = {given.name: (given.value, given.source) for given in told.inputs}
        assert sources["container type"] == ("sandbox", "io.kubernetes.cri.container-type")
        assert sources["declared: vCPUs"] == ("2", "io.kubernetes.cri.sandbox-cpu-quota")
        assert sources["declared now: vCPUs"] == ("4", "resize of the sandbox")
        assert sources["declared now: memory"] == ("1024 MiB", "io.kubernetes.cri.sandbox-memory")
        assert sources["plugged: vCPUs"] == ("4", "hypervisor")
        assert sources["machine maximum vCPUs"] == ("8", "hypervisor")
        assert "no containers; resized: at least 4, rounded up: 4" in told.explain


# compat


@virtual
async def test_an_add_lowers_nothing_and_a_delete_raises_nothing() -> None:
    async with rig(KATA) as r:
        await r.put("pinned", resources(cpus="0-5"))
        assert r.plugged == 6
        # The first quota makes the cpuset count for nothing: 1 + 0.5, but who adds lowers nothing
        outcome = await r.put("small", cpus("0.5"), Patience(wait=1))
        assert (outcome.sandbox.vcpus.exact, outcome.sandbox.vcpus.desired, r.plugged) == ("3/2", 6, 6)
        assert r.store.sandboxes["s1"].held_vcpus == 6
        assert any("lowers nothing" in line for line in r.sandbox.explain().explain)
        # An update recomputes
        outcome = await r.patch("small", cpus("0.75"), Patience(wait=1))
        assert (outcome.sandbox.vcpus.desired, r.plugged) == (2, 2)
        assert r.store.sandboxes["s1"].held_vcpus is None
        # Without the quota the cpuset would count again, but who deletes raises nothing
        outcome = await r.delete("small")
        assert (outcome.sandbox.vcpus.exact, outcome.sandbox.vcpus.desired) == ("6", 2)
        assert r.store.sandboxes["s1"].held_vcpus == 2
        # The same again is no operation; another PUT on a present container recomputes
        assert (await r.put("pinned", resources(cpus="0-5"))).sandbox.vcpus.desired == 2
        assert (await r.put("pinned", resources(cpus="0-4"))).sandbox.vcpus.desired == 5


@virtual
async def test_what_is_held_survives_attaching_and_a_failed_operation() -> None:
    vm = FakeVm()
    async with rig(KATA, vm) as r:
        await r.put("pinned", resources(cpus="0-5"))
        await r.put("small", cpus("0.5"))
        await r.attach()
        assert r.state.vcpus.desired == 6
        vm.vcpus_until_refusal = 0
        with pytest.raises(Problem):
            await r.put("large", cpus("6"))
        assert (r.state.vcpus.exact, r.state.vcpus.desired) == ("3/2", 6)
        assert r.store.sandboxes["s1"].held_vcpus == 6


@virtual
async def test_a_whole_table_of_newcomers_lowers_nothing_and_a_mixed_one_recomputes() -> None:
    async with rig(KATA) as r:
        await r.put("pinned", resources(cpus="0-5"))
        both = {"pinned": resources(cpus="0-5"), "small": cpus("0.5")}
        outcome = await r.sandbox.put_all({name: Raw(text) for name, text in both.items()}, Patience())
        assert outcome.sandbox.vcpus.desired == 6
        other = {"pinned": resources(cpus="0-5"), "other": cpus("0.5")}
        outcome = await r.sandbox.put_all({name: Raw(text) for name, text in other.items()}, Patience())
        assert outcome.sandbox.vcpus.desired == 2
        outcome = await r.sandbox.put_all({"pinned": Raw(resources(cpus="0-5"))}, Patience())
        assert (outcome.sandbox.vcpus.exact, outcome.sandbox.vcpus.desired) == ("6", 2)


@virtual
async def test_who_adds_waits_for_what_was_held_back() -> None:
    async with rig(KATA) as r:
        await r.put("pinned", resources(cpus="0-5"))
        await r.put("small", cpus("0.5"))
        await r.patch("small", cpus("0.75"), Patience(wait=1))
        assert (await r.delete("small")).sandbox.vcpus.desired == 2
        outcome = await r.put("idle", b"{}")  # asks for nothing, but the cpuset counts from now on
        assert (outcome.settled, outcome.sandbox.vcpus.desired, r.plugged) == (True, 6, 6)


@virtual
async def test_a_delete_that_would_raise_never_waits_nor_fails() -> None:
    async with rig(KATA) as r:
        await r.put("pinned", resources(cpus="0-5", shares=2))
        await r.put("small", cpus("0.5"))
        await r.patch("small", cpus("0.75"), Patience(wait=1))
        r.vm.vcpus_until_refusal = 0
        assert (await r.delete("small", Patience(wait=1))).settled
        assert r.plugged == 2
