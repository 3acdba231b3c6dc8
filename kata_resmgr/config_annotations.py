"""Kata's annotations that change the configuration for one sandbox, as far as ``enable_annotations`` lets them.

``io.katacontainers.config.hypervisor.<name>`` and ``io.katacontainers.config.runtime.<name>`` take effect where a
pattern matches the whole of *name* (SPEC 2). What a pattern lets in must be right: an unknown name and a bad value
refuse the sandbox. Values that do not bear on this program are not looked at. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kata_resmgr.config_keys import HYPERVISORS, OTHER_ANNOTATION_FAMILIES, OTHER_ANNOTATIONS
from kata_resmgr.config_table import Override, either, plain, shown
from kata_resmgr.exact import exact
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem
from kata_resmgr.toml_file import FloatText

HYPERVISOR_PREFIX = "io.katacontainers.config.hypervisor."
RUNTIME_PREFIX = "io.katacontainers.config.runtime."
HYPERVISOR_NAME = RUNTIME_PREFIX + "hypervisor_name"

SMALLEST_MEMORY = 64
"""MiB: below this no guest boots."""
MOST_SLOTS = 256

NOTES_LIMIT = 32
"""Ignored annotations that are told one by one: a pod may have any number of them."""
_VALUE_LIMIT = 2048
"""Characters of a number."""
_WHITE_SPACE = " \t\n\r\f\v"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the configuration allows one sandbox's annotations."""

    patterns: tuple[str, ...]
    """``enable_annotations``."""
    host_cpus: int
    max_memory: int
    """MiB."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the annotations put over Kata's two tables, by the keys of these, and what is to be told."""

    hypervisor: Mapping[str, Override]
    runtime: Mapping[str, Override]
    notes: tuple[Note, ...]


def overrides(annotations: Mapping[str, str], bounds: Bounds) -> Overrides:
    """Judge every annotation of Kata's configuration. Raises :class:`Problem` ``invalid_annotation``."""
    hypervisor: dict[str, Override] = {}
    runtime: dict[str, Override] = {}
    ignored: list[str] = []
    for key in sorted(annotations):
        for prefix, meanings, others, found in (
            (HYPERVISOR_PREFIX, _HYPERVISOR, OTHER_ANNOTATIONS["hypervisor"], hypervisor),
            (RUNTIME_PREFIX, _RUNTIME, OTHER_ANNOTATIONS["runtime"], runtime),
        ):
            if not key.startswith(prefix):
                continue
            name = key.removeprefix(prefix)
            if not _allowed(name, bounds.patterns):
                ignored.append(name)
            elif (meaning := meanings.get(name)) is not None:
                text = annotations[key].strip(_WHITE_SPACE)
                found[meaning.key] = Override(meaning.read(_Given(key, text), bounds), key)
            elif name not in others and not name.startswith(OTHER_ANNOTATION_FAMILIES):
                detail = f'annotation "{plain(key)}" is allowed by enable_annotations, but not known: take it out'
                raise Problem(Code.INVALID_ANNOTATION, detail)
    return Overrides(hypervisor, runtime, tuple(_notes(ignored)))


def hypervisor_of(annotations: Mapping[str, str], bounds: Bounds) -> str | None:
    """The canonical name of the hypervisor that the annotations choose, where they may.

    Raises :class:`Problem` ``invalid_annotation``.
    """
    if HYPERVISOR_NAME not in annotations:
        return None
    only = {HYPERVISOR_NAME: annotations[HYPERVISOR_NAME]}
    chosen = overrides(only, bounds).runtime.get("hypervisor_name")
    return None if chosen is None else HYPERVISORS[chosen.value]


def lets_in(pattern: str) -> bool:
    """Whether *pattern* matches any annotation that Kata knows; one that does not is probably mistyped."""
    names = (*_HYPERVISOR, *_RUNTIME, *OTHER_ANNOTATIONS["hypervisor"], *OTHER_ANNOTATIONS["runtime"])
    return any(_allowed(name, (pattern,)) for name in names)


def _allowed(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) is not None for pattern in patterns)


def _notes(ignored: list[str]) -> list[Note]:
    notes = [
        Note("AnnotationIgnored", plain(name), "not allowed by enable_annotations") for name in ignored[:NOTES_LIMIT]
    ]
    if more := len(ignored) - len(notes):
        notes.append(Note("AnnotationIgnored", "more", f"{more} more are not allowed by enable_annotations"))
    return notes


