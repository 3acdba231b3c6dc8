"""OCI ``linux.resources``: what of it bears on sizes, checked; everything else, kept as it came.

A record is the JSON text that was given (or merged) plus :class:`Resources`, the typed view of it. The text is what
is stored and returned, so members that this program does not know survive. The merge rules are SPEC 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeAlias

import msgspec

from kata_resmgr import cpuset
from kata_resmgr.problem import At, Code, Problem, one_line

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Uint64 = Annotated[int, msgspec.Meta(ge=0)]
_UINT64_MAX = 2**64 - 1  # msgspec takes no bound above int64; decode() enforces this one

DEFAULT_PERIOD = 100_000
"""Microseconds: the kernel's ``cpu.cfs_period_us`` where none is stated."""

NESTING_MAX = 64
"""Levels of objects and arrays: a bound of its own, because Python's depends on how deep the caller is already."""


class _Wire(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A known object of the OCI runtime specification; its unknown members are not looked at here."""


class LinuxCpu(_Wire, frozen=True):
    shares: Uint64 | None = None
    quota: Int64 | None = None
    period: Uint64 | None = None
    burst: Uint64 | None = None
    realtime_runtime: Int64 | None = None
    realtime_period: Uint64 | None = None
    cpus: str | None = None
    mems: str | None = None
    idle: Int64 | None = None


class LinuxMemory(_Wire, frozen=True):
    limit: Int64 | None = None
    reservation: Int64 | None = None
    swap: Int64 | None = None
    kernel: Int64 | None = None
    kernel_tcp: Int64 | None = msgspec.field(name="kernelTCP", default=None)
    swappiness: Uint64 | None = None
    disable_oom_killer: bool | None = msgspec.field(name="disableOOMKiller", default=None)
    use_hierarchy: bool | None = None
    check_before_update: bool | None = None


class LinuxHugepageLimit(_Wire, frozen=True):
    page_size: str
    limit: Uint64 | None = None


class LinuxPids(_Wire, frozen=True):
    limit: Int64 | None = None


class LinuxResources(_Wire, frozen=True):
    """OCI's ``linux.resources``, as far as it is looked into. Other members are kept and given back as they are."""

    cpu: LinuxCpu | None = None
    memory: LinuxMemory | None = None
    hugepage_limits: list[LinuxHugepageLimit] | None = None
    pids: LinuxPids | None = None
    unified: dict[str, str] | None = None


Given: TypeAlias = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"$ref": "#/components/schemas/LinuxResources"})
]
"""An OCI object that stays the text it came as; what it is to be is said to the API's description alone."""

_NO_CPU = LinuxCpu()
_NO_MEMORY = LinuxMemory()
_decoder = msgspec.json.Decoder(LinuxResources)
_any_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Resources:
    """What sizes are made of, in plain numbers."""

    quota: int
    """Microseconds a period; 0 not stated, negative unlimited."""
    period: int
    """Microseconds, 1 or more."""
    shares: int
    """0: not stated."""
    cpus: frozenset[int]
    """The cpuset; empty: not stated."""
    memory: int
    """Bytes; 0: unlimited."""
    hugepages: int
    """Bytes over all page sizes."""


def decode(text: bytes, where: str = "/resources") -> Resources:
    """The typed view of one ``linux.resources`` text.

    *where* is the JSON pointer of the text in its body. Raises :class:`Problem` ``invalid_resources`` naming the
    member where one has the wrong type, is out of its 64-bit range or is no list of ids.
    """
    try:
        wire = _decoder.decode(text)
        whole = _any_decoder.decode(text)  # what the typed decoder skips must be sound too: it is merged and returned
    except msgspec.ValidationError as error:
        _refuse(error, where)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(where, f"not JSON: {error}") from None
    if text.count(b"{") + text.count(b"[") > NESTING_MAX and _nests_too_deeply(whole):
        raise _invalid(where, f"objects and arrays nest more than {NESTING_MAX} levels deep")
    for member, value in _unsigned(wire):
        if value is not None and value > _UINT64_MAX:
            raise _invalid(f"{where}/{member}", f"{value} is out of range; at most {_UINT64_MAX} is allowed")
    cpu = wire.cpu or _NO_CPU
    memory = wire.memory or _NO_MEMORY
    if cpu.mems:
        _ids(cpu.mems, f"{where}/cpu/mems")
    return Resources(
        quota=cpu.quota or 0,
        period=cpu.period or DEFAULT_PERIOD,
        shares=cpu.shares or 0,
        cpus=_ids(cpu.cpus, f"{where}/cpu/cpus") if cpu.cpus else frozenset(),
        memory=max(memory.limit or 0, 0),
        hugepages=sum({h.page_size: h.limit or 0 for h in wire.hugepage_limits}.values())
        if wire.hugepage_limits
        else 0,
    )


