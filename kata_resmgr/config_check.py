"""What a configuration comes to, value by value, and what in it looks like a mistake. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kata_resmgr.config import CUT_TO_MAXIMUM, SandboxConfig, Settings
from kata_resmgr.config_annotations import lets_in
from kata_resmgr.config_keys import HYPERVISORS, OTHER_HYPERVISORS, OTHER_KEYS, OUR_KEYS, READ_KEYS, nearest
from kata_resmgr.config_table import Override, Setting, Table, plain, shown
from kata_resmgr.exact import decimal_text

_LIKENESS_OF_KEYS = 0.8
"""For names that may be right without our knowing them: only what is nearly the same."""
_LIKENESS_OF_TABLES = 0.7

Value = bool | int | Fraction | str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Effective:
    """One effective value. *setting* is what a file says of it, where one does; *value* None: unset."""

    table: str
    key: str
    value: Value
    origin: str
    setting: Setting | None


def effective_values(settings: Settings) -> Iterator[Effective]:
    """Every value, table by table: of the hypervisor that is chosen, and of others that have a table."""
    tables = settings.layers.tables
    chosen = settings.for_sandbox()
    kata = tables["kata"]
    for key in kata.settings:
        yield Effective("kata", key, kata.text(key), kata.origin(key), _setting(kata, key))
    yield from _sandbox_values("runtime", READ_KEYS["runtime"], chosen, tables["runtime"], tables["resmgr"])
    for name in dict.fromkeys((chosen.hypervisor, *HYPERVISORS.values())):
        table = tables.get(f"hypervisor.{name}")
        if table is None and name != chosen.hypervisor:
            continue
        keys = [key for key in READ_KEYS["hypervisor"] if key != "machine_type" or name == "qemu"]
        own = [] if table is None else [table]
        yield from _sandbox_values(f"hypervisor.{name}", keys, settings.for_sandbox(name), *own)
    keys = [key for key in OUR_KEYS["resmgr"] if key not in READ_KEYS["runtime"]]
    yield from _sandbox_values("resmgr", keys, chosen, tables["resmgr"])
    for key in OUR_KEYS["daemon"]:
        value, origin = getattr(settings.daemon, key), settings.daemon.origins[key]
        yield Effective("daemon", key, _plain_value(value), origin, _setting(tables["daemon"], key))


def likely_mistakes(settings: Settings) -> Iterator[str]:
    """One line each, with the place and what may have been meant. Nothing here keeps the daemon from starting."""
    tables = settings.layers.tables
    yield from _unknown_keys("runtime", tables["runtime"])
    for name, setting in settings.layers.hypervisors.items():
        table = tables.get(f"hypervisor.{name}")
        if table is not None:
            yield from _unknown_keys("hypervisor", table)
            yield from _useless_patterns(table)
            config = settings.for_sandbox(name)
            yield from _cut(config, table)
            yield from _idle_bursts(config, table)
        elif name not in OTHER_HYPERVISORS:
            near = nearest(name, (*HYPERVISORS, *OTHER_HYPERVISORS), _LIKENESS_OF_TABLES)
            if near is not None:
                yield f"{setting.where}: [hypervisor.{plain(name)}]: is left alone; did you mean {near}?"
    named = tables["runtime"].settings.get("hypervisor_name")
    chosen = settings.for_sandbox().hypervisor
    if isinstance(named, Setting) and settings.layers.hypervisors and f"hypervisor.{chosen}" not in tables:
        yield (
            f"{named.where}: [runtime] hypervisor_name = {shown(named.value)}: there is no [hypervisor.{chosen}]; "
            "its defaults hold"
        )


# Values

_FIELDS = {"hypervisor_name": "hypervisor", "static_sandbox_resource_mgmt": "static"}
"""Where the field of :class:`SandboxConfig` is not called as the key is."""


def _sandbox_values(
    table: str, keys: tuple[str, ...] | list[str], config: SandboxConfig, *said_in: Table
) -> Iterator[Effective]:
    """*said_in*: the tables that may hold these keys; the last one wins."""
    for key in keys:
        field = _FIELDS.get(key, key)
        value = config.rate_limits[key] if key in config.rate_limits else getattr(config, field)
        if key in ("shrink_delay", "deadline"):
            value = f"{decimal_text(Fraction(str(value)))}s"
        setting = next((found for holder in reversed(said_in) if (found := _setting(holder, key)) is not None), None)
        yield Effective(table, key, _plain_value(value), config.origins[field], setting)


def _setting(table: Table, key: str) -> Setting | None:
    setting = table.settings.get(key)
    return None if isinstance(setting, Override) else setting


def _plain_value(value: Value | Path | tuple[Path, ...]) -> Value:
    if isinstance(value, tuple):
        return tuple(str(item) for item in value)
    return str(value) if isinstance(value, str | Path) else value


# Mistakes


def _unknown_keys(kind: str, table: Table) -> Iterator[str]:
    """Keys that neither Kata nor this program knows, as far as something else was probably meant."""
    known = (*READ_KEYS[kind], *sorted(OTHER_KEYS[kind]))
    homes = {"runtime": READ_KEYS["runtime"], "hypervisor.<name>": READ_KEYS["hypervisor"], **OUR_KEYS}
    for key, setting in table.settings.items():
        if key in known or isinstance(setting.value, dict):
            continue
        near = nearest(key.lower(), known, _LIKENESS_OF_KEYS)
        home = next((name for name, keys in homes.items() if key in keys), None)
        if home is not None:
            yield f"{setting.where}: [{table.name}] {key}: has no meaning here; it belongs into [{home}]"
        elif near is not None:
            yield f"{setting.where}: [{table.name}] {plain(key)}: there is no such key; did you mean {near}?"


def _useless_patterns(table: Table) -> Iterator[str]:
    for pattern in table.patterns("enable_annotations") or ():
        if not lets_in(pattern):
            yield (
                f"{table.settings['enable_annotations'].where}: [{table.name}] enable_annotations: {shown(pattern)} "
                "matches the whole of no annotation that Kata has"
            )


def _cut(config: SandboxConfig, table: Table) -> Iterator[str]:
    setting = table.settings.get("default_vcpus")
    if setting is not None and config.origins["default_vcpus"].startswith(CUT_TO_MAXIMUM):
        yield (
            f"{setting.where}: [{table.name}] default_vcpus = {shown(setting.value)}: above default_maxvcpus, which is "
            f"{config.default_maxvcpus} ({config.origins['default_maxvcpus']}), and cut to it"
        )


def _idle_bursts(config: SandboxConfig, table: Table) -> Iterator[str]:
    for device in ("disk", "net"):
        for burst in config.io_limits(device).idle_bursts:
            yield f"{table.settings[burst.name].where}: [{table.name}] {burst.message}"
