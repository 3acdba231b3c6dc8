"""The configuration: what the file says, made effective by SPEC 2, with the origin of every value.

Files are read into tables of *settings* (a value and where it stands), laid over each other. The effective values for
one sandbox are then a pure function of those tables, of the host, and of the sandbox's annotations, which are one more
layer of settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

from kata_resmgr.config_annotations import HYPERVISOR_NAME, SMALLEST_MEMORY, Bounds, hypervisor_of, overrides
from kata_resmgr.config_daemon import DaemonConfig, daemon_config
from kata_resmgr.config_keys import HYPERVISORS, RATE_LIMITERS
from kata_resmgr.config_layers import NOTHING, Layers, read_layers
from kata_resmgr.config_table import ConfigError, Override, Table, either, plain
from kata_resmgr.host import Host, this_host
from kata_resmgr.limits import LARGEST_SIZE, IoLimits, LimitRefused, Scaling, configured
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem

__all__ = ["ConfigError", "DaemonConfig", "SandboxConfig", "Settings", "load"]

DEFAULT_PATH = Path("/etc/kata-resmgr/config.toml")

MOST_VCPUS = {"qemu": 240, "clh": 254}
"""By hypervisor: what it is known to start with."""
CUT_TO_MAXIMUM = "cut to default_maxvcpus"
"""How the origin of such a ``default_vcpus`` begins."""
DEFAULT_MEMORY = 2048
DEFAULT_MEMORY_SLOTS = 10

_LARGEST_MEMORY = (1 << 43) - 1  # MiB: in bytes it still fits into 63 bits
_LARGEST_COUNT = (1 << 32) - 1  # as in Kata


class Base(StrEnum):
    """Whether ``default_vcpus`` and ``default_memory`` are added to what the containers ask for (SPEC 5)."""

    ADD = "add"
    MAX = "max"


class Compat(StrEnum):
    """Whose sizing is followed to the letter (SPEC 5, end)."""

    KATA = "kata"


class CpusetSizing(StrEnum):
    """Whose cpuset counts as demand (SPEC 4)."""

    EXCLUSIVE = "exclusive"
    ALWAYS = "always"


class OverMax(StrEnum):
    """What becomes of a demand above ``default_maxvcpus``."""

    CLAMP = "clamp"
    REFUSE = "refuse"


class TcgUnplug(StrEnum):
    """Whether vCPUs are removed under TCG, where a later plug would end QEMU (SPEC 8)."""

    NEVER = "never"
    ONCE = "once"


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """Everything that one sandbox lives by; all values are effective ones.

    Memory is in MiB, durations are in seconds. ``origins`` tells for each field, and for each key of *rate_limits*,
    where its value comes from: ``config.toml:16``, ``config.d/10-more.toml:3``, ``default``, ``host``, ``sandbox``,
    an annotation's key, or a cut with its reason.
    """

    hypervisor: str
    static: bool
    default_vcpus: Fraction
    default_maxvcpus: int
    default_memory: int
    default_maxmemory: int
    memory_slots: int
    overhead_vcpus: Fraction
    overhead_memory: int
    enable_annotations: tuple[str, ...]
    machine_type: str
    """Empty where the hypervisor has none."""
    confidential_guest: bool
    enable_virtio_mem: bool
    enable_hugepages: bool
    enable_mem_prealloc: bool
    reclaim_guest_freed_memory: bool
    rate_limits: Mapping[str, int]
    """Kata's ``disk_rate_limiter_*`` and ``net_rate_limiter_*`` by these names, in Kata's units; 0: none."""
    sandbox_cgroup_only: bool
    enable_vcpus_pinning: bool
    base: Base
    compat: Compat | None
    cpuset_sizing: CpusetSizing
    shares_sizing: bool
    over_max_vcpus: OverMax
    rate_limiter_scaling: Scaling
    shrink_delay: float
    deadline: float
    tcg_unplug: TcgUnplug
    host_cpus: int
    host_memory: int
    origins: Mapping[str, str]
    notes: tuple[Note, ...] = ()
    """What there is to tell about these values, and about the sandbox's annotations."""

    def io_limits(self, device: str) -> IoLimits:
        """The limits of every ``"disk"``, or of every ``"net"``."""
        return configured(device, self.rate_limits, self.rate_limiter_scaling)


