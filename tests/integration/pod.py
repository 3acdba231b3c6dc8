"""A pod whose VM is a real QEMU with the mini firmware, and the daemon that sizes it. Its fixture is in conftest.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kata_resmgr.guest.machine import MACHINE
from tests.conftest import StartFirmware
from tests.daemon import Caller, Daemon

SANDBOX = "/v1/sandboxes/s1"


class Pod:
    """A registered sandbox whose VM runs, and its caller."""

    def __init__(
        self,
        daemon: Daemon,
        start: StartFirmware,
        path: str = SANDBOX,
        *,
        arguments: Sequence[str] = (),
        machine: str = MACHINE,
    ) -> None:
        """*arguments* follow the daemon's own, and overrule them, as an operator's would."""
        self.daemon = daemon
        self.path = path
        self.caller = daemon.caller()
        self.args = self.caller.ok("PUT", path, {})["vmm"]["args"]
        self.guest = start([*self.args, *arguments], machine=machine)
        self.guest.ready()
        self.caller.ok("PUT", f"{path}/vm", {})

    @property
    def state(self) -> dict[str, Any]:
        answer = self.caller.ok("GET", self.path)
        assert isinstance(answer, dict)
        return answer

    def put(self, cpus: float, query: str = "", caller: Caller | None = None) -> tuple[int, Any]:
        body = {"resources": {"cpu": {"quota": round(cpus * 100_000), "period": 100_000}}}
        return (caller or self.caller).call("PUT", f"{self.path}/containers/c1{query}", body)

    def sizes(self) -> tuple[int, int, int]:
        vcpus = self.state["vcpus"]
        return vcpus["desired"], vcpus["plugged"], vcpus["pending"]

    def condition(self, kind: str) -> dict[str, Any] | None:
        return next((condition for condition in self.state["conditions"] if condition["type"] == kind), None)


class MakePod(Protocol):
    """What ``pod`` is: it makes one pod, of a VM with the given maximum of vCPUs."""

    def __call__(
        self,
        maximum: int,
        *,
        host_cpus: int = 8,
        arguments: Sequence[str] = (),
        machine: str = MACHINE,
        hypervisor: str = "",
    ) -> Pod: ...
