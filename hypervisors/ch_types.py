"""Cloud Hypervisor's own objects, under the names and in the units that its API gives them.

What is sent: what is not set is left out, never null (the VMM refuses null), and a member that is not named here can
neither be decoded nor be sent. The VMM itself drops one that it does not know in silence, and a disk whose limiter is
misspelled is then not limited.

What is read (:class:`VmInfo`): null and missing are the same, since releases before v53 write what is not set as null,
and what is not needed is passed over. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

U8: TypeAlias = Annotated[int, Meta(ge=0, le=0xFF)]
U16: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF)]
I63: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
DeviceId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128, pattern="^(?!__)")]
"""The VMM keeps ids that start with ``__`` for itself."""


class TokenBucket(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Bytes, or operations; times in milliseconds. No burst is left out."""

    size: I63
    one_time_burst: I63 = 0
    refill_time: I63


class RateLimiterConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What is not limited is left out."""

    bandwidth: TokenBucket | None = None
    ops: TokenBucket | None = None


class RateLimitGroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One limiter that several disks share. Groups exist only from boot."""

    id: DeviceId
    rate_limiter_config: RateLimiterConfig


class QueueAffinity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The host CPUs that serve one queue of a disk."""

    queue_index: U16
    host_cpus: tuple[U16, ...]


class DiskConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A disk, as ``vm.add-disk`` takes it. All its queues share one limiter."""

    id: DeviceId
    path: str | None = None
    readonly: bool = False
    direct: bool = False
    iommu: bool = False
    num_queues: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1
    queue_size: U16 = 128
    vhost_user: bool = False
    vhost_socket: str | None = None
    rate_limiter_config: RateLimiterConfig | None = None
    rate_limit_group: str | None = None
    serial: Annotated[str, Meta(max_length=20)] | None = None
    queue_affinity: tuple[QueueAffinity, ...] | None = None
    backing_files: bool = False
    sparse: bool = True
    image_type: Literal["FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"] = "Unknown"
    lock_granularity: Literal["ByteRange", "Full"] = "ByteRange"
    pci_segment: U16 = 0
    pci_device_id: U8 | None = None

    @property
    def queues(self) -> int:
        """How many vCPUs the VM must have for it."""
        return self.num_queues


class NetConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A net device, as ``vm.add-net`` takes it. Each queue pair has a limiter of its own, and each direction."""

    id: DeviceId
    tap: str | None = None
    ip: str | None = None
    mask: str | None = None
    mac: str | None = None
    host_mac: str | None = None
    mtu: Annotated[int, Meta(ge=1280, le=0xFFFF)] | None = None
    iommu: bool = False
    num_queues: Annotated[int, Meta(ge=2, le=0xFFFF)] = 2
    """Receiving and sending ones: two for each pair."""
    queue_size: U16 = 256
    vhost_user: bool = False
    vhost_socket: str | None = None
    vhost_mode: Literal["Client", "Server"] = "Client"
    rate_limiter_config: RateLimiterConfig | None = None
    offload_tso: bool = True
    offload_ufo: bool = True
    offload_csum: bool = True
    pci_segment: U16 = 0
    pci_device_id: U8 | None = None

    @property
    def queues(self) -> int:
        """How many vCPUs the VM must have for it."""
        return pairs(self.num_queues)


class VmResize(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """``vm.resize``. The VMM takes several at once and carries out a part of them when one fails: send one."""

    desired_vcpus: int | None = None
    desired_ram: int | None = None


class VmRemoveDevice(msgspec.Struct, frozen=True, gc=False):
    id: str


class VmmPing(msgspec.Struct, frozen=True, gc=False):
    """``vmm.ping``: what the VMM is. *pid* is the one that it sees."""

    pid: int
    version: str = ""
    build_version: str = ""
    features: tuple[str, ...] = ()


class PciDeviceInfo(msgspec.Struct, frozen=True, gc=False):
    """Where a device that was added sits."""

    id: str
    bdf: str


class CpusInfo(msgspec.Struct, frozen=True, gc=False):
    """*boot_vcpus* is what was last asked for, also after the start."""

    boot_vcpus: int = 1
    max_vcpus: int = 1


class MemoryInfo(msgspec.Struct, frozen=True, gc=False):
    """*size* is what was last asked for with ACPI, the boot memory with virtio-mem."""

    size: int = 512 << 20
    hotplug_method: str = "Acpi"
    hotplug_size: int = 0
    hotplugged_size: int = 0
    zones: tuple[Mapping[str, Any], ...] = ()


class PlatformInfo(msgspec.Struct, frozen=True, gc=False):
    """*uuid* is what releases before v53 call it."""

    uuid: str = ""
    system_uuid: str = ""
    tdx: bool = False
    sev_snp: bool = False


class ConfigInfo(msgspec.Struct, frozen=True, gc=False):
    """The part of a VmConfig that is read. Devices are what the VMM wrote, to be compared with what was sent."""

    cpus: CpusInfo = CpusInfo()
    memory: MemoryInfo = MemoryInfo()
    platform: PlatformInfo = PlatformInfo()
    disks: tuple[Mapping[str, Any], ...] = ()
    net: tuple[Mapping[str, Any], ...] = ()
    fs: tuple[Mapping[str, Any], ...] = ()
    generic_vhost_user: tuple[Mapping[str, Any], ...] = ()


class DeviceNode(msgspec.Struct, frozen=True, gc=False):
    """A virtio device is below a node with its address."""

    id: str
    parent: str | None = None
    pci_bdf: str | None = None


class VmInfo(msgspec.Struct, frozen=True, gc=False):
    """``vm.info``. What was asked to leave is no longer in *config*; until it has left it is in *device_tree*."""

    config: ConfigInfo
    state: str
    memory_actual_size: int = 0
    device_tree: Mapping[str, DeviceNode] = {}


Counters: TypeAlias = dict[str, dict[str, int]]
"""``vm.counters``: by the device's id."""


