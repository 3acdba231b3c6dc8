"""What a daemon keeps after a flood, after hostile monitors, and after many connections: next to nothing.

The daemon is a process of its own, and the monitor is the fake on the wire, in this one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypervisors.base import ConnectionLost, Unreachable
from hypervisors.fake import Guest
from hypervisors.qemu import QemuHypervisor
from tests.daemon import Caller, Daemon
from tests.drivers.backends import Hints
from tests.drivers.misdeeds import EVENT, MISDEEDS, SIZE_EVENT
from tests.fakes.qmp_server import QmpServer

WARM_UP: Final = 5_000
"""Events, and :data:`WARM_UP_CYCLES` connections, before the first measurement: what is allocated once is no growth."""
WARM_UP_CYCLES: Final = 20
VM: Final = "/v1/sandboxes/s1/vm"
CONTAINER: Final = "/v1/sandboxes/s1/containers/c1"

_REFUSAL: Final = (
    b'{"event": "ACPI_DEVICE_OST", "data": {"info": {"device": "resmgr-vcpu-1", "slot": "1", "slot-type": "CPU", '
    b'"source": 3, "status": 129}}}\r\n'
)
_DELETED: Final = b'{"event": "DEVICE_DELETED", "data": {"path": "/machine/peripheral/somebody-elses"}}\r\n'
_RESET: Final = b'{"event": "RESET", "data": {"guest": true, "reason": "guest-reset"}}\r\n'
_KINDS: Final = (EVENT, EVENT, EVENT, SIZE_EVENT, _REFUSAL, _DELETED, _RESET, b'{"event": "NO_SUCH_EVENT"}\r\n')
_BATCH: Final = 100


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process has."""

    rss: int
    """KiB."""
    peak: int
    """KiB: the most since :func:`forget_peak`."""
    threads: int
    descriptors: int
    log: int
    """Bytes."""

    @classmethod
    def of(cls, daemon: Daemon) -> Footprint:
        pid = daemon.process.pid
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            rss=int(fields["VmRSS"].split()[0]),
            peak=int(fields["VmHWM"].split()[0]),
            threads=int(fields["Threads"]),
            descriptors=descriptors(pid),
            log=daemon.log.stat().st_size,
        )


def descriptors(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Scene:
    """A daemon with one sandbox, and the monitor of its VM."""

    def __init__(self, daemon: Daemon, server: QmpServer) -> None:
        self.daemon = daemon
        self.server = server
        self._caller: Caller = daemon.caller()

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        return await asyncio.to_thread(self._caller.call, method, path, body)

    async def attach(self) -> tuple[int, Any]:
        return await self.call("PUT", VM, {"socket": str(self.server.path)})

    async def detach(self) -> None:
        assert (await self.call("DELETE", VM))[0] == 204

    def footprint(self) -> Footprint:
        return Footprint.of(self.daemon)

    async def flood(self, count: int) -> None:
        """So many events, and one answer after them."""
        batch = b"".join(_KINDS[number % len(_KINDS)] for number in range(_BATCH))
        for _ in range(count // _BATCH):
            await self.server.write(batch)
        assert (await self.call("POST", "/v1/sandboxes/s1/reconcile"))[0] in (200, 202)


@asynccontextmanager
async def scene(directory: Path) -> AsyncIterator[Scene]:
    daemon = Daemon(directory)
    await asyncio.to_thread(daemon.__enter__)
    try:
        async with QmpServer(directory / "m") as server:
            played = Scene(daemon, server)
            assert (await played.call("PUT", "/v1/sandboxes/s1", {}))[0] == 201
            yield played
    finally:
        await asyncio.to_thread(daemon.__exit__, None, None, None)


async def flooded(directory: Path, events: int) -> tuple[Footprint, Footprint]:
    """The daemon before and after so many events of all kinds, with a removal under way that the guest refuses."""
    async with scene(directory) as s:
        assert (await s.attach())[0] == 200
        assert (await s.call("PUT", CONTAINER, {"resources": {"cpu": {"quota": 100_000, "period": 100_000}}}))[0] == 201
        s.server.guest = Guest.IGNORE
        assert (await s.call("DELETE", f"{CONTAINER}?wait=50ms"))[0] == 204
        await s.flood(WARM_UP)
        before = s.footprint()
        await s.flood(events)
        return before, s.footprint()


async def insulted(directory: Path, times: int) -> tuple[Footprint, Footprint]:
    """The daemon before and after an attach has met each misdeed that ends at once, so many times; with its peak."""
    async with scene(directory) as s:
        assert (await s.attach())[0] == 200
        await s.detach()
        forget_peak(s.daemon.process.pid)
        before = s.footprint()
        for misdeed in [misdeed for misdeed in MISDEEDS if misdeed.error is Unreachable] * times:
            misdeed.commit(s.server, always=True)
            status, problem = await s.attach()
            assert (status, problem["code"]) == (503, "hypervisor_unreachable"), (misdeed, problem)
            s.server.behave()
        assert (await s.attach())[0] == 200
        return before, s.footprint()


async def reconnected(directory: Path, cycles: int) -> tuple[Footprint, Footprint]:
    """The daemon before and after so many times of attaching and detaching."""
    async with scene(directory) as s:

        async def go_round(times: int) -> Footprint:
            for _ in range(times):
                assert (await s.attach())[0] == 200
                await s.detach()
            return s.footprint()

        return await go_round(WARM_UP_CYCLES), await go_round(cycles)


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    tasks: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        return cls(len(asyncio.all_tasks()), threading.active_count(), descriptors("self"))


async def driver_reconnected(directory: Path, cycles: int) -> tuple[Held, Held]:
    """One driver in this process, connected so many times; it, the monitor and garbage end that in turn."""
    async with QmpServer(directory / "m") as server:
        driver = QemuHypervisor(server.path)

        async def go_round(times: int) -> Held:
            for number in range(times):
                hints = Hints()
                await driver.connect(hints)
                match number % 3:
                    case 0:
                        await driver.close()
                    case 1:
                        server.drop()
                        await hints.next(ConnectionLost)
                    case _:
                        server.send(b"nonsense\r\n")
                        await hints.next(ConnectionLost)
            await driver.connect(Hints())  # the monitor serves one client after the other: the last is out
            await driver.close()
            await server.gone()
            return Held.now()

        return await go_round(WARM_UP_CYCLES), await go_round(cycles)
