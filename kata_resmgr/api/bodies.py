"""What callers send: this API's own objects, typed and closed. OCI objects in them stay text for the core to read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from hypervisors.base import DeviceKind
from hypervisors.ch_types import DiskConfig, NetConfig
from kata_resmgr import oci
from kata_resmgr.devices import AnyConfig, AnySpec, Spec
from kata_resmgr.ids import check_id
from kata_resmgr.limits import Limits
from kata_resmgr.plan import Op, Request, Step
from kata_resmgr.problem import At, Code, Problem
from kata_resmgr.sizing import MIB

_ONE_OF_STEPS = Meta(
    extra_json_schema={
        "oneOf": [{"$ref": f"#/components/schemas/{op}Step"} for op in ("Create", "Update", "Resize", "Delete")]
    }
)
_RESOURCES_OR_NULL = Meta(
    extra_json_schema={"anyOf": [{"$ref": "#/components/schemas/LinuxResources"}, {"type": "null"}]}
)
_A_CONFIG = Meta(
    extra_json_schema={
        "type": "object",
        "description": "As Cloud Hypervisor names it, without id, rate_limiter_config and rate_limit_group.",
    }
)
_A_CONTAINER = Meta(extra_json_schema={"$ref": "#/components/schemas/ContainerBody"})


class Body(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An object of this API: a member that it does not have is refused."""


class Nothing(Body, frozen=True):
    """The body of a call that takes none: absent, or ``{}``."""


class SandboxBody(Body, frozen=True):
    """API.md: SandboxSpec."""

    hypervisor: str | None = None
    annotations: dict[str, str] | None = None
    resources: Annotated[Raw, _RESOURCES_OR_NULL] | UnsetType = UNSET
    directory: str | None = None
    rate_limit_groups: dict[str, Limits] | None = None


class DiskBody(Body, frozen=True):
    """API.md: DiskSpec. ``limits`` absent: the configuration's; ``{}``: none."""

    config: Annotated[Raw, _A_CONFIG]
    limits: Limits | UnsetType = UNSET
    group: str | None = None


class NetBody(Body, frozen=True):
    """API.md: NetSpec."""

    config: Annotated[Raw, _A_CONFIG]
    limits: Limits | UnsetType = UNSET


class LimitsBody(Body, frozen=True):
    """API.md: Limits, and whether the device may be taken out and added again for them."""

    bytes_per_second: int = 0
    burst_bytes: int = 0
    ops_per_second: int = 0
    burst_ops: int = 0
    replace: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(self.bytes_per_second, self.burst_bytes, self.ops_per_second, self.burst_ops)


class VmBody(Body, frozen=True):
    """API.md: VmSpec."""

    socket: str | None = None
    pid: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    memory_block_bytes: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)] | None = None


class ContainerBody(Body, frozen=True):
    """What a container is created, replaced or updated with."""

    resources: oci.Given


class ResizeBody(Body, frozen=True):
    """What is merged into the size that a sandbox declares."""

    resources: oci.Given


class HostBody(Body, frozen=True):
    """The host that a plan is for, as far as it is not the configuration's; bytes below a MiB are left out."""

    cpus: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)] | None = None
    memory_bytes: Annotated[int, Meta(ge=MIB, le=(1 << 63) - 1)] | None = None


class PlannedSandboxBody(Body, frozen=True):
    """The sandbox that a plan is for."""

    annotations: dict[str, str] | None = None
    resources: Annotated[Raw, _RESOURCES_OR_NULL] | UnsetType = UNSET


class PlanBody(Body, frozen=True):
    """API.md: Plan request. Steps are decoded one by one, so that a fault can be told with its place."""

    hypervisor: str | None = None
    host: HostBody | None = None
    sandbox: PlannedSandboxBody | None = None
    steps: list[Annotated[Raw, _ONE_OF_STEPS]] | None = None


class CreateStep(Body, frozen=True, tag_field="op", tag="create"):
    container: str
    resources: oci.Given


class UpdateStep(Body, frozen=True, tag_field="op", tag="update"):
    container: str
    resources: oci.Given


class ResizeStep(Body, frozen=True, tag_field="op", tag="resize"):
    resources: oci.Given


class DeleteStep(Body, frozen=True, tag_field="op", tag="delete"):
    """*resources* are ignored: a runtime's calls can be handed on as they are."""

    container: str
    resources: Raw | UnsetType = UNSET


class TableBody(Body, frozen=True):
    """The whole table. Entries are decoded one by one, so that a fault can be told with its container."""

    containers: dict[str, Annotated[Raw, _A_CONTAINER]]


STEPS = (CreateStep, UpdateStep, ResizeStep, DeleteStep)

_B = TypeVar("_B", bound=Body)

_container = msgspec.json.Decoder(ContainerBody)
_step: msgspec.json.Decoder[CreateStep | UpdateStep | ResizeStep | DeleteStep] = msgspec.json.Decoder(
    CreateStep | UpdateStep | ResizeStep | DeleteStep
)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_PLACE = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)


