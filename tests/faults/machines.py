"""The VMs that outlive a killed daemon, each a process of its own: QEMU under KVM, and the two fakes on the wire."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from hypervisors.base import Accelerator
from hypervisors.vmm_process import VmmProcess
from kata_resmgr.guest.machine import FirmwareGuest
from tests.daemon import Caller
from tests.integration.monitor import monitor

MAX_VCPUS = 6
MIB = 1 << 20
BOOT_MIB = 64
MAX_MIB = 64 + 1024
CONFIG = f"""
[resmgr]
host_cpus = {MAX_VCPUS}
shrink_delay = "50ms"
[hypervisor.qemu]
default_memory = {BOOT_MIB}
default_maxmemory = {MAX_MIB}
[hypervisor.clh]
default_memory = {BOOT_MIB}
default_maxmemory = {MAX_MIB}
[runtime]
hypervisor_name = "qemu"
"""


class Kind(StrEnum):
    """What a VM is run by."""

    KVM = "QEMU under KVM"
    QMP = "the fake of QMP"
    CLH = "the fake of Cloud Hypervisor"


class Machine:
    """A VM, and the sandbox that it belongs to."""

    def __init__(self, kind: Kind, name: str, directory: Path) -> None:
        self.kind = kind
        self.name = name
        self.path = f"/v1/sandboxes/{name}"
        self.memory = kind is not Kind.CLH
        """Whether its memory comes and goes."""
        self._directory = directory
        self._socket = Path()
        self._pid = 0

    def start(self, caller: Caller, stack: ExitStack) -> None:
        """Register it, start the VM, and attach it. It ends with *stack*."""
        body = {"hypervisor": "clh" if self.kind is Kind.CLH else "qemu"}
        vmm = caller.ok("PUT", self.path, body)["vmm"]
        self._socket = self._directory / f"{self.name}.api" if self.kind is Kind.CLH else Path(vmm["monitor"])
        if self.kind is Kind.KVM:
            guest = stack.enter_context(FirmwareGuest(vmm["args"], accelerator=Accelerator.KVM))
            guest.ready()
        elif self.kind is Kind.QMP:
            sizes = {"max-vcpus": MAX_VCPUS, "memory": BOOT_MIB * MIB, "max-memory": MAX_MIB * MIB, "slots": 10}
            arguments = [f"--{option}={value}" for option, value in sizes.items()]
            stack.enter_context(fake("tests.fakes.qmp_process", self._socket, *arguments))
        else:
            config = f"--config={json.dumps(vmm['config'])}"
            process = stack.enter_context(fake("tests.fakes.cloud_hypervisor", self._socket, config))
            self._pid = process.pid
            tell(process, "cooperate", True)
        caller.ok("PUT", f"{self.path}/vm", {"socket": str(self._socket)})

    def vcpus(self) -> int:
        """As the hypervisor itself tells, to whom nobody else may be connected."""
        if self.kind is Kind.CLH:
            process = VmmProcess(self._pid)
            try:
                return len(process.vcpus())
            finally:
                process.close()
        with monitor(self._socket) as beside:
            return beside.vcpus()


@contextmanager
def fake(module: str, socket: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fake in a process of its own, which listens; it ends with its stdin."""
    command = [sys.executable, "-m", module, str(socket), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), f"{module} did not start"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def tell(process: subprocess.Popen[bytes], *call: Any) -> None:  # noqa: ANN401 - JSON
    """Have a fake of Cloud Hypervisor carry out a call."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(call).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
