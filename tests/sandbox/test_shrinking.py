"""Giving vCPUs back: when it starts, what proves it, and what is said while it does not end."""

from __future__ import annotations

import asyncio
import json

import pytest

from hypervisors.base import Accelerator
from hypervisors.fake import FakeVm, Guest
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.vm import Goal
from tests.sandbox.rig import Rig, cpus, rig
from tests.virtual_time import virtual


def removals(r: Rig) -> list[tuple[str, ...]]:
    return [call.argument for call in r.vm.called("start_removing_vcpus") if isinstance(call.argument, tuple)]


@virtual
async def test_a_delete_answers_at_once_and_the_shrink_follows_after_the_delay() -> None:
    async with rig('[resmgr]\nshrink_delay = "5s"\n') as r:
        await r.put("c1", cpus("2"))
        outcome = await r.delete("c1")
        assert (outcome.sandbox.satisfied, outcome.sandbox.converged) == (True, False)
        assert (outcome.sandbox.surplus.vcpus, outcome.sandbox.surplus.reason) == (2, "grace")
        assert r.condition("Surplus") is None
        await r.pass_time(4.9)
        assert r.plugged == 3
        await r.pass_time(0.2)
        assert (r.plugged, r.state.converged) == (1, True)


@virtual
async def test_with_a_wait_the_removal_starts_at_once_and_is_waited_for() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        outcome = await r.delete("c1", Patience(wait=3))
        assert (outcome.settled, outcome.sandbox.vcpus.plugged, outcome.sandbox.converged) == (True, 1, True)


@virtual
async def test_an_update_that_shrinks_with_a_wait_tells_when_it_is_not_reached() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        r.vm.guest = Guest.IGNORE
        outcome = await r.put("c1", cpus("0.5"), Patience(wait=3))
        assert (outcome.settled, outcome.sandbox.vcpus.pending) == (False, 1)


@virtual
async def test_the_last_plugged_leaves_first_and_boot_vcpus_are_never_asked() -> None:
    async with rig(vm=FakeVm(boot_vcpus=2, max_vcpus=8)) as r:
        await r.put("c1", cpus("4"))
        await r.put("c1", cpus("3"), Patience(wait=1))
        assert removals(r) == [("resmgr-vcpu-3",)]
        await r.delete("c1", Patience(wait=1))
        assert r.vm.vcpus == ("/machine/unattached/device[0]", "/machine/unattached/device[1]")
        assert (r.state.surplus.vcpus, r.state.surplus.reason, r.state.converged) == (1, "boot-floor", True)


@virtual
async def test_a_silent_guest_is_asked_again_and_again_and_converges_when_it_turns() -> None:
    async with rig() as r:
        await r.put("c1", cpus("1"))
        r.vm.guest = Guest.IGNORE
        outcome = await r.delete("c1", Patience(wait=0.5))
        assert (outcome.sandbox.satisfied, outcome.sandbox.surplus.reason) == (True, None)
        await r.pass_time(1)
        assert r.state.surplus.reason == "guest-silent"
        condition = r.condition("Surplus")
        assert condition is not None
        assert condition.reason == "guest-silent"
        await r.pass_time(200)
        assert len(removals(r)) == 7  # at 0, 1, 3, 8, 23, 83 and 143 seconds
        r.vm.guest = Guest.COOPERATE
        await r.pass_time(0.1)
        assert (r.state.converged, r.state.surplus.vcpus, r.condition("Surplus")) == (True, 0, None)
        assert r.store.removals["s1"] == {}


@virtual
async def test_a_refusal_is_told_at_once() -> None:
    async with rig() as r:
        await r.put("c1", cpus("1"))
        r.vm.guest = Guest.REFUSE
        await r.delete("c1", Patience(wait=0.05))
        assert r.state.surplus.reason == "guest-refused"
        await r.pass_time(30)  # asked again and refused again, and never called silent meanwhile
        assert r.state.surplus.reason == "guest-refused"
        r.vm.guest = Guest.IGNORE
        await r.pass_time(130)
        assert r.state.surplus.reason == "guest-silent"


@virtual
async def test_a_removal_is_recorded_before_it_is_sent_and_struck_out_only_on_proof() -> None:
    async with rig() as r:
        await r.put("c1", cpus("1"))
        r.vm.stall()
        deleting = asyncio.create_task(r.delete("c1", Patience(wait=5)))
        await r.vm.stalled()
        assert list(r.store.removals["s1"]) == ["resmgr-vcpu-1"]
        r.vm.lying_removals = True
        r.vm.resume()
        await r.pass_time(0.1)
        assert list(r.store.removals["s1"]) == ["resmgr-vcpu-1"]
        r.vm.lying_removals = False
        assert (await deleting).settled
        assert r.store.removals["s1"] == {}


