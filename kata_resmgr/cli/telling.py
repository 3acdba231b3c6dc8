"""Sandboxes in words, for people."""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from typing import Any

_MIB = 1 << 20


def mib(size: int) -> str:
    """Bytes as MiB, exactly where that is whole."""
    return f"{size // _MIB} MiB" if size % _MIB == 0 else f"{size} bytes"


def size_line(sandbox: dict[str, Any]) -> str:
    """What is wanted and what is there, in one line."""
    vcpus, memory = sandbox["vcpus"], sandbox["memory"]
    if sandbox["phase"] == "sized":
        return f"{sandbox['id']}: {vcpus['desired']} vCPUs and {mib(memory['desired'])} desired; no VM is attached yet"
    reached = "" if sandbox["satisfied"] else ", not reached yet"
    return (
        f"{sandbox['id']}: {vcpus['plugged']} of {vcpus['desired']} vCPUs and "
        f"{mib(memory['plugged'])} of {mib(memory['desired'])}{reached}"
    )


def device_line(device: dict[str, Any]) -> str:
    """One disk or net, and its limits, in one line."""
    limits, effective = device["limits"], device["effective"] or {}
    if limits is None:
        told = f"limited by group {device['group']}"
    else:
        rates = (("bytesPerSecond", "bytes/s"), ("opsPerSecond", "ops/s"))
        held = [f"{limits[name]} {unit}{_really(effective, name)}" for name, unit in rates if limits[name]]
        told = "at most " + " and ".join(held) if held else "not limited"
    return f"{device['id']} at {device['address'] or 'no address yet'}, {told}"


def tell_device(device: dict[str, Any]) -> None:
    """After a change of a device."""
    print(device_line(device))


def _really(effective: dict[str, Any], name: str) -> str:
    return f" (in effect {effective[name]})" if name in effective else ""


def boot_line(boot: dict[str, Any]) -> str:
    """What the VM is started with, and what it may have."""
    return (
        f"boot with {boot['vcpus']} of at most {boot['maxVcpus']} vCPUs and "
        f"{mib(boot['memoryBytes'])} of at most {mib(boot['maxMemoryBytes'])}"
    )


def tell_size(sandbox: dict[str, Any]) -> None:
    """After a change of a sandbox."""
    print(size_line(sandbox))


def tell_result(result: dict[str, Any]) -> None:
    """After a change of a container."""
    print(size_line(result["sandbox"]))


def tell_boot(sandbox: dict[str, Any]) -> None:
    """After a registration: what the VM is to be started with."""
    import shlex

    vmm = sandbox["vmm"]
    print(f"{sandbox['id']}: {boot_line(sandbox['boot'])}")
    if "config" in vmm:
        import json

        print(f"VmConfig: {json.dumps(vmm['config'])}")
        for device, limiter in vmm["limiters"].items():
            print(f"rate_limiter_config of each {device}: {json.dumps(limiter)}")
    else:
        print(f"arguments: {shlex.join(vmm['args'])}")
    if vmm.get("kernelParams"):
        print(f"kernel parameters: {shlex.join(vmm['kernelParams'])}")
    _tell_conditions(sandbox)


def tell_sandbox(sandbox: dict[str, Any]) -> None:
    """Everything about one."""
    boot, vcpus, memory, surplus = (sandbox[name] for name in ("boot", "vcpus", "memory", "surplus"))
    weight = "no weight" if sandbox["cpuWeight"] is None else f"weight {sandbox['cpuWeight']}"
    rows = [
        ("vcpus", f"{vcpus['desired']} desired (exactly {vcpus['exact']}), {vcpus['plugged']} plugged"),
        ("memory", f"{mib(memory['desired'])} desired, {mib(memory['plugged'])} plugged"),
        ("leaving", f"{vcpus['pending']} vCPUs, {mib(memory['pending'])}"),
        ("surplus", f"{surplus['vcpus']} vCPUs, {mib(surplus['memoryBytes'])}{_because(surplus['reason'])}"),
        ("boot", f"{boot['vcpus']} vCPUs, {mib(boot['memoryBytes'])}"),
        ("at most", f"{boot['maxVcpus']} vCPUs, {mib(boot['maxMemoryBytes'])} in {boot['memorySlots']} slots"),
        ("satisfied", _yes(sandbox["satisfied"])),
        ("converged", _yes(sandbox["converged"])),
        ("shares", f"{sandbox['shares']} ({weight})"),
        ("containers", str(sandbox["counts"]["containers"])),
    ]
    print(f"{sandbox['id']}: {sandbox['hypervisor']}, {sandbox['mode']}, {sandbox['phase']}")
    for name, text in rows:
        print(f"  {name:<11} {text}")
    for kind in ("disks", "nets"):
        for device in sandbox.get(kind, {}).values():
            print(f"  {kind[:-1]:<11} {device_line(device)}")
    _tell_conditions(sandbox)


def tell_explanation(explanation: dict[str, Any]) -> None:
    """The inputs with their sources, and the steps from them to the size."""
    for given in explanation["inputs"]:
        print(f"{given['name']} = {given['value']} ({given['source']})")
    for step in explanation["explain"]:
        print(step)


def _tell_conditions(sandbox: dict[str, Any]) -> None:
    for condition in sandbox["conditions"]:
        print(f"{condition['type']} ({condition['reason']}) since {condition['since']}: {condition['message']}")


def _because(reason: str | None) -> str:
    return "" if reason is None else f" ({reason})"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