def read(text: bytes, kind: type[T]) -> T:
    """What the VMM answered, as *kind*; null is what is missing. Raises msgspec.DecodeError or ValidationError."""
    return msgspec.convert(without_nulls(msgspec.json.decode(text)), kind)


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - what JSON can hold
    """*value* without members that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    if isinstance(value, list):
        return [without_nulls(member) for member in value]
    return value


def limiter_shown(device: Mapping[str, Any]) -> RateLimiterConfig | None:
    """The limiter that ``vm.info`` shows for a device; members that this project does not know are passed over."""
    shown = device.get("rate_limiter_config") or {}
    bandwidth, ops = (_bucket_shown(shown.get(name)) for name in ("bandwidth", "ops"))
    return None if bandwidth is None and ops is None else RateLimiterConfig(bandwidth, ops)


def _bucket_shown(bucket: Mapping[str, Any] | None) -> TokenBucket | None:
    if not bucket:
        return None
    members = (bucket.get(name, 0) for name in ("size", "one_time_burst", "refill_time"))
    size, burst, refill = (int(member) for member in members)  # others' may be larger than what we would ask for
    return TokenBucket(size=size, one_time_burst=burst, refill_time=refill)


def pairs(queues: int) -> int:
    """Queue pairs of a net device with so many queues."""
    return (queues + 1) // 2


def queue_floor(config: ConfigInfo) -> int:
    """The least number of vCPUs with which the VMM still accepts the devices that it has (1 or more).

    With fewer, every later ``vm.add-*`` fails, and the next reboot ends the VMM (SPEC 9).
    """
    whole = (int(device.get("num_queues", 1)) for device in (*config.disks, *config.fs))
    halves = (pairs(int(device.get("num_queues", 2))) for device in config.net)
    return max([1, *whole, *halves])


def dropped(sent: Mapping[str, Any], shown: Mapping[str, Any]) -> str | None:
    """The first member of *sent* that *shown* lacks or has otherwise, as a path; None when all are there."""
    for name, value in sent.items():
        there = shown.get(name)
        if isinstance(value, dict):
            inner = dropped(value, there if isinstance(there, dict) else {})
            if inner is not None:
                return f"{name}.{inner}"
        elif not _same(value, there):
            return name
    return None


def _same(sent: object, shown: object) -> bool:
    """Addresses may come back in other letters."""
    if isinstance(sent, str) and isinstance(shown, str):
        return sent.casefold() == shown.casefold() if ":" in sent else sent == shown
    return sent == shown
