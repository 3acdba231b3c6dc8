"""Attach, detach, hold, disconnects, foreign hands, static mode."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
import structlog

from hypervisors.fake import FakeHypervisor, FakeVm, Guest
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.store import Attachment
from tests.sandbox.rig import cpus, make_plan, rig
from tests.virtual_time import virtual


@virtual
async def test_a_busy_monitor_is_told_and_the_sandbox_stays_sized() -> None:
    vm = FakeVm()
    vm.busy = True
    async with rig(vm=vm, attached=False) as r:
        with pytest.raises(Problem) as failure:
            await r.attach()
        assert (failure.value.code, failure.value.retryable) == (Code.MONITOR_BUSY, True)
        assert r.state.phase == "sized"
        vm.busy = False
        assert (await r.attach()).phase == "running"


@virtual
async def test_attaching_the_same_again_reads_back_and_another_is_a_conflict() -> None:
    async with rig() as r:
        assert (await r.attach()).vcpus.plugged == 1
        assert len(r.vm.called("connect")) == 1
        other = Attachment("/run/other.sock", None, None)
        with pytest.raises(Problem) as failure:
            await r.sandbox.attach(other, lambda: FakeHypervisor(r.vm))
        assert failure.value.code is Code.CONFLICT


@virtual
async def test_a_pid_that_is_not_the_vmms_is_a_conflict() -> None:
    async with rig(vm=FakeVm(pid=1), attached=False) as r:
        with pytest.raises(Problem, match="pid 2 was given, pid 1 answers"):
            await r.sandbox.attach(Attachment("/run/s1.sock", 2, None), lambda: FakeHypervisor(r.vm))
        assert r.state.phase == "sized"
        assert not r.vm.connected


@virtual
async def test_a_vm_killed_in_the_middle_of_a_grow() -> None:
    async with rig() as r:
        r.vm.stall()
        growing = asyncio.create_task(r.put("c1", cpus("2")))
        await r.vm.stalled()
        r.vm.die()
        with pytest.raises(Problem) as failure:
            await growing
        assert failure.value.code is Code.HYPERVISOR_UNREACHABLE
        assert (r.state.phase, r.state.counts.containers) == ("unreachable", 0)


@virtual
async def test_unreachable_a_grow_fails_a_shrink_is_kept_and_coming_back_converges() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        r.vm.die()
        await r.pass_time(0.01)
        assert r.condition("Unreachable") is not None
        with pytest.raises(Problem) as failure:
            await r.put("c2", cpus("1"))
        assert (failure.value.code, failure.value.retryable) == (Code.HYPERVISOR_UNREACHABLE, True)
        await r.delete("c1")
        await r.pass_time(60)
        attempts = len(r.vm.called("connect"))
        assert 12 < attempts < 25  # pauses grow from a tenth of a second to five
        r.vm.back()
        await r.pass_time(6)
        assert (r.state.phase, r.plugged, r.condition("Unreachable")) == ("running", 1, None)


@virtual
async def test_a_vm_that_was_away_for_hours_is_taken_back() -> None:
    async with rig() as r:
        r.vm.die()
        await r.pass_time(2 * 3600)  # more than a thousand attempts: twice as long each time is no float any more
        assert r.state.phase == "unreachable"
        r.vm.back()
        await r.pass_time(6)
        assert r.state.phase == "running"


@virtual
async def test_a_vm_that_breaks_each_session_at_once_is_tried_ever_less_often() -> None:
    async with rig() as r:
        for _ in range(600):
            r.vm.drop()
            await r.pass_time(0.1)
        assert len(r.vm.called("connect")) < 25
        await r.pass_time(10)  # one that lasts makes good
        connects = len(r.vm.called("connect"))
        r.vm.drop()
        await r.pass_time(0.2)
        assert len(r.vm.called("connect")) == connects + 1


@virtual
async def test_a_guest_that_cries_for_nothing_is_looked_at_ever_less_often_and_logged_no_more() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        r.vm.guest = Guest.REFUSE
        await r.delete("c1", Patience(wait=0.1))
        before = len(r.vm.calls)
        with structlog.testing.capture_logs() as logged:
            for _ in range(10_000):
                r.vm.refuse("resmgr-vcpu-2")
                r.vm.reset()
                await r.pass_time(0.001)
        assert len(r.vm.calls) - before < 100
        assert len(logged) < 100
        await r.put("c2", cpus("3"))  # while it cries, who asks is served
        assert r.plugged >= 4
        r.vm.guest = Guest.COOPERATE
        await r.delete("c2", Patience(wait=10))
        assert (r.plugged, r.state.converged) == (1, True)


@virtual
async def test_removals_are_remembered_across_a_reconnect() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        r.vm.guest = Guest.IGNORE
        await r.delete("c1", Patience(wait=0.1))
        r.vm.drop()
        r.vm.guest_ejects("resmgr-vcpu-2")  # while nobody looks
        await r.pass_time(0.5)
        assert (r.state.phase, r.state.vcpus.plugged, r.state.vcpus.pending) == ("running", 2, 1)


@virtual
async def test_a_lost_vm_is_told_and_another_may_be_attached() -> None:
    process = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - stands in for the VMM
    vm = FakeVm(pid=process.pid)
    async with rig(vm=vm) as r:
        await r.put("c1", cpus("1"))
        process.kill()
        process.wait()
        vm.die()
        await r.pass_time(1)
        assert r.state.phase == "lost"
        assert r.condition("Lost") is not None
        with pytest.raises(Problem) as failure:
            await r.put("c2", cpus("1"))
        assert not failure.value.retryable
        await r.delete("c1")
        r.vm = FakeVm()
        assert (await r.attach()).phase == "running"


@virtual
async def test_on_hold_nothing_is_called_and_the_end_converges() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        assert (await r.sandbox.hold()).phase == "held"
        calls = len(r.vm.calls)
        with pytest.raises(Problem) as failure:
            await r.put("c2", cpus("1"))
        assert (failure.value.code, failure.value.retryable) == (Code.HELD, True)
        with pytest.raises(Problem, match="held"):
            await r.sandbox.reconcile(Patience())
        await r.delete("c1")
        await r.pass_time(60)
        assert len(r.vm.calls) == calls
        assert r.store.sandboxes["s1"].held
        r.sandbox.release()
        await r.pass_time(1)
        assert (r.state.phase, r.plugged, r.condition("Held")) == ("running", 1, None)


@virtual
async def test_a_hold_waits_for_the_call_under_way_and_fails_who_waits() -> None:
    async with rig(driver_timeout=60) as r:
        r.vm.stall()
        growing = asyncio.create_task(r.put("c1", cpus("2")))
        await r.vm.stalled()
        holding = asyncio.create_task(r.sandbox.hold())
        await r.pass_time(1)
        assert not holding.done()
        with pytest.raises(Problem, match="put on hold"):
            await growing
        r.vm.resume()
        await holding
        calls = len(r.vm.calls)
        await r.pass_time(10)
        assert len(r.vm.calls) == calls


@virtual
async def test_a_hold_that_cannot_be_had_in_time_is_not_held() -> None:
    async with rig('[resmgr]\ndeadline = "1s"\n', driver_timeout=60) as r:
        r.vm.stall()
        growing = asyncio.create_task(r.put("c1", cpus("2"), Patience(deadline=30)))
        await r.vm.stalled()
        with pytest.raises(Problem) as failure:
            await r.sandbox.hold()
        assert failure.value.code is Code.HYPERVISOR_TIMEOUT
        assert r.state.phase == "running"
        with pytest.raises(Problem):
            await growing
        r.vm.resume()


@virtual
async def test_foreign_vcpus_count_and_are_never_asked_to_leave() -> None:
    async with rig() as r:
        r.vm.plug_foreign(2)
        await r.pass_time(0.1)
        condition = r.condition("ForeignChange")
        assert condition is not None
        assert "1 vCPUs before, 2 now" in condition.message or "1 vCPUs before, 3 now" in condition.message
        await r.pass_time(60)
        assert (r.plugged, r.state.vcpus.plugged) == (3, 3)
        assert (await r.put("c1", cpus("2"))).sandbox.vcpus.plugged == 3
        assert r.vm.called("add_vcpus") == []


@virtual
async def test_what_somebody_else_takes_is_not_fought_over_until_the_next_operation() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        r.vm.unplug_foreign("resmgr-vcpu-2")
        await r.pass_time(60)
        assert (r.plugged, r.state.satisfied) == (2, False)
        assert r.condition("ForeignChange") is not None
        await r.sandbox.reconcile(Patience(wait=1))
        assert (r.plugged, r.condition("ForeignChange")) == (3, None)


@virtual
async def test_ours_do_not_go_for_those_of_others_until_the_next_operation() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        r.vm.plug_foreign()
        await r.pass_time(60)
        assert (r.plugged, r.state.surplus.vcpus, r.state.surplus.reason) == (4, 1, "grace")
        assert (r.condition("ForeignChange") is not None, r.condition("Surplus")) == (True, None)
        await r.put("c1", cpus("1"))
        await r.pass_time(60)
        assert (r.plugged, r.state.converged) == (2, True)
        r.vm.plug_foreign()
        await r.pass_time(60)
        await r.put("c1", cpus("2"))
        assert r.plugged == 3
        await r.sandbox.reconcile(Patience(wait=1))
        assert (r.plugged, r.state.converged) == (3, True)


@virtual
async def test_a_foreign_change_that_our_own_plug_reads_back_is_told() -> None:
    async with rig() as r:
        r.vm.stall()
        growing = asyncio.create_task(r.put("c1", cpus("2")))
        await r.vm.stalled()
        r.vm.plug_foreign()
        r.vm.resume()
        assert (await growing).sandbox.vcpus.plugged == 4
        assert r.condition("ForeignChange") is not None
        await r.put("c1", cpus("4"))
        assert r.condition("ForeignChange") is None


@virtual
async def test_detach_lets_go_and_a_new_attach_reads_back() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        await r.sandbox.detach()
        assert not r.vm.connected
        assert (r.state.phase, r.state.vcpus.plugged, r.plugged) == ("sized", 0, 3)
        assert (await r.attach()).vcpus.plugged == 3


@virtual
async def test_detaching_fails_who_waits() -> None:
    async with rig(driver_timeout=60) as r:
        r.vm.stall()
        growing = asyncio.create_task(r.put("c1", cpus("2")))
        await r.vm.stalled()
        await r.sandbox.detach()
        with pytest.raises(Problem, match="detached"):
            await growing
        assert r.state.counts.containers == 0


@virtual
async def test_static_mode_never_asks_the_hypervisor_for_anything() -> None:
    async with rig("[runtime]\nstatic_sandbox_resource_mgmt = true\n") as r:
        outcome = await r.put("c1", cpus("2"))
        assert (outcome.settled, outcome.sandbox.mode, outcome.sandbox.vcpus.desired) == (True, "static", 1)
        condition = r.condition("DemandExceedsSize")
        assert condition is not None
        assert condition.message == "the containers ask for 2 vCPUs, fixed at 1"
        await r.delete("c1", Patience(wait=1))
        assert r.condition("DemandExceedsSize") is None
        assert {call.name for call in r.vm.calls} == {"connect", "read"}


@virtual
async def test_a_machine_found_without_hotplug_is_static_from_then_on() -> None:
    async with rig(vm=FakeVm(vcpu_hotplug=False)) as r:
        outcome = await r.put("c1", cpus("2"))
        assert (outcome.settled, outcome.sandbox.mode) == (True, "static")
        assert r.condition("HotplugUnsupported") is not None


@virtual
async def test_the_boot_size_can_be_changed_until_a_vm_is_attached() -> None:
    async with rig(attached=False) as r:
        await r.put("c1", cpus("1"))
        await r.sandbox.register_again(make_plan(resources=b'{"cpu": {"quota": 300000}}'))
        assert (r.state.boot.vcpus, r.state.vcpus.desired) == (3, 3)
        await r.attach()
        with pytest.raises(Problem) as failure:
            await r.sandbox.register_again(make_plan())
        assert failure.value.code is Code.CONFLICT


@virtual
async def test_a_put_that_is_there_already_changes_nothing() -> None:
    async with rig() as r:
        await r.put("c1", cpus("2"))
        before = r.state.generation
        calls = len(r.vm.calls)
        outcome = await r.put("c1", b' {"cpu":{"period":100000,"quota":200000}}')
        assert (outcome.settled, outcome.created, r.state.generation) == (True, False, before)
        assert len(r.vm.calls) == calls


@virtual
async def test_what_is_not_there_cannot_be_updated_and_is_deleted_already() -> None:
    async with rig() as r:
        with pytest.raises(Problem) as failure:
            await r.patch("c1", b"{}")
        assert failure.value.code is Code.NOT_FOUND
        assert (await r.delete("c1")).settled


@virtual
async def test_after_it_was_forgotten_no_operation_touches_the_store() -> None:
    async with rig(driver_timeout=60) as r:
        r.vm.stall()
        first = asyncio.create_task(r.put("c1", cpus("2")))
        await r.vm.stalled()
        second = asyncio.create_task(r.put("c1", cpus("3")))
        await asyncio.sleep(0)
        await r.sandbox.forget()
        for operation in (first, second):
            with pytest.raises(Problem):
                await operation
        assert (r.store.sandboxes, r.store.containers) == ({}, {})


@virtual
async def test_sandboxes_do_not_wait_for_each_other() -> None:
    async with rig(driver_timeout=60) as hung, rig() as healthy:
        hung.vm.stall()
        stuck = asyncio.create_task(hung.put("c1", cpus("2")))
        await hung.vm.stalled()
        assert (await healthy.put("c1", cpus("2"))).settled
        hung.vm.resume()
        await stuck


@virtual
async def test_the_explanation_names_each_input() -> None:
    async with rig() as r:
        await r.put("a", cpus("1.5"))
        told = r.sandbox.explain()
        assert "default_vcpus = 1 (default)" in told.explain
        assert "a: quota 150000 / period 100000 = 1.5" in told.explain
        assert "1 + 1.5 = 2.5, rounded up once: 3" in told.explain
