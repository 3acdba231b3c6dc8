"""The daemon as a process: what it is put together from, its signals, its start and its end."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import grp
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from kata_resmgr import config, logs, systemd, watchdog
from kata_resmgr.api.server import CONNECTIONS, Api
from kata_resmgr.config import ConfigError, Settings
from kata_resmgr.drivers import Drivers
from kata_resmgr.listening import Listener, ListenError, make_directory
from kata_resmgr.manager import ResourceManager
from kata_resmgr.sqlite_store import SqliteStore
from kata_resmgr.state_lock import StateError
from kata_resmgr.store import StateUnavailable

STOP_PATIENCE = 75.0
"""Seconds for which running operations may hold up the end: service managers kill after 90."""
_DESCRIPTORS = 4 * CONNECTIONS

log = structlog.get_logger(__name__)


def serve(path: Path | None) -> int:
    """Run the daemon with the configuration at *path* until SIGTERM or SIGINT.

    Returns the exit status: 0, or 1 with a line on stderr when it cannot start.
    """
    try:
        settings = config.load(path)
        logs.configure(settings.daemon.log_level, settings.daemon.log_format)
        faulthandler.enable()  # a watchdog ends with SIGABRT: then stderr tells where it hung
        asyncio.run(_run(path, settings))
    except (ConfigError, ListenError, StateError, StateUnavailable, systemd.InheritedError) as error:
        print(f"kata-resmgr: {error}", file=sys.stderr)
        return 1
    return 0


def assemble(settings: Settings, drivers: Drivers) -> ResourceManager:
    """The composition root: what the daemon keeps state in, and which driver drives which VM.

    Raises :class:`StateError`.
    """
    return ResourceManager(settings, SqliteStore(settings.daemon.state), drivers.open)


async def _run(path: Path | None, settings: Settings) -> None:
    group = _group(settings.daemon.socket_group)
    _make_place(settings.daemon.state, group if settings.daemon.state.parent == settings.daemon.socket.parent else None)
    drivers = Drivers()
    # First: it holds the state, and a second daemon on it must not touch the socket.
    manager = assemble(settings, drivers)
    inherited = systemd.inherited_sockets()
    own = None if inherited else Listener(settings.daemon.socket, group)
    _allow_descriptors()
    api = Api(manager, group)
    try:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await manager.adopt()  # who connects meanwhile waits
        await api.start(inherited if own is None else [own.socket], inherited=own is None)
        loop.add_signal_handler(signal.SIGHUP, _reload, path, manager)
        gc.collect()
        gc.freeze()  # what was imported lives as long as the process: no collection needs to look at it again
        log.info("serving", socket=None if own is None else str(settings.daemon.socket), inherited=len(inherited))
        attending = asyncio.create_task(watchdog.attend(api.succeeds))
        await stop.wait()
        attending.cancel()
        systemd.notify("STOPPING=1")
        log.info("stopping")
        await api.stop(STOP_PATIENCE)
        await manager.close()
        await drivers.close()
    finally:
        if own is not None:
            own.remove()
    log.info("stopped")


def _reload(path: Path | None, manager: ResourceManager) -> None:
    """SIGHUP: new sandboxes live by what the file says now; the rest, and a bad file, change nothing."""
    loop = asyncio.get_running_loop()
    systemd.notify("RELOADING=1", f"MONOTONIC_USEC={int(loop.time() * 1e6)}")
    try:
        manager.settings = replace(config.load(path), daemon=manager.settings.daemon)  # the process keeps its own
        log.info("configuration read again")
        status = "configuration read again"
        manager.events.tell(None, "config.reloaded", {})
    except ConfigError as error:
        log.error("configuration left as it was", reason=str(error))
        status = f"configuration left as it was: {error}"
    systemd.notify("READY=1", f"STATUS={status}")


def _make_place(state: Path, group: int | None) -> None:
    try:
        make_directory(state.parent, group)
    except OSError as error:
        raise StateError(f"{state.parent}: the directory of [daemon] state cannot be made: {error.strerror}") from error


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f'[daemon] socket_group = "{name[:80]}": there is no such group on this host') from None


def _allow_descriptors() -> None:
    """One for each connection and VM: the usual soft limit of 1024 is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