def read_body(decoder: msgspec.json.Decoder[_B], text: bytes, prefix: str = "") -> _B:
    """Decode *text*. Raises :class:`Problem` (``invalid_body``), with a JSON pointer that starts with *prefix*."""
    try:
        str(text, "utf-8")  # what stays Raw is not looked into by the decoder
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        at = _place(str(error), prefix)
        raise Problem(Code.INVALID_BODY, f"{at.pointer or 'the body'}: {at.detail}", at=(at,)) from error
    except ValueError as error:
        at = At(prefix, f"it is not JSON: {error}")
    except RecursionError:
        at = At(prefix, "it is nested too deeply")
    raise Problem(Code.INVALID_BODY, f"the body is at fault: {at.detail}; send one JSON object in UTF-8", at=(at,))


def read_table(table: TableBody) -> dict[str, Raw]:
    """The resources of each container. Raises :class:`Problem` (``invalid_body``, ``invalid_id``)."""
    return {
        check_id(name, "container"): read_body(_container, bytes(entry), f"/containers/{_escaped(name)}").resources
        for name, entry in table.containers.items()
    }


_CONFIGS: Mapping[DeviceKind, type[DiskConfig] | type[NetConfig]] = {
    DeviceKind.DISK: DiskConfig,
    DeviceKind.NET: NetConfig,
}
_ELSEWHERE = {"rate_limiter_config": "say limits beside config", "rate_limit_group": "say group beside config"}


def read_device(body: DiskBody | NetBody, kind: DeviceKind, device_id: str) -> AnySpec:
    """What a device is to be. Raises :class:`Problem` (``invalid_body``, ``invalid_id``, ``not_supported``)."""
    if device_id.startswith("_"):
        raise Problem(Code.INVALID_ID, f"{kind} id {device_id[:40]!r}: the VMM keeps those that start with _")
    config = _read_config(bytes(body.config), kind, device_id)
    if not config.vhost_user and isinstance(config, DiskConfig) and config.path is None:
        raise _at("/config/path", "it is missing: name the disk's image or device")
    if config.vhost_user and config.vhost_socket is None:
        raise _at("/config/vhost_socket", "it is missing: name the socket of the vhost-user back-end")
    limits = None if body.limits is UNSET else body.limits
    return Spec(config, limits, body.group if isinstance(body, DiskBody) else None)


def _read_config(text: bytes, kind: DeviceKind, device_id: str) -> AnyConfig:
    members = msgspec.json.decode(text)
    if not isinstance(members, dict):
        raise _at("/config", "it must be an object")
    for name, instead in _ELSEWHERE.items():
        if name in members:
            raise _at(f"/config/{name}", f"limits are not a part of it: {instead}")
    if kind is DeviceKind.NET and "fds" in members:
        raise Problem(Code.NOT_SUPPORTED, "config has fds, which cannot pass through this API: name a tap instead")
    if members.setdefault("id", device_id) != device_id:
        raise _at("/config/id", f"it is not the id of the path, {device_id!r}: leave it out")
    try:
        return msgspec.convert(members, _CONFIGS[kind])
    except msgspec.ValidationError as error:
        at = _place(str(error), "/config")
        raise _at(at.pointer, at.detail) from None


def _at(pointer: str, detail: str) -> Problem:
    return Problem(Code.INVALID_BODY, f"{pointer}: {detail}", at=(At(pointer, detail),))


def read_plan(body: PlanBody) -> Request:
    """What is to be planned. Raises :class:`Problem` (``invalid_body``, ``invalid_id``)."""
    host, sandbox = body.host or HostBody(), body.sandbox or PlannedSandboxBody()
    return Request(
        hypervisor=body.hypervisor,
        host_cpus=host.cpus,
        host_memory=None if host.memory_bytes is None else host.memory_bytes // MIB,
        annotations=sandbox.annotations,
        resources=stated(sandbox.resources),
        steps=tuple(_read_step(bytes(step), f"/steps/{place}") for place, step in enumerate(body.steps or ())),
    )


def _read_step(text: bytes, pointer: str) -> Step:
    match read_body(_step, text, pointer):
        case CreateStep(container, resources):
            return Step(Op.CREATE, check_id(container, "container"), bytes(resources))
        case UpdateStep(container, resources):
            return Step(Op.UPDATE, check_id(container, "container"), bytes(resources))
        case ResizeStep(resources):
            return Step(Op.RESIZE, "", bytes(resources))
        case DeleteStep(container):
            return Step(Op.DELETE, check_id(container, "container"))


def stated(resources: Raw | UnsetType) -> bytes | None:
    """The text of an OCI object that need not be there."""
    return None if resources is UNSET or bytes(resources) == b"null" else bytes(resources)


def _place(message: str, prefix: str) -> At:
    """msgspec tells where as a path after the text; RFC 6901 wants a pointer."""
    pointer = prefix
    if (place := _PLACE.fullmatch(message)) is not None:
        message = place[1]
        pointer += place[2].replace("[...]", "").replace(".", "/")
    if (unknown := _UNKNOWN.fullmatch(message)) is not None:
        return At(f"{pointer}/{_escaped(unknown[1])}", "there is no such member; take it out")
    if (missing := _MISSING.fullmatch(message)) is not None:
        return At(f"{pointer}/{_escaped(missing[1])}", "it is missing")
    return At(pointer, message.replace("`", ""))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
