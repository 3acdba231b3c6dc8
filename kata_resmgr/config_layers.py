"""The files of one configuration, laid over each other.

From the bottom: Kata's file, which ``[kata] config_path`` names; its drop-ins; this program's own file; its drop-ins.
Tables merge key by key, everything else replaces what lies below it (SPEC 2). A file's directory, in which its drop-ins
lie and from which a relative ``config_path`` counts, is that of the file itself, not that of a link to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kata_resmgr.config_keys import HYPERVISORS, KATA_TABLES, OUR_KEYS, nearest
from kata_resmgr.config_table import DROP_INS, ConfigError, Setting, Table, plain, shown
from kata_resmgr.toml_file import TomlError, TomlFile, read_toml

_LIKENESS = 0.5
"""For what is refused anyway: even a distant name is of help."""


@dataclass(frozen=True, slots=True)
class Layers:
    """What all files say together."""

    tables: Mapping[str, Table]
    """Those that bear on this program: ``runtime``, ``kata``, ``resmgr`` and ``daemon``, which may be empty, and
    ``hypervisor.qemu`` and ``hypervisor.clh`` where they are there."""
    files: tuple[Path, ...]
    """What was read, lowest first."""
    hypervisors: Mapping[str, Setting]
    """Every ``[hypervisor.<name>]`` there is, by its canonical name; also those of other hypervisors."""


def read_layers(path: Path) -> Layers:
    """Read *path* and all that belongs to it. Raises :class:`ConfigError`."""
    try:
        own = _file_and_drop_ins(path)
        files, tree = own, _merged(own)
        config_path = _table(tree, "kata").settings.get("config_path")
        if isinstance(config_path, Setting):
            kata = _kata_files(config_path)
            files, tree = [*kata, *own], laid_over(_merged(kata), tree)
    except TomlError as error:
        raise ConfigError(str(error)) from error
    return Layers(_tables(tree), tuple(file.path for file in files), _hypervisors(tree))


NOTHING = Layers({name: Table(name, {}) for name in ("runtime", *OUR_KEYS)}, (), {})
"""What holds without any file."""


def settings_of(file: TomlFile) -> dict[str, Setting]:
    """The values of one file with their places; tables are settings whose value is a dict of settings."""

    def placed(value: Any, names: tuple[str, ...]) -> Setting:  # noqa: ANN401 - what TOML can hold
        if isinstance(value, dict):
            value = {key: placed(inner, (*names, key)) for key, inner in value.items()}
        return Setting(value, file.path, file.line(*names))

    try:
        return {key: placed(value, (key,)) for key, value in file.values.items()}
    except RecursionError as error:
        raise TomlError(f"{file.path}: nested too deeply") from error


def laid_over(below: Mapping[str, Setting], above: Mapping[str, Setting]) -> dict[str, Setting]:
    """Both, with *above* winning: tables merge, anything else is replaced."""
    merged = dict(below)
    for key, setting in above.items():
        under = below.get(key)
        if under is not None and isinstance(under.value, dict) and isinstance(setting.value, dict):
            merged[key] = replace(setting, value=laid_over(under.value, setting.value))
        else:
            merged[key] = setting
    return merged


def _file_and_drop_ins(path: Path) -> list[TomlFile]:
    directory = _directory(path) / DROP_INS
    return [read_toml(path), *map(read_toml, _drop_ins(directory))]


def _drop_ins(directory: Path) -> list[Path]:
    """``*.toml``, as a shell takes it: what starts with a dot is an editor's, not a drop-in."""
    try:
        found = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TomlError(f"{directory}: cannot be read: {error.strerror or error}") from error
    chosen = (path for path in found if path.name.endswith(".toml") and not path.name.startswith("."))
    return sorted(chosen, key=lambda path: os.fsencode(path.name))


def _kata_files(config_path: Setting) -> list[TomlFile]:
    """Kata's file and its drop-ins."""
    named = config_path.value
    problem = f"{config_path.where}: [kata] config_path = {shown(named)}:"
    if not isinstance(named, str) or not named or "\0" in named:
        raise ConfigError(f"{problem} must be the path of a file")
    try:
        files = _file_and_drop_ins(_directory(config_path.file) / named)
    except TomlError as error:
        raise ConfigError(f"{problem} {error}") from error
    for file in files:
        if "kata" in file.values:
            where = f"{file.path}:{file.line('kata')}"
            raise ConfigError(f"{where}: [kata]: must not stand in a file that [kata] config_path names; take it out")
    return files


def _directory(path: Path) -> Path:
    return Path(os.path.realpath(path)).parent


def _merged(files: list[TomlFile]) -> dict[str, Setting]:
    tree: dict[str, Setting] = {}
    for file in files:
        tree = laid_over(tree, _checked(settings_of(file)))
    return tree


def _checked(layer: dict[str, Setting]) -> dict[str, Setting]:
    """One file's settings, with canonical names of hypervisors. A table that nobody knows is refused."""
    for name, setting in layer.items():
        if name not in KATA_TABLES and name not in OUR_KEYS:
            near = _instead(name, (*KATA_TABLES, *OUR_KEYS))
            raise ConfigError(f"{setting.where}: [{plain(name)}]: there is no such table; {near}")
    hypervisors = layer.get("hypervisor")
    if hypervisors is None or not isinstance(hypervisors.value, dict):
        return layer
    renamed: dict[str, Setting] = {}
    for name, setting in hypervisors.value.items():
        canonical = str(HYPERVISORS.get(name, name))
        if canonical in renamed:
            raise ConfigError(
                f"{setting.where}: [hypervisor.{name}]: must not stand beside another [hypervisor.{canonical}]; "
                "clh and cloud-hypervisor are the same"
            )
        renamed[canonical] = setting
    return {**layer, "hypervisor": replace(hypervisors, value=renamed)}


def _hypervisors(tree: Mapping[str, Setting]) -> dict[str, Setting]:
    _table(tree, "hypervisor")
    return dict(tree["hypervisor"].value) if "hypervisor" in tree else {}


def _tables(tree: Mapping[str, Setting]) -> dict[str, Table]:
    tables = {name: _table(tree, name) for name in ("runtime", *OUR_KEYS)}
    hypervisors = _hypervisors(tree)
    for name in dict.fromkeys(HYPERVISORS.values()):
        if name in hypervisors:
            tables[f"hypervisor.{name}"] = _table(hypervisors, name, within="hypervisor.")
    for name, known in OUR_KEYS.items():
        for key, setting in tables[name].settings.items():
            if key not in known:
                raise ConfigError(
                    f"{setting.where}: [{name}] {plain(key)}: there is no such key; {_instead(key, known)}"
                )
    return tables


def _table(tree: Mapping[str, Setting], name: str, within: str = "") -> Table:
    setting = tree.get(name)
    if setting is None:
        return Table(name, {})
    if not isinstance(setting.value, dict):
        raise ConfigError(f"{setting.where}: {within}{name} = {shown(setting.value)}: must be a table")
    return Table(within + name, setting.value)


def _instead(name: str, known: tuple[str, ...]) -> str:
    near = nearest(name, known, _LIKENESS)
    return f"there are {', '.join(known)}" if near is None else f"the nearest is {near}"