# Values


@dataclass(frozen=True, slots=True)
class _Given:
    """One annotation, without the white space around its value."""

    key: str
    text: str

    def refuse(self, allowed: str) -> NoReturn:
        raise Problem(Code.INVALID_ANNOTATION, f'annotation "{self.key}" = {shown(self.text)}: must be {allowed}')


def _vcpus(given: _Given, bounds: Bounds) -> FloatText:
    """Decimal text, with or without an exponent."""
    allowed = f"a decimal number from 0 to {bounds.host_cpus}"
    if len(given.text) > _VALUE_LIMIT or _DECIMAL.fullmatch(given.text) is None:
        given.refuse(allowed)
    try:
        fits = 0 <= exact(given.text) <= bounds.host_cpus
    except ValueError as error:
        given.refuse(f"{allowed}; {error}")
    if not fits:
        given.refuse(allowed)
    return FloatText(given.text)


def _max_vcpus(given: _Given, bounds: Bounds) -> int:
    return _whole(given, bounds.host_cpus)


def _slots(given: _Given, _: Bounds) -> int:
    return _whole(given, MOST_SLOTS)


def _whole(given: _Given, high: int) -> int:
    allowed = f"a whole number from 0 to {high}"
    if len(given.text) > _VALUE_LIMIT or _DIGITS.fullmatch(given.text) is None:
        given.refuse(allowed)
    value = int(given.text)
    if value > high:
        given.refuse(allowed)
    return value


def _memory(given: _Given, bounds: Bounds) -> int:
    """MiB. Digits alone are MiB; a unit is a power of 1024, and what is no whole MiB is rounded up."""
    allowed = f"0, or a size from {SMALLEST_MEMORY} MiB to default_maxmemory, which is {bounds.max_memory} MiB"
    match = _SIZE.fullmatch(given.text)
    if match is None or len(given.text) > _VALUE_LIMIT:
        given.refuse(f"{allowed}, in digits and K, M, G or T, or in digits alone for MiB")
    value = int(match[1]) << 10 * "kmgt".index((match[2] or "m").lower())
    mib = -(-value >> 10)
    if mib and not SMALLEST_MEMORY <= mib <= bounds.max_memory:
        given.refuse(allowed)
    return mib


def _flag(given: _Given, _: Bounds) -> bool:
    """As Go's strconv.ParseBool."""
    value = _BOOLEANS.get(given.text)
    if value is None:
        given.refuse("true or false")
    return value


def _text(given: _Given, _: Bounds) -> str:
    if not given.text:
        given.refuse("not blank")
    return given.text


def _hypervisor_name(given: _Given, _: Bounds) -> str:
    if given.text not in HYPERVISORS:
        given.refuse(either(HYPERVISORS))
    return given.text


_DIGITS = re.compile(r"[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SIZE = re.compile(r"([0-9]+)[ \t]*(?:([kmgt])i?b?)?", re.IGNORECASE | re.ASCII)
_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


# Names


@dataclass(frozen=True, slots=True)
class _Meaning:
    key: str
    """The key that the annotation stands for, in the table of its prefix."""
    read: Callable[[_Given, Bounds], Any]
    """The checked value as a file would have it."""


_HYPERVISOR = {
    "default_vcpus": _Meaning("default_vcpus", _vcpus),
    "default_max_vcpus": _Meaning("default_maxvcpus", _max_vcpus),
    "default_memory": _Meaning("default_memory", _memory),
    "memory_slots": _Meaning("memory_slots", _slots),
    "enable_virtio_mem": _Meaning("enable_virtio_mem", _flag),
    "enable_hugepages": _Meaning("enable_hugepages", _flag),
    "enable_mem_prealloc": _Meaning("enable_mem_prealloc", _flag),
    "reclaim_guest_freed_memory": _Meaning("reclaim_guest_freed_memory", _flag),
    "machine_type": _Meaning("machine_type", _text),
}
_RUNTIME = {
    "hypervisor_name": _Meaning("hypervisor_name", _hypervisor_name),
    "sandbox_cgroup_only": _Meaning("sandbox_cgroup_only", _flag),
    "enable_vcpus_pinning": _Meaning("enable_vcpus_pinning", _flag),
}
