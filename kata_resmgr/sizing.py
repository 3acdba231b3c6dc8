"""How big the VM must be: boot size, demand, target. Pure rules over exact numbers (SPEC 5 and 6).

Everything here is a function of the configuration, the declared size and the table's sums, so a restart, a dry run
and a live sandbox come to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from math import ceil

import msgspec

from hypervisors.base import MemoryHotplug, MemoryMethod
from kata_resmgr.config import Base, Compat, OverMax, SandboxConfig
from kata_resmgr.demand import Sums
from kata_resmgr.note import Note as Note
from kata_resmgr.problem import Code, Problem

MIB = 1024 * 1024
DIMM_GRANULARITY = 128 * MIB
"""Bytes: the block that a Linux guest onlines where it tells no other; it drops an unaligned DIMM silently."""
VIRTIO_MEM_GRANULARITY = 2 * MIB
STATIC_MEMORY_FLOOR = 64 * MIB
"""Bytes: less does not boot a guest."""
STATIC_MACHINES = frozenset({"microvm"})
"""Machine types without vCPU hot-plug."""


@dataclass(frozen=True, slots=True)
class Declared:
    """The size that a pod declares of itself; None where it declares none."""

    vcpus: Fraction | None = None
    memory: int | None = None
    """Bytes, a multiple of 2 MiB."""

    def __bool__(self) -> bool:
        return self.vcpus is not None or self.memory is not None


@dataclass(frozen=True, slots=True)
class BootSize:
    """What the VM is started with. It stays as it is for the VM's life."""

    vcpus: int
    max_vcpus: int
    memory: int
    """Bytes, as is *max_memory*."""
    max_memory: int
    memory_slots: int
    granularity: int
    """Bytes: memory beyond boot comes in multiples of it."""
    static: bool
    """Never resized (SPEC 6)."""
    exact: Fraction
    """What *vcpus* was rounded from."""

    @property
    def mode(self) -> str:
        """As answers name it."""
        return "static" if self.static else "dynamic"


NO_FLOOR = Fraction(0)


class Target(msgspec.Struct, frozen=True, gc=False):
    """What the present table asks for."""

    exact: Fraction
    """The bare demand, before floor and clamp."""
    vcpus: int
    memory: int
    """Bytes, cut to the maximum."""
    excess: int
    """vCPUs that are asked for above the maximum; 0: not clamped."""
    floor: Fraction = NO_FLOOR
    """vCPUs that a pod-level resize asks for; 0 without one."""
    held: bool = False
    """*vcpus* are those of before, as ``compat`` has it."""
    memory_excess: int = 0
    """Bytes that are asked for above the maximum."""

    @property
    def memory_asked(self) -> int:
        """Bytes, before the maximum cuts them."""
        return self.memory + self.memory_excess

    def asks_more_than(self, before: Target) -> bool:
        """Whether more vCPUs are asked for: more than the target of before, or than what was cut to it."""
        return self.vcpus > before.vcpus or self.exact > before.exact or self.floor > before.floor


def boot_size(config: SandboxConfig, declared: Declared) -> tuple[BootSize, list[Note]]:
    """The size to start the VM with, and what there is to tell about it.

    Raises :class:`Problem` ``memory_limit_exceeded``, ``vcpu_limit_exceeded`` or ``no_memory``.
    """
    unpluggable = config.machine_type in STATIC_MACHINES or config.confidential_guest
    if config.static or unpluggable:
        boot, notes = _static_boot(config, declared)
        if not config.static:
            why = "a confidential guest" if config.confidential_guest else f"machine type {config.machine_type}"
            notes.append(Note("HotplugUnsupported", "vcpus", f"{why} cannot hot-plug: sized once, at boot"))
        return boot, notes
    return _dynamic_boot(config, declared)


