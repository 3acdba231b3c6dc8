"""Why the VM is as big as it is: every step from the inputs to the target, in words and numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil

from hypervisors.base import Machine, Plugged
from kata_resmgr import annotations as said
from kata_resmgr import demand, oci
from kata_resmgr.config import Base, Compat, SandboxConfig
from kata_resmgr.declared import Declaration
from kata_resmgr.demand import Record, Sums
from kata_resmgr.sizing import MIB, BootSize, Target, number, static_excess
from kata_resmgr.view import Input

CONTAINERS_SHOWN = 100
"""How many containers are explained one by one; the sums cover all."""

_CONFIG_INPUTS = (
    "default_vcpus",
    "default_maxvcpus",
    "default_memory",
    "default_maxmemory",
    "base",
    "compat",
    "cpuset_sizing",
    "shares_sizing",
    "over_max_vcpus",
    "overhead_vcpus",
    "overhead_memory",
)
_NAMED_IN_STEPS = ("default_vcpus", "default_memory")


def inputs(
    config: SandboxConfig, annotations: Mapping[str, str], declared: Declaration, resized: Declaration | None
) -> list[Input]:
    """What the decision rests on before there is a VM, each with where it comes from."""
    listed = list(_given(config, annotations))
    for when, declaration in (("declared", declared), ("declared now", resized)):
        if declaration is None:
            continue
        if declaration.size.vcpus is not None:
            listed.append(Input(f"{when}: vCPUs", number(declaration.size.vcpus), declaration.vcpus_from))
        if declaration.size.memory is not None:
            listed.append(Input(f"{when}: memory", _size(declaration.size.memory), declaration.memory_from))
    return listed


def premises(config: SandboxConfig, annotations: Mapping[str, str]) -> Iterator[str]:
    """What :func:`lines` takes as known, each with where it comes from: for a text that has no list of inputs."""
    origin = config.origins
    yield f"hypervisor = {config.hypervisor} ({origin['hypervisor']})"
    yield f"host CPUs = {config.host_cpus} ({origin['host_cpus']})"
    yield f"host memory = {config.host_memory} MiB ({origin['host_memory']})"
    for given in _given(config, annotations):
        if given.name not in _NAMED_IN_STEPS:
            unit = " MiB" if given.name.endswith("memory") else ""
            yield f"{given.name} = {given.value}{unit} ({given.source})"


def _given(config: SandboxConfig, annotations: Mapping[str, str]) -> Iterator[Input]:
    """The configuration, and what kind of container the sandbox's first is."""
    origin = config.origins
    yield Input("static_sandbox_resource_mgmt", _value(config.static), origin["static"])
    for name in _CONFIG_INPUTS:
        yield Input(name, _value(getattr(config, name)), origin[name])
    kind, key = said.container_type(annotations)
    if key is not None:
        yield Input("container type", kind.value, key)


def reported(machine: Machine | None, plugged: Plugged | None) -> Iterator[Input]:
    """What the hypervisor has told."""
    if machine is not None:
        yield Input("machine maximum vCPUs", str(machine.max_vcpus), "hypervisor")
        yield Input("accelerator", machine.accelerator, "hypervisor")
    if plugged is not None:
        yield Input("plugged: vCPUs", str(len(plugged.vcpus)), "hypervisor")
        yield Input("plugged: memory", _size(plugged.memory), "hypervisor")


def lines(
    config: SandboxConfig,
    boot: BootSize,
    declared: Declaration,
    records: Mapping[str, Record],
    sums: Sums,
    target: Target,
    *,
    resized: Declaration | None = None,
) -> Iterator[str]:
    """The steps, a line each."""
    yield from _boot(config, boot, declared)
    if resized is not None:
        yield from _declared(config, resized, "now declared") if resized.size else ("now declared: nothing",)
    for shown, (name, record) in enumerate(records.items()):
        if shown == CONTAINERS_SHOWN:
            yield f"... and {len(records) - CONTAINERS_SHOWN} more containers"
            break
        yield f"{name}: {_container(record)}"
    size_now = None if resized is None else resized.size
    if boot.static:
        yield f"static: the size stays as at boot, {boot.vcpus} vCPUs and {_size(boot.memory)}"
        if (excess := static_excess(config, boot, declared.size, sums, size_now)) is not None:
            yield excess.message
    else:
        yield from _vcpus(config, boot, sums, target)
        yield _memory(config, boot, sums, target, 0 if size_now is None else size_now.memory or 0)


