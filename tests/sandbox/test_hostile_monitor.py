"""A sandbox whose QEMU turns hostile: the operation fails, the phase tells, and one that turns good is taken back.

On the wire and in real time; only the driver's deadlines and the pauses between attempts are short.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hypervisors import qemu_args
from hypervisors.base import TimedOut
from hypervisors.qemu import QemuHypervisor
from kata_resmgr import vm
from kata_resmgr.events import Events, Teller
from kata_resmgr.guest.machine import FirmwareGuest
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience, Sandbox
from kata_resmgr.store import Attachment, MemoryStore
from tests.drivers.misdeeds import ANSWERS, GREETINGS, LONG, Misdeed
from tests.fakes.qmp_server import ID, QmpServer
from tests.sandbox.rig import NO_PATIENCE, cpus, make_plan

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PATIENCE = 10.0
STOPPED = 0.5
"""Seconds for each call to a QEMU that will be stopped."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "RECONNECT_FIRST", 0.01)
    monkeypatch.setattr(vm, "RECONNECT_LONGEST", 0.02)


class Driver:
    """Opens drivers whose calls have so many seconds."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.deadline = LONG

    def __call__(self) -> QemuHypervisor:
        return QemuHypervisor(self.socket, timeout=self.deadline, greeting_timeout=self.deadline)


@asynccontextmanager
async def sandbox_on(driver: Driver) -> AsyncIterator[Sandbox]:
    """A sandbox with the VM of *driver* attached; it leaves no task."""
    before = asyncio.all_tasks()
    store = MemoryStore()
    sandbox = Sandbox("s1", make_plan(), store, Teller(Events(store), "s1"))
    await sandbox.attach(Attachment(str(driver.socket), None, None), driver)
    try:
        yield sandbox
    finally:
        await sandbox.close()
    assert asyncio.all_tasks() - before == set()


async def use(driver: Driver, deadline: float, server: QmpServer, sandbox: Sandbox) -> None:
    """Connect anew, with another deadline."""
    driver.deadline = deadline
    connections = server.connections
    server.drop()
    await until(lambda: server.connections > connections and sandbox.phase == "running")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - a state that nobody tells of
            await asyncio.sleep(0.005)


def conditions(sandbox: Sandbox) -> dict[str, str]:
    return {condition.type: condition.message for condition in sandbox.state().conditions}


@pytest.mark.parametrize("misdeed", ANSWERS, ids=str)
async def test_an_operation_that_meets_it_fails_and_changes_nothing(short_tmp: Path, misdeed: Misdeed) -> None:
    driver = Driver(short_tmp / "m")
    async with QmpServer(driver.socket) as server, sandbox_on(driver) as sandbox:
        await sandbox.put("c1", cpus(1), NO_PATIENCE)
        await use(driver, misdeed.deadline, server, sandbox)
        misdeed.commit(server, always=True)
        # A plug that is told of would end the half of a line that some leave behind.
        server.spoil("device_add", b'{"return": {}, "id": ' + ID + b"}\r\n", always=True)

        with pytest.raises(Problem) as failure:
            await sandbox.put("c2", cpus(1), NO_PATIENCE)

        late = misdeed.error is TimedOut
        assert failure.value.code is (Code.HYPERVISOR_TIMEOUT if late else Code.HYPERVISOR_UNREACHABLE)
        assert failure.value.retryable
        attempts = server.connections
        await until(lambda: server.connections > attempts)
        state = sandbox.state()
        assert (state.phase, state.counts.containers, state.vcpus.desired) == ("unreachable", 1, 2)
        assert 0 < len(conditions(sandbox)["Unreachable"]) <= 256

        driver.deadline = LONG
        server.behave()
        await until(lambda: sandbox.phase == "running")
        assert "Unreachable" not in conditions(sandbox)
        assert (await sandbox.put("c2", cpus(1), NO_PATIENCE))[1].sandbox.vcpus.plugged == 3


@pytest.mark.parametrize("misdeed", GREETINGS, ids=str)
async def test_a_vm_that_comes_back_so_stays_unreachable_until_it_turns_good(short_tmp: Path, misdeed: Misdeed) -> None:
    driver = Driver(short_tmp / "m")
    async with QmpServer(driver.socket) as server, sandbox_on(driver) as sandbox:
        driver.deadline = misdeed.deadline
        misdeed.commit(server, always=True)
        server.drop()
        await until(lambda: sandbox.phase == "unreachable")
        attempts = server.connections
        await until(lambda: server.connections >= attempts + 2)
        assert sandbox.phase == "unreachable"
        assert "Unreachable" in conditions(sandbox)
        with pytest.raises(Problem) as failure:
            await sandbox.put("c1", cpus(1), NO_PATIENCE)
        assert (failure.value.code, failure.value.retryable) == (Code.HYPERVISOR_UNREACHABLE, True)

        driver.deadline = LONG
        server.behave()
        await until(lambda: sandbox.phase == "running")
        assert (await sandbox.put("c1", cpus(1), NO_PATIENCE))[1].sandbox.vcpus.plugged == 2


@pytest.mark.parametrize("misdeed", GREETINGS, ids=str)
async def test_it_cannot_be_attached_and_later_it_can(short_tmp: Path, misdeed: Misdeed) -> None:
    driver = Driver(short_tmp / "m")
    async with QmpServer(driver.socket) as server:
        driver.deadline = misdeed.deadline
        misdeed.commit(server, always=True)
        with pytest.raises(Problem) as failure:
            async with sandbox_on(driver):
                pass
        assert failure.value.retryable
        assert failure.value.code in (Code.MONITOR_BUSY, Code.HYPERVISOR_UNREACHABLE)

        driver.deadline = LONG
        server.behave()
        async with sandbox_on(driver) as sandbox:
            assert sandbox.state().phase == "running"


async def test_a_stopped_qemu_is_unreachable_until_it_goes_on(
    short_tmp: Path, minifw_guest: Callable[[Sequence[str]], FirmwareGuest]
) -> None:
    guest = minifw_guest(qemu_args.vmm_arguments(1, 4, 32, 32, 0, str(short_tmp / "m")))
    await asyncio.to_thread(guest.ready)
    driver = Driver(short_tmp / "m")
    driver.deadline = STOPPED
    async with sandbox_on(driver) as sandbox:
        driver.deadline = LONG
        guest.pause()
        with pytest.raises(Problem) as failure:
            await sandbox.put("c1", cpus(1), NO_PATIENCE)
        assert (failure.value.code, failure.value.retryable) == (Code.HYPERVISOR_TIMEOUT, True)
        assert sandbox.phase == "unreachable"
        guest.resume()  # what it was sent while it was stopped it carries out now
        await until(lambda: sandbox.phase == "running")
        assert (await sandbox.put("c1", cpus(1), NO_PATIENCE))[1].sandbox.vcpus.plugged == 2
        await sandbox.delete("c1", Patience(wait=PATIENCE))
        state = sandbox.state()
        assert (state.vcpus.plugged, state.converged) == (1, True)
