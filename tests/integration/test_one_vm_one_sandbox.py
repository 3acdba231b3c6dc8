"""One VM belongs to one sandbox, by whatever path it is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kata_resmgr import config
from kata_resmgr.drivers import Drivers
from kata_resmgr.host import Host
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience
from kata_resmgr.store import MemoryStore
from tests.examples import resources
from tests.fakes.qmp_server import QmpServer

OTHER_UUID = "00000000-1111-2222-3333-444444444444"


@pytest_asyncio.fixture
async def first(short_tmp: Path) -> AsyncIterator[QmpServer]:
    async with QmpServer(short_tmp / "monitor") as server:
        yield server


@pytest_asyncio.fixture
async def manager(first: QmpServer, short_tmp: Path) -> AsyncIterator[ResourceManager]:
    """With sandboxes s1, which drives the first VM, and s2, which drives none and wants three vCPUs."""
    file = short_tmp / "config.toml"
    file.write_text(f'[daemon]\nsocket = "{short_tmp}/api.sock"\nvm_roots = ["{short_tmp}"]\n')
    drivers = Drivers()
    manager = ResourceManager(config.load(file, Host(cpus=8, memory=16384)), MemoryStore(), drivers.open)
    for name in ("s1", "s2"):
        await manager.put_sandbox(name, SandboxSpec())
    await manager.put_container("s2", "c1", resources(quota=150_000), Patience())
    await manager.attach("s1", str(first.path), None, None)
    yield manager
    await manager.close()
    await drivers.close()


async def refusal(manager: ResourceManager, path: Path) -> Problem:
    before = manager.sandbox("s2")
    with pytest.raises(Problem) as refused:
        await manager.attach("s2", str(path), None, None)
    assert manager.sandbox("s2") == before
    assert manager.sandbox("s1").phase == "running"
    return refused.value


async def test_by_the_same_path_a_link_or_a_hard_link(manager: ResourceManager, short_tmp: Path) -> None:
    monitor = short_tmp / "monitor"
    (short_tmp / "link").symlink_to("monitor")
    (short_tmp / "again").hardlink_to(monitor)
    for path in (monitor, short_tmp / "link", short_tmp / "again"):
        problem = await refusal(manager, path)
        assert problem.code is Code.CONFLICT
        assert 'belongs to sandbox "s1": one VM, one sandbox' in problem.detail


async def test_by_a_second_monitor(manager: ResourceManager, short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "second") as second:  # the same process and UUID as the first
        problem = await refusal(manager, second.path)
        assert problem.code is Code.CONFLICT
        assert 'belongs to sandbox "s1": one VM, one sandbox' in problem.detail
        assert "device_add" not in second.sent()
        await manager.detach("s1")
        assert (await manager.attach("s2", str(second.path), None, None)).phase == "running"


async def test_another_vm_is_free(manager: ResourceManager, short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "other") as other:
        other.uuid = OTHER_UUID
        assert (await manager.attach("s2", str(other.path), None, None)).phase == "running"


async def test_a_link_that_takes_the_place_of_a_monitor_is_not_followed(
    manager: ResourceManager, first: QmpServer, short_tmp: Path
) -> None:
    async with QmpServer(short_tmp / "other") as other:
        await first.kill()
        first.path.unlink()
        first.path.symlink_to(other.path)
        async with asyncio.timeout(10):
            while "a symbolic link is in the way" not in str(manager.sandbox("s1").conditions):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # it is tried again in the sandbox's own time
        assert other.sent() == []
