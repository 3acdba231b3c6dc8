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
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hypervisors.base import TimedOut
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
    until = time.monotonic() + 5
    while held() != before and time.monotonic() < until:  # noqa: ASYNC110 - the kernel shows a thread a little longer than Python
        await asyncio.sleep(0.001)
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


@pytest.fixture
async def pool() -> AsyncIterator[CallPool]:
    pool = CallPool()
    yield pool
    await pool.close()


def stop(pid: int) -> None:
    """Stop a process, and wait until it stands still: a signal takes effect when the process next runs."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.001)


async def test_two_hundred_vms_share_few_threads_and_hung_ones_do_not_take_them(
    fleet: dict[str, int], pool: CallPool
) -> None:
    def drivers(paths: list[str], timeout: float) -> list[CloudHypervisor]:
        return [CloudHypervisor(path, pool, boot_vcpus=1, boot_memory=GIB, timeout=timeout) for path in paths]

    async def hang(driver: CloudHypervisor) -> None:
        with pytest.raises(TimedOut):
            await driver.connect(Hints())

    async def go_on_hanging() -> None:
        while True:
            await asyncio.gather(*map(hang, impatient))

    hung, sound = list(fleet)[:30], list(fleet)[30:]
    impatient, patient = drivers(hung, 0.3), drivers(sound, 30.0)
    for path in hung:
        stop(fleet[path])
    async with asyncio.timeout(10):
        while not all(map(pool.suspected, hung)):  # those that had no turn yet are not
            await asyncio.gather(*map(hang, impatient))

    others = asyncio.create_task(go_on_hanging())
    await asyncio.gather(*(driver.connect(Hints()) for driver in patient))
    plugged = await asyncio.gather(*(driver.add_vcpus(1) for driver in patient))
    assert not others.done()
    others.cancel()
    await asyncio.wait([others])
    assert [len(each.vcpus) for each in plugged] == [2] * len(sound)

    for path in hung:
        os.kill(fleet[path], signal.SIGCONT)
    back = drivers(hung, 30.0)
    await asyncio.gather(*(driver.connect(Hints()) for driver in back))
    assert not any(map(pool.suspected, hung))

    assert len(pool_threads()) <= THREADS
    for driver in (*patient, *impatient, *back):
        await driver.close()
