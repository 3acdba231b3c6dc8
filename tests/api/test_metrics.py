"""``GET /metrics`` over a real socket, of a real manager with VMs that are fakes."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from hypervisors.fake import FakeHypervisor, FakeVm, Guest
from kata_resmgr.api.server import Api
from kata_resmgr.manager import ResourceManager
from kata_resmgr.store import MemoryStore
from tests.api.api_harness import Door, bound, until
from tests.sandbox.rig import load


@dataclass(frozen=True)
class Daemon(Door):
    """One whose VMs are all *vm*."""

    vm: FakeVm

    async def series(self) -> dict[str, float]:
        reply = await self.ask("GET", "/metrics")
        assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {
            sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
            for family in text_string_to_metric_families(reply.body.decode())
            for sample in family.samples
        }


def named(metric: str, **labels: str) -> str:
    return metric + json.dumps(labels, sort_keys=True)


@asynccontextmanager
async def daemon() -> AsyncIterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="rm-") as directory, socket.socket(socket.AF_UNIX) as monitor:
        monitor.bind(str(Path(directory, "resmgr.sock")))
        vm = FakeVm(boot_vcpus=1, max_vcpus=8)
        settings = load(f'[resmgr]\nshrink_delay = "0"\n[daemon]\nvm_roots = ["{directory}"]')
        manager = ResourceManager(settings, MemoryStore(), lambda *_: FakeHypervisor(vm))
        path, listener = bound(directory, 0o600)
        api = Api(manager, None)
        await api.start([listener])
        try:
            caller = Daemon(path, vm)
            assert (await caller.ask("PUT", "/v1/sandboxes/s1", json.dumps({"directory": directory}))).status == 201
            assert (await caller.ask("PUT", "/v1/sandboxes/s1/vm", "{}")).status == 200
            yield caller
        finally:
            await api.stop(5)
            await manager.close()


C1 = "/v1/sandboxes/s1/containers/c1"
ONE_CPU = '{"resources": {"cpu": {"quota": 100000, "period": 100000, "shares": 512}}}'


async def test_the_life_of_a_sandbox_in_metrics() -> None:
    async with daemon() as caller:
        await caller.ask("PUT", C1, ONE_CPU)
        caller.vm.guest = Guest.IGNORE
        await caller.ask("PATCH", C1, '{"resources": {"cpu": {"quota": -1}}}')
        await until(lambda: caller.vm.called("start_removing_vcpus") != [])
        series = await caller.series()
        shown = {
            state: series[named("kata_resmgr_vcpus", sandbox="s1", state=state)]
            for state in ("desired", "plugged", "pending")
        }
        assert shown == {"desired": 1, "plugged": 2, "pending": 1}
        assert series[named("kata_resmgr_cpu_shares", sandbox="s1")] == 512
        hypervisor = {"backend": "qemu", "result": "ok"}
        assert series[named("kata_resmgr_hypervisor_seconds_count", command="add_vcpus", **hypervisor)] == 1
        await caller.ask("DELETE", "/v1/sandboxes/s1")
        assert not [name for name in await caller.series() if "s1" in name]


async def test_operations_and_how_they_ended() -> None:
    async with daemon() as caller:
        await caller.ask("PUT", C1, ONE_CPU)
        await caller.ask("PATCH", "/v1/sandboxes/none", ONE_CPU)
        await caller.ask("POST", "/nowhere")
        await caller.ask("GET", "/v1/sandboxes")
        counted: dict[tuple[str, str], float] = {}
        expected = {
            ("put_sandbox", "ok"): 1.0,
            ("attach", "ok"): 1.0,
            ("put_container", "ok"): 1.0,
            ("resize", "not_found"): 1.0,
            ("none", "not_found"): 1.0,
        }
        for _ in range(1000):  # they are counted shortly after the answer
            series = await caller.series()
            start = "kata_resmgr_operation_seconds_count"
            found = [(json.loads(n.removeprefix(start)), v) for n, v in series.items() if n.startswith(start)]
            counted = {(labels["op"], labels["result"]): value for labels, value in found}
            if counted == expected:
                break
        assert counted == expected
