"""The size that a pod or a single container declares of itself: at its start, and after a resize (SPEC 3 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from kata_resmgr import annotations as said
from kata_resmgr import demand, oci
from kata_resmgr.annotations import ContainerType, Said
from kata_resmgr.config import SandboxConfig
from kata_resmgr.sizing import MIB, Declared, round_up

RESOURCES = "resources"
RESIZE = "resize of the sandbox"
"""Sources that are no annotation."""

_FEWEST_SHARES = 3
"""2 is what the kubelet gives a container that asks for nothing."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is declared, as a record that a pod-level resize merges into, and where each dimension is said."""

    text: bytes
    """An OCI ``linux.resources`` text."""
    size: Declared
    vcpus_from: str
    """An annotation's key, :data:`RESOURCES` or :data:`RESIZE`; "" where no CPU is declared. Memory likewise."""
    memory_from: str


def declare(config: SandboxConfig, annotations: Mapping[str, str], resources: bytes | None) -> Declaration:
    """What a sandbox declares when it is registered.

    A pod's sandbox declares by its annotations alone; anything else by its *resources* (an OCI text, or None), and by
    the annotations what those leave open. Both are checked, whether they count or not. Raises :class:`Problem`
    ``invalid_annotation`` or ``invalid_resources``.
    """
    pod = _of_annotations(config, annotations)
    if resources is None:
        return pod
    own = _declaration(config, resources, RESOURCES, RESOURCES)
    if said.container_type(annotations)[0] is ContainerType.SANDBOX:
        return pod
    return _supplemented(config, own, pod)


def resized(config: SandboxConfig, present: Declaration, update: bytes) -> Declaration:
    """*present* with *update* merged into it, as an update of a container is (SPEC 4)."""
    return become(config, present, oci.merge(present.text, update))


def become(config: SandboxConfig, present: Declaration, text: bytes) -> Declaration:
    """What is declared where a resize has made *text* of *present*."""
    merged = _declaration(config, text, RESIZE, RESIZE)
    return Declaration(
        merged.text,
        merged.size,
        present.vcpus_from if merged.size.vcpus == present.size.vcpus else merged.vcpus_from,
        present.memory_from if merged.size.memory == present.size.memory else merged.memory_from,
    )


def of_resources(resources: oci.Resources, config: SandboxConfig) -> Declared:
    """What resources declare: their quota, else their counting cpuset, else (``shares_sizing``) their shares; limit
    and huge pages.

    Memory is rounded up to an even number of MiB, which huge pages need.
    """
    asked = demand.of(resources, demand.counting(config))
    vcpus: Fraction | None = None
    if asked.quota:
        vcpus = Fraction(asked.quota, asked.period)
    elif asked.cpus:
        vcpus = Fraction(len(asked.cpus))
    elif config.shares_sizing and asked.shares >= _FEWEST_SHARES:
        vcpus = Fraction(-(-asked.shares // demand.SHARES_PER_CPU))
    return Declared(vcpus=vcpus, memory=round_up(asked.memory, 2 * MIB) if asked.memory else None)


def _of_annotations(config: SandboxConfig, annotations: Mapping[str, str]) -> Declaration:
    """containerd's keys, else CRI-O's, else CRI-O's old one: the next is read only where one declares nothing."""
    found = _of_said(config, said.containerd(annotations))
    for key in said.CRIO:
        if found.size:
            break
        other = _of_said(config, said.crio(annotations, key))
        if other.size or found.text == said.NOTHING:  # a period that stands alone is kept too, for a later resize
            found = other
    return found


def _of_said(config: SandboxConfig, source: Said) -> Declaration:
    by_quota = oci.decode(source.text).quota > 0
    return _declaration(
        config, source.text, source.keys.get("quota" if by_quota else "shares", ""), source.keys.get("limit", "")
    )


def _declaration(config: SandboxConfig, text: bytes, vcpus_from: str, memory_from: str) -> Declaration:
    size = of_resources(oci.decode(text), config)
    return Declaration(text, size, "" if size.vcpus is None else vcpus_from, "" if size.memory is None else memory_from)


def _supplemented(config: SandboxConfig, own: Declaration, pod: Declaration) -> Declaration:
    """*own*, with the dimensions that it leaves open taken whole from *pod*."""
    takes_vcpus = own.size.vcpus is None and pod.size.vcpus is not None
    takes_memory = own.size.memory is None and pod.size.memory is not None
    if not takes_vcpus and not takes_memory:
        return own
    record, other = msgspec.json.decode(own.text), msgspec.json.decode(pod.text)
    if takes_vcpus:
        record["cpu"] = other["cpu"]
    if takes_memory:
        record["memory"] = other["memory"]
    return _declaration(
        config,
        msgspec.json.encode(record),
        pod.vcpus_from if takes_vcpus else own.vcpus_from,
        pod.memory_from if takes_memory else own.memory_from,
    )