def _dynamic_boot(config: SandboxConfig, declared: Declared) -> tuple[BootSize, list[Note]]:
    notes: list[Note] = []
    ignored = config.compat is Compat.KATA  # there the declared CPU is what the containers bring
    exact = config.default_vcpus if declared.vcpus is None or ignored else declared.vcpus
    wanted = max(ceil(exact), 1)
    vcpus = min(wanted, config.default_maxvcpus)
    if vcpus < wanted:
        text = f"{wanted} vCPUs to boot with are above the maximum of {config.default_maxvcpus}"
        if config.over_max_vcpus is OverMax.REFUSE:
            raise Problem(Code.VCPU_LIMIT_EXCEEDED, f"{text}: declare less or raise default_maxvcpus")
        notes.append(Note("Clamped", "boot", f"{text}; booting with {vcpus}"))
    default_memory, max_memory = config.default_memory * MIB, config.default_maxmemory * MIB
    memory = max(default_memory, declared.memory or 0)
    if memory > max_memory:
        raise Problem(
            Code.MEMORY_LIMIT_EXCEEDED,
            f"{memory // MIB} MiB to boot with are above the maximum of {config.default_maxmemory} MiB: "
            "declare less or raise default_maxmemory",
        )
    return (
        BootSize(
            vcpus=vcpus,
            max_vcpus=config.default_maxvcpus,
            memory=memory,
            max_memory=max_memory,
            memory_slots=0 if memory == max_memory else config.memory_slots,
            granularity=VIRTIO_MEM_GRANULARITY if config.enable_virtio_mem else DIMM_GRANULARITY,
            static=False,
            exact=exact,
        ),
        notes,
    )


def _static_boot(config: SandboxConfig, declared: Declared) -> tuple[BootSize, list[Note]]:
    notes: list[Note] = []
    if declared:
        exact = max(config.overhead_vcpus + (declared.vcpus or 0), Fraction(1))
        vcpus = ceil(exact)
        memory = config.overhead_memory * MIB + (declared.memory or 0)
        if 0 < memory < STATIC_MEMORY_FLOOR:
            notes.append(
                Note(
                    "MemoryFloor",
                    "memory",
                    f"{memory // MIB} MiB are too few to boot with; {STATIC_MEMORY_FLOOR // MIB} MiB instead",
                )
            )
            memory = STATIC_MEMORY_FLOOR
    else:
        exact = config.default_vcpus
        vcpus = max(ceil(exact), 1)
        memory = config.default_memory * MIB
    if memory == 0:
        raise Problem(
            Code.NO_MEMORY, "the sandbox would boot with 0 MiB: set a limit, default_memory or overhead_memory"
        )
    above = [
        text
        for text, over in (
            (f"{vcpus} vCPUs, the host has {config.host_cpus}", vcpus > config.host_cpus),
            (f"{memory // MIB} MiB, the host has {config.host_memory}", memory > config.host_memory * MIB),
        )
        if over
    ]
    if above:
        notes.append(Note("AboveHost", "boot", "; ".join(above)))
    return (
        BootSize(
            vcpus=vcpus,
            max_vcpus=vcpus,
            memory=memory,
            max_memory=max(memory, config.default_maxmemory * MIB),
            memory_slots=0,
            granularity=VIRTIO_MEM_GRANULARITY if config.enable_virtio_mem else DIMM_GRANULARITY,
            static=True,
            exact=exact,
        ),
        notes,
    )


def fit_memory(boot: BootSize, able: MemoryHotplug, block: int | None) -> BootSize:
    """*boot* on a machine that can do so much: its method's granularity, at least the guest's *block*; its maximum."""
    granularity = max(boot.granularity, block or 0)
    if able.method is MemoryMethod.NONE or boot.static:
        return replace(boot, granularity=granularity)
    least = VIRTIO_MEM_GRANULARITY if able.method is MemoryMethod.VIRTIO_MEM else DIMM_GRANULARITY
    return replace(
        boot, granularity=max(least, able.granularity, block or 0), max_memory=min(boot.max_memory, able.maximum)
    )