def _boot(config: SandboxConfig, boot: BootSize, declared: Declaration) -> Iterator[str]:
    yield f"default_vcpus = {number(config.default_vcpus)} ({config.origins['default_vcpus']})"
    yield f"default_memory = {config.default_memory} MiB ({config.origins['default_memory']})"
    yield from _declared(config, declared, "declared")
    if boot.static and declared.size:
        yield f"overhead: {number(config.overhead_vcpus)} vCPUs, {config.overhead_memory} MiB"
    elif config.compat is Compat.KATA and declared.size.vcpus is not None:
        yield 'compat = "kata": the declared vCPUs come with the containers, not at boot'
    wanted = max(ceil(boot.exact), 1)
    cut = f", cut to the maximum of {boot.vcpus}" if boot.vcpus < wanted else ""
    yield f"boot: {number(boot.exact)} vCPUs, rounded up once: {wanted}{cut}; {_size(boot.memory)}"


def _declared(config: SandboxConfig, declaration: Declaration, when: str) -> Iterator[str]:
    size = declaration.size
    asked = demand.of(oci.decode(declaration.text), demand.counting(config))
    if size.vcpus is not None:
        if asked.quota:
            vcpus = f"quota {asked.quota} / period {asked.period} = {number(size.vcpus)} vCPUs"
        elif asked.cpus:
            vcpus = f"cpuset of {len(asked.cpus)}: as many vCPUs"
        else:
            vcpus = f"{asked.shares} shares, {demand.SHARES_PER_CPU} a vCPU, rounded up: {number(size.vcpus)} vCPUs"
        yield f"{when}: {vcpus} ({declaration.vcpus_from})"
    if size.memory is not None:
        even = "" if asked.memory == size.memory else f", up to an even number of MiB: {_size(size.memory)}"
        yield f"{when}: {_size(asked.memory)}{even} ({declaration.memory_from})"


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
    wanted = 0
    if sums.containers:
        wanted = ceil(target.exact)
        yield from _demand(config, sums, target)
    if target.floor > wanted:
        wanted = ceil(target.floor)
        none = "" if sums.containers else "no containers; "
        yield f"{none}resized: at least {number(target.floor)}, rounded up: {wanted}"
    if not wanted and not sums.containers:
        yield f"no containers: the boot size, {boot.vcpus}"
    if target.excess:
        limit = "default_maxvcpus" if boot.max_vcpus == config.default_maxvcpus else "the machine's maximum"
        yield f"above {limit} = {boot.max_vcpus}: {wanted} cut to {boot.max_vcpus}"
    elif boot.vcpus > wanted and (sums.containers or wanted):
        yield f"never below the boot size: {boot.vcpus}"
    if target.held:
        yield f'compat = "kata": a container that comes lowers nothing, one that goes raises nothing: {target.vcpus}'


def _demand(config: SandboxConfig, sums: Sums, target: Target) -> Iterator[str]:
    kata = config.compat is Compat.KATA
    terms = [Fraction(sums.cpuset_vcpus)] if sums.cpuset_vcpus else []
    if sums.quota_vcpus:
        if kata and terms:
            yield 'compat = "kata": beside a quota no cpuset counts'
            terms.clear()
        terms.insert(0, sums.quota_vcpus)
        if kata or config.base is Base.ADD:
            terms.insert(0, config.default_vcpus)
    demand = " + ".join(map(number, terms)) or "0"
    if len(terms) > 1:
        demand += f" = {number(sum(terms, start=Fraction()))}"
    if target.exact > sum(terms):
        demand += f", at least default_vcpus = {number(target.exact)}"
    yield f"{demand}, rounded up once: {ceil(target.exact)}"


def _memory(config: SandboxConfig, boot: BootSize, sums: Sums, target: Target, resized: int) -> str:
    need = sums.memory
    demand = f"memory: limits and huge pages of {_size(sums.memory)}"
    if config.base is Base.ADD:
        need += config.default_memory * MIB
        demand = f"memory: {config.default_memory} MiB + limits and huge pages of {_size(sums.memory)} = {_size(need)}"
    if resized > need:
        need = resized
        demand += f", resized: at least {_size(resized)}"
    if need <= boot.memory:
        return f"{demand}, within the boot size: {_size(target.memory)}"
    return f"{demand}, from the boot size in steps of {_size(boot.granularity)}: {_size(target.memory)}"


def _value(value: object) -> str:
    """A configuration value as an answer shows it."""
    match value:
        case None:
            return "not set"
        case bool():
            return str(value).lower()
        case Fraction():
            return number(value)
        case _:
            return str(value)


def _size(amount: int) -> str:
    """Bytes, in MiB where that is exact."""
    return f"{amount} bytes" if amount % MIB else f"{amount // MIB} MiB"
