"""What callers send: this API's own objects, typed and closed. OCI objects in them stay text for the core to read."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from kata_resmgr.ids import check_id
from kata_resmgr.problem import At, Code, Problem


class Body(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An object of this API: a member that it does not have is refused."""


class Nothing(Body, frozen=True):
    """The body of a call that takes none: absent, or ``{}``."""


class SandboxBody(Body, frozen=True):
    """API.md: SandboxSpec."""

    hypervisor: str | None = None
    annotations: dict[str, str] | None = None
    resources: Raw | UnsetType = UNSET
    directory: str | None = None


class VmBody(Body, frozen=True):
    """API.md: VmSpec."""

    socket: str | None = None
    pid: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    memory_block_bytes: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)] | None = None


class ContainerBody(Body, frozen=True):
    """What a container is created, replaced or updated with."""

    resources: Raw


class TableBody(Body, frozen=True):
    """The whole table. Entries are decoded one by one, so that a fault can be told with its container."""

    containers: dict[str, Raw]


_B = TypeVar("_B", bound=Body)

_container = msgspec.json.Decoder(ContainerBody)
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
