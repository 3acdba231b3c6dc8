"""A daemon that is killed, and the next one: what was answered is there, what was not is wholly done or undone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from hypervisors.base import Accelerator, Listener, Machine
from hypervisors.fake import Call, FakeHypervisor, FakeVm, Guest
from kata_resmgr.manager import ADOPTED_AT_ONCE, SandboxSpec
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import LOST_KEPT, Patience
from kata_resmgr.store import StateUnavailable
from kata_resmgr.vm import Goal
from tests.sandbox.hosts import Machines, machines
from tests.sandbox.rig import cpus
from tests.virtual_time import VirtualLoop, virtual

T = TypeVar("T")

NOW = Patience()
SOON = Patience(wait=5)


def put(host: Machines, name: str, size: float, patience: Patience = NOW) -> Awaitable[Any]:
    return host.manager.put_container("s1", name, cpus(size), patience)


def sizes(host: Machines, name: str = "s1") -> tuple[int, int, int]:
    vcpus = host.manager.sandbox(name).vcpus
    return vcpus.desired, vcpus.plugged, vcpus.pending


@virtual
async def test_a_restart_is_invisible(short_tmp: Path) -> None:
    async with machines(short_tmp, "[hypervisor.qemu]\ndefault_vcpus = 0.5\n") as host:
        vm = await host.boot("s1", FakeVm(max_vcpus=6))
        await put(host, "a", 1.5)
        await host.manager.resize("s1", cpus("2.5"), NOW)
        await host.manager.put_sandbox("s2", SandboxSpec("qemu", resources=cpus("2")))
        before = host.manager.sandbox("s1"), host.manager.sandbox("s2"), host.manager.explain("s1"), host.table("s1")
        calls = len(vm.calls)
        await host.restart()
        after = host.manager.sandbox("s1"), host.manager.sandbox("s2"), host.manager.explain("s1"), host.table("s1")
        for state, earlier in zip(after[:2], before[:2], strict=True):
            assert msgspec.to_builtins(state) | {"generation": 0} == msgspec.to_builtins(earlier) | {"generation": 0}
        assert after[2:] == before[2:]
        await asyncio.sleep(60)
        assert [call.name for call in list(vm.calls)[calls:]] == ["close", "connect", "read"]
        await put(host, "b", 2)
        assert sizes(host) == (4, 4, 0)


@virtual
async def test_what_was_registered_stays_as_it_was_registered(short_tmp: Path) -> None:
    async with machines(short_tmp, "[hypervisor.qemu]\ndefault_vcpus = 2\ndefault_maxvcpus = 4\n") as host:
        spec = SandboxSpec(
            "qemu",
            {"io.katacontainers.config.hypervisor.default_vcpus": "3", "io.kubernetes.cri.container-type": "sandbox"},
            cpus("1"),
        )
        await host.manager.put_sandbox("s1", spec)
        conditions = host.manager.sandbox("s1").conditions
        assert [condition.type for condition in conditions] == ["AnnotationIgnored"]
        await host.restart()
        assert host.manager.sandbox("s1").conditions == conditions  # since then, not since the restart
        assert not (await host.manager.put_sandbox("s1", spec)).created
        assert host.manager.sandbox("s1").conditions == conditions
        await host.boot("s2")
        await host.manager.detach("s2")
        await host.restart()
        with pytest.raises(Problem, match="a VM has been attached, so the size stays"):
            await host.manager.put_sandbox("s2", replace(spec))


# Kill -9 at every commit of a pod's life

STEPS: list[tuple[str, Callable[[Machines], Awaitable[Any]], dict[str, float] | None]] = [
    ("create a", lambda host: put(host, "a", 1), {"a": 1}),
    ("create b", lambda host: put(host, "b", 2), {"a": 1, "b": 2}),
    ("grow a", lambda host: host.manager.patch_container("s1", "a", cpus(2), NOW), {"a": 2, "b": 2}),
    ("delete b", lambda host: host.manager.delete_container("s1", "b", SOON), {"a": 2}),
    ("hold", lambda host: host.manager.hold("s1"), None),
    ("shrink a, held", lambda host: put(host, "a", 1), {"a": 1}),
    ("release", lambda host: host.manager.release("s1"), None),
    (
        "whole table",
        lambda host: host.manager.put_containers("s1", {"c": msgspec.Raw(cpus(1)), "d": msgspec.Raw(cpus(3))}, NOW),
        {"c": 1, "d": 3},
    ),
    ("delete d", lambda host: host.manager.delete_container("s1", "d", NOW), {"c": 1}),
    ("converge", lambda host: host.manager.reconcile("s1", SOON), None),
]


def as_sizes(table: dict[str, Any]) -> dict[str, float]:
    return {name: resources["cpu"]["quota"] / 100_000 for name, resources in table.items()}


@pytest.mark.parametrize("at_once", [False, True])
@virtual
async def test_killed_at_any_commit(at_once: bool, short_tmp: Path) -> None:
    for lives in count(int(at_once)):
        directory = short_tmp / str(lives)
        directory.mkdir()
        async with machines(directory) as host:
            if not await killed(host, lives, at_once):
                break
    assert lives > 15  # the whole life has been led


async def killed(host: Machines, lives: int, at_once: bool) -> bool:
    """Lead that life; whether the daemon was killed before its end, and the next one made good of it."""
    vm = await host.boot("s1")
    host.store.at_once, host.store.lives = at_once, lives
    answered: dict[str, float] = {}
    held = False
    for name, step, table in STEPS:
        attempted = answered if table is None else table
        try:
            await step(host)
        except StateUnavailable:
            if not at_once:  # refused: nothing has changed, in memory either
                assert as_sizes(host.table("s1")) == answered, name
                assert host.manager.sandbox("s1").phase == ("held" if held else "running"), name
            break
        if host.store.dead:  # what nobody waits for was not kept
            break
        held = (held or name == "hold") and name != "release"
        answered = attempted
    else:
        return False
    await host.restart()
    await must_be_made_good(host, vm, (answered, attempted), name, held)
    return True


async def must_be_made_good(
    host: Machines, vm: FakeVm, tables: tuple[dict[str, float], ...], name: str, held: bool
) -> None:
    """The next daemon goes on from one of these *tables*; *name* is the step in which the last one was killed."""
    assert as_sizes(host.table("s1")) in tables, name
    if name not in ("hold", "release"):
        assert (host.manager.sandbox("s1").phase == "held") == held, name
    await host.manager.release("s1")
    assert (await host.manager.wait_for("s1", Goal.CONVERGED, 30)).converged, name
    assert len(vm.vcpus) == host.manager.sandbox("s1").vcpus.desired, name
    await put(host, "z", 1)
    assert sizes(host)[0] == len(vm.vcpus), name


# Kill -9 between any two turns of the event loop


class Hesitant(FakeHypervisor):
    """What it is asked for is some turns on its way, done, and known some turns later."""

    async def _call(self, call: Call, carry_out: Callable[[], T]) -> T:
        for _ in range(2):
            await asyncio.sleep(0)
        answer = await super()._call(call, carry_out)
        for _ in range(2):
            await asyncio.sleep(0)
        return answer


@virtual
async def test_killed_at_any_await(short_tmp: Path) -> None:
    for turns in count():
        directory = short_tmp / str(turns)
        directory.mkdir()
        async with machines(directory) as host:
            host.driver = Hesitant
            if not await killed_after(host, turns):
                break
    assert turns > 50  # the whole life has been led


async def killed_after(host: Machines, turns: int) -> bool:
    """Lead that life; whether it was still led after so many turns, when everything stopped."""
    vm = await host.boot("s1")
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    led: list[tuple[str, dict[str, float], dict[str, float], bool]] = [("", {}, {}, False)]
    at_the_end: list[tuple[str, dict[str, float], dict[str, float], bool]] = []
    left = turns

    def turn() -> None:
        nonlocal left
        left -= 1
        if left < 0:  # from now on nothing is kept, and nothing is sent
            loop.at_each_turn(None)
            at_the_end.append(led[-1])
            host.store.lives = 0
            vm.die()

    async def lead() -> None:
        answered: dict[str, float] = {}
        held = False
        for name, step, table in STEPS:
            attempted = answered if table is None else table
            led.append((name, answered, attempted, held))
            await step(host)
            held = (held or name == "hold") and name != "release"
            answered = attempted

    loop.at_each_turn(turn)
    with suppress(Problem):
        await lead()
    loop.at_each_turn(None)
    if not at_the_end:
        return False
    await host.kill()
    vm.back()
    host.start()
    await host.manager.adopt()
    name, answered, attempted, held = at_the_end[0]
    await must_be_made_good(host, vm, (answered, attempted), name, held)
    return True


@virtual
async def test_a_grow_that_was_not_answered_is_undone_and_what_it_plugged_leaves(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 1)
        vm.stall(carry_out_first=True)
        growing = asyncio.ensure_future(put(host, "b", 3))
        await vm.stalled()
        host.store.lives = 0
        await host.kill()
        with pytest.raises(Problem):
            await growing
        host.start()
        await host.manager.adopt()
        assert as_sizes(host.table("s1")) == {"a": 1}
        assert sizes(host) == (2, 5, 0)
        await asyncio.sleep(4.9)  # a surplus like any other: it has its delay
        assert (sizes(host), host.manager.sandbox("s1").surplus.reason) == ((2, 5, 0), "grace")
        await asyncio.sleep(0.2)
        assert sizes(host) == (2, 2, 0)


# Removals


@virtual
async def test_a_removal_is_carried_over_and_completed(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 2)
        vm.guest = Guest.IGNORE
        await host.manager.delete_container("s1", "a", Patience(wait=4))
        assert sizes(host) == (1, 3, 2)
        sent = len(vm.called("start_removing_vcpus"))
        await host.restart()
        assert (sizes(host), host.manager.sandbox("s1").surplus.reason) == ((1, 3, 2), "guest-silent")
        assert len(vm.called("start_removing_vcpus")) == sent  # its next time has not come
        await put(host, "b", 1)  # what is leaving does not serve it
        assert sizes(host) == (2, 4, 2)
        vm.guest_ejects()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await host.manager.wait_for("s1", Goal.CONVERGED, 1)).converged
        assert sizes(host) == (2, 2, 0)


@virtual
async def test_a_removal_that_ended_while_nobody_looked(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 2)
        vm.guest = Guest.IGNORE
        await host.manager.delete_container("s1", "a", Patience(wait=0.1))
        await host.kill()
        vm.guest_ejects()
        host.start()
        await host.manager.adopt()
        assert sizes(host) == (1, 1, 0)
        assert host.conditions("s1") == []  # nobody else did it
        await host.restart()
        assert sizes(host) == (1, 1, 0)


@virtual
async def test_a_removal_that_cannot_be_recorded_is_not_sent(short_tmp: Path) -> None:
    async with machines(short_tmp, '[resmgr]\nshrink_delay = "1s"\n') as host:
        vm = await host.boot("s1")
        await put(host, "a", 2)
        await host.manager.delete_container("s1", "a", NOW)
        host.store.lives = 0
        await asyncio.sleep(60)
        assert (len(vm.vcpus), vm.called("start_removing_vcpus")) == (3, [])
        assert sizes(host) == (1, 3, 0)
        host.store.lives = None
        await asyncio.sleep(1.1)
        assert sizes(host) == (1, 1, 0)


@virtual
async def test_under_tcg_nothing_is_plugged_after_a_removal_that_an_earlier_daemon_made(short_tmp: Path) -> None:
    async with machines(short_tmp, '[resmgr]\ntcg_unplug = "once"\n') as host:
        vm = await host.boot("s1", FakeVm(accelerator=Accelerator.TCG))
        await put(host, "a", 1)
        assert await host.manager.delete_container("s1", "a", SOON)
        await host.restart()
        with pytest.raises(Problem) as failure:
            await put(host, "a", 1)
        assert failure.value.code is Code.NOT_SUPPORTED
        assert len(vm.vcpus) == 1


@virtual
async def test_a_table_that_could_not_be_read_whole_takes_nothing_from_its_vm(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 1)
        await put(host, "b", 2)
        await host.kill()
        host.start()
        with host.store._transaction() as db:
            db.execute("UPDATE container SET resources = x'00' WHERE id = 'b'")
        await host.manager.adopt()
        await asyncio.sleep(3000)
        assert (host.store.quarantined, list(host.table("s1")), len(vm.vcpus)) == (1, ["a"], 4)
        await put(host, "b", 1, SOON)  # the shim has said it again: nothing is kept back any more
        assert sizes(host) == (3, 3, 0)


# Which VM it is


@virtual
async def test_another_vm_at_the_socket_is_not_adopted(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 1)
        await host.kill()
        vm.identity = "another"
        host.start()
        await host.manager.adopt()
        state = host.manager.sandbox("s1")
        assert state.phase == "unreachable"
        assert "another VM answers" in next(c.message for c in state.conditions if c.type == "Unreachable")
        with pytest.raises(Problem) as failure:
            await put(host, "b", 3)
        assert (failure.value.code, failure.value.retryable) == (Code.HYPERVISOR_UNREACHABLE, True)
        await host.manager.delete_container("s1", "a", NOW)
        await asyncio.sleep(600)
        assert {call.name for call in list(vm.calls)[-4:]} == {"connect", "read", "close"}  # looked at, never touched


@virtual
async def test_a_vm_that_comes_back_later_is_adopted_then(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 1)
        vm.busy = True
        await host.restart()
        assert host.manager.sandbox("s1").phase == "unreachable"
        await host.manager.delete_container("s1", "a", NOW)
        vm.busy = False
        await asyncio.sleep(20)
        assert (host.manager.sandbox("s1").phase, len(vm.vcpus)) == ("running", 1)


@virtual
async def test_a_lost_vm_is_kept_for_an_hour_across_restarts(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - stands in for the VMM
        vm = await host.boot("s1", FakeVm(pid=process.pid))
        await put(host, "a", 1)
        await host.kill()
        process.kill()
        process.wait()
        vm.die()
        host.start()
        await host.manager.adopt()
        assert host.manager.sandbox("s1").phase == "lost"
        with pytest.raises(Problem) as failure:
            await put(host, "b", 1)
        assert (failure.value.code, failure.value.retryable) == (Code.HYPERVISOR_UNREACHABLE, False)
        await asyncio.sleep(LOST_KEPT / 2)
        await host.restart()
        assert (host.manager.sandbox("s1").phase, list(host.table("s1"))) == ("lost", ["a"])
        await asyncio.sleep(LOST_KEPT / 2 - 1)
        assert host.manager.sandbox("s1").phase == "lost"
        await asyncio.sleep(2)
        assert host.manager.sandboxes() == []
        await host.restart()
        assert host.manager.sandboxes() == []


@virtual
async def test_a_lost_sandbox_with_a_new_vm_is_not_forgotten(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - stands in for the VMM
        vm = await host.boot("s1", FakeVm(pid=process.pid))
        process.kill()
        process.wait()
        vm.die()
        await asyncio.sleep(1)
        assert host.manager.sandbox("s1").phase == "lost"
        vm.back()
        vm.pid = os.getpid()
        await host.manager.attach("s1", None, None, None)
        await asyncio.sleep(2 * LOST_KEPT)
        assert host.manager.sandbox("s1").phase == "running"
        await host.restart()
        assert host.manager.sandbox("s1").phase == "running"


@virtual
async def test_a_hold_goes_on(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        await put(host, "a", 1)
        await host.manager.hold("s1")
        calls = len(vm.calls)
        await host.restart()
        assert (host.manager.sandbox("s1").phase, host.conditions("s1")) == ("held", [("Held", "hold")])
        await host.manager.delete_container("s1", "a", NOW)
        await asyncio.sleep(60)
        assert {call.name for call in list(vm.calls)[calls:]} == {"close"}
        await host.manager.release("s1")
        await asyncio.sleep(6)
        assert (host.manager.sandbox("s1").phase, sizes(host)) == ("running", (1, 1, 0))


@virtual
async def test_an_attachment_that_was_not_answered_is_undone(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        await host.manager.put_sandbox("s1", SandboxSpec("qemu"))
        await put(host, "a", 3)
        vm = FakeVm()
        host.run("s1", vm)
        for lives in (0, 1):
            host.store.lives = lives
            with pytest.raises(Problem) as failure:
                await host.manager.attach("s1", None, None, None)
            assert failure.value.code is Code.STATE_UNAVAILABLE
            assert {call.name for call in vm.calls} <= {"connect", "read", "close"}
            await host.restart()
            assert host.manager.sandbox("s1").phase == "sized"
        await host.manager.attach("s1", None, None, None)
        await asyncio.sleep(0.1)
        assert len(vm.vcpus) == 4


# Many


@virtual
async def test_what_cannot_be_restored_holds_up_nobody(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        await host.boot("s1")
        await host.boot("s2")
        await host.kill()
        host.start()
        with host.store._transaction() as db:
            row = json.loads(db.execute("SELECT record FROM sandbox WHERE id = 's1'").fetchone()[0])
            row["annotations"] = {"io.kubernetes.cri.sandbox-memory": "many"}
            db.execute("UPDATE sandbox SET record = ? WHERE id = 's1'", (json.dumps(row),))
        await host.manager.adopt()
        assert [sandbox.id for sandbox in host.manager.sandboxes()] == ["s2"]
        assert host.store.quarantined == 1
        await host.restart()
        assert [sandbox.id for sandbox in host.manager.sandboxes()] == ["s2"]


class SlowToAnswer(FakeHypervisor):
    """Connecting takes a while, and how many are at it is counted."""

    now = most = 0

    async def connect(self, listener: Listener) -> Machine:
        kind = type(self)
        kind.now += 1
        kind.most = max(kind.most, kind.now)
        await asyncio.sleep(0.2)
        kind.now -= 1
        return await super().connect(listener)


@virtual
async def test_two_hundred_vms_are_reached_side_by_side_but_not_all_at_once(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        for number in range(200):
            await host.boot(f"s{number}")
        host.driver = SlowToAnswer
        began = asyncio.get_running_loop().time()
        await host.restart()
        assert {sandbox.phase for sandbox in host.manager.sandboxes()} == {"running"}
        assert SlowToAnswer.most == ADOPTED_AT_ONCE
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.2 * 4)  # 200 by 64


@virtual
async def test_a_hung_vm_holds_the_start_up_for_a_second_at_most(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        hung, *_ = [await host.boot(f"s{number}") for number in range(5)]
        await host.kill()
        hung.stall()
        host.start()
        began = asyncio.get_running_loop().time()
        await host.manager.adopt()
        assert asyncio.get_running_loop().time() - began == 1
        assert [sandbox.phase for sandbox in host.manager.sandboxes()] == ["unreachable", *["running"] * 4]
        hung.resume()
        await asyncio.sleep(1)
        assert host.manager.sandbox("s0").phase == "running"


# What cannot be written


@virtual
async def test_a_sandbox_that_cannot_be_kept_is_not_there(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        host.store.lives = 0
        with pytest.raises(StateUnavailable):
            await host.manager.put_sandbox("s1", SandboxSpec("qemu"))
        assert (host.manager.sandboxes(), host.has_directory("s1")) == ([], False)
        host.store.lives = None
        await host.boot("s1")
        host.store.lives = 0
        for refused in (host.manager.delete_sandbox("s1"), host.manager.detach("s1")):
            with pytest.raises(StateUnavailable):
                await refused
        assert host.manager.sandbox("s1").phase == "running"


@virtual
async def test_a_grow_that_can_only_be_begun_is_undone_everywhere(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        vm = await host.boot("s1")
        host.store.lives = 0
        with pytest.raises(StateUnavailable):
            await put(host, "a", 2)
        assert (vm.called("add_vcpus"), host.table("s1")) == ([], {})
        host.store.lives = 1  # its beginning can be written, its end cannot
        with pytest.raises(StateUnavailable):
            await put(host, "a", 2)
        assert (host.table("s1"), sizes(host)) == ({}, (1, 3, 0))
        host.store.lives = None
        await asyncio.sleep(6)
        assert sizes(host) == (1, 1, 0)


@virtual
async def test_deleted_in_the_middle_of_a_hold_it_does_not_come_back(short_tmp: Path) -> None:
    async with machines(short_tmp) as host:
        for turns in range(8):
            await host.boot("s1")
            holding = asyncio.ensure_future(host.manager.hold("s1"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.gather(holding, host.manager.delete_sandbox("s1"), return_exceptions=True)
            await host.restart()
            assert host.manager.sandboxes() == [], turns
            host.unlisten()
