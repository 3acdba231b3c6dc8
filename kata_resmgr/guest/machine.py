"""Runs the guests: QEMU as a process of its own, cleaned up whatever happens.

::

    with LinuxGuest(["-smp", "1,maxcpus=4", "-m", "256M", ...]) as guest:
        guest.ready()
        guest.online_cpus()

The caller's arguments say how many vCPUs, how much memory and which monitors; the rest is here. The guest's serial
ports are a socket pair and an unnamed file: nothing is left in a file system. Leaving the context ends QEMU, and so
does the end of this process, however it comes. Failures are :class:`GuestError`, with what QEMU and the guest said.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import ClassVar, Literal, Self, TypeAlias

from hypervisors.base import Accelerator
from kata_resmgr.guest import GuestError, build, packages
from kata_resmgr.guest.packages import Say, silent
from kata_resmgr.guest.qemus import INSTALLED, Qemu

NEEDS = (packages.QEMU, packages.SETPRIV)
"""What must be installed to run a guest that is built."""

MACHINE = "q35,vmport=on"
"""The machine, unless a test asks for another. `vmport` is for :data:`_CPU`."""

Mode: TypeAlias = Literal["c", "i", "r", "s"]
"""How the mini firmware meets a removal: it cooperates, ignores, refuses; or it spins, deaf to hot-plug."""

_TERMINATE_SECONDS = 3.0
_KILL_SECONDS = 10.0
_TRIAL_SECONDS = 10.0
_ANSWER_LIMIT = 1 << 20
_TAIL = 2000

# The kernel ends a child with the *thread* that started it (PR_SET_PDEATHSIG). This one lives as long as the process.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qemu-starter")


def prepare(say: Say = silent) -> None:
    """What both guests need, so that starting one later takes no longer than it must."""
    FirmwareGuest.prepare(say)
    LinuxGuest.prepare(say)


class _Serial:
    """Our end of one of the guest's serial ports. Both calls raise :class:`OSError` at the deadline or the end."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair()
        self._received = bytearray()

    def send(self, data: bytes, until: float) -> None:
        self._socket.settimeout(_left(until))
        self._socket.sendall(data)

    def line(self, until: float) -> bytes:
        """The next line, without its end."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _ANSWER_LIMIT:
                raise ConnectionError(f"it sent a line of more than {_ANSWER_LIMIT} bytes")
            self._socket.settimeout(_left(until))
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError("QEMU closed the serial port")
            self._received += received
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()


class _Log:
    """An unnamed file in memory that QEMU writes to."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kata-resmgr-guest")

    def tail(self) -> str:
        """The end of what was written, while it is open."""
        if self.fd < 0:
            return ""
        # Read at an offset: the place where QEMU writes on is shared with us.
        return os.pread(self.fd, _TAIL, max(0, os.fstat(self.fd).st_size - _TAIL)).decode(errors="replace").strip()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class Guest(ABC):
    """A running QEMU with a guest. Its methods may be called from any thread."""

    kind: ClassVar[str]
    """What runs inside, in words."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        accelerator: Accelerator | None = None,
        machine: str = MACHINE,
        qemu: Qemu = INSTALLED,
    ) -> None:
        """Start *qemu*, under the accelerator of :func:`accelerator_for` unless one is given.

        *machine* is the type with its properties. *arguments* may use its chardevs ``console``, which is a log, and
        ``harness``.
        """
        packages.ensure(NEEDS)
        self.accelerator = accelerator or accelerator_for(type(self))
        self._exchange = threading.Lock()
        self._said, self._console, self._serial = _Log(), _Log(), _Serial()
        port = self._serial.theirs.fileno()
        argv = [
            "setpriv", "--pdeathsig", "KILL", "--",
            qemu.program, *qemu.options, "-no-user-config", "-nodefaults", "-display", "none",
            "-machine", machine, "-accel", self.accelerator.value, *_CPU[self.accelerator],
            "-chardev", f"file,id=console,path=/dev/fd/{self._console.fd}",
            "-chardev", f"socket,id=harness,fd={port}",
            *arguments,
        ]  # fmt: skip

        def start() -> subprocess.Popen[bytes]:
            said = self._said.fd
            return subprocess.Popen(
                argv,
                env=os.environ | qemu.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(self._console.fd, port),
            )

        try:
            self._process = _starter.submit(start).result()
        except BaseException:
            self._release()
            raise
        # So that the end of QEMU is the end of the stream.
        self._serial.theirs.close()

    @classmethod
    def prepare(cls, say: Say = silent) -> None:
        """Install and build what this guest needs. Raises :class:`GuestError` where that cannot be done here."""
        packages.ensure(NEEDS, say)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @abstractmethod
    def ready(self, seconds: float) -> None:
        """Wait until the guest is up: once for its start, and once more for each reset."""

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether QEMU has not ended; a paused one has not."""
        return self._process.poll() is None

    def pause(self) -> None:
        """Stop the whole of QEMU, its monitors included (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """The end of :meth:`pause`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End QEMU at once, as a crash would (SIGKILL), and wait until it is gone. Its sockets stay behind."""
        self._process.kill()
        self._process.wait(_KILL_SECONDS)

    def close(self) -> None:
        """End QEMU, which removes its sockets if it is well enough. May be called twice."""
        if self.running:
            self._process.terminate()
            self.resume()
            try:
                self._process.wait(_TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._release()

    def _release(self) -> None:
        self._serial.close()
        self._said.close()
        self._console.close()

    @contextlib.contextmanager
    def _deadline(self, task: str, seconds: float) -> Iterator[float]:
        """One exchange with the guest at a time, and the story told when it fails."""
        with self._exchange:
            try:
                yield time.monotonic() + seconds
            except OSError as error:
                raise GuestError(self._story(task, seconds, error)) from None

    def _story(self, task: str, seconds: float, error: OSError) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The serial port is closed a moment before the process ends.
            self._process.wait(0.2)
        status = self._process.poll()
        state = "QEMU runs" if status is None else f"QEMU ended with status {status}"
        logs = {"QEMU said": self._said.tail(), "the console said": self._console.tail()}
        quoted = "".join(f"\n{log}: {text}" for log, text in logs.items() if text)
        return f"{self.kind} under {self.accelerator.value}: {task}, within {seconds:g} s: {error}; {state}{quoted}"


_CPU = {
    # Some hosts offer this feature without the register behind it, and QEMU then refuses to start.
    Accelerator.KVM: ("-cpu", "host,-arch-capabilities"),
    # Linux from 6.9 on counts the slots for hot-plug only where it knows that it is a guest, and TCG is no hypervisor
    # that it knows. It knows VMware by the serial number and QEMU's `vmport`, where the CPU names no other.
    Accelerator.TCG: ("-cpu", "qemu64,-hypervisor", "-smbios", "type=1,serial=VMware-kata-resmgr"),
}


class FirmwareGuest(Guest):
    """The mini firmware: hot-plug answered by registers, up at once, idle at no cost."""

    kind = "mini firmware"

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        accelerator: Accelerator | None = None,
        machine: str = MACHINE,
        qemu: Qemu = INSTALLED,
    ) -> None:
        """Start it; see :class:`Guest`."""
        own = ["-bios", str(build.firmware(machine.partition(",")[0])), "-serial", "chardev:harness"]
        super().__init__([*own, *arguments], accelerator=accelerator, machine=machine, qemu=qemu)

    @classmethod
    def prepare(cls, say: Say = silent) -> None:
        super().prepare(say)
        build.firmware(say=say)

    def ready(self, seconds: float = 10.0) -> None:
        with self._deadline("waiting for it to come up", seconds) as until:
            while self._serial.line(until) != b"R":
                pass

    def mode(self, mode: Mode, seconds: float = 10.0) -> None:
        """Tell it how to meet removals from now on, and wait until it has heard."""
        with self._deadline(f"setting mode {mode}", seconds) as until:
            self._serial.send(mode.encode(), until)
            while self._serial.line(until) != mode.encode():
                pass


class LinuxGuest(Guest):
    """The distribution's Linux, whose user land brings online what is plugged, and answers questions."""

    kind = "Linux"

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        kernel_params: Sequence[str] = (),
        accelerator: Accelerator | None = None,
        machine: str = MACHINE,
        qemu: Qemu = INSTALLED,
        reboots: bool = False,
    ) -> None:
        """Start it; see :class:`Guest`.

        A reset or a panic ends QEMU, unless the guest *reboots*.
        """
        image = self.image()
        self.release = image.release
        self._up = False
        super().__init__(
            [
                "-kernel", str(image.kernel), "-initrd", str(image.initrd),
                "-append", " ".join(["console=ttyS0", "quiet", "panic=-1", "cryptomgr.notests", *kernel_params]),
                "-serial", "chardev:console", "-serial", "chardev:harness",
                *([] if reboots else ["-no-reboot"]),
                *arguments,
            ],
            accelerator=accelerator,
            machine=machine,
            qemu=qemu,
        )  # fmt: skip

    @classmethod
    def image(cls, say: Say = silent) -> build.LinuxImage:
        """What it boots. Raises :class:`GuestError` where that cannot be built."""
        return build.linux(say)

    @classmethod
    def prepare(cls, say: Say = silent) -> None:
        super().prepare(say)
        cls.image(say)

    def ready(self, seconds: float = 60.0) -> None:
        """Wait until user land watches for hot-plug: once for its start, and once more for each reset."""
        with self._deadline("waiting for its user land", seconds) as until:
            while self._serial.line(until) != b"ready":
                pass
            self._up = True

    def run(self, command: str, seconds: float = 30.0) -> str:
        """What the shell *command* prints in the guest, without a last newline; both of its outputs.

        Waits for the guest to be :meth:`ready` where nobody has yet. :class:`GuestError` when the command's status
        is not 0, or the deadline passes. A command that was given up runs on, and its late answer is passed over.
        """
        if not self._up:
            self.ready()
        token = secrets.token_hex(8)
        opening, closing = f"{token}{{".encode(), f"{token}}}".encode()
        with self._deadline(f"running {command!r}", seconds) as until:
            self._serial.send(f"{token} {base64.b64encode(command.encode()).decode()}\n".encode(), until)
            while self._serial.line(until) != opening:
                pass
            answer = bytearray()
            while not (line := self._serial.line(until)).startswith(closing):
                answer += line + b"\n"
                if len(answer) > _ANSWER_LIMIT:
                    raise ConnectionError(f"it answered with more than {_ANSWER_LIMIT} bytes")
        # One newline is the frame's, another the last of the command.
        printed = answer.decode(errors="replace").removesuffix("\n").removesuffix("\n")
        status = int(line.removeprefix(closing))
        if status != 0:
            raise GuestError(f"{self.kind}: {command!r} ended with status {status}: {printed}")
        return printed

    def online_cpus(self) -> int:
        """How many CPUs the guest itself uses."""
        return int(self.run("grep -c ^processor /proc/cpuinfo"))

    def mem_total(self) -> int:
        """How much memory the guest itself uses, in bytes (``MemTotal``)."""
        return int(self.run("awk '/^MemTotal:/ { print $2 }' /proc/meminfo")) * 1024

    def hold_memory(self, size: int, seconds: float = 60.0) -> None:
        """Have the guest use *size* bytes more, of which it cannot let go, until :meth:`free_memory`."""
        self.run(f"hold {size}", seconds)

    def free_memory(self) -> None:
        """The end of :meth:`hold_memory`."""
        self.run("killall hold")


def accelerator_for(kind: type[Guest]) -> Accelerator:
    """KVM where such a guest was seen to come up under it, else TCG."""
    return Accelerator.KVM if why_not_kvm(kind) is None else Accelerator.TCG


@cache
def why_not_kvm(kind: type[Guest]) -> str | None:
    """Why KVM cannot run such a guest on this machine, or None where it can; found by trying, once in a process.

    A nested or reduced KVM may run the firmware and still not boot Linux.
    """
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm cannot be opened: {error.strerror}"
    kind.prepare()
    try:
        with kind(["-m", "128M"], accelerator=Accelerator.KVM) as guest:
            guest.ready(_TRIAL_SECONDS)
    except GuestError as error:
        return str(error)
    return None
