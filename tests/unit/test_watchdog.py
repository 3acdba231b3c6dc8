"""What the service manager hears of the daemon's life, and when it hears nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kata_resmgr import systemd, watchdog
from kata_resmgr.api import server
from tests.api.api_harness import serving
from tests.virtual_time import virtual

PERIOD = 30.0


@dataclass
class Daemon:
    """Answers its own questions as the test has it; ``None``: not at all."""

    ready: bool = True
    alive: bool | OSError | None = True
    asked: list[str] = field(default_factory=list)

    async def succeeds(self, path: str) -> bool:
        self.asked.append(path)
        if path == "/readyz":
            return self.ready
        if isinstance(self.alive, OSError):
            raise self.alive
        if self.alive is None:
            await asyncio.get_running_loop().create_future()
        return self.alive is True


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the manager was told, in order; it watches."""
    lines: list[str] = []
    monkeypatch.setattr(systemd, "notify", lambda *said: lines.extend(said))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(PERIOD * 1e6)))
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    return lines


@asynccontextmanager
async def attended(daemon: Daemon) -> AsyncIterator[None]:
    task = asyncio.create_task(watchdog.attend(daemon.succeeds))
    yield
    task.cancel()
    await asyncio.wait([task])


@virtual
async def test_ready_is_told_once_it_is(told: list[str]) -> None:
    daemon = Daemon(ready=False)
    async with attended(daemon):
        await asyncio.sleep(10)
        assert (told, len(daemon.asked)) == ([], 200)
        daemon.ready = True
        await asyncio.sleep(0.1)
        assert told == ["READY=1", "WATCHDOG=1"]


@virtual
async def test_life_is_proved_often_enough(told: list[str]) -> None:
    async with attended(Daemon()):
        await asyncio.sleep(10 * PERIOD - 1)
    assert told == ["READY=1"] + 30 * ["WATCHDOG=1"]


@pytest.mark.parametrize("answer", [None, False, OSError(24, "Too many open files")])
@virtual
async def test_without_an_answer_nothing_is_told_and_it_is_asked_again(
    told: list[str], answer: bool | OSError | None
) -> None:
    daemon = Daemon()
    async with attended(daemon):
        await asyncio.sleep(1)
        daemon.alive = answer
        told.clear()
        await asyncio.sleep(PERIOD)
        assert told == []
        daemon.alive = True
        await asyncio.sleep(PERIOD)
        assert "WATCHDOG=1" in told


@pytest.mark.parametrize(
    ("period", "watched", "seconds"),
    [
        ("", "", None),
        ("0", "", None),
        ("-1", "", None),
        ("30000000", "", 30.0),
        ("30000000", str(os.getpid()), 30.0),
        ("30000000", "1", None),
    ],
)
def test_whom_the_manager_watches(
    monkeypatch: pytest.MonkeyPatch, period: str, watched: str, seconds: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", period)
    monkeypatch.setenv("WATCHDOG_PID", watched)
    assert systemd.watchdog_period() == seconds


@virtual
async def test_who_is_not_watched_proves_nothing(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC")
    async with attended(Daemon()):
        await asyncio.sleep(PERIOD)
    assert told == ["READY=1"]


async def test_the_api_is_asked_over_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        monkeypatch.setattr(server, "CONNECTIONS", 0)  # however many others there are
        assert await served.api.succeeds("/healthz")
        assert not await served.api.succeeds("/nowhere")
        stopping = asyncio.create_task(served.api.stop(5))
        await asyncio.sleep(0)
        assert not await served.api.succeeds("/readyz")
        await stopping
