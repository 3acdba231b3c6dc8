"""The API on a real Unix socket, over a manager that answers by script and notes what it was asked."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hypervisors.base import DeviceKind
from kata_resmgr import config, view
from kata_resmgr.api.server import Api
from kata_resmgr.events import Events
from kata_resmgr.host import Host
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.metrics import Metrics
from kata_resmgr.plan import Planned, Request, dry_run
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Outcome, Patience
from kata_resmgr.store import MemoryStore
from kata_resmgr.vm import Goal
from tests.api.contract import must_keep

SANDBOX = view.Sandbox(
    id="s1",
    hypervisor="qemu",
    mode="dynamic",
    phase="running",
    generation=4,
    boot=view.Boot(1, 8, 1 << 31, 1 << 34, 10, 1 << 27),
    vmm=view.Vmm(["-smp", "1,maxcpus=8"], [], "/run/kata-resmgr/vm/s1/resmgr.sock"),
    vcpus=view.Vcpus("16/5", 4, 5, 1),
    memory=view.Memory(1 << 31, 1 << 31, 0),
    satisfied=True,
    converged=False,
    surplus=view.Surplus(1, 0, None),
    shares=1024,
    cpu_weight=100,
    conditions=[],
    counts=view.Counts(1),
)


class ScriptedManager(ResourceManager):
    """Notes each call in ``calls``; ``raises`` is raised instead of answering, ``gate`` holds answers back."""

    def __init__(self) -> None:
        self.events = Events(MemoryStore())
        self.metrics = Metrics(self.events, lambda: 0)
        self._sandboxes = {}
        self.calls: list[tuple[Any, ...]] = []
        self.raises: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.settled = True
        self.created = False
        self.finished = 0

    def _note(self, *call: Any) -> None:  # noqa: ANN401
        self.calls.append(call)
        if self.raises is not None:
            raise self.raises

    async def _change(self, *call: Any) -> Outcome:  # noqa: ANN401
        self._note(*call)
        if self.gate is not None:
            await self.gate.wait()
        self.finished += 1
        return Outcome(SANDBOX, self.settled, self.created)

    async def put_sandbox(self, sandbox_id: str, spec: SandboxSpec) -> Outcome:
        return await self._change("put_sandbox", sandbox_id, spec)

    async def resize(self, sandbox_id: str, resources: bytes, patience: Patience) -> Outcome:
        return await self._change("resize", sandbox_id, resources, patience)

    def sandboxes(self, phase: str | None = None) -> list[view.Sandbox]:
        self._note("sandboxes", phase)
        return [SANDBOX]

    def sandbox(self, sandbox_id: str) -> view.Sandbox:
        self._note("sandbox", sandbox_id)
        if sandbox_id != "s1":
            raise Problem(Code.NOT_FOUND, f"there is no sandbox {sandbox_id}")
        return SANDBOX

    async def wait_for(self, sandbox_id: str, goal: Goal, wait: float) -> view.Sandbox:
        return (await self._change("wait_for", sandbox_id, goal, wait)).sandbox

    async def delete_sandbox(self, sandbox_id: str) -> None:
        await self._change("delete_sandbox", sandbox_id)

    async def attach(
        self, sandbox_id: str, socket: str | None, pid: int | None, memory_block: int | None
    ) -> view.Sandbox:
        return (await self._change("attach", sandbox_id, socket, pid, memory_block)).sandbox

    async def detach(self, sandbox_id: str) -> None:
        await self._change("detach", sandbox_id)

    async def hold(self, sandbox_id: str) -> view.Sandbox:
        return (await self._change("hold", sandbox_id)).sandbox

    async def release(self, sandbox_id: str) -> None:
        await self._change("release", sandbox_id)

    async def reconcile(self, sandbox_id: str, patience: Patience) -> Outcome:
        return await self._change("reconcile", sandbox_id, patience)

    def explain(self, sandbox_id: str) -> view.Explanation:
        self._note("explain", sandbox_id)
        source = view.Input("default_vcpus", "1", "config.toml:16")
        return view.Explanation("s1", [source], ["1 + 1.5 = 2.5"], SANDBOX.vcpus, SANDBOX.memory)

    async def put_containers(self, sandbox_id: str, table: Mapping[str, msgspec.Raw], patience: Patience) -> Outcome:
        return await self._change("put_containers", sandbox_id, {k: bytes(v) for k, v in table.items()}, patience)

    async def put_container(
        self, sandbox_id: str, container_id: str, resources: bytes, patience: Patience
    ) -> tuple[view.Container, Outcome]:
        outcome = await self._change("put_container", sandbox_id, container_id, resources, patience)
        return view.Container(container_id, msgspec.Raw(resources)), outcome

    async def patch_container(
        self, sandbox_id: str, container_id: str, resources: bytes, patience: Patience
    ) -> tuple[view.Container, Outcome]:
        outcome = await self._change("patch_container", sandbox_id, container_id, resources, patience)
        return view.Container(container_id, msgspec.Raw(resources)), outcome

    def container(self, sandbox_id: str, container_id: str) -> view.Container:
        self._note("container", sandbox_id, container_id)
        return view.Container(container_id, msgspec.Raw(b'{"x-unknown": 1.50}'))

    def containers(self, sandbox_id: str) -> dict[str, view.Container]:
        self._note("containers", sandbox_id)
        return {"c1": view.Container("c1", msgspec.Raw(b'{"x-unknown": 1.50}'))}

    def devices(self, sandbox_id: str, kind: DeviceKind) -> dict[str, view.Device]:
        self._note("devices", sandbox_id, kind)
        return {}

    async def plan(self, request: Request) -> Planned:
        self._note("plan", request)
        return dry_run(config.load(Path("/dev/null"), Host(8, 16384)), request)

    async def delete_container(self, sandbox_id: str, container_id: str, patience: Patience) -> bool:
        return (await self._change("delete_container", sandbox_id, container_id, patience)).settled


@dataclass(frozen=True)
class Reply:
    """One response, its headers by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401
        return json.loads(self.body)


