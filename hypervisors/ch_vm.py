"""One VM of Cloud Hypervisor: what is known of it, and what is done to it. For one thread at a time.

The API answers 204 for "asked" and shows what was asked for as what there is. So:

- vCPUs are counted by the VMM's threads (:mod:`hypervisors.vmm_process`). While a removal is under way the VMM refuses
  every other number of vCPUs (429, or 500 before v46) except the present one, which it accepts; it then forgets what it
  was asked for, and carries out the removal all the same. The present number is therefore never sent.
- Memory is what :mod:`hypervisors.ch_memory` makes of ``vm.info``.
- What was sent for a device is compared with what ``vm.info`` shows then.

Whatever changes something reads first: after a call that timed out nobody knows what has become of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hypervisors import ch_memory
from hypervisors.base import (
    Accelerator,
    Altered,
    Device,
    DeviceKind,
    Machine,
    MemoryMethod,
    Plugged,
    Refused,
    Unreachable,
    Unsupported,
    Vcpu,
)
from hypervisors.ch_client import ApiError, Exchange
from hypervisors.ch_types import (
    DiskConfig,
    NetConfig,
    VmInfo,
    VmmPing,
    VmResize,
    dropped,
    limiter_shown,
    queue_floor,
)
from hypervisors.vmm_process import VmmProcess

_BOOTED: Final = ("Running", "Paused", "BreakPoint")
_VIRTIO_PCI: Final = "_virtio-pci-"
_VMMS_OWN: Final = "__"
_COUNTED: Final[dict[str, DeviceKind]] = {"read_bytes": DeviceKind.DISK, "rx_bytes": DeviceKind.NET}
"""What is counted for each kind."""


class ChVm:
    """The VM behind one API socket, booted with *boot_vcpus* vCPUs and *boot_memory* bytes.

    What it was booted with the VMM does not remember; vCPUs above are ours. All methods raise
    :class:`hypervisors.base.HypervisorError`.
    """

    def __init__(self, api: Exchange, boot_vcpus: int, boot_memory: int) -> None:
        ping = api.ping()
        if api.peer != ping.pid:
            raise Unreachable(
                f"{api.path}: the VMM says that its process is {ping.pid}, and {api.peer} listens there: start it with "
                "a path as its --api-socket, in this PID namespace"
            )
        try:
            self.process = VmmProcess(ping.pid)
        except OSError as error:
            raise Unreachable(f"{api.path}: process {ping.pid}: {error.strerror}") from None
        self.release = _release(ping)
        self.restarts = 0
        """How often the guest was seen to have been started anew."""
        self._boot_vcpus = boot_vcpus
        self._boot_memory = boot_memory
        self._first_thread: int | None = None
        self._slots_used = 0
        self._shown: dict[str, tuple[DeviceKind, Mapping[str, Any]]] = {}
        self._known: dict[str, Device | None] = {}
        try:
            info = self._info(api)
            self.memory = ch_memory.memory(info)
            self._slots_used = int(self.memory.asked > boot_memory)  # at least: how often, the VMM does not tell
            self.machine = self._machine(ping, info)
            self.why_memory_is_fixed = ch_memory.why_fixed(info.config) or ""
            self._vcpus(api)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it. May be called twice."""
        self.process.close()

    # Reading

    def read(self, api: Exchange) -> Plugged:
        """What there is now."""
        return self._plugged(api, self._info(api))

    def counters(self, api: Exchange) -> Mapping[str, Mapping[str, int]]:
        return api.counters()

    def _info(self, api: Exchange) -> VmInfo:
        try:
            info = api.info()
        except ApiError as error:
            raise Unreachable(f"{api.path}: there is no VM: {error}") from None
        if info.state not in _BOOTED:
            raise Unreachable(f"{api.path}: the VM is not booted (state {info.state[:20]})")
        return info

    def _plugged(self, api: Exchange, info: VmInfo) -> Plugged:
        numbers = self._vcpus(api)
        self._see_memory(info)
        return Plugged(
            vcpus=tuple([Vcpu(f"vcpu{number}", ours=number >= self._boot_vcpus) for number in numbers]),
            memory=self.memory.present,
            memory_asked=self.memory.asked if self.memory.asked != self.memory.present else None,
            memory_grows_left=self._grows_left(),
            memory_floor=self._boot_memory,
            vcpu_floor=queue_floor(info.config),
            devices=self._devices(api, info),
        )

    def _vcpus(self, api: Exchange) -> list[int]:
        """The numbers of those that are plugged, the last plugged last."""
        if api.peer != self.process.pid:
            raise Unreachable(f"{api.path}: another process answers there now: {api.peer}, not {self.process.pid}")
        try:
            threads = self.process.vcpus()
        except OSError as error:
            raise Unreachable(f"{api.path}: the VMM's threads cannot be read: {error}") from None
        first = threads.get(0)
        if first != self._first_thread and None not in (first, self._first_thread):
            self.restarts += 1
            self._slots_used = 0
        self._first_thread = first if first is not None else self._first_thread
        return list(threads)

    def _see_memory(self, info: VmInfo) -> None:
        before, self.memory = self.memory, ch_memory.memory(info)
        if self.memory.asked > before.asked:  # by whomever
            self._slots_used += 1

    def _grows_left(self) -> int | None:
        if self.machine.memory.method is not MemoryMethod.ACPI:
            return None
        return max(0, ch_memory.SLOTS - self._slots_used)

    def _machine(self, ping: VmmPing, info: VmInfo) -> Machine:
        config = info.config
        return Machine(
            identity=config.platform.system_uuid or config.platform.uuid,
            pid=ping.pid,
            max_vcpus=config.cpus.max_vcpus,
            vcpu_hotplug=not (config.platform.tdx or config.platform.sev_snp),
            accelerator=Accelerator.KVM if "kvm" in ping.features else Accelerator.OTHER,
            memory=ch_memory.hotplug(config, self._boot_memory),
            tells_changes=False,
            one_resize=True,
        )

    # vCPUs

    def add_vcpus(self, api: Exchange, count: int) -> Plugged:
        """See :meth:`hypervisors.base.Hypervisor.add_vcpus`."""
        if not self.machine.vcpu_hotplug:
            raise Unsupported(f"{api.path}: a confidential VM keeps the vCPUs that it was booted with")
        self._info(api)
        present = len(self._vcpus(api))
        free = self.machine.max_vcpus - present
        if count > free:
            raise Refused(f"{api.path}: {count} vCPUs asked for, {free} of {self.machine.max_vcpus} slots are free")
        api.resize(VmResize(desired_vcpus=present + count))
        return self.read(api)

    def remove_vcpus(self, api: Exchange, ids: Sequence[str]) -> bool:
        """Ask for these; whether all of them are still there.

        Raises :class:`Refused` also for one that is below one that is to stay, and where fewer would be left than the
        devices have queues.
        """
        info = self._info(api)
        present = self._vcpus(api)
        leaving = [number for number in present if f"vcpu{number}" in ids]
        if not leaving:
            return False
        target = leaving[0]
        if target < self._boot_vcpus:
            raise Refused(f"vcpu{target}: Boot CPU is unpluggable: the VM was booted with {self._boot_vcpus}")
        wanted = info.config.cpus.boot_vcpus  # those above were asked to leave before
        for number in present:
            if target < number < wanted and number not in leaving:
                raise Refused(f"vcpu{target} cannot leave before vcpu{number}: the last one leaves first")
        floor = queue_floor(info.config)
        if target < floor:
            raise Refused(f"{target} vCPUs would be left, and a device has queues for {floor}: remove that first")
        try:
            api.resize(VmResize(desired_vcpus=target))
        except ApiError:
            # It says no also while an earlier removal is under way, with a status that depends on its release.
            if not self._info(api).config.cpus.boot_vcpus <= target < len(self._vcpus(api)):
                raise
        return len(leaving) == len(set(ids))

    # Memory

    def grow_memory(self, api: Exchange, to: int) -> Plugged:
        """See :meth:`hypervisors.base.Hypervisor.grow_memory`. The size that is asked for already is not sent again."""
        info = self._info(api)
        plugged = self._plugged(api, info)
        if to == self.memory.asked:
            return plugged
        if plugged.memory_grows_left == 0:
            raise Refused(f"{api.path}: {ch_memory.NO_SLOT}: {ch_memory.SLOTS} grows since the guest's start")
        try:
            api.resize(VmResize(desired_ram=to))
        except ApiError as error:
            if any(ch_memory.NO_SLOT in cause for cause in error.causes):
                self._slots_used = ch_memory.SLOTS
            raise
        return self.read(api)

    def shrink_memory(self, api: Exchange, to: int) -> None:
        """Ask for *to* bytes, if that is not what is asked for already: a repeated size is an error to the VMM."""
        self._see_memory(self._info(api))
        if self.memory.asked != to:
            api.resize(VmResize(desired_ram=to))
            self._see_memory(self._info(api))

    # Devices

    def add_device(self, api: Exchange, device: DiskConfig | NetConfig) -> Device:
        """See :meth:`hypervisors.base.Hypervisor.add_device`."""
        if device.queues > self._boot_vcpus:
            raise Refused(
                f"{device.id}: queues for {device.queues} vCPUs, and the VM was booted with {self._boot_vcpus}: "
                "ask for fewer (num_queues)"
            )
        self._info(api)
        api.add(device)
        self.read(api)
        _, shown = self._shown.get(device.id, (None, None))
        there = self._known.get(device.id)
        if shown is None or there is None:
            raise Refused(f"{device.id}: the VMM accepted it, and does not have it")
        member = dropped(msgspec.json.decode(msgspec.json.encode(device)), shown)
        if member is not None:
            said = f"{device.id}: the VMM (release {self.release}) accepted it without {member}"
            try:
                api.remove(device.id)
            except ApiError as error:
                raise Altered(f"{said}, and does not take it out again: {error}") from None
            raise Altered(f"{said}, and was asked to take it out again")
        return there

    def remove_device(self, api: Exchange, device_id: str) -> None:
        """See :meth:`hypervisors.base.Hypervisor.start_removing_device`."""
        try:
            api.remove(device_id)
        except ApiError:
            # It says no also where the device is gone, and v53 where it has been asked before.
            self.read(api)
            if device_id in self._shown:
                raise

    def _devices(self, api: Exchange, info: VmInfo) -> tuple[Device, ...]:
        """Disks and nets, those that were asked to leave and have not left included."""
        tree = info.device_tree
        self._shown = {
            str(device["id"]): (kind, device)
            for kind, devices in ((DeviceKind.DISK, info.config.disks), (DeviceKind.NET, info.config.net))
            for device in devices
            if "id" in device
        }
        known = {name: device for name, device in self._known.items() if name in tree}
        for name, (kind, device) in self._shown.items():
            known[name] = Device(
                id=name,
                kind=kind,
                address=_address(info, name),
                limiter=limiter_shown(device),
                group=device.get("rate_limit_group"),
            )
        strangers = [
            name for name in tree if name not in known and _VIRTIO_PCI + name in tree and not name.startswith(_VMMS_OWN)
        ]
        if strangers:  # among them may be one that was asked to leave before we came: what it counts tells its kind
            counters = api.counters()
            for name in strangers:
                counted = counters.get(name, {})
                found = next((kind for counter, kind in _COUNTED.items() if counter in counted), None)
                known[name] = None if found is None else Device(name, found, _address(info, name))
        self._known = known
        return tuple([device for device in known.values() if device is not None])


def _address(info: VmInfo, name: str) -> str:
    node = info.device_tree.get(_VIRTIO_PCI + name)
    return "" if node is None or node.pci_bdf is None else node.pci_bdf


def _release(ping: VmmPing) -> int | None:
    """The release's number, such as 52; None where it is not told."""
    number = re.match(r"v?(\d{1,4})\.", ping.version or ping.build_version)
    return None if number is None else int(number[1])