def demand_vcpus(config: SandboxConfig, declared: Declared, sums: Sums) -> Fraction:
    """``exact``: the bare demand of the containers in vCPUs, under the size that is declared now."""
    default = config.default_vcpus
    if config.compat is Compat.KATA:
        return default + sums.quota_vcpus if sums.quota_vcpus else Fraction(sums.cpuset_vcpus) or default
    containers = _containers_vcpus(config, sums)
    if config.base is Base.MAX:
        return containers if declared.vcpus is not None else max(containers, default)
    return containers + default if sums.quota_vcpus else max(containers, default)


def _containers_vcpus(config: SandboxConfig, sums: Sums) -> Fraction:
    """What the containers ask for, without any default."""
    if not sums.cpuset_vcpus or (config.compat is Compat.KATA and sums.quota_vcpus):
        return sums.quota_vcpus
    return sums.quota_vcpus + sums.cpuset_vcpus


def demand_memory(config: SandboxConfig, sums: Sums) -> int:
    """The bare demand in bytes."""
    return sums.memory + (config.default_memory * MIB if config.base is Base.ADD else 0)


def target(
    config: SandboxConfig,
    boot: BootSize,
    declared: Declared,
    sums: Sums,
    *,
    resized: Declared | None = None,
    held: int | None = None,
) -> Target:
    """What the VM should have now.

    *declared* is the size known at boot, *resized* what it has become by a pod-level resize (None: never resized),
    *held* the vCPUs that :func:`held_vcpus` keeps. The maximum is ``boot.max_vcpus``, cut to the machine's once one is
    attached. In static mode the target is the boot size, whatever is asked for. Whether the target may be is for
    :func:`must_be_allowed` to say: more memory than the maximum is refused, but a machine whose own is lower finds the
    table as it is.
    """
    if boot.static:
        return Target(exact=boot.exact, vcpus=boot.vcpus, memory=boot.memory, excess=0)
    exact = demand_vcpus(config, declared if resized is None else resized, sums)
    wanted = ceil(exact) if sums.containers else 0
    memory = demand_memory(config, sums)
    floor = NO_FLOOR
    if resized is not None:
        floor = resized.vcpus or NO_FLOOR
        wanted = max(wanted, ceil(floor))
        memory = max(memory, resized.memory or 0)
    vcpus = max(wanted, boot.vcpus, 1) if held is None else max(held, boot.vcpus)
    asked = boot.memory + round_up(max(memory - boot.memory, 0), boot.granularity)
    room = max(boot.max_memory - boot.memory, 0) // boot.granularity * boot.granularity
    memory = min(asked, boot.memory + room)
    return Target(
        exact=exact,
        vcpus=min(vcpus, boot.max_vcpus),
        memory=memory,
        excess=max(wanted - boot.max_vcpus, 0),
        floor=floor,
        held=held is not None,
        memory_excess=asked - memory,
    )


class Change(Enum):
    """What an operation does to the table, as far as ``compat`` tells operations apart."""

    ADD = "add"
    """Containers come, and nothing else."""
    DELETE = "delete"
    """Containers go, and nothing else."""
    UPDATE = "update"


def held_vcpus(config: SandboxConfig, change: Change, before: Target, after: Target) -> int | None:
    """The vCPUs that stay although the table asks for others: under ``compat``, where an Add would lower them or a
    Delete raise them (SPEC 5, end); None where *after* holds.
    """
    if config.compat is not Compat.KATA:
        return None
    lowered, raised = after.vcpus < before.vcpus, after.vcpus > before.vcpus
    holds = (change is Change.ADD and lowered) or (change is Change.DELETE and raised)
    return before.vcpus if holds else None


