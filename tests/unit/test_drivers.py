"""Each sandbox's VM by the driver of its hypervisor, and a Cloud Hypervisor of one on the fake wire."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kata_resmgr import config
from kata_resmgr.drivers import Drivers
from kata_resmgr.host import Host
from kata_resmgr.ledger import registered
from kata_resmgr.limits import Limits
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.sqlite_store import SqliteStore
from kata_resmgr.store import MemoryStore
from kata_resmgr.vmm import cloud_hypervisor
from tests.drivers.ch_rig import MIB, RELEASES, must_be_valid
from tests.examples import resources
from tests.fakes.ch_vmm import Vmm
from tests.fakes.cloud_hypervisor import CloudHypervisorServer

DEFAULT = config.load(Path(os.devnull), Host(cpus=8, memory=16384))


@asynccontextmanager
async def clh_sandbox(directory: Path, release: int = 54) -> AsyncIterator[tuple[ResourceManager, Vmm]]:
    """The sandbox s1 with its VM on the fake wire; what it shrinks, it shrinks at once."""
    file = directory / "config.toml"
    file.write_text(f'[daemon]\nsocket = "{directory}/api.sock"\n[resmgr]\nshrink_delay = "0"\n')
    drivers = Drivers()
    manager = ResourceManager(config.load(file, Host(cpus=8, memory=16384)), MemoryStore(), drivers.open)
    sandbox = (await manager.put_sandbox("s1", SandboxSpec(hypervisor="clh"))).sandbox
    vm = msgspec.to_builtins(sandbox.vmm)["config"]
    must_be_valid("vm.create", {"payload": {}, **vm})
    with CloudHypervisorServer(directory / "ch", vm, release=release) as server:
        await manager.attach("s1", str(server.path), None, None)
        try:
            yield manager, server.vmm
        finally:
            server.vmm.resume_answers()
            await manager.close()
            server.http.wait_until_free()
    await drivers.close()


async def test_eight_grows_by_acpi_and_no_more(short_tmp: Path) -> None:
    async with clh_sandbox(short_tmp) as (manager, vmm):
        for pieces in range(1, 9):
            await manager.put_container("s1", "c1", resources(limit=pieces * 128 * MIB), Patience())
        with pytest.raises(Problem) as refusal:
            await manager.patch_container("s1", "c1", resources(limit=9 * 128 * MIB), Patience())
        assert refusal.value.code is Code.MEMORY_SLOTS_EXHAUSTED
        assert manager.sandbox("s1").memory.plugged == (2048 + 8 * 128) * MIB

        await manager.delete_container("s1", "c1", Patience(wait=0.05))

        assert manager.sandbox("s1").surplus.reason == "acpi-memory"
        assert len(vmm.bodies("vm.resize")) == 8


async def test_a_queue_count_holds_vcpus(short_tmp: Path) -> None:
    async with clh_sandbox(short_tmp) as (manager, vmm):
        await manager.put_container("s1", "c1", resources(quota=250_000), Patience())
        vmm.config["disks"] = [{"id": "foreign", "num_queues": 3}]
        await manager.reconcile("s1", Patience())

        await manager.delete_container("s1", "c1", Patience(wait=0.05))
        vmm.eject_vcpus()
        await manager.reconcile("s1", Patience())

        held = manager.sandbox("s1")
        assert (held.vcpus.plugged, held.vcpus.desired) == (3, 1)
        assert held.surplus.reason == "queue-floor"
        assert [body["desired_vcpus"] for body in vmm.bodies("vm.resize")] == [4, 3]


@pytest.mark.parametrize("release", RELEASES)
async def test_a_cloud_hypervisor_grows(short_tmp: Path, release: int) -> None:
    async with clh_sandbox(short_tmp, release) as (manager, vmm):
        attached = manager.sandbox("s1")
        assert (attached.phase, attached.vcpus.plugged) == ("running", 1)
        _, outcome = await manager.put_container("s1", "c1", resources(quota=250_000), Patience())
        assert (outcome.sandbox.vcpus.plugged, vmm.vcpus) == (4, 4)
        with pytest.raises(Problem) as refusal:
            await manager.attach("s1", str(short_tmp / "config.toml"), None, None)
        assert refusal.value.code is Code.INVALID_PATH


@pytest.mark.parametrize("release", RELEASES)
async def test_what_is_leaving_is_waited_for_before_it_is_plugged_again(short_tmp: Path, release: int) -> None:
    """4 -> 2 -> 4 vCPUs with a guest that is slow; memory is added, and never asked back."""
    large, small = resources(quota=250_000, limit=256 * MIB), resources(quota=50_000, limit=128 * MIB)
    async with clh_sandbox(short_tmp, release) as (manager, vmm):
        await manager.put_container("s1", "c1", large, Patience())
        _, shrunk = await manager.patch_container("s1", "c1", small, Patience(wait=0.05))
        assert (shrunk.settled, shrunk.sandbox.vcpus.pending) == (False, 2)

        again = asyncio.create_task(manager.patch_container("s1", "c1", large, Patience()))
        await asyncio.sleep(0)
        vmm.eject_vcpus()
        _, grown = await again

        assert (grown.sandbox.vcpus.plugged, vmm.vcpus) == (4, 4)
        assert grown.sandbox.memory.plugged == (2048 + 256) * MIB
        sent = vmm.bodies("vm.resize")
        assert [body["desired_vcpus"] for body in sent if "desired_vcpus" in body][-1] == 4
        assert [body["desired_ram"] // MIB for body in sent if "desired_ram" in body] == [2304]


async def test_a_cloud_hypervisor_is_adopted_after_a_restart(short_tmp: Path) -> None:
    file = short_tmp / "config.toml"
    file.write_text(f'[daemon]\nsocket = "{short_tmp}/api.sock"\nstate = "{short_tmp}/state.db"\n')
    settings = config.load(file, Host(cpus=8, memory=16384))
    drivers = Drivers()

    def start() -> ResourceManager:
        return ResourceManager(settings, SqliteStore(settings.daemon.state), drivers.open)

    manager = start()
    sandbox = (await manager.put_sandbox("s1", SandboxSpec(hypervisor="clh"))).sandbox
    with CloudHypervisorServer(short_tmp / "ch", msgspec.to_builtins(sandbox.vmm)["config"]) as server:
        await manager.attach("s1", str(server.path), None, None)
        await manager.put_container("s1", "c1", resources(quota=250_000), Patience())
        await manager.close()

        manager = start()
        await manager.adopt()

        adopted = manager.sandbox("s1")
        assert (adopted.phase, adopted.vcpus.desired, adopted.vcpus.plugged) == ("running", 4, 4)
        assert adopted.vmm == sandbox.vmm
        await manager.close()
    await drivers.close()


def test_groups_are_given_to_the_vmm_that_boots() -> None:
    sandbox, _, size, _ = registered(DEFAULT, "clh", {}, None)

    given = cloud_hypervisor(sandbox, size, {"gold": Limits(bytes_per_second=1 << 20, burst_ops=0)})

    body = msgspec.json.decode(msgspec.json.encode(given.config))
    assert body["rate_limit_groups"] == [
        {"id": "gold", "rate_limiter_config": {"bandwidth": {"size": 1 << 20, "refill_time": 1000}}}
    ]
    must_be_valid("vm.create", {"payload": {}, **body})
    for nothing in (Limits(), Limits(ops_per_second=9)):
        with pytest.raises(Problem, match="/rateLimitGroups/gold/") as refused:
            cloud_hypervisor(sandbox, size, {"gold": nothing})
        assert refused.value.code is Code.INVALID_BODY
