"""Disks and nets through the manager and the durable store: races, late ends, and kill -9 at every commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypervisors.base import Device, DeviceKind
from hypervisors.ch_types import DiskConfig, NetConfig, RateLimiterConfig, TokenBucket
from hypervisors.fake import FakeVm, Guest
from kata_resmgr import view
from kata_resmgr.devices import AnySpec, Spec, State, read_record
from kata_resmgr.limits import Limits
from kata_resmgr.manager import SandboxSpec
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.store import StateUnavailable
from kata_resmgr.vm import Goal
from tests.sandbox.hosts import Machines, machines
from tests.virtual_time import virtual

DISK, NET = DeviceKind.DISK, DeviceKind.NET
NOW, LONG = Patience(), Patience(wait=9)
SLOW = Limits(ops_per_second=50)
FAST = Limits(ops_per_second=500)


@asynccontextmanager
async def host_with_vm(directory: Path, toml: str = "") -> AsyncIterator[tuple[Machines, FakeVm]]:
    (directory / "image").write_bytes(b"")
    async with machines(directory, f"[hypervisor.clh]\n{toml}") as host:
        vm = FakeVm(boot_vcpus=1, max_vcpus=4)
        vm.tells_changes = False
        host.listen(directory / "ch.sock", vm)
        await host.manager.put_sandbox("s1", SandboxSpec("clh"))
        await attach(host)
        yield host, vm


async def attach(host: Machines) -> None:
    await host.manager.attach("s1", str(host.directory / "ch.sock"), None, None)


def disk(host: Machines, name: str = "d1", limits: Limits | None = SLOW, **members: Any) -> AnySpec:  # noqa: ANN401
    return Spec(DiskConfig(id=name, path=str(host.directory / "image"), **members), limits)


def add(host: Machines, spec: AnySpec, patience: Patience = NOW) -> Awaitable[tuple[view.Device, bool]]:
    return host.manager.put_device("s1", spec, patience)


def remove(host: Machines, name: str = "d1", kind: DeviceKind = DISK, patience: Patience = NOW) -> Awaitable[None]:
    return host.manager.delete_device("s1", kind, name, patience)


def limit(host: Machines, limits: Limits, replace: bool = True, patience: Patience = NOW) -> Awaitable[view.Device]:
    return host.manager.limit_device("s1", DISK, "d1", limits, replace, patience)


def ops(size: int) -> RateLimiterConfig:
    return RateLimiterConfig(ops=TokenBucket(size=size, refill_time=1000))


def there(vm: FakeVm) -> dict[str, RateLimiterConfig | None]:
    return {name: device.limiter for name, device in vm.devices.items()}


def known(host: Machines) -> list[str]:
    return sorted(name for kind in DeviceKind for name in host.manager.devices("s1", kind))


def kept(host: Machines) -> dict[str, State]:
    """What a restart would find."""
    rows = host.store._db.execute("SELECT kind, id, record FROM device").fetchall()
    return {name: read_record(kind, record).state for kind, name, record in rows}


async def told(host: Machines) -> list[str]:
    lines = (await host.manager.events.lines(None, "s1")).splitlines()
    return [event["type"] for event in map(msgspec.json.decode, lines) if event["type"].startswith("device")]


async def refused(operation: Awaitable[object]) -> Problem:
    with pytest.raises(Problem) as caught:
        await operation
    return caught.value


async def converged(host: Machines) -> bool:
    return (await host.manager.wait_for("s1", Goal.CONVERGED, 200)).converged


@virtual
async def test_a_removal_is_repeated_in_its_rhythm_and_may_end_hours_later(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        vm.guest = Guest.IGNORE
        await remove(host)
        await asyncio.sleep(3 * 3600)
        assert 180 <= len(vm.called("start_removing_device")) <= 190  # after 1, 2, 5, 15 s, then each minute
        assert len(vm.called("read")) < 2000
        vm.guest_ejects("d1")
        assert await converged(host)
        assert known(host) == []


@virtual
async def test_a_removal_that_the_vmm_refuses_goes_on(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        vm.guest = Guest.REFUSE
        await remove(host, patience=Patience(wait=5))
        assert known(host) == ["d1"]
        vm.guest = Guest.COOPERATE
        assert await converged(host)
        assert there(vm) == {}


@virtual
async def test_a_refusal_leaves_nothing(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        vm.refuses_devices = True
        for _ in range(100):
            problem = await refused(add(host, disk(host)))
            assert (problem.code, "refused by the test" in problem.detail) == (Code.HYPERVISOR_REFUSED, True)
            assert (known(host), kept(host), there(vm)) == ([], {}, {})
        vm.refuses_devices, vm.lying_adds = False, True
        assert "is not there" in (await refused(add(host, disk(host)))).detail
        vm.lying_adds = False
        assert (await add(host, disk(host)))[1]
        assert await told(host) == ["device.added"]


@virtual
async def test_it_is_recorded_before_it_is_sent(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        host.store.lives = 0
        with pytest.raises(StateUnavailable):
            await add(host, disk(host))
        assert (vm.called("add_device"), known(host)) == ([], [])
        host.store.lives = None
        vm.stall("add_device")
        adding = asyncio.ensure_future(add(host, disk(host)))
        await vm.stalled()
        assert kept(host) == {"d1": State.ADDING}
        vm.resume()
        await adding


@pytest.mark.parametrize("carry_out_first", [True, False])
@virtual
async def test_what_comes_after_the_deadline_goes_again(carry_out_first: bool, short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        vm.stall("add_device", carry_out_first=carry_out_first)
        adding = asyncio.ensure_future(add(host, disk(host), Patience(deadline=1)))
        problem = await refused(adding)
        assert problem.code is Code.HYPERVISOR_TIMEOUT
        assert (await refused(add(host, disk(host)))).code is Code.SHRINK_PENDING
        vm.resume()
        assert await converged(host)
        assert (known(host), there(vm), kept(host)) == ([], {}, {})
        assert (await add(host, disk(host)))[1]


@virtual
async def test_one_that_somebody_else_adds_at_the_same_moment_stays(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        vm.stall("add_device")
        adding = asyncio.ensure_future(add(host, disk(host)))
        await vm.stalled()
        vm.devices["d1"] = Device("d1", DISK, "0000:00:09.0")
        vm.resume()
        assert (await refused(adding)).code is Code.HYPERVISOR_REFUSED
        await asyncio.sleep(100)
        assert (list(vm.devices), known(host), kept(host)) == (["d1"], [], {})
        assert vm.called("start_removing_device") == []


@virtual
async def test_a_caller_that_is_cut_off_leaves_nothing_half_done(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        vm.stall("add_device", carry_out_first=True)
        adding = asyncio.ensure_future(add(host, disk(host)))
        await vm.stalled()
        adding.cancel()
        await asyncio.wait([adding])
        vm.resume()
        assert await converged(host)
        assert (known(host), there(vm)) == ([], {})


@virtual
async def test_a_burst_without_its_rate_is_told_also_after_a_restart(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host, limits=Limits(burst_bytes=100)))
        assert there(vm) == {"d1": None}
        assert host.conditions("s1") == [("BurstWithoutRate", "disk/d1")]
        await host.restart()
        assert host.conditions("s1") == [("BurstWithoutRate", "disk/d1")]
        await remove(host, patience=LONG)
        assert host.conditions("s1") == []


@virtual
async def test_limits_are_the_configurations_where_the_caller_has_none(short_tmp: Path) -> None:
    toml = "net_rate_limiter_ops_max_rate = 100\n"
    async with host_with_vm(short_tmp, toml) as (host, vm):
        device, _ = await add(host, Spec(NetConfig(id="n1", tap="t")))
        assert (device.limits, there(vm)) == (Limits(ops_per_second=100), {"n1": ops(100)})
        await add(host, Spec(NetConfig(id="n2", tap="u"), Limits()))
        assert there(vm)["n2"] is None


@virtual
async def test_other_limits_take_it_out_and_add_it_again(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        assert (await refused(limit(host, FAST, replace=False))).code is Code.NOT_SUPPORTED_LIVE
        assert (await limit(host, SLOW, replace=False)).limits == SLOW
        assert (await limit(host, FAST)).limits == FAST
        assert (there(vm), kept(host)) == ({"d1": ops(500)}, {"d1": State.PRESENT})
        assert (await limit(host, Limits())).limits == Limits()
        assert there(vm) == {"d1": None}
        assert await told(host) == ["device.added", "device.limits", "device.limits"]
        vm.guest = Guest.IGNORE
        problem = await refused(limit(host, FAST, patience=Patience(deadline=2)))
        assert (problem.code, problem.retryable) == (Code.SHRINK_PENDING, True)
        vm.guest = Guest.COOPERATE  # it lets go late, and gets back what it had
        assert await converged(host)
        assert (there(vm), host.manager.devices("s1", DISK)["d1"].limits) == ({"d1": None}, Limits())


@virtual
async def test_a_disk_that_is_not_taken_with_other_limits_returns_with_its_own(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        vm.refuses_devices = True
        assert (await refused(limit(host, FAST))).code is Code.HYPERVISOR_REFUSED
        await asyncio.sleep(0.5)
        assert (there(vm), known(host)) == ({}, ["d1"])
        assert host.conditions("s1") == [("LimitsDiffer", "disk/d1")]
        vm.refuses_devices = False
        assert await converged(host)
        assert (there(vm), host.conditions("s1")) == ({"d1": ops(50)}, [])
        assert host.manager.devices("s1", DISK)["d1"].limits == SLOW


@virtual
async def test_one_that_is_removed_while_it_returns_is_not_left_behind(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        vm.refuses_devices = True
        await refused(limit(host, FAST))
        vm.refuses_devices = False
        vm.stall("add_device", carry_out_first=True)
        await vm.stalled()  # it is being added again, by the loop alone
        await remove(host)
        vm.resume()
        assert await converged(host)
        assert (there(vm), known(host), kept(host)) == ({}, [], {})


@virtual
async def test_while_held_nothing_is_sent_and_a_removal_is_kept_for_later(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        await host.manager.hold("s1")
        calls = len(vm.calls)
        assert (await refused(add(host, disk(host, "d2")))).code is Code.HELD
        assert (await refused(limit(host, FAST))).code is Code.HELD
        assert (await host.manager.device("s1", DISK, "d1")).counters is None
        await remove(host, patience=Patience(wait=1))
        assert len(vm.calls) == calls
        await host.manager.release("s1")
        assert await converged(host)
        assert there(vm) == {}


@virtual
async def test_out_of_reach_an_addition_fails_at_once_and_a_removal_waits(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        vm.die()
        await asyncio.sleep(0.05)
        assert (await refused(add(host, disk(host, "d2")))).code is Code.HYPERVISOR_UNREACHABLE
        await remove(host)
        vm.back()
        await asyncio.sleep(10)
        assert (there(vm), known(host)) == ({}, [])


@virtual
async def test_an_addition_whose_connection_breaks_is_undone(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        vm.stall("add_device", carry_out_first=True)
        adding = asyncio.ensure_future(add(host, disk(host)))
        await vm.stalled()
        assert list(vm.devices) == ["d1"]
        vm.drop()
        assert (await refused(adding)).code is Code.HYPERVISOR_UNREACHABLE
        await asyncio.sleep(10)
        assert (there(vm), known(host), kept(host)) == ({}, [], {})


@virtual
async def test_a_detached_vm_keeps_them_and_they_are_no_longer_ours(short_tmp: Path) -> None:
    async with host_with_vm(short_tmp) as (host, vm):
        await add(host, disk(host))
        await host.manager.detach("s1")
        assert (known(host), kept(host), list(vm.devices)) == ([], {}, ["d1"])
        assert (await refused(add(host, disk(host)))).code is Code.CONFLICT  # no VM
        await attach(host)
        assert "not added here" in (await refused(add(host, disk(host)))).detail


# Kill -9 at every commit of a life with devices

Step = tuple[str, Callable[[Machines], Awaitable[object]], dict[str, RateLimiterConfig | None]]
NET_1 = Spec(NetConfig(id="n1", tap="t"), SLOW)
STEPS: list[Step] = [
    ("add a disk", lambda host: add(host, disk(host)), {"d1": ops(50)}),
    ("add a net", lambda host: add(host, NET_1), {"d1": ops(50), "n1": ops(50)}),
    ("other limits", lambda host: limit(host, FAST), {"d1": ops(500), "n1": ops(50)}),
    ("remove the net", lambda host: remove(host, "n1", NET, LONG), {"d1": ops(500)}),
    ("no limits", lambda host: limit(host, Limits()), {"d1": None}),
    ("remove the disk", lambda host: remove(host), {}),
]


@pytest.mark.parametrize("at_once", [False, True])
@virtual
async def test_killed_at_any_commit(at_once: bool, short_tmp: Path) -> None:
    for lives in count(int(at_once)):
        directory = short_tmp / str(lives)
        directory.mkdir()
        async with host_with_vm(directory) as (host, vm):
            if not await killed(host, vm, lives, at_once):
                break
    assert lives > 12  # the whole life has been led


async def killed(host: Machines, vm: FakeVm, lives: int, at_once: bool) -> bool:
    """Lead that life; whether the daemon was killed before its end, and the next one made good of it."""
    host.store.at_once, host.store.lives = at_once, lives
    answered: dict[str, RateLimiterConfig | None] = {}
    for life_step in STEPS:
        name, step, attempted = life_step
        try:
            await step(host)
        except Problem:
            break
        if host.store.dead:
            break
        answered = attempted
    else:
        return False
    await host.restart()
    assert await converged(host), name
    assert there(vm) in (answered, attempted), name
    assert known(host) == sorted(vm.devices), name
    assert kept(host) == dict.fromkeys(vm.devices, State.PRESENT), name
    assert host.conditions("s1") == [], name
    assert (await add(host, disk(host, "d9")))[1], name
    return True