@virtual
async def test_a_guest_reset_repeats_the_removal_at_once() -> None:
    async with rig() as r:
        await r.put("c1", cpus("1"))
        r.vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=30))
        r.vm.guest_forgets()
        asked = len(removals(r))
        r.vm.reset()
        await r.pass_time(0.01)
        assert len(removals(r)) == asked + 1


@virtual
async def test_reconcile_shrinks_at_once() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        await r.delete("c1")
        outcome = await r.sandbox.reconcile(Patience(wait=1))
        assert (outcome.settled, r.plugged) == (True, 1)


@virtual
async def test_each_lower_target_stands_for_the_whole_delay() -> None:
    async with rig('[resmgr]\nshrink_delay = "5s"\n') as r:
        await r.put("c1", cpus("4"))
        await r.put("c1", cpus("3"))
        await r.pass_time(4)
        await r.put("c1", cpus("1"))
        await r.pass_time(1.1)
        assert r.plugged == 4
        await r.pass_time(3.5)
        assert r.plugged == 4
        await r.pass_time(0.5)
        assert r.plugged == 2


@virtual
async def test_under_tcg_nothing_is_removed_and_growing_goes_on() -> None:
    async with rig(vm=FakeVm(max_vcpus=8, accelerator=Accelerator.TCG)) as r:
        await r.put("c1", cpus("2"))
        await r.delete("c1", Patience(wait=1))
        assert removals(r) == []
        assert (r.state.surplus.reason, r.state.converged) == ("tcg", True)
        assert (await r.put("c1", cpus("3"))).sandbox.vcpus.plugged == 4


@virtual
async def test_under_tcg_once_removes_and_then_never_plugs_again() -> None:
    toml = '[resmgr]\ntcg_unplug = "once"\n'
    async with rig(toml, vm=FakeVm(max_vcpus=8, accelerator=Accelerator.TCG)) as r:
        await r.put("c1", cpus("2"))
        await r.put("c1", cpus("1"), Patience(wait=1))
        assert r.plugged == 2
        with pytest.raises(Problem) as failure:
            await r.put("c2", cpus("1"))
        assert failure.value.code is Code.NOT_SUPPORTED
        assert r.state.counts.containers == 1
        await r.delete("c1", Patience(wait=1))
        assert r.plugged == 1


@virtual
async def test_under_tcg_one_removal_ends_before_the_next_starts() -> None:
    # Seen on QEMU 7.2 with Linux: three asked for together, and a vCPU is never woken again.
    toml = '[resmgr]\ntcg_unplug = "once"\n'
    async with rig(toml, vm=FakeVm(max_vcpus=8, accelerator=Accelerator.TCG)) as r:
        await r.put("c1", cpus("3"))
        r.vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.5))
        assert removals(r) == [("resmgr-vcpu-3",)]
        r.vm.guest = Guest.COOPERATE
        await r.pass_time(0.1)
        assert removals(r) == [("resmgr-vcpu-3",), ("resmgr-vcpu-2",), ("resmgr-vcpu-1",)]
        assert r.state.converged


@virtual
async def test_a_quota_of_a_hundredth_leaves_one_and_cpusets_count_their_union() -> None:
    async with rig() as r:
        tiny = json.dumps({"cpu": {"quota": 1000, "period": 100000}}).encode()
        assert (await r.put("c1", tiny)).sandbox.vcpus.desired == 2  # default_vcpus is added: 1 + 1/100
        await r.delete("c1", Patience(wait=1))
        assert r.plugged == 1
        await r.put("a", b'{"cpu": {"cpus": "0-1"}}')
        assert (await r.put("b", b'{"cpu": {"cpus": "1-2"}}')).sandbox.vcpus.desired == 3


@virtual
async def test_waiting_for_convergence_answers_at_the_end_with_what_is() -> None:
    async with rig() as r:
        await r.put("c1", cpus("1"))
        r.vm.guest = Guest.IGNORE
        await r.delete("c1")
        state = await r.sandbox.wait_for(Goal.CONVERGED, 20)
        assert (state.satisfied, state.converged) == (True, False)
