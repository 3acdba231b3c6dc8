"""What a shim gives to the VMM that it starts, so that the VM has its size and the daemon can drive it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hypervisors import qemu_args
from hypervisors.ch_types import RateLimitGroupConfig
from kata_resmgr import view
from kata_resmgr.config import SandboxConfig
from kata_resmgr.limits import LimitRefused, Limits, requested
from kata_resmgr.problem import At, Code, Problem
from kata_resmgr.sizing import DIMM_GRANULARITY, MIB, BootSize

MONITOR = "resmgr.sock"
"""The monitor's name in the sandbox's directory."""
HOTPLUG_UNIT = DIMM_GRANULARITY
"""Bytes: what Cloud Hypervisor's region for memory that comes later is a multiple of."""


NO_GROUPS: Mapping[str, Limits] = MappingProxyType({})


def given(
    config: SandboxConfig, boot: BootSize, monitor: str | None, groups: Mapping[str, Limits] = NO_GROUPS
) -> view.Vmm | view.ClhVmm:
    """For the sandbox's hypervisor; *monitor* is None with Cloud Hypervisor, which alone has *groups*."""
    return cloud_hypervisor(config, boot, groups) if monitor is None else qemu(config, boot, monitor)


def qemu(config: SandboxConfig, boot: BootSize, monitor: str) -> view.Vmm:
    """*monitor* is the path of the socket that QEMU shall listen on."""
    return view.Vmm(
        args=qemu_args.vmm_arguments(
            vcpus=boot.vcpus,
            max_vcpus=boot.max_vcpus,
            memory_mib=boot.memory // MIB,
            max_memory_mib=boot.max_memory // MIB,
            memory_slots=boot.memory_slots,
            monitor=monitor,
            machine_type=config.machine_type,
            virtio_mem=config.enable_virtio_mem,
            huge_pages=config.enable_hugepages,
            prealloc=config.enable_mem_prealloc,
            free_page_reporting=config.reclaim_guest_freed_memory,
        ),
        kernel_params=list(qemu_args.KERNEL_PARAMS),
        monitor=monitor,
    )


def cloud_hypervisor(config: SandboxConfig, boot: BootSize, groups: Mapping[str, Limits] = NO_GROUPS) -> view.ClhVmm:
    """Members of Cloud Hypervisor's VmConfig, and the limiters for the devices that the shim puts into it.

    A static VM, and one that is as big as it may be, has no region to grow into. *groups* are limits that disks share,
    by the group's id: the VMM takes them at boot only. Raises :class:`Problem` (``invalid_body``) for a group's limit
    that cannot be kept, and where a group has none.
    """
    region = 0 if boot.static else (boot.max_memory - boot.memory) // HOTPLUG_UNIT * HOTPLUG_UNIT
    memory = view.ClhMemory(
        size=boot.memory, hotplug_method="VirtioMem" if config.enable_virtio_mem else "Acpi", hotplug_size=region
    )
    cpus = view.ClhCpus(boot_vcpus=boot.vcpus, max_vcpus=boot.max_vcpus)
    limiters = {
        device: limiter for device in ("disk", "net") if (limiter := config.io_limits(device).limiter()) is not None
    }
    return view.ClhVmm(view.ClhConfig(cpus, memory, tuple([_group(*group) for group in groups.items()])), limiters)


def _group(name: str, limits: Limits) -> RateLimitGroupConfig:
    try:
        limiter = requested(limits).limiter()
        if limiter is None:
            raise LimitRefused("bytesPerSecond", 0, f"set, or opsPerSecond: the group {name!r} would limit nothing")
    except LimitRefused as error:
        at = At(f"/rateLimitGroups/{name}/{error.name}", str(error))
        raise Problem(Code.INVALID_BODY, f"{at.pointer}: {error}", at=(at,)) from None
    return RateLimitGroupConfig(name, limiter)