def same(text: bytes, other: bytes) -> bool:
    """Whether two texts that :func:`decode` accepts say the same, however they are written."""
    return text == other or _canonical(text) == _canonical(other)


def _canonical(text: bytes) -> bytes:
    # Text against text: as Python values, true and 1 would be equal.
    return msgspec.json.encode(_any_decoder.decode(text), order="sorted")


def merge(old: bytes, update: bytes) -> bytes:
    """*old* with *update* laid over it, member by member (SPEC 4).

    Both are texts that :func:`decode` accepts, and so is what is returned. Absent, null, 0 (quota, period, shares,
    limit) and blank (cpus, mems) keep the old value; huge page entries replace those of their size, and one with a
    limit of 0 or none removes it.
    """
    merged = _any_decoder.decode(old)
    change = _any_decoder.decode(update)
    for name, keeping in _KEEPING.items():
        stated = change.get(name)
        if stated is not None:
            change[name] = {member: value for member, value in stated.items() if member not in keeping or _says(value)}
    if (entries := change.pop("hugepageLimits", None)) is not None:
        merged["hugepageLimits"] = _merge_hugepages(merged.get("hugepageLimits") or [], entries)
    _overlay(merged, change)
    return msgspec.json.encode(merged)


_KEEPING = {"cpu": frozenset({"quota", "period", "shares", "cpus", "mems"}), "memory": frozenset({"limit"})}


def _says(value: int | str | None) -> bool:
    """Whether a member of :data:`_KEEPING` states something."""
    return bool(value.strip() if isinstance(value, str) else value)


def _overlay(old: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if value is None:
            continue
        present = old.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            _overlay(present, value)
        else:
            old[key] = value


def _merge_hugepages(old: list[dict[str, Any]], change: list[dict[str, Any]]) -> list[dict[str, Any]]:
    entries = {entry["pageSize"]: entry for entry in old}
    for size, entry in {entry["pageSize"]: entry for entry in change}.items():  # of one size, the last counts
        if entry.get("limit"):
            entries[size] = entry
        else:
            entries.pop(size, None)
    return list(entries.values())


def _unsigned(wire: LinuxResources) -> Iterator[tuple[str, int | None]]:
    """Every member that is an unsigned 64-bit number, with its pointer."""
    if wire.cpu is not None:
        yield "cpu/shares", wire.cpu.shares
        yield "cpu/period", wire.cpu.period
        yield "cpu/burst", wire.cpu.burst
        yield "cpu/realtimePeriod", wire.cpu.realtime_period
    if wire.memory is not None:
        yield "memory/swappiness", wire.memory.swappiness
    for index, entry in enumerate(wire.hugepage_limits or ()):
        yield f"hugepageLimits/{index}/limit", entry.limit


def _nests_too_deeply(whole: object) -> bool:
    level = [whole]
    for _ in range(NESTING_MAX):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return any(isinstance(value, dict | list) for value in level)


def _ids(text: str, pointer: str) -> frozenset[int]:
    try:
        return cpuset.parse(text)
    except ValueError as error:
        raise _invalid(pointer, str(error)) from None


_PATH = re.compile(r" - at `\$?(.*)`$")


def _refuse(error: msgspec.ValidationError, where: str) -> NoReturn:
    """msgspec names the place as ``$.cpu.quota`` or ``$.hugepageLimits[...]``; callers get a JSON pointer."""
    text = str(error)
    match = _PATH.search(text)
    path = match[1] if match else ""
    members = [part for part in re.split(r"[.\[\]]", path) if part and part != "..."]
    raise _invalid("/".join([where, *members]), text[: match.start()] if match else text)


def _invalid(pointer: str, detail: str) -> Problem:
    return Problem(Code.INVALID_RESOURCES, f"{pointer}: {detail}", at=(At(pointer, one_line(detail)),))