def must_be_allowed(config: SandboxConfig, boot: BootSize, before: Target, after: Target) -> None:
    """Refuse an operation, other than a delete, that leads from one target to the other.

    Raises :class:`Problem` ``vcpu_limit_exceeded`` (``over_max_vcpus``) or ``memory_limit_exceeded``.
    """
    if after.excess and config.over_max_vcpus is OverMax.REFUSE:
        for asked, earlier in ((after.exact, before.exact), (after.floor, before.floor)):
            if ceil(asked) > boot.max_vcpus and asked > earlier:
                raise Problem(
                    Code.VCPU_LIMIT_EXCEEDED,
                    f"{number(asked)} vCPUs are above the maximum of {boot.max_vcpus}: ask for less, or raise "
                    "default_maxvcpus for new sandboxes",
                )
    if after.memory_excess and after.memory_asked > before.memory_asked:
        raise Problem(
            Code.MEMORY_LIMIT_EXCEEDED,
            f"{after.memory_asked} bytes are above the maximum of {boot.max_memory}: ask for less, or raise "
            "default_maxmemory for new sandboxes",
        )


def excess(
    config: SandboxConfig, boot: BootSize, declared: Declared, sums: Sums, target: Target, resized: Declared | None
) -> Note | None:
    """What is asked for beyond what there can be: the condition that is in force as long as that is so."""
    if boot.static:
        return static_excess(config, boot, declared, sums, resized)
    cut = []
    if target.excess:
        cut.append(f"{boot.max_vcpus + target.excess} vCPUs are asked for, the maximum is {boot.max_vcpus}")
    if target.memory_excess:
        cut.append(f"{target.memory_asked} bytes are asked for, the maximum is {target.memory}")
    return Note("Clamped", "demand", "; ".join(cut)) if cut else None


def static_excess(
    config: SandboxConfig, boot: BootSize, declared: Declared, sums: Sums, resized: Declared | None = None
) -> Note | None:
    """In static mode: what is asked for beyond the fixed size, if it is (SPEC 6)."""
    now, raised = (declared, Declared()) if resized is None else (resized, resized)
    vcpus = max(_containers_vcpus(config, sums), raised.vcpus or Fraction(0))
    vcpus += config.overhead_vcpus if now else 0
    memory = max(sums.memory, raised.memory or 0) + (config.overhead_memory * MIB if now else 0)
    beyond = [
        text
        for text, over in (
            (f"{number(vcpus)} vCPUs, fixed at {boot.vcpus}", vcpus > boot.vcpus),
            (f"{memory} bytes, fixed at {boot.memory}", memory > boot.memory),
        )
        if over
    ]
    asking = "the containers ask" if resized is None else "the containers and the resized sandbox ask"
    return Note("DemandExceedsSize", "static", f"{asking} for " + "; ".join(beyond)) if beyond else None


def round_up(amount: int, unit: int) -> int:
    """*amount* as the next multiple of *unit*."""
    return -(-amount // unit) * unit


def exact_text(value: Fraction) -> str:
    """A fraction in lowest terms, as the API tells a demand; one that is too long for that, as :func:`number`.

    Only periods that share no factors, by the hundred, come to so long a denominator. Python itself refuses to write
    out more than 4300 digits.
    """
    return str(value) if value.denominator.bit_length() <= _LONGEST_DENOMINATOR else number(value)


_LONGEST_DENOMINATOR = 3000  # bits: about 900 digits


def number(value: Fraction) -> str:
    """A number, 0 or more, as people write it: decimal where that is exact in a few digits, else as a short fraction.

    A fraction with a long denominator (periods without a common factor multiply) is rounded, and says so.
    """
    for digits in range(7):
        scaled = value * 10**digits
        if scaled.denominator == 1:
            text = f"{scaled.numerator:0{digits + 1}d}"
            return text if digits == 0 else f"{text[:-digits]}.{text[-digits:]}"
    return str(value) if value.denominator <= 10**9 else f"about {number(round(value, 6))}"
