"""The example of a shim, in Go: it is sound, and leads a pod's life through a real daemon on a QMP server."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.fakes.qmp_memory import Memory
from tests.fakes.qmp_server import QmpServer

SOURCE = Path(__file__).parents[2] / "docs/examples/shim"
PATIENCE = 600.0
"""Seconds: the first build on a machine compiles Go's own library too."""

pytestmark = pytest.mark.skipif(shutil.which("go") is None, reason="go is not on PATH")


async def run(*command: str | Path) -> str:
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOPROXY": "off", "CGO_ENABLED": "0"}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=SOURCE, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rm-"))
    yield path
    shutil.rmtree(path)


async def test_the_shim_is_sound_and_leads_a_life(directory: Path) -> None:
    program = directory / "shim"
    assert await run("gofmt", "-l", ".") == ""
    await run("go", "vet", "./...")
    await run("go", "build", "-o", program, ".")
    with Daemon(directory, "[resmgr]\nhost_cpus = 8\n[hypervisor.qemu]\ndefault_memory = 64\n") as daemon:
        async with QmpServer(directory / "resmgr.sock", max_vcpus=8, memory=Memory(64 << 20)):
            told = await run(program, "-socket", daemon.socket, "-directory", directory, "-patience", "30s")
        caller = daemon.caller()
        assert caller.ok("GET", "/v1/sandboxes") == {"sandboxes": []}
    start, *steps = told.splitlines()
    assert f"{directory}/resmgr.sock" in start
    assert steps == [
        "attached: 1 of 1 vCPUs",
        "created c1 with 1.5 CPUs: 3 of 3 vCPUs",
        "updated c1 to 2.5 CPUs: 4 of 4 vCPUs",
        "resumed: 4 of 4 vCPUs",
    ]
