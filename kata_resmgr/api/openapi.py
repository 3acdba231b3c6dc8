"""The API's description, as OpenAPI 3.1: made of the routes' own table and of the types on the wire.

Pure. What cannot be told from there is here: what parameters look like, and which problems any request may meet.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from kata_resmgr import __version__, duration, oci, view
from kata_resmgr.api import bodies
from kata_resmgr.api.problems import ProblemBody
from kata_resmgr.ids import ID_PATTERN
from kata_resmgr.problem import Code
from kata_resmgr.vm import Goal, Phase

if TYPE_CHECKING:
    from kata_resmgr.api.routes import Route

Json: TypeAlias = dict[str, Any]

_SCHEMAS: Final = "#/components/schemas/"
_ROLE: Final = re.compile(r":[a-z]+:`([^`]*)`")
"""reStructuredText's way to name a thing."""
_ID: Final = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_DURATION: Final = {"type": "string", "pattern": f"^(0|{duration.FORM.pattern})$", "examples": ["5s", "500ms"]}

_QUERY: Final[Mapping[str, tuple[Json, str]]] = {
    "deadline": (_DURATION, "How long the whole operation may take; at its end everything is as before. At most 1h."),
    "wait": (_DURATION, "How long the answer is held back, until what is asked for is reached. At most 1h."),
    "for": ({"type": "string", "enum": list(Goal)}, "What is waited for."),
    "view": ({"type": "string", "enum": ["full"]}, "With the containers and devices."),
    "phase": ({"type": "string", "enum": list(Phase)}, "Only sandboxes in this phase."),
    "since": ({"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}, "Only what came after this number."),
    "sandbox": (_ID, "Only what concerns this sandbox."),
    "follow": ({"type": "string", "enum": ["true", "false"]}, "Whether to go on with what happens."),
}
_ALWAYS: Final = (ProblemBody, oci.LinuxResources, view.Vmm, view.ClhVmm, *bodies.STEPS)
"""Types that are described whether a route names them or not: others refer to them by name."""
_IDS: Final = {"sandboxes": "id", "containers": "cid", "disks": "did", "nets": "nid"}
"""What the id after each of these is called."""

_ANY: Final = frozenset(
    {
        Code.FORBIDDEN,
        Code.HEADERS_TOO_LARGE,
        Code.INTERNAL,
        Code.INVALID_BODY,
        Code.INVALID_QUERY,
        Code.TIMEOUT,
        Code.TOO_LARGE,
        Code.TOO_MANY,
    }
)
"""What any request may meet: who asks, and how it is put on the wire."""


def describe(routes: Mapping[str, Mapping[str, Route]]) -> Json:
    """The OpenAPI document of *routes*: methods by path, ids in paths as ``*``."""
    every = [route for methods in routes.values() for route in methods.values()]
    kinds: dict[Any, None] = dict.fromkeys(_ALWAYS)
    for route in every:
        kinds.update(dict.fromkeys(kind for told in route.answers.values() for kind in told))
        if route.body is not None:
            kinds[route.body.type] = None
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
    for schema in components.values():
        if "description" in schema:
            schema["description"] = _in_markdown(schema["description"])
    known = dict(zip(kinds, schemas, strict=True))
    paths: Json = {}
    for pattern, methods in routes.items():
        path, names = _path(pattern)
        paths[path] = {method.lower(): _operation(method, names, route, known) for method, route in methods.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kata-resmgr",
            "version": __version__,
            "summary": "Sandboxes, their containers' CPU and memory, and VMs that are as big as these ask for.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost", "description": "On a Unix socket, /run/kata-resmgr/api.sock."}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "headers": {
                "Api-Version": {"description": "The version of this API.", "schema": {"type": "string"}},
                "Retry-After": {
                    "description": "Seconds after which the same request may be repeated.",
                    "schema": {"type": "string", "pattern": "^[0-9]+$"},
                },
            },
        },
    }


def _path(pattern: str) -> tuple[str, list[str]]:
    """``v1/sandboxes/*/vm`` is ``/v1/sandboxes/{id}/vm``, with the names of its ids."""
    parts = pattern.split("/")
    names = [_IDS[before] for before, part in pairwise(parts) if part == "*"]
    left = iter(names)
    return "/" + "/".join(f"{{{next(left)}}}" if part == "*" else part for part in parts), names


def _operation(method: str, names: list[str], route: Route, known: Mapping[Any, Json]) -> Json:
    told: Json = {
        "operationId": route.op,
        "summary": " ".join((route.handler.__doc__ or "").split()),
        "responses": dict(
            sorted({**_successes(route, known), **_problems(_codes(method, names, route), known)}.items())
        ),
    }
    parameters: list[Json] = [{"name": name, "in": "path", "required": True, "schema": _ID} for name in names]
    for name in sorted(route.query):
        schema, says = _QUERY[name]
        parameters.append({"name": name, "in": "query", "description": says, "schema": schema})
    if parameters:
        told["parameters"] = parameters
    if route.body is not None:
        told["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": known[route.body.type]}},
        }
    return told


def _successes(route: Route, known: Mapping[Any, Json]) -> Json:
    answers: Json = {}
    for status, kinds in route.answers.items():
        answers[str(status)] = _response(HTTPStatus(status).phrase)
        if kinds:
            schema = known[kinds[0]] if len(kinds) == 1 else {"anyOf": [known[kind] for kind in kinds]}
            answers[str(status)]["content"] = {route.media_type: {"schema": schema}}
    return answers


def _codes(method: str, names: list[str], route: Route) -> set[Code]:
    codes = {*_ANY, *route.problems}
    if names:
        codes.add(Code.INVALID_ID)
    if route.body is not None:
        codes.add(Code.UNSUPPORTED_TYPE)
    if method != "GET":
        codes.add(Code.SHUTTING_DOWN)
        if route.changes:
            codes.add(Code.STATE_UNAVAILABLE)
    return codes


def _problems(codes: set[Code], known: Mapping[Any, Json]) -> Json:
    by_status: defaultdict[int, list[Code]] = defaultdict(list)
    for code in Code:
        if code in codes:
            by_status[code.status].append(code)
    return {str(status): _problem(met, known) for status, met in by_status.items()}


def _problem(codes: list[Code], known: Mapping[Any, Json]) -> Json:
    told = _response("; ".join(f"{code.text}: {code.title.lower()}" for code in codes))
    told["headers"]["Retry-After"] = {"$ref": "#/components/headers/Retry-After"}
    schema = {"allOf": [known[ProblemBody], {"properties": {"code": {"enum": [code.text for code in codes]}}}]}
    told["content"] = {"application/problem+json": {"schema": schema}}
    return told


def _in_markdown(docstring: str) -> str:
    return " ".join(_ROLE.sub(r"`\1`", docstring).replace("``", "`").split())


def _response(says: str) -> Json:
    return {"description": says, "headers": {"Api-Version": {"$ref": "#/components/headers/Api-Version"}}}