@dataclass(frozen=True, slots=True)
class Settings:
    """One configuration as it was read: checked as a whole, made effective for each sandbox."""

    daemon: DaemonConfig
    layers: Layers
    host: Host
    configs: Mapping[str, SandboxConfig]
    """By hypervisor: what a sandbox lives by that says nothing of its own."""

    def for_sandbox(self, hypervisor: str | None = None, annotations: Mapping[str, str] | None = None) -> SandboxConfig:
        """The effective values for one sandbox; *hypervisor* None: as annotations and configuration say.

        Raises :class:`Problem`: ``invalid_config`` for a hypervisor that nobody knows, ``invalid_annotation``.
        """
        annotations = annotations or {}
        if hypervisor is None:
            name, origin = _hypervisor(self.layers.tables)
            if (chosen := hypervisor_of(annotations, _bounds(self.configs[name]))) is not None:
                # What the configuration chose has let it in; all else is for the chosen one to let in.
                annotations = {key: value for key, value in annotations.items() if key != HYPERVISOR_NAME}
                name, origin = chosen, HYPERVISOR_NAME
        elif hypervisor in HYPERVISORS:
            name, origin = HYPERVISORS[hypervisor], "sandbox"
        else:
            detail = f'hypervisor "{plain(hypervisor)}" is not known: use {either(HYPERVISORS)}'
            raise Problem(Code.INVALID_CONFIG, detail)
        config = self.configs[name]
        changes = overrides(annotations, _bounds(config))
        if changes.hypervisor or changes.runtime:
            tables = self.layers.tables
            changed = {
                **tables,
                "runtime": tables["runtime"].under(changes.runtime),
                f"hypervisor.{name}": _hypervisor_table(tables, name).under(changes.hypervisor),
            }
            config = _sandbox_config(changed, self.host, name)
        return replace(config, origins={**config.origins, "hypervisor": origin}, notes=config.notes + changes.notes)

    def for_host(self, cpus: int | None, memory: int | None) -> Settings:
        """These settings where the host has so many CPUs, and RAM in MiB; None: as they say themselves.

        Raises :class:`Problem` ``invalid_config`` for values that do not go together on that host.
        """
        named = {"host_cpus": cpus, "host_memory": memory}
        said = {key: Override(value, "request") for key, value in named.items() if value is not None}
        if not said:
            return self
        tables = {**self.layers.tables, "resmgr": self.layers.tables["resmgr"].under(said)}
        try:
            return replace(self, layers=replace(self.layers, tables=tables), configs=_configs(tables, self.host))
        except ConfigError as error:
            raise Problem(Code.INVALID_CONFIG, str(error)) from error


def load(path: Path | None, host: Host | None = None) -> Settings:
    """Read *path*, or the default file where there is one; *host* stands in for this host in tests.

    Raises :class:`ConfigError`.
    """
    layers = read_layers(path or DEFAULT_PATH) if path is not None or DEFAULT_PATH.exists() else NOTHING
    try:
        host = host or this_host()
    except (OSError, ValueError) as error:
        raise ConfigError(f"this host's size cannot be read: {error}") from error
    _hypervisor(layers.tables)  # for its refusal: every value is judged at the start, not at its first use
    return Settings(daemon_config(layers.tables["daemon"]), layers, host, _configs(layers.tables, host))


# From tables to effective values (SPEC 2)


def _hypervisor(tables: Mapping[str, Table]) -> tuple[str, str]:
    """The configuration's choice and its origin: the key, else the only table there is, else QEMU."""
    runtime = tables["runtime"]
    name = runtime.text("hypervisor_name")
    if name is not None:
        if name not in HYPERVISORS:
            runtime.refuse("hypervisor_name", either(HYPERVISORS))
        return HYPERVISORS[name], runtime.origin("hypervisor_name")
    there = [name for name in MOST_VCPUS if f"hypervisor.{name}" in tables]
    return (there[0], f"the only table, [hypervisor.{there[0]}]") if len(there) == 1 else ("qemu", "default")


