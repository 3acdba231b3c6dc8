"""Why the VM is as big as it is: every step from the inputs to the target, in words and numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil

from hypervisors.base import Machine
from kata_resmgr import oci
from kata_resmgr.config import Base, SandboxConfig
from kata_resmgr.demand import Record, Sums
from kata_resmgr.sizing import MIB, BootSize, Declared, Target, number, static_excess
from kata_resmgr.view import Input

CONTAINERS_SHOWN = 100
"""How many containers are explained one by one; the sums cover all."""

_CONFIG_INPUTS = (
    "default_vcpus",
    "default_maxvcpus",
    "default_memory",
    "default_maxmemory",
    "base",
    "cpuset_sizing",
    "over_max_vcpus",
)


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
    yield from _boot(config, boot, declared)
    for shown, (name, record) in enumerate(records.items()):
        if shown == CONTAINERS_SHOWN:
            yield f"... and {len(records) - CONTAINERS_SHOWN} more containers"
            break
        yield f"{name}: {_container(record)}"
    if boot.static:
        yield f"static: the size stays as at boot, {boot.vcpus} vCPUs and {_size(boot.memory)}"
        if (excess := static_excess(config, boot, declared, sums)) is not None:
            yield excess.message
    else:
        yield from _vcpus(config, boot, sums, target)
        yield _memory(config, boot, sums, target)


def _boot(config: SandboxConfig, boot: BootSize, declared: Declared) -> Iterator[str]:
    yield f"default_vcpus = {number(config.default_vcpus)} ({config.origins['default_vcpus']})"
    yield f"default_memory = {config.default_memory} MiB ({config.origins['default_memory']})"
    if declared.vcpus is not None:
        yield f"declared: {number(declared.vcpus)} vCPUs"
    if declared.memory is not None:
        yield f"declared: {_size(declared.memory)}"
    if boot.static and declared:
        yield f"overhead: {number(config.overhead_vcpus)} vCPUs, {config.overhead_memory} MiB"
    wanted = max(ceil(boot.exact), 1)
    cut = f", cut to the maximum of {boot.vcpus}" if boot.vcpus < wanted else ""
    yield f"boot: {number(boot.exact)} vCPUs, rounded up once: {wanted}{cut}; {_size(boot.memory)}"


def _container(record: Record) -> str:
    asked = record.demand
    if asked.quota:
        vcpus = f"quota {asked.quota} / period {asked.period} = {number(Fraction(asked.quota, asked.period))}"
    elif asked.cpus:
        vcpus = f"cpuset of {len(asked.cpus)}"
    elif cpus := oci.decode(record.text).cpus:
        vcpus = f"cpuset of {len(cpus)} does not count: {asked.shares} shares ask for less"
    else:
        vcpus = "no vCPUs asked for"
    return f"{vcpus}, {_size(asked.memory)}" if asked.memory else vcpus


def _vcpus(config: SandboxConfig, boot: BootSize, sums: Sums, target: Target) -> Iterator[str]:
    if not sums.containers:
        yield f"no containers: the boot size, {target.vcpus}"
        return
    terms = [Fraction(sums.cpuset_vcpus)] if sums.cpuset_vcpus else []
    if sums.quota_vcpus:
        terms.insert(0, sums.quota_vcpus)
        if config.base is Base.ADD:
            terms.insert(0, config.default_vcpus)
    demand = " + ".join(map(number, terms)) or "0"
    if len(terms) > 1:
        demand += f" = {number(sum(terms, start=Fraction()))}"
    if target.exact > sum(terms):
        demand += f", at least default_vcpus = {number(target.exact)}"
    wanted = ceil(target.exact)
    yield f"{demand}, rounded up once: {wanted}"
    if target.excess:
        limit = "default_maxvcpus" if boot.max_vcpus == config.default_maxvcpus else "the machine's maximum"
        yield f"above {limit} = {boot.max_vcpus}: {wanted} cut to {target.vcpus}"
    elif target.vcpus > wanted:
        yield f"never below the boot size: {target.vcpus}"


def _memory(config: SandboxConfig, boot: BootSize, sums: Sums, target: Target) -> str:
    need = sums.memory
    demand = f"memory: limits and huge pages of {_size(sums.memory)}"
    if config.base is Base.ADD:
        need += config.default_memory * MIB
        demand = f"memory: {config.default_memory} MiB + limits and huge pages of {_size(sums.memory)} = {_size(need)}"
    if need <= boot.memory:
        return f"{demand}, within the boot size: {_size(target.memory)}"
    return f"{demand}, from the boot size in steps of {_size(boot.granularity)}: {_size(target.memory)}"


def _size(amount: int) -> str:
    """Bytes, in MiB where that is exact."""
    return f"{amount} bytes" if amount % MIB else f"{amount // MIB} MiB"
