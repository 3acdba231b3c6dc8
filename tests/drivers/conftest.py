"""What the driver's tests on the wire are held to when they end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest


@pytest.fixture
async def nothing_left_behind() -> AsyncIterator[None]:
    """Neither tasks nor descriptors may outlive a test and its fixtures, nor exceptions that nobody looked at."""
    descriptors = _descriptors()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    yield
    for _ in range(3):  # closed transports let go of their sockets in a later turn of the loop
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert _descriptors() == descriptors
    gc.collect()  # asyncio complains when a task goes whose exception was not retrieved
    assert complaints == []


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
