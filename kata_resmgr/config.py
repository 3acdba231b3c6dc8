"""The configuration: what the file says, made effective by SPEC 2, with the origin of every value.

A file is read into tables of *settings* (a value and where it stands). The effective values for one sandbox are then a
pure function of those tables and of the host. Whatever is laid over the file later is one more table of settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from kata_resmgr.config_table import ConfigError, Setting, Table, either, plain, shown
from kata_resmgr.host import Host, this_host
from kata_resmgr.problem import Code, Problem
from kata_resmgr.toml_file import TomlError, TomlFile, read_toml

__all__ = ["ConfigError", "SandboxConfig", "Settings", "load"]

DEFAULT_PATH = Path("/etc/kata-resmgr/config.toml")

QEMU_MAX_VCPUS = 240
SMALLEST_MEMORY = 64
"""MiB: below this no guest boots."""
DEFAULT_MEMORY = 2048
DEFAULT_MEMORY_SLOTS = 10
SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (unix(7))."""

_LARGEST_MEMORY = (1 << 43) - 1  # MiB: in bytes it still fits into 63 bits
_LARGEST_COUNT = (1 << 31) - 1


class Base(StrEnum):
    """Whether ``default_vcpus`` and ``default_memory`` are added to what the containers ask for (SPEC 5)."""

    ADD = "add"
    MAX = "max"


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

    Memory is in MiB, durations are in seconds. ``origins`` tells for each field where its value comes from:
    ``config.toml:16``, ``default``, ``host``, or a cut with its reason.
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
    machine_type: str
    confidential_guest: bool
    enable_virtio_mem: bool
    base: Base
    cpuset_sizing: CpusetSizing
    shares_sizing: bool
    over_max_vcpus: OverMax
    shrink_delay: float
    deadline: float
    tcg_unplug: TcgUnplug
    host_cpus: int
    host_memory: int
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """``[daemon]``: what the process itself lives by. It is read once, at the start."""

    socket: Path
    socket_group: str | None
    state: Path
    vm_roots: tuple[Path, ...]
    disk_roots: tuple[Path, ...]
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class Settings:
    """One configuration as it was read: checked as a whole, made effective for each sandbox."""

    daemon: DaemonConfig
    tables: Mapping[str, Table]
    host: Host

    def for_sandbox(self, hypervisor: str | None) -> SandboxConfig:
        """The effective values for one sandbox; *hypervisor* None: as the configuration says.

        Raises :class:`Problem` (``invalid_config``) where this hypervisor cannot be had.
        """
        name = _hypervisor_name(self.tables) if hypervisor is None else _CANONICAL.get(hypervisor)
        if name != "qemu":
            raise Problem(Code.INVALID_CONFIG, f"hypervisor {(hypervisor or name)!r} is not supported yet; use 'qemu'")
        return _sandbox_config(self.tables, self.host, name)


def load(path: Path | None, host: Host | None = None) -> Settings:
    """Read *path*, or the default file where there is one; *host* stands in for this host in tests.

    Raises :class:`ConfigError`.
    """
    try:
        if path is not None or DEFAULT_PATH.exists():
            tables = _tables(read_toml(path or DEFAULT_PATH))
        else:
            tables = {name: Table(name, {}) for name in ("runtime", "hypervisor.qemu", "resmgr", "daemon")}
        host = host or this_host()
    except TomlError as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"this host's size cannot be read: {error}") from error
    _sandbox_config(tables, host, "qemu")  # for its checks: every value is judged at the start, not at the first use
    _hypervisor_name(tables)
    return Settings(_daemon_config(tables["daemon"]), tables, host)


# What is known

_KATA_TABLES = ("hypervisor", "runtime", "agent", "factory", "image", "netmon", "proxy", "shim")
_OUR_TABLES = ("kata", "resmgr", "daemon")
OUR_KEYS = {
    "resmgr": (
        "static_sandbox_resource_mgmt",
        "base",
        "compat",
        "cpuset_sizing",
        "shares_sizing",
        "over_max_vcpus",
        "rate_limiter_scaling",
        "shrink_delay",
        "deadline",
        "host_cpus",
        "host_memory",
        "tcg_unplug",
    ),
    "daemon": ("socket", "socket_group", "state", "vm_roots", "disk_roots", "log_level", "log_format"),
}
_CANONICAL = {"qemu": "qemu", "clh": "clh", "cloud-hypervisor": "clh"}