def _hypervisor_table(tables: Mapping[str, Table], hypervisor: str) -> Table:
    name = f"hypervisor.{hypervisor}"
    return tables.get(name) or Table(name, {})


def _bounds(config: SandboxConfig) -> Bounds:
    return Bounds(config.enable_annotations, config.host_cpus, config.default_maxmemory)


def _configs(tables: Mapping[str, Table], host: Host) -> dict[str, SandboxConfig]:
    return {hypervisor: _sandbox_config(tables, host, hypervisor) for hypervisor in MOST_VCPUS}


def _sandbox_config(tables: Mapping[str, Table], host: Host, hypervisor: str) -> SandboxConfig:
    resmgr, runtime, kata = tables["resmgr"], tables["runtime"], _hypervisor_table(tables, hypervisor)

    origins = {"hypervisor": tables["runtime"].origin("hypervisor_name")}
    host_cpus = resmgr.integer("host_cpus", 1, _LARGEST_COUNT)
    host_memory = resmgr.integer("host_memory", 1, _LARGEST_MEMORY)
    origins["host_cpus"] = "host" if host_cpus is None else resmgr.origin("host_cpus")
    origins["host_memory"] = "host" if host_memory is None else resmgr.origin("host_memory")
    host = Host(host_cpus or host.cpus, host_memory or host.memory)

    kata_static, own_static = runtime.flag("static_sandbox_resource_mgmt"), resmgr.flag("static_sandbox_resource_mgmt")
    static = bool(kata_static if own_static is None else own_static)
    origins["static"] = (runtime if own_static is None else resmgr).origin("static_sandbox_resource_mgmt")

    maximum, origins["default_maxvcpus"] = _max_vcpus(kata, host, MOST_VCPUS[hypervisor])
    vcpus, origins["default_vcpus"] = _vcpus(kata, host, maximum)
    max_memory, origins["default_maxmemory"] = _max_memory(kata, host)
    memory, origins["default_memory"] = _memory(kata, host, max_memory, static=static)

    slots = kata.integer("memory_slots", 0, 256)
    origins["memory_slots"] = kata.origin("memory_slots") if slots else "default"
    overhead_vcpus = kata.number("overhead_vcpus") or Fraction(0)
    if not 0 <= overhead_vcpus <= _LARGEST_COUNT:
        kata.refuse("overhead_vcpus", f"a number from 0 to {_LARGEST_COUNT}")

    for key in (
        "overhead_vcpus",
        "overhead_memory",
        "enable_annotations",
        "machine_type",
        "confidential_guest",
        "enable_virtio_mem",
        "enable_hugepages",
        "enable_mem_prealloc",
        "reclaim_guest_freed_memory",
        *RATE_LIMITERS,
    ):
        origins[key] = kata.origin(key)
    for key in ("sandbox_cgroup_only", "enable_vcpus_pinning"):
        origins[key] = runtime.origin(key)
    for key in (
        "base",
        "compat",
        "cpuset_sizing",
        "shares_sizing",
        "over_max_vcpus",
        "rate_limiter_scaling",
        "shrink_delay",
        "deadline",
        "tcg_unplug",
    ):
        origins[key] = resmgr.origin(key)

    scaling = resmgr.choice("rate_limiter_scaling", Scaling) or Scaling.KATA
    rate_limits = {key: kata.integer(key, 0, LARGEST_SIZE) or 0 for key in RATE_LIMITERS}
    shrink_delay, deadline = resmgr.duration("shrink_delay"), resmgr.duration("deadline")
    return SandboxConfig(
        hypervisor=hypervisor,
        static=static,
        default_vcpus=vcpus,
        default_maxvcpus=maximum,
        default_memory=memory,
        default_maxmemory=max_memory,
        memory_slots=slots or DEFAULT_MEMORY_SLOTS,
        overhead_vcpus=overhead_vcpus,
        overhead_memory=kata.integer("overhead_memory", 0, _LARGEST_MEMORY) or 0,
        enable_annotations=kata.patterns("enable_annotations") or (),
        machine_type=(kata.text("machine_type") or "q35") if hypervisor == "qemu" else "",
        confidential_guest=kata.flag("confidential_guest") or False,
        enable_virtio_mem=kata.flag("enable_virtio_mem") or False,
        enable_hugepages=kata.flag("enable_hugepages") or False,
        enable_mem_prealloc=kata.flag("enable_mem_prealloc") or False,
        reclaim_guest_freed_memory=kata.flag("reclaim_guest_freed_memory") or False,
        rate_limits=rate_limits,
        sandbox_cgroup_only=runtime.flag("sandbox_cgroup_only") or False,
        enable_vcpus_pinning=runtime.flag("enable_vcpus_pinning") or False,
        base=resmgr.choice("base", Base) or Base.ADD,
        compat=resmgr.choice("compat", Compat),
        cpuset_sizing=resmgr.choice("cpuset_sizing", CpusetSizing) or CpusetSizing.EXCLUSIVE,
        shares_sizing=resmgr.flag("shares_sizing") or False,
        over_max_vcpus=resmgr.choice("over_max_vcpus", OverMax) or OverMax.CLAMP,
        rate_limiter_scaling=scaling,
        shrink_delay=5.0 if shrink_delay is None else shrink_delay,
        deadline=10.0 if deadline is None else deadline,
        tcg_unplug=resmgr.choice("tcg_unplug", TcgUnplug) or TcgUnplug.NEVER,
        host_cpus=host.cpus,
        host_memory=host.memory,
        origins=origins,
        notes=tuple(_idle_bursts(kata, rate_limits, scaling)),
    )


