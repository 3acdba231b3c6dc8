"""The bare fleet: one stock qemu.qmp client for each VM, in one event loop, with read-back and nothing else.

A plug is pipelined with its read-back; an unplug waits for QEMU's event first. The default listener is told to keep
nothing, as any program that runs for long has to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qemu.qmp import QMPClient


class BareVm:
    """One VM through one connection."""

    def __init__(self) -> None:
        self._client = QMPClient()
        self._client.events.event_filter = lambda _: False
        self._slot: dict[str, Any] = {}
        self.operations = 0

    async def connect(self, path: Path) -> None:
        await self._client.connect(str(path))
        slots: Any = await self._client.execute("query-hotpluggable-cpus")
        self._slot = [slot for slot in slots if "qom-path" not in slot][-1]

    async def close(self) -> None:
        await self._client.disconnect()

    async def work(self, end: float) -> None:
        """Plug and unplug until *end* (``time.monotonic``), counting what was done by then."""
        while time.monotonic() < end:
            await self._plug()
            self._count(end)
            await self._unplug()
            self._count(end)

    def _count(self, end: float) -> None:
        self.operations += time.monotonic() < end

    async def _plug(self) -> None:
        arguments = {"driver": self._slot["type"], "id": "bare", **self._slot["props"]}
        await asyncio.gather(
            self._client.execute("device_add", arguments), self._client.execute("query-hotpluggable-cpus")
        )

    async def _unplug(self) -> None:
        with self._client.listener("DEVICE_DELETED") as gone:
            await self._client.execute("device_del", {"id": "bare"})
            await gone.get()
        await self._client.execute("query-hotpluggable-cpus")


async def work(paths: Sequence[Path], seconds: float) -> list[int]:
    """How many operations each VM was put through in so many seconds, all at once."""
    vms = [BareVm() for _ in paths]
    await asyncio.gather(*(vm.connect(path) for vm, path in zip(vms, paths, strict=True)))
    try:
        end = time.monotonic() + seconds
        await asyncio.gather(*(vm.work(end) for vm in vms))
    finally:
        await asyncio.gather(*(vm.close() for vm in vms))
    return [vm.operations for vm in vms]
