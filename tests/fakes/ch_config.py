"""Cloud Hypervisor's configuration objects as the fake VMM stores them: filled in, and judged.

*release* decides which members are known, and which rules there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

Json = dict[str, Any]

MIB: Final = 1 << 20

DISK: Final[Json] = {
    "id": None,
    "path": None,
    "readonly": False,
    "direct": False,
    "iommu": False,
    "num_queues": 1,
    "queue_size": 128,
    "vhost_user": False,
    "vhost_socket": None,
    "rate_limit_group": None,
    "rate_limiter_config": None,
    "pci_segment": 0,
    "serial": None,
    "queue_affinity": None,
}
NET: Final[Json] = {
    "id": None,
    "tap": None,
    "ip": None,
    "mask": None,
    "mac": None,
    "host_mac": None,
    "mtu": None,
    "iommu": False,
    "num_queues": 2,
    "queue_size": 256,
    "vhost_user": False,
    "vhost_socket": None,
    "vhost_mode": "Client",
    "fds": None,
    "rate_limiter_config": None,
    "offload_tso": True,
    "offload_ufo": True,
    "offload_csum": True,
    "pci_segment": 0,
}
SINCE: Final[Mapping[str, Json]] = {
    "disks": {"backing_files": (51, False), "sparse": (51, True), "image_type": (51, "Unknown")}
    | {"lock_granularity": (52, "ByteRange"), "pci_device_id": (52, None)},
    "net": {"pci_device_id": (52, None)},
}
"""Members that later releases know, with the first that does and the default."""
OTHER: Final[Json] = {"id": None}
FS: Final[Json] = {"id": None, "tag": None, "socket": None, "num_queues": 1, "queue_size": 1024}
VM: Final[Json] = {
    "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
    "memory": {
        "size": 512 * MIB,
        "hotplug_method": "Acpi",
        "hotplug_size": None,
        "hotplugged_size": None,
        "zones": None,
        "shared": False,
    },
    "rate_limit_groups": None,
    "disks": None,
    "net": None,
    "fs": None,
    "pmem": None,
    "vsock": None,
    "balloon": None,
    "platform": None,
}
ADDS: Final = {
    "vm.add-disk": ("disks", "disk", "The disk could not be added to the VM"),
    "vm.add-net": ("net", "net", "The network device could not be added to the VM"),
    "vm.add-fs": ("fs", "fs", "The fs could not be added to the VM"),
    "vm.add-pmem": ("pmem", "pmem", "The pmem device could not be added to the VM"),
    "vm.add-vsock": ("vsock", "vsock", "The vsock device could not be added to the VM"),
    "vm.add-vdpa": ("vdpa", "vdpa", "The vDPA device could not be added to the VM"),
    "vm.add-device": ("devices", "vfio", "The device could not be added to the VM"),
    "vm.add-user-device": ("user_devices", "vfio_user", "The user device could not be added to the VM"),
    "vm.add-generic-vhost-user": (
        "generic_vhost_user",
        "generic_vhost_user",
        "The generic vhost-user device could not be added to the VM",
    ),
}


class VmmError(Exception):
    """*kind* is Cloud Hypervisor's name of the error, on which the status depends."""

    def __init__(self, kind: str, *texts: str) -> None:
        self.kind = kind
        self.texts = texts
        super().__init__(": ".join(texts))


class BadRequest(Exception):
    """Refused before the VMM hears of it; *body* as it goes over the wire."""

    def __init__(self, *texts: str) -> None:
        self.body = json.dumps(texts, separators=(",", ":")).encode() if texts else b""
        super().__init__(*texts)


def filled(kind: str, given: Json, release: int) -> Json:
    """With defaults in place of what is missing, and without what this release does not know."""
    known = dict({"disks": DISK, "net": NET, "fs": FS}.get(kind, OTHER))
    if kind in ("disks", "net"):
        known |= {name: default for name, (since, default) in SINCE[kind].items() if release >= since}
    else:
        known |= given
    for name, default in known.items():
        if name in given and given[name] is None and default is not None:
            text = f"invalid type: null, expected {type(default).__name__} at line 1 column 1"
            raise BadRequest("Failed to deserialize JSON", text)
    device = {name: given.get(name, default) for name, default in known.items()}
    if device.get("rate_limiter_config") is not None:
        device["rate_limiter_config"] = _limiter(device["rate_limiter_config"])
    if device.get("fds"):
        device["fds"] = None  # their numbers mean nothing here
    return device


def validate(config: Json, release: int) -> None:
    """The rules that bear on devices, in the VMM's order; it stops at the first that is broken."""
    for rule in (_check_cpus, _check_groups, _check_disks, _check_nets, _check_ids):
        rule(config, release)
    balloon = config["balloon"]
    if balloon and balloon["size"] >= config["memory"]["size"]:
        raise _invalid(f"Balloon size ({balloon['size']}) greater than RAM ({config['memory']['size']})")