def _idle_bursts(table: Table, rate_limits: Mapping[str, int], scaling: Scaling) -> Iterator[Note]:
    """The rate limits, judged: one that cannot be kept is refused, and a burst that counts for nothing is told."""
    for device in ("disk", "net"):
        try:
            limits = configured(device, rate_limits, scaling)
        except LimitRefused as error:
            table.refuse(error.name, error.must)
        for burst in limits.idle_bursts:
            yield Note("BurstWithoutRate", burst.name, burst.message)


def _max_vcpus(table: Table, host: Host, most: int) -> tuple[int, str]:
    value = table.integer("default_maxvcpus", 0, _LARGEST_COUNT)
    origin = table.origin("default_maxvcpus")
    maximum = value or host.cpus
    if not value:
        origin = "host"
    elif value > host.cpus:
        maximum, origin = host.cpus, f"cut to the host ({origin})"
    if maximum > most:
        return most, f"cut to the hypervisor's {most} ({origin})"
    return maximum, origin


def _vcpus(table: Table, host: Host, maximum: int) -> tuple[Fraction, str]:
    value = table.number("default_vcpus")
    origin = table.origin("default_vcpus")
    if not value:
        return Fraction(1), "default"
    if value < 0:
        value, origin = Fraction(host.cpus), f"the host's CPUs ({origin})"
    elif value > host.cpus:
        value, origin = Fraction(host.cpus), f"cut to the host ({origin})"
    if value > maximum:
        return Fraction(maximum), f"{CUT_TO_MAXIMUM} ({origin})"
    return value, origin


def _max_memory(table: Table, host: Host) -> tuple[int, str]:
    value = table.integer("default_maxmemory", 0, _LARGEST_MEMORY)
    if not value:
        return host.memory, "host"
    origin = table.origin("default_maxmemory")
    return (host.memory, f"cut to the host ({origin})") if value > host.memory else (value, origin)


def _memory(table: Table, host: Host, maximum: int, *, static: bool) -> tuple[int, str]:
    value = table.integer("default_memory", 0, _LARGEST_MEMORY)
    if value == 0 and static:
        return 0, table.origin("default_memory")
    if not value:
        if maximum < DEFAULT_MEMORY:
            return maximum, "cut to default_maxmemory (default)"
        return DEFAULT_MEMORY, "default"
    origin = table.origin("default_memory")
    if value < SMALLEST_MEMORY:
        table.refuse("default_memory", f"0 or at least {SMALLEST_MEMORY} MiB")
    if value > host.memory:
        value, origin = host.memory, f"cut to the host ({origin})"
    if value > maximum:
        table.refuse("default_memory", f"at most default_maxmemory, which is {maximum} MiB")
    return value, origin
