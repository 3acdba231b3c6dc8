"""Proof of life for the service manager, given for as long as a caller would be answered (sd_watchdog_enabled(3)).

A timer alone proves that the event loop turns. Here the daemon asks itself, the way its callers do, and tells the
manager only when the answer came; a daemon that hangs, or no longer answers, is ended and started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from kata_resmgr import systemd

READY_PATIENCE: Final = 1.0
"""Seconds that the answer to whether it is ready may take before it is asked again."""
LOOK_EVERY: Final = 0.05
_IN_TIME: Final = 3
"""Times within the manager's period that life is proved: one may be late, and one more may fail."""

log = structlog.get_logger(__name__)

Ask = Callable[[str], Awaitable[bool]]
"""Whether a GET of this path succeeds."""


async def attend(ask: Ask) -> None:
    """Tell when the daemon is ready, and from then on that it lives, until cancelled."""
    while not await _succeeds(ask, "/readyz", READY_PATIENCE):  # noqa: ASYNC110 - nobody but the route knows
        await asyncio.sleep(LOOK_EVERY)
    systemd.notify("READY=1")
    period = systemd.watchdog_period()
    if period is None:
        return
    while True:
        if await _succeeds(ask, "/healthz", period / _IN_TIME):
            systemd.notify("WATCHDOG=1")
        await asyncio.sleep(period / _IN_TIME)


async def _succeeds(ask: Ask, path: str, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await ask(path)
    except (OSError, TimeoutError) as error:
        log.error("no answer to itself", path=path, error=repr(error))
        return False