def _check_cpus(config: Json, _release: int) -> None:
    boot, most = config["cpus"]["boot_vcpus"], config["cpus"]["max_vcpus"]
    if most < boot:
        raise _invalid(f"Max CPUs ({most}) lower than boot CPUs ({boot})")


def _check_groups(config: Json, _release: int) -> None:
    for group in config["rate_limit_groups"] or ():
        limiter = group.get("rate_limiter_config") or {}
        if not group.get("id") or not (limiter.get("bandwidth") or limiter.get("ops")):
            raise _invalid("Invalid rate-limiter group")


def _check_disks(config: Json, release: int) -> None:
    groups = {group["id"] for group in config["rate_limit_groups"] or ()}
    for disk in config["disks"] or ():
        if disk["vhost_socket"] and not disk["vhost_user"]:
            raise _invalid("Disk path and vhost socket both provided")
        if disk["vhost_user"] and not disk["vhost_socket"]:
            raise _invalid("No socket provided when using vhost-user")
        _check_queues(disk["num_queues"], config)
        size = disk["queue_size"]
        if size & (size - 1) or not 0 < size <= 32768:
            raise _invalid(f"Queue size must be a power of 2 no greater than 32768: {size}")
        if size <= 2 and release >= 53:
            raise _invalid(f"Block queue size must be greater than 2: {size}")
        if disk["vhost_user"] and not config["memory"]["shared"]:
            raise _invalid("Using vhost-user requires using shared memory or huge pages")
        limited = disk["rate_limit_group"] or disk["rate_limiter_config"]
        if disk["vhost_user"] and limited and release >= 52:
            raise _invalid("Rate limiting is not supported with vhost-user")
        if disk["rate_limit_group"] and (disk["rate_limiter_config"] or disk["rate_limit_group"] not in groups):
            raise _invalid("Invalid rate-limiter group")
        if len(disk["serial"] or "") > 20 and release >= 47:
            raise _invalid(f"Block device serial length ({len(disk['serial'])}) exceeds maximum allowed length (20)")


def _check_nets(config: Json, _release: int) -> None:
    for net in config["net"] or ():
        if net["num_queues"] < 2:
            raise _invalid(f"Number of queues ({net['num_queues']}) to virtio_net should be higher than 2")
        _check_queues(net["num_queues"] // 2, config)
        size = net["queue_size"]
        if size & (size - 1) or not 0 < size <= 32768:
            raise _invalid(f"Queue size must be a power of 2 no greater than 32768: {size}")
        if net["mtu"] is not None and net["mtu"] < 1280:
            raise _invalid(f"Provided MTU {net['mtu']} is lower than 1280 (expected by VIRTIO specification)")
        if (net["offload_tso"] or net["offload_ufo"]) and not net["offload_csum"]:
            raise _invalid('"offload_tso" and "offload_ufo" depend on "offload_csum"')
        if net["mask"] and not net["ip"]:
            raise _invalid("Mask provided without an IP")
        if net["ip"] and not net["mask"]:
            raise _invalid("IP provided without a mask")


def _check_ids(config: Json, _release: int) -> None:
    names: set[str] = set()
    kinds = ("rate_limit_groups", *(kind for kind, _, _ in ADDS.values()))
    listed = [each for kind in kinds if isinstance(config.get(kind), list) for each in config[kind]]
    single = [config[kind] for kind in ("balloon", "console") if config.get(kind)]
    for name in (each.get("id") for each in (*single, *listed)):
        if name is None:
            continue
        if name.startswith("__"):
            raise _invalid(f"Identifier {name} is not valid")
        if name in names:
            raise VmmError("IdentifierNotUnique", "Failed to validate config", f"Identifier {name} is not unique")
        names.add(name)


def _invalid(text: str) -> VmmError:
    return VmmError("ConfigValidation", "Failed to validate config", text)


def _check_queues(count: int, config: Json) -> None:
    boot = config["cpus"]["boot_vcpus"]
    if count > boot:
        raise _invalid(f"Queue count ({count}) must not exceed boot vCPUs ({boot})")


def _limiter(given: Json) -> Json:
    """The one object of which unknown members are refused."""
    for name in given:
        if name not in ("bandwidth", "ops"):
            text = f"unknown field `{name}`, expected `bandwidth` or `ops` at line 1 column 1"
            raise BadRequest("Failed to deserialize JSON", text)
    filled: Json = {}
    for name in ("bandwidth", "ops"):
        bucket = given.get(name)
        if bucket is not None:
            for member in ("size", "refill_time"):
                if not isinstance(bucket.get(member), int):
                    raise BadRequest("Failed to deserialize JSON", f"missing field `{member}` at line 1 column 1")
            bucket = {member: bucket.get(member) for member in ("size", "one_time_burst", "refill_time")}
        filled[name] = bucket
    return filled
