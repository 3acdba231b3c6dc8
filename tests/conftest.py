"""What all tests share: guests under real QEMU, short directories, and the account of what ran for real.

``minifw_guest`` and ``linux_guest`` are factories; what they start ends with the test. A test that uses one belongs
to a group, such as "7.2.22, KVM, mini firmware", and the summary names the groups that ran and the reason for each
that did not. There are two reasons: a machine without a KVM that serves, and a distribution that has no second QEMU.
Everything else is installed, or an error. Tests run with the installed QEMU, those marked ``every_qemu`` with each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import pytest

from hypervisors.base import Accelerator
from kata_resmgr.guest import GuestError, build, qemus
from kata_resmgr.guest.machine import MACHINE, FirmwareGuest, LinuxGuest, why_not_kvm
from kata_resmgr.guest.qemus import Qemu

_SESSION = ("KATA_RESMGR_TEST_SESSION", uuid.uuid4().hex)
"""In the environment of all that this session starts, so that what it leaves can be found."""

_GROUP = "real QEMU"
_QEMUS: Final[dict[str, Callable[[], Qemu]]] = {"installed": lambda: qemus.INSTALLED, "backports": qemus.backports}
_left_behind: list[str] = []


class StartFirmware(Protocol):
    """What ``minifw_guest`` is."""

    def __call__(self, arguments: Sequence[str], *, machine: str = MACHINE) -> FirmwareGuest: ...


class StartLinux(Protocol):
    """What ``linux_guest`` is."""

    def __call__(
        self, arguments: Sequence[str], *, kernel_params: Sequence[str] = (), reboots: bool = False
    ) -> LinuxGuest: ...


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_qemu"):
        each = [pytest.param(name, marks=pytest.mark.qemu(name)) for name in _QEMUS]
        metafunc.parametrize("qemu", each, indirect=True)


@pytest.fixture
def qemu(request: pytest.FixtureRequest) -> Qemu:
    """The QEMU that this test's guests run under."""
    return _QEMUS[_qemu_of(request.node)]()


@pytest.fixture
def minifw_guest(qemu: Qemu) -> Iterator[StartFirmware]:
    """Starts mini firmware guests under KVM; ``ready()`` is the caller's to await."""
    with contextlib.ExitStack() as guests:

        def start(arguments: Sequence[str], *, machine: str = MACHINE) -> FirmwareGuest:
            return guests.enter_context(
                FirmwareGuest(arguments, accelerator=Accelerator.KVM, machine=machine, qemu=qemu)
            )

        yield start


@pytest.fixture(
    params=[
        pytest.param(Accelerator.TCG, id="tcg", marks=pytest.mark.tcg),
        pytest.param(Accelerator.KVM, id="kvm", marks=pytest.mark.kvm),
    ]
)
def linux_guest(request: pytest.FixtureRequest, qemu: Qemu) -> Iterator[StartLinux]:
    """Starts Linux guests: each test under TCG, and once more under KVM where Linux boots under it."""
    accelerator: Accelerator = request.param
    with contextlib.ExitStack() as guests:

        def start(arguments: Sequence[str], *, kernel_params: Sequence[str] = (), reboots: bool = False) -> LinuxGuest:
            return guests.enter_context(
                LinuxGuest(arguments, kernel_params=kernel_params, accelerator=accelerator, qemu=qemu, reboots=reboots)
            )

        yield start


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory of the test's own whose path is short enough for the sockets in it (107 bytes)."""
    directory = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


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


def pytest_configure(config: pytest.Config) -> None:
    name, value = _SESSION
    os.environ[name] = value
    config.addinivalue_line("markers", "kvm: needs real QEMU under KVM; skipped where KVM does not serve")
    config.addinivalue_line("markers", f"qemu(name): runs with that QEMU, one of {', '.join(_QEMUS)}")
    config.addinivalue_line("markers", "every_qemu: runs once with each of them; needs the qemu fixture")
    config.addinivalue_line("markers", "tcg: needs real QEMU under TCG, which runs anywhere")
    config.addinivalue_line("markers", "system: in a Debian of its own under systemd (make test-system)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Before `-m` selects by marker.
    for item in items:
        if isinstance(item, pytest.Function) and "minifw_guest" in item.fixturenames:
            item.add_marker("kvm")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marked = [accelerator for accelerator in Accelerator if item.get_closest_marker(accelerator.value)]
    if not marked:
        return
    # The firmware proves nothing under TCG, whose removals are broken: what is marked for TCG runs Linux.
    linux = Accelerator.TCG in marked or (isinstance(item, pytest.Function) and "linux_guest" in item.fixturenames)
    kind = LinuxGuest if linux else FirmwareGuest
    kind.prepare()
    guest = f"Linux {build.linux().release}" if linux else kind.kind
    name = _qemu_of(item)
    try:
        version, missing = _QEMUS[name]().version, None
    except GuestError as error:
        version, missing = name, str(error)
    item.user_properties.append((_GROUP, f"{version}, {marked[0].value.upper()}, {guest}"))
    if missing is not None:
        pytest.skip(missing)
    if Accelerator.KVM in marked and (reason := why_not_kvm(kind)):
        pytest.skip(reason.splitlines()[0])


def _qemu_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("qemu")
    return str(marker.args[0]) if marker is not None else "installed"


def pytest_sessionfinish(session: pytest.Session) -> None:
    until = time.monotonic() + 5
    while (left := _qemus_of_this_session()) and time.monotonic() < until:
        time.sleep(0.05)
    for pid, command in left.items():
        _left_behind.append(f"QEMU was left running: {command}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _qemus_of_this_session() -> dict[int, str]:
    """The command lines of the QEMU processes that descend from this session, by process id."""
    mark = "=".join(_SESSION).encode()
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not (process / "comm").read_text().startswith("qemu-system"):
                continue
            if mark in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(process.name)] = command
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for group in (str(value) for name, value in getattr(report, "user_properties", ()) if name == _GROUP):
                what = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}" if outcome == "skipped" else outcome
                counts.setdefault(group, Counter())[what] += 1
    for group, outcomes in sorted(counts.items()):
        told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        terminalreporter.write_line(f"{_GROUP}: {group}: {told}")
    for line in _left_behind:
        terminalreporter.write_line(line, red=True)
