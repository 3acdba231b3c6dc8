"""What Prometheus is told (API.md, Metrics).

Sandboxes are read when they are asked about: they pay nothing in between, and a deleted one's series are gone with it.
Their lines are written here, not by prometheus-client, in slices between which others have a turn: of 1,000 sandboxes
the library would make 60 ms in which nothing else is served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from hypervisors.base import (
    Busy,
    Device,
    Hypervisor,
    HypervisorError,
    Listener,
    Machine,
    Plugged,
    Refused,
    TimedOut,
    Unreachable,
    Unsupported,
)
from hypervisors.ch_types import DiskConfig, NetConfig
from kata_resmgr.events import Events

T = TypeVar("T")

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_SLICE: Final = 50
"""Sandboxes that are written without letting anybody else have a turn."""
_BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""Seconds: a plug takes less than a millisecond, and a guest takes as long as the deadline lets it."""
_RESULTS: Final[Mapping[type[HypervisorError], str]] = {
    Unreachable: "unreachable",
    Refused: "refused",
    TimedOut: "timed_out",
    Unsupported: "unsupported",
    Busy: "busy",
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # when a histogram was first used is of no use to anybody


class Measures(msgspec.Struct, frozen=True, gc=False):
    """What one sandbox shows."""

    sandbox: str
    vcpus: tuple[int, int, int]
    """Desired, plugged, pending."""
    memory: tuple[int, int, int]
    """The same, in bytes."""
    unsatisfied: float
    """Seconds for which it has had less than it asks for; 0 where it has it, or has no VM."""
    shares: int


class Measured(Protocol):
    """A sandbox."""

    def measures(self) -> Measures:
        """As it is now."""


class Metrics:
    """The metrics of one daemon. *quarantined*: how much of the state has been put aside since the start."""

    def __init__(self, events: Events, quarantined: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Counters(events, quarantined))
        ProcessCollector(registry=self._registry)
        self._operations = Histogram(
            "kata_resmgr_operation_seconds",
            "Operations on the socket: ok, accepted (202), or the code of the problem.",
            ("op", "result"),
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._calls = Histogram(
            "kata_resmgr_hypervisor_seconds",
            "Calls to hypervisors.",
            ("backend", "command", "result"),
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._call_series: dict[tuple[str, str, str], Histogram] = {}

    def operation(self, op: str, result: str, seconds: float) -> None:
        """One operation was answered."""
        self._operations.labels(op, result).observe(seconds)

    def call(self, backend: str, command: str, result: str, seconds: float) -> None:
        """One call to a hypervisor has ended."""
        series = self._call_series.get((backend, command, result))
        if series is None:  # the library's own look-up takes as long as all the rest
            series = self._call_series[backend, command, result] = self._calls.labels(backend, command, result)
        series.observe(seconds)

    async def text(self, sandboxes: Sequence[Measured]) -> bytes:
        """The answer to a scrape."""
        return await _of_sandboxes(sandboxes) + generate_latest(self._registry)


async def _of_sandboxes(sandboxes: Sequence[Measured]) -> bytes:
    vcpus = ["# HELP kata_resmgr_vcpus vCPUs of a sandbox.\n# TYPE kata_resmgr_vcpus gauge\n"]
    memory = [
        "# HELP kata_resmgr_memory_bytes Memory of a sandbox, boot memory included.\n"
        "# TYPE kata_resmgr_memory_bytes gauge\n"
    ]
    unsatisfied = [
        "# HELP kata_resmgr_unsatisfied_seconds For how long a sandbox has had less than it asks for.\n"
        "# TYPE kata_resmgr_unsatisfied_seconds gauge\n"
    ]
    shares = ["# HELP kata_resmgr_cpu_shares Sum of the containers' CPU shares.\n# TYPE kata_resmgr_cpu_shares gauge\n"]
    for first in range(0, len(sandboxes), _SLICE):
        for sandbox in sandboxes[first : first + _SLICE]:
            m = sandbox.measures()
            name = f'{{sandbox="{m.sandbox}"'  # an id has nothing that would have to be escaped
            for family, metric, states in ((vcpus, "vcpus", m.vcpus), (memory, "memory_bytes", m.memory)):
                desired, plugged, pending = states
                start = f"kata_resmgr_{metric}{name},state="
                family.append(
                    f'{start}"desired"}} {desired}\n{start}"plugged"}} {plugged}\n{start}"pending"}} {pending}\n'
                )
            unsatisfied.append(f"kata_resmgr_unsatisfied_seconds{name}}} {m.unsatisfied}\n")
            shares.append(f"kata_resmgr_cpu_shares{name}}} {m.shares}\n")
        await asyncio.sleep(0)
    return "".join([*vcpus, *memory, *unsatisfied, *shares]).encode()


class _Counters(Collector):
    """What others count."""

    def __init__(self, events: Events, quarantined: Callable[[], int]) -> None:
        self._events = events
        self._quarantined = quarantined

    def collect(self) -> Iterable[Metric]:
        for name, says, value in (
            ("reconnects", "VMs that could not be reached, and were reached again.", self._events.reconnects),
            ("quarantined", "Rows and files of the state that could not be read.", self._quarantined()),
            ("events", "Events that were told.", self._events.total),
        ):
            yield CounterMetricFamily(f"kata_resmgr_{name}", says, value=value)


class MeasuredHypervisor:
    """A driver whose calls are counted and timed: *driver*, of the kind that *backend* names."""

    def __init__(self, driver: Hypervisor, backend: str, metrics: Metrics) -> None:
        self._driver = driver
        self._told = partial(metrics.call, backend)

    async def _timed(self, command: str, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            answer = await call
        except HypervisorError as error:
            result = next((name for kind, name in _RESULTS.items() if isinstance(error, kind)), "failed")
            self._told(command, result, time.perf_counter() - began)
            raise
        self._told(command, "ok", time.perf_counter() - began)
        return answer

    async def connect(self, listener: Listener) -> Machine:
        return await self._timed("connect", self._driver.connect(listener))

    async def read(self) -> Plugged:
        return await self._timed("read", self._driver.read())

    async def add_vcpus(self, count: int) -> Plugged:
        return await self._timed("add_vcpus", self._driver.add_vcpus(count))

    async def start_removing_vcpus(self, ids: Sequence[str]) -> None:
        await self._timed("start_removing_vcpus", self._driver.start_removing_vcpus(ids))

    async def grow_memory(self, to: int) -> Plugged:
        return await self._timed("grow_memory", self._driver.grow_memory(to))

    async def start_shrinking_memory(self, to: int, ids: Sequence[str] = ()) -> None:
        await self._timed("start_shrinking_memory", self._driver.start_shrinking_memory(to, ids))

    async def add_device(self, device: DiskConfig | NetConfig) -> Device:
        return await self._timed("add_device", self._driver.add_device(device))

    async def start_removing_device(self, device_id: str) -> None:
        await self._timed("start_removing_device", self._driver.start_removing_device(device_id))

    async def counters(self) -> Mapping[str, Mapping[str, int]]:
        return await self._timed("counters", self._driver.counters())

    async def close(self) -> None:
        await self._driver.close()