@dataclass(frozen=True)
class Door:
    """The socket at which an API is asked."""

    path: str

    async def raw(self, data: bytes) -> Reply:
        """Send *data* on a connection of its own, and read one response."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(data)
            async with asyncio.timeout(20):
                return await read_reply(reader)
        finally:
            writer.close()

    async def ask(self, method: str, path: str, body: bytes | str | None = None, *headers: str) -> Reply:
        data = body.encode() if isinstance(body, str) else body
        head = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
        if data is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        reply = await self.raw("\r\n".join([*head, "", ""]).encode() + (data or b""))
        must_keep(method, path, reply.status, reply.headers, reply.body)
        return reply


@dataclass(frozen=True)
class Served(Door):
    """A running API."""

    api: Api
    manager: ScriptedManager


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Reply(int(status.split()[1]), headers, body)


def bound(directory: str, mode: int) -> tuple[str, socket.socket]:
    """A socket of that mode in *directory*, which everybody may enter."""
    path = Path(directory, "api.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(mode)
    path.parent.chmod(0o755)
    return str(path), listener


@asynccontextmanager
async def serving(group: int | None = None, mode: int = 0o600) -> AsyncIterator[Served]:
    """The API on a socket of its own directory; both are gone afterwards."""
    directory = tempfile.mkdtemp(prefix="rm-")
    try:
        path, listener = bound(directory, mode)
        manager = ScriptedManager()
        api = Api(manager, group)
        await api.start([listener])
        try:
            yield Served(path, api, manager)
        finally:
            if manager.gate is not None:
                manager.gate.set()
            await api.stop(5)
    finally:
        shutil.rmtree(directory)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is another's
            await asyncio.sleep(0.001)
