"""Metrics: what a scrape shows, and that drivers are timed whatever becomes of their calls."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hypervisors.base import Refused, TimedOut
from hypervisors.fake import FakeHypervisor, FakeVm
from kata_resmgr.events import Events
from kata_resmgr.metrics import MeasuredHypervisor, Measures, Metrics
from kata_resmgr.sandbox import Patience
from kata_resmgr.store import MemoryStore
from tests.sandbox.rig import cpus, rig
from tests.virtual_time import virtual

STATES = ("desired", "plugged", "pending")


def parsed(text: bytes) -> dict[str, float]:
    """Value by series, where no series is told twice."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            series = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert series not in found
            found[series] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Events(MemoryStore()), lambda: 0)


@virtual
async def test_a_sandbox() -> None:
    async with rig(vm=FakeVm(boot_vcpus=1, max_vcpus=8)) as made:
        shown = Metrics(made.events, lambda: 7)
        await made.put("a", cpus(2, memory={"limit": 1}))
        series = parsed(await shown.text([made.sandbox]))
        assert {state: series[f"kata_resmgr_vcpus{{sandbox=s1,state={state}}}"] for state in STATES} == {
            "desired": 3, "plugged": 3, "pending": 0,
        }  # fmt: skip
        assert series["kata_resmgr_memory_bytes{sandbox=s1,state=plugged}"] == 2 << 30
        assert series["kata_resmgr_cpu_shares{sandbox=s1}"] == 0
        assert series["kata_resmgr_unsatisfied_seconds{sandbox=s1}"] == 0
        assert series["kata_resmgr_quarantined_total"] == 7
        assert series["kata_resmgr_events_total"] == made.events.total > 3
        assert series["kata_resmgr_reconnects_total"] == 0
        assert series["process_resident_memory_bytes"] > 0
        assert not any("online" in name for name in series)  # nobody tells it
        assert not any("s1" in name for name in parsed(await shown.text([])))


@virtual
async def test_for_how_long_there_has_been_too_little() -> None:
    async with rig(vm=FakeVm(boot_vcpus=1, max_vcpus=8)) as made:
        made.vm.stall()
        outcome = await made.put("a", cpus(2), Patience(wait=1))
        assert not outcome.settled
        await made.pass_time(2)
        assert made.sandbox.measures().unsatisfied == 3
        made.vm.resume()
        await made.pass_time(0.001)
        assert made.sandbox.measures().unsatisfied == 0


async def test_operations_are_counted_by_what_became_of_them(metrics: Metrics) -> None:
    metrics.operation("put_container", "ok", 0.003)
    metrics.operation("put_container", "held", 0.1)
    series = parsed(await metrics.text([]))
    assert series["kata_resmgr_operation_seconds_count{op=put_container,result=ok}"] == 1
    assert series["kata_resmgr_operation_seconds_sum{op=put_container,result=held}"] == 0.1
    assert series["kata_resmgr_operation_seconds_bucket{le=0.002,op=put_container,result=ok}"] == 0
    assert series["kata_resmgr_operation_seconds_bucket{le=0.005,op=put_container,result=ok}"] == 1
    assert not any("created" in name for name in series)


@virtual
async def test_calls_to_a_hypervisor_are_counted_by_what_became_of_them() -> None:
    vm = FakeVm(boot_vcpus=1, max_vcpus=4)
    metrics = Metrics(Events(MemoryStore()), lambda: 0)
    driver = MeasuredHypervisor(FakeHypervisor(vm), "qemu", metrics)
    await driver.connect(lambda _: None)
    assert len((await driver.add_vcpus(1)).vcpus) == 2
    vm.vcpus_until_refusal = 0
    with pytest.raises(Refused):
        await driver.add_vcpus(1)
    vm.stall()
    with pytest.raises(TimedOut):
        await driver.read()
    await driver.close()
    series = parsed(await metrics.text([]))
    counts = {
        (command, result): series[
            f"kata_resmgr_hypervisor_seconds_count{{backend=qemu,command={command},result={result}}}"
        ]
        for command, result in [("connect", "ok"), ("add_vcpus", "ok"), ("add_vcpus", "refused"), ("read", "timed_out")]
    }
    assert set(counts.values()) == {1}


class Numbered:
    """A sandbox that shows its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def measures(self) -> Measures:
        n = self._number
        return Measures(f"sandbox-{n}", (n, n, 0), (n << 30, n << 30, 0), 0.5, 1024)


async def test_a_scrape_of_a_thousand_sandboxes_lets_others_have_their_turns(metrics: Metrics) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    began = time.perf_counter()
    text = await metrics.text([Numbered(n) for n in range(1000)])
    took = time.perf_counter() - began
    task.cancel()
    assert turns >= 1000 / 50
    assert took < 1  # 10 ms on a quiet machine
    series = parsed(text)
    assert series["kata_resmgr_vcpus{sandbox=sandbox-999,state=plugged}"] == 999
    assert series["kata_resmgr_unsatisfied_seconds{sandbox=sandbox-0}"] == 0.5