# From a file to tables


def _tables(file: TomlFile) -> dict[str, Table]:
    """The tables that bear on this program. Other tables of Kata's are left alone; unknown ones are refused."""
    for name in file.values:
        if name not in _KATA_TABLES and name not in _OUR_TABLES:
            near = _nearest(name, (*_KATA_TABLES, *_OUR_TABLES))
            raise ConfigError(f"{file.path}:{file.line(name)}: [{plain(name)}]: there is no such table; {near}")
    if "kata" in file.values:
        where = f"{file.path}:{file.line('kata')}"
        raise ConfigError(f"{where}: [kata]: Kata's own files cannot be named here yet; take it out")
    tables = {name: _table(file, name) for name in ("runtime", "resmgr", "daemon")}
    for name in _table(file, "hypervisor").settings:
        canonical = _CANONICAL.get(name)
        if canonical is None:
            continue
        if f"hypervisor.{canonical}" in tables:
            raise ConfigError(
                f"{file.path}:{file.line('hypervisor', name)}: [hypervisor.{name}]: "
                "must not stand beside [hypervisor.clh], which is the same"
            )
        tables[f"hypervisor.{canonical}"] = _table(file, "hypervisor", name)
    tables.setdefault("hypervisor.qemu", Table("hypervisor.qemu", {}))
    for name, known in OUR_KEYS.items():
        for key, setting in tables[name].settings.items():
            if key not in known:
                where = f"{setting.file}:{setting.line}: [{name}] {plain(key)}"
                raise ConfigError(f"{where}: there is no such key; {_nearest(key, known)}")
    return tables


def _table(file: TomlFile, *names: str) -> Table:
    values: Any = file.values
    for depth, name in enumerate(names, start=1):
        values = values.get(name, {})
        if not isinstance(values, dict):
            where = f"{file.path}:{file.line(*names[:depth])}"
            raise ConfigError(f"{where}: {'.'.join(names[:depth])} = {shown(values)}: must be a table")
    settings = {key: Setting(value, file.path, file.line(*names, key)) for key, value in values.items()}
    return Table(".".join(names), settings)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    return f"the nearest is {near[0]}" if near else f"there are {', '.join(names)}"


# From tables to effective values (SPEC 2)


def _hypervisor_name(tables: Mapping[str, Table]) -> str:
    """The configuration's choice: the key, else the only table there is, else QEMU."""
    runtime = tables["runtime"]
    name = runtime.text("hypervisor_name")
    if name is not None:
        if name not in _CANONICAL:
            runtime.refuse("hypervisor_name", either(_CANONICAL))
        return _CANONICAL[name]
    only_clh = "hypervisor.clh" in tables and not tables["hypervisor.qemu"].settings
    return "clh" if only_clh else "qemu"


