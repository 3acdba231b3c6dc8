"""What a pod's annotations say about its kind and its size, as the CRI runtimes write them (SPEC 3).

containerd writes a decimal text for each member, CRI-O one JSON object. What is said is checked here and handed on
as an OCI ``linux.resources`` text, so that every declared size is read and merged in one way. Which source counts,
and what it declares, are rules of :mod:`kata_resmgr.declared`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from kata_resmgr.problem import At, Code, Problem

CONTAINERD = {
    "quota": "io.kubernetes.cri.sandbox-cpu-quota",
    "period": "io.kubernetes.cri.sandbox-cpu-period",
    "shares": "io.kubernetes.cri.sandbox-cpu-shares",
    "limit": "io.kubernetes.cri.sandbox-memory",
}
"""containerd's key for each OCI member."""
CRIO = ("io.kubernetes.cri-o.PodLinuxResources", "io.kubernetes.cri-o.LinuxResources")
"""CRI-O's keys; the second is the deprecated one."""


class ContainerType(Enum):
    """What a sandbox's first container is to the engine that made it."""

    SANDBOX = "sandbox"
    CONTAINER = "container"
    SINGLE = "single container"


TYPE_KEYS = (
    "io.kubernetes.cri-o.ContainerType",
    "io.kubernetes.cri.container-type",
    "io.kubernetes.docker.type",
)
"""CRI-O's, containerd's and dockershim's, in the order in which they count."""

_TYPES = {
    "sandbox": ContainerType.SANDBOX,
    "podsandbox": ContainerType.SANDBOX,
    "pod_sandbox": ContainerType.SANDBOX,
    "container": ContainerType.CONTAINER,
    "pod_container": ContainerType.CONTAINER,
    "single_container": ContainerType.SINGLE,
}


def container_type(annotations: Mapping[str, str]) -> tuple[ContainerType, str | None]:
    """The container's type and the key that says so; a single container (None) where no key has a known value."""
    for key in TYPE_KEYS:
        known = _TYPES.get(annotations.get(key, ""))
        if known is not None:
            return known, key
    return ContainerType.SINGLE, None


@dataclass(frozen=True, slots=True)
class Said:
    """The size that one source names: an OCI ``linux.resources`` text, and the key of each of its members."""

    text: bytes
    keys: Mapping[str, str]


def containerd(annotations: Mapping[str, str]) -> Said:
    """What containerd's keys say.

    Raises :class:`Problem` ``invalid_annotation`` for the first that is neither blank nor a number of its range.
    """
    stated = {member: _number(key, annotations.get(key, ""), member) for member, key in CONTAINERD.items()}
    return Said(_text(stated), CONTAINERD)


def crio(annotations: Mapping[str, str], key: str) -> Said:
    """What CRI-O's *key* says. Raises :class:`Problem` ``invalid_annotation``."""
    text = annotations.get(key, "").strip(_SPACE)
    if not text:
        return Said(NOTHING, {})
    try:
        wire = _decoder.decode(text)
    except msgspec.ValidationError as error:
        wrong = [member for member in _CRIO_MEMBERS.values() if str(error).endswith(f"`$.{member}`")]
        must = f"{wrong[0]} must be a whole number" if wrong else "it must be a JSON object"
        raise _invalid(key, f"{_excerpt(text)}: {must}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _invalid(key, f"{_excerpt(text)}: it must be a JSON object: {error}") from None
    stated = {"quota": wire.quota, "period": wire.period, "shares": wire.shares, "limit": wire.limit}
    for member, value in stated.items():
        low, high = _RANGES[member]
        if value is not None and not low <= value <= high:
            raise _invalid(key, f"{_CRIO_MEMBERS[member]} = {value} is out of range: {low} to {high} is allowed")
    return Said(_text(stated), dict.fromkeys(stated, key))


_CRIO_MEMBERS = {"quota": "cpu_quota", "period": "cpu_period", "shares": "cpu_shares", "limit": "memory_limit_in_bytes"}


class _CrioResources(msgspec.Struct, frozen=True, rename=_CRIO_MEMBERS):
    """The four members of CRI's ``LinuxContainerResources`` that name sizes; the others are left alone."""

    quota: int | None = None
    period: int | None = None
    shares: int | None = None
    limit: int | None = None


_decoder = msgspec.json.Decoder(_CrioResources)

_SIGNED, _UNSIGNED = (-(2**63), 2**63 - 1), (0, 2**64 - 1)
_RANGES = {"quota": _SIGNED, "period": _UNSIGNED, "shares": _UNSIGNED, "limit": _SIGNED}
_SPACE = " \t\n\v\f\r"
_DIGITS = re.compile(r"(-?)0*([0-9]+)", re.ASCII)
_MOST_DIGITS = 20


def _number(key: str, value: str, member: str) -> int | None:
    """The whole number that a decimal text says; None where it is blank."""
    text = value.strip(_SPACE)
    if not text:
        return None
    low, high = _RANGES[member]
    match = _DIGITS.fullmatch(text)
    if match is None or (match[1] and low == 0):
        raise _invalid(key, f'"{_excerpt(text)}" must be a whole number from {low} to {high}')
    number = int(match[1] + match[2]) if len(match[2]) <= _MOST_DIGITS else high + 1
    if not low <= number <= high:
        raise _invalid(key, f"{_excerpt(text)} is out of range: {low} to {high} is allowed")
    return number


NOTHING = b'{"cpu":{},"memory":{}}'
"""The text of a source that names no size."""


def _text(stated: Mapping[str, int | None]) -> bytes:
    present = {member: value for member, value in stated.items() if value is not None}
    memory = {"limit": present.pop("limit")} if "limit" in present else {}
    return msgspec.json.encode({"cpu": present, "memory": memory})


def _invalid(key: str, detail: str) -> Problem:
    return Problem(Code.INVALID_ANNOTATION, f"annotation {key}: {detail}", at=(At(f"/annotations/{key}", detail),))


def _excerpt(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
