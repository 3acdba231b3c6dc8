"""Cloud Hypervisor as a backend of the behaviour tests: a fake process, and a real one where it is installed."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hypervisors.base import Hypervisor
from hypervisors.ch_pool import CallPool
from hypervisors.cloud_hypervisor import CloudHypervisor
from hypervisors.fake import Guest
from kata_resmgr.guest import build
from kata_resmgr.guest.qemus import Qemu
from tests.drivers.backends import BOOT_VCPUS, MAX_VCPUS, MEMORY, MIB, Backend
from tests.drivers.ch_rig import config

PROGRAM: Final = "cloud-hypervisor"
_PATIENCE: Final = 30.0
LINUX_MEMORY: Final = 512 * MIB


class ChProcess(Backend):
    """A process that serves the API at *path*."""

    def __init__(self, path: Path, process: subprocess.Popen[str], pool: CallPool, memory: int) -> None:
        self._path = path
        self._process = process
        self._pool = pool
        self._memory = memory

    def vcpu(self, number: int) -> str:
        return f"vcpu{BOOT_VCPUS + number - 1}"

    def driver(self) -> Hypervisor:
        return CloudHypervisor(str(self._path), self._pool, boot_vcpus=BOOT_VCPUS, boot_memory=self._memory)

    async def guest(self, guest: Guest) -> None:
        raise NotImplementedError("this guest cannot be told how to meet removals")

    async def plug_foreign(self, *, named: bool = True) -> None:
        raise NotImplementedError("nothing tells who plugged a vCPU")

    async def unplug_foreign(self, vcpu: str) -> None:
        raise NotImplementedError("nothing tells who unplugged a vCPU")

    async def reset(self) -> None:
        await asyncio.to_thread(_put, self._path, "vm.reboot", None)

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


class FakeChProcess(ChProcess):
    async def guest(self, guest: Guest) -> None:
        assert guest is not Guest.REFUSE, "nothing tells of a refusal"
        await self._order("cooperate", guest is Guest.COOPERATE)

    async def _order(self, name: str, *arguments: object) -> None:
        def order() -> None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "\n"

        await asyncio.to_thread(order)


@asynccontextmanager
async def fake_ch(directory: Path, _qemu: Qemu) -> AsyncIterator[Backend]:
    vm = config(vcpus=BOOT_VCPUS, max_vcpus=MAX_VCPUS, memory=MEMORY, hotplug=0)
    command = [sys.executable, "-m", "tests.fakes.cloud_hypervisor", str(directory / "ch"), "--config", json.dumps(vm)]
    pool = CallPool()
    with _started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline)
        backend = FakeChProcess(directory / "ch", process, pool, MEMORY)
        await backend.guest(Guest.COOPERATE)
        yield backend
    await pool.close()


@asynccontextmanager
async def real_ch(directory: Path, _qemu: Qemu) -> AsyncIterator[Backend]:
    """Boots the Linux guest; skipped where the program is not installed."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not on PATH")
    image = build.linux()
    vm = config(vcpus=BOOT_VCPUS, max_vcpus=MAX_VCPUS, memory=LINUX_MEMORY, hotplug=0)
    vm |= {
        "payload": {"kernel": str(image.kernel), "initramfs": str(image.initrd), "cmdline": "console=ttyS0"},
        "console": {"mode": "Off"},
        "serial": {"mode": "Null"},
    }
    pool = CallPool()
    with _started([PROGRAM, "--api-socket", str(directory / "ch")]) as process:
        await asyncio.to_thread(_boot, directory / "ch", vm)
        yield ChProcess(directory / "ch", process, pool, LINUX_MEMORY)
    await pool.close()


@contextmanager
def _started(command: list[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:  # noqa: ANN401 - subprocess's
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _boot(path: Path, vm: dict[str, Any]) -> None:
    for _ in range(int(_PATIENCE * 100)):
        with socket.socket(socket.AF_UNIX) as connection:
            if connection.connect_ex(str(path)) == 0:
                break
        time.sleep(0.01)
    _put(path, "vm.create", vm)
    _put(path, "vm.boot", None)


def _put(path: Path, call: str, body: object) -> None:
    """A call by another client than ours."""
    connection = http.client.HTTPConnection("localhost", timeout=_PATIENCE)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(str(path))
        connection.request("PUT", f"/api/v1/{call}", None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        assert 200 <= response.status < 300, text
    finally:
        connection.close()