def _sandbox_config(tables: Mapping[str, Table], host: Host, hypervisor: str) -> SandboxConfig:
    resmgr, runtime, kata = tables["resmgr"], tables["runtime"], tables[f"hypervisor.{hypervisor}"]
    for key, only in (("compat", None), ("rate_limiter_scaling", "kata")):
        if resmgr.text(key) not in (None, only):
            resmgr.refuse(key, "left out: it is not supported yet")

    origins: dict[str, str] = {}
    host_cpus = resmgr.integer("host_cpus", 1, _LARGEST_COUNT)
    host_memory = resmgr.integer("host_memory", 1, _LARGEST_MEMORY)
    origins["host_cpus"] = "host" if host_cpus is None else resmgr.origin("host_cpus")
    origins["host_memory"] = "host" if host_memory is None else resmgr.origin("host_memory")
    host = Host(host_cpus or host.cpus, host_memory or host.memory)

    kata_static, own_static = runtime.flag("static_sandbox_resource_mgmt"), resmgr.flag("static_sandbox_resource_mgmt")
    static = bool(kata_static if own_static is None else own_static)
    origins["static"] = (runtime if own_static is None else resmgr).origin("static_sandbox_resource_mgmt")

    maximum, origins["default_maxvcpus"] = _max_vcpus(kata, host)
    vcpus, origins["default_vcpus"] = _vcpus(kata, host, maximum)
    max_memory, origins["default_maxmemory"] = _max_memory(kata, host)
    memory, origins["default_memory"] = _memory(kata, host, max_memory, static=static)

    slots = kata.integer("memory_slots", 0, 256)
    origins["memory_slots"] = kata.origin("memory_slots") if slots else "default"
    overhead_vcpus = kata.number("overhead_vcpus") or Fraction(0)
    if not 0 <= overhead_vcpus <= _LARGEST_COUNT:
        kata.refuse("overhead_vcpus", f"a number from 0 to {_LARGEST_COUNT}")

    for key in ("overhead_vcpus", "overhead_memory", "machine_type", "confidential_guest", "enable_virtio_mem"):
        origins[key] = kata.origin(key)
    for key in ("base", "cpuset_sizing", "shares_sizing", "over_max_vcpus", "shrink_delay", "deadline", "tcg_unplug"):
        origins[key] = resmgr.origin(key)
    origins["hypervisor"] = runtime.origin("hypervisor_name")

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
        machine_type=kata.text("machine_type") or "q35",
        confidential_guest=kata.flag("confidential_guest") or False,
        enable_virtio_mem=kata.flag("enable_virtio_mem") or False,
        base=resmgr.choice("base", Base) or Base.ADD,
        cpuset_sizing=resmgr.choice("cpuset_sizing", CpusetSizing) or CpusetSizing.EXCLUSIVE,
        shares_sizing=resmgr.flag("shares_sizing") or False,
        over_max_vcpus=resmgr.choice("over_max_vcpus", OverMax) or OverMax.CLAMP,
        shrink_delay=5.0 if shrink_delay is None else shrink_delay,
        deadline=10.0 if deadline is None else deadline,
        tcg_unplug=resmgr.choice("tcg_unplug", TcgUnplug) or TcgUnplug.NEVER,
        host_cpus=host.cpus,
        host_memory=host.memory,
        origins=origins,
    )


def _max_vcpus(table: Table, host: Host) -> tuple[int, str]:
    value = table.integer("default_maxvcpus", 0, _LARGEST_COUNT)
    origin = table.origin("default_maxvcpus")
    maximum = value or host.cpus
    if not value:
        origin = "host"
    elif value > host.cpus:
        maximum, origin = host.cpus, f"cut to the host ({origin})"
    if maximum > QEMU_MAX_VCPUS:
        return QEMU_MAX_VCPUS, f"cut to QEMU's {QEMU_MAX_VCPUS} ({origin})"
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
        return Fraction(maximum), f"cut to default_maxvcpus ({origin})"
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


class _LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _LogFormat(StrEnum):
    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


def _daemon_config(table: Table) -> DaemonConfig:
    socket = table.path("socket") or Path("/run/kata-resmgr/api.sock")
    if len(bytes(socket)) > SOCKET_PATH_LIMIT:
        table.refuse("socket", f"a path of at most {SOCKET_PATH_LIMIT} bytes")
    roots, disk_roots = table.paths("vm_roots"), table.paths("disk_roots")
    default_roots = (Path("/run/vc"), Path("/run/kata"), Path("/run/kata-resmgr"))
    return DaemonConfig(
        socket=socket,
        socket_group=table.text("socket_group") or None,
        state=table.path("state") or Path("/run/kata-resmgr/state.db"),
        vm_roots=default_roots if roots is None else roots,
        disk_roots=disk_roots or (),
        log_level=table.choice("log_level", _LogLevel) or _LogLevel.INFO,
        log_format=table.choice("log_format", _LogFormat) or _LogFormat.AUTO,
    )
