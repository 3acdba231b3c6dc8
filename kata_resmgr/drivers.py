"""Which driver drives which sandbox's VM, and what all drivers of a kind share."""

from __future__ import annotations

from hypervisors.base import Hypervisor
from hypervisors.ch_pool import CallPool
from hypervisors.cloud_hypervisor import CloudHypervisor
from hypervisors.qemu import QemuHypervisor
from kata_resmgr.sandbox import Plan


class Drivers:
    """Opens drivers, until :meth:`close`."""

    def __init__(self) -> None:
        self._calls = CallPool()

    def open(self, plan: Plan, socket: str) -> Hypervisor:
        """A driver, not connected, of the VM at *socket* that was booted as *plan* says."""
        if plan.config.hypervisor == "clh":
            return CloudHypervisor(socket, self._calls, boot_vcpus=plan.boot.vcpus, boot_memory=plan.boot.memory)
        return QemuHypervisor(socket)

    async def close(self) -> None:
        """Once all drivers are closed."""
        await self._calls.close()
