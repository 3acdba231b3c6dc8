"""Many Cloud Hypervisors and many attachments: few threads, and nothing left of any."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypervisors.base import HypervisorError, TimedOut
from hypervisors.ch_pool import THREADS, CallPool
from hypervisors.cloud_hypervisor import CloudHypervisor
from tests.drivers.backends import Hints
from tests.drivers.ch_rig import GIB, config, new_driver
from tests.fakes.cloud_hypervisor import CloudHypervisorServer

VMS = 200
CYCLES = 1000


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("clh")]


async def test_a_thousand_attachments_leave_nothing(short_tmp: Path) -> None:
    before = held()
    with CloudHypervisorServer(short_tmp / "ch", config()) as server:
        pool = CallPool()
        driver = new_driver(server, pool)
        await driver.connect(Hints())
        await driver.close()
        server.http.wait_until_free()
        after_one, _ = held()
        for _ in range(CYCLES):
            await driver.connect(Hints())
            await driver.close()
        server.http.wait_until_free()

        descriptors, _ = held()
        assert descriptors == after_one
        assert len(pool_threads()) <= THREADS
        await pool.close()
    assert held() == before


@pytest.fixture
def fleet(short_tmp: Path) -> Iterator[dict[str, int]]:
    """The sockets of as many VMMs, each a process of its own, with their pids."""
    paths = [str(short_tmp / f"{number}") for number in range(VMS)]
    command = [sys.executable, "-m", "tests.fakes.cloud_hypervisor", *paths, "--config", json.dumps(config(vcpus=1))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield dict(zip(paths, json.loads(process.stdout.readline()), strict=True))
        process.stdin.close()


async def test_two_hundred_vms_share_few_threads_and_hung_ones_do_not_take_them(fleet: dict[str, int]) -> None:
    pool = CallPool()
    drivers = {
        path: CloudHypervisor(path, pool, boot_vcpus=1, boot_memory=GIB, timeout=1.0 if number < 30 else 20.0)
        for number, path in enumerate(fleet)
    }
    hung, sound = list(drivers)[:30], list(drivers)[30:]

    async def each(paths: list[str]) -> list[object]:
        return await asyncio.gather(*(drivers[path].read() for path in paths), return_exceptions=True)

    await asyncio.gather(*(driver.connect(Hints()) for driver in drivers.values()))
    for path in hung:
        os.kill(fleet[path], signal.SIGSTOP)
    first = await each(hung)
    assert all(isinstance(error, TimedOut) for error in first)

    again = asyncio.create_task(each(hung))
    began = time.monotonic()
    plugged = await asyncio.gather(*(drivers[path].add_vcpus(1) for path in sound))
    took = time.monotonic() - began
    grown = not again.done()
    assert all(isinstance(error, TimedOut) for error in await again)

    for path in hung:
        os.kill(fleet[path], signal.SIGCONT)
    back = await each(hung)
    while any(isinstance(answer, HypervisorError) for answer in back):
        back = await each(hung)

    assert [len(each.vcpus) for each in plugged] == [2] * len(sound)
    assert grown or took < 10
    assert len(pool_threads()) <= THREADS
    for driver in drivers.values():
        await driver.close()
    await pool.close()
