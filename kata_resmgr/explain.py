"""Why the VM is as big as it is: every step from the inputs to the target, in words and numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from hypervisors.base import Machine
from kata_resmgr.config import Base, SandboxConfig
from kata_resmgr.demand import Record, Sums
from kata_resmgr.sizing import MIB, BootSize, Declared, Target, number
from kata_resmgr.view import Input

CONTAINERS_SHOWN = 100
"""How many containers are explained one by one; the sums cover all."""

_CONFIG_INPUTS = ("default_vcpus", "default_maxvcpus", "default_memory", "default_maxmemory", "base")


def inputs(config: SandboxConfig, machine: Machine | None) -> list[Input]:
    """What the decision rests on, each with where it comes from."""
    origin = config.origins
    listed = [Input("static_sandbox_resource_mgmt", str(config.static).lower(), origin["static"])]
    for name in _CONFIG_INPUTS:
        value = getattr(config, name)
        listed.append(Input(name, number(value) if isinstance(value, Fraction) else str(value), origin[name]))
    if machine is not None:
        listed.append(Input("machine maximum vCPUs", str(machine.max_vcpus), "hypervisor"))
        listed.append(Input("accelerator", machine.accelerator, "hypervisor"))
    return listed


def lines(
    config: SandboxConfig,
    boot: BootSize,
    declared: Declared,
    records: Mapping[str, Record],
    sums: Sums,
    target: Target,
) -> Iterator[str]:
    """The steps, a line each."""
    yield f"default_vcpus = {number(config.default_vcpus)} ({config.origins['default_vcpus']})"
    if declared.vcpus is not None:
        yield f"declared: {number(declared.vcpus)} vCPUs"
    if declared.memory is not None:
        yield f"declared: {declared.memory // MIB} MiB"
    yield f"boot: {number(boot.exact)} vCPUs, rounded up once: {boot.vcpus}; {boot.memory // MIB} MiB"
    for count, (name, record) in enumerate(records.items()):
        if count == CONTAINERS_SHOWN:
            yield f"... and {len(records) - CONTAINERS_SHOWN} more containers"
            break
        yield f"{name}: {_container(record)}"
    if boot.static:
        yield f"static: the size stays as at boot, {boot.vcpus} vCPUs"
        return
    yield from _vcpus(config, boot, sums, target)
    yield _memory(config, boot, sums, target)


def _container(record: Record) -> str:
    asked = record.demand
    parts = []
    if asked.quota:
        vcpus = Fraction(asked.quota, asked.period)
        parts.append(f"quota {asked.quota} / period {asked.period} = {number(vcpus)}")
    elif asked.cpus:
        parts.append(f"cpuset of {len(asked.cpus)}")
    else:
        parts.append("no vCPUs asked for")
    if asked.memory:
        parts.append(f"{asked.memory} bytes")
    return ", ".join(parts)


def _vcpus(config: SandboxConfig, boot: BootSize, sums: Sums, target: Target) -> Iterator[str]:
    if not sums.containers:
        yield f"no containers: the boot size, {target.vcpus}"
        return
    terms = []
    if config.base is Base.ADD and sums.quota_vcpus:
        terms.append(number(config.default_vcpus))
    if sums.quota_vcpus:
        terms.append(number(sums.quota_vcpus))
    if sums.cpuset_vcpus or not terms:
        terms.append(str(sums.cpuset_vcpus))
    plain = sums.quota_vcpus + sums.cpuset_vcpus
    if config.base is Base.ADD and sums.quota_vcpus:
        plain += config.default_vcpus
    total = f"{' + '.join(terms)} = {number(plain)}" if len(terms) > 1 else number(plain)
    if target.exact > plain:
        total += f", at least default_vcpus = {number(config.default_vcpus)}"
    wanted = target.vcpus + target.excess
    yield f"{total}, rounded up once: {-(-target.exact.numerator // target.exact.denominator)}"
    if target.excess:
        yield f"above the maximum of {boot.max_vcpus}: {wanted} cut to {target.vcpus}"
    elif target.vcpus > target.exact and target.vcpus == boot.vcpus:
        yield f"never below the boot size: {target.vcpus}"


def _memory(config: SandboxConfig, boot: BootSize, sums: Sums, target: Target) -> str:
    terms = [f"{sums.memory} bytes of limits and huge pages"]
    if config.base is Base.ADD:
        terms.append(f"default_memory = {config.default_memory} MiB ({config.origins['default_memory']})")
    return (
        f"memory: {' + '.join(terms)}; what is beyond the boot size in steps of {boot.granularity // MIB} MiB: "
        f"{target.memory // MIB} MiB"
    )
