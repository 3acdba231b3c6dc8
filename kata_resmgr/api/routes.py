"""What each path and method does. Nothing here knows about sockets, headers or bytes on a wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import unquote

import msgspec

from kata_resmgr import __version__, metrics, view
from kata_resmgr.api import queries
from kata_resmgr.api.answers import API_VERSION, Answer, Stream, Text
from kata_resmgr.api.bodies import (
    Body,
    ContainerBody,
    Nothing,
    PlanBody,
    ResizeBody,
    SandboxBody,
    TableBody,
    VmBody,
    read_plan,
    read_table,
    stated,
)
from kata_resmgr.ids import check_id
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Outcome
from kata_resmgr.vm import Goal

_REMEMBERED_PATHS = 1024
_REMEMBERED_PATH = 512
"""How many paths of how many characters are not taken apart again."""

NDJSON = "application/x-ndjson"
PHASES = ("sized", "running", "held", "unreachable", "lost")


class Call(msgspec.Struct, frozen=True, gc=False):
    """One request, checked: the ids of its path, its query, and its body as the route's type."""

    manager: ResourceManager
    closing: asyncio.Event
    sandbox: str
    container: str
    query: Mapping[str, str]
    body: Any


class Handler(Protocol):
    """Serves a route. Its name says what it does."""

    __name__: str

    async def __call__(self, call: Call, /) -> Answer:
        """Raises :class:`Problem`."""


@dataclass(frozen=True, slots=True)
class Route:
    """What serves one method of one path. ``body`` None: it takes none, and what is sent is not looked at."""

    handler: Handler
    query: frozenset[str] = frozenset()
    body: msgspec.json.Decoder[Any] | None = None
    body_optional: bool = False
    changes: bool = True
    """Whether it may change something, where its method is not GET."""

    @property
    def op(self) -> str:
        """What it is called in metrics and in the API's description."""
        return self.handler.__name__.lstrip("_")


class NoSuchMethod(Problem):
    """405, with the methods that there are."""

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(Code.METHOD_NOT_ALLOWED, f"{method[:20]} {path[:80]}: this path takes {allowed}")
        self.allowed = allowed


def find(method: str, path: str) -> tuple[Route, str, str]:
    """The route of a request, with the ids of its sandbox and container, "" where its path has none.

    *path* is raw: an id that hides a slash behind ``%2F`` is a malformed id, not another path. Raises
    :class:`Problem`.
    """
    return _find(method, path) if len(path) <= _REMEMBERED_PATH else _find.__wrapped__(method, path)


@lru_cache(_REMEMBERED_PATHS)  # a shim asks for the same container again and again
def _find(method: str, path: str) -> tuple[Route, str, str]:
    segments = path.split("/")[1:]
    names = segments[2:5:2]
    if len(segments) > 2:
        segments[2::2] = "*" * len(segments[2::2])
    methods = _ROUTES.get("/".join(segments))
    if methods is None:
        raise Problem(Code.NOT_FOUND, f"there is no path {path[:80]!r} here; sandboxes are below /v1/sandboxes")
    route = methods.get(method)
    if route is None:
        raise NoSuchMethod(method, path, ", ".join(methods))
    sandbox, container = (*names, "", "")[:2]
    if names:
        check_id(unquote(sandbox), "sandbox")
    if len(names) == 2:
        check_id(unquote(container), "container")
    return route, unquote(sandbox), unquote(container)


# The daemon


async def _version(call: Call) -> Answer:
    return Answer(200, {"version": __version__, "apiVersion": API_VERSION, "minApiVersion": API_VERSION})


async def _alive(call: Call) -> Answer:
    return Answer(200, {"ok": True, "reasons": []})


async def _ready(call: Call) -> Answer:
    reasons = ["the daemon is stopping"] if call.closing.is_set() else []
    return Answer(503 if reasons else 200, {"ok": not reasons, "reasons": reasons})


async def _plan(call: Call) -> Answer:
    return Answer(200, await call.manager.plan(read_plan(call.body)))


async def _metrics(call: Call) -> Answer:
    return Answer(200, Text(metrics.CONTENT_TYPE, await call.manager.metrics_text()))


async def _events(call: Call) -> Answer:
    since, sandbox = queries.number(call.query, "since"), call.query.get("sandbox")
    if sandbox is not None:
        check_id(sandbox, "sandbox")
    if queries.choice(call.query, "follow", ("true", "false")) == "true":
        return Answer(200, Stream(NDJSON, call.manager.events.follow(since, sandbox)))
    return Answer(200, Text(NDJSON, await call.manager.events.lines(since, sandbox)))


# Sandboxes


class FullSandbox(view.Sandbox, frozen=True, kw_only=True):
    """The answer to ``?view=full``."""

    containers: dict[str, ContainerBody]
    disks: dict[str, None] = msgspec.field(default_factory=dict)
    nets: dict[str, None] = msgspec.field(default_factory=dict)


def _full(sandbox: view.Sandbox, containers: Mapping[str, view.Container]) -> FullSandbox:
    members = {name: getattr(sandbox, name) for name in sandbox.__struct_fields__}
    return FullSandbox(**members, containers={name: ContainerBody(held.resources) for name, held in containers.items()})


async def _list_sandboxes(call: Call) -> Answer:
    phase = queries.choice(call.query, "phase", PHASES)
    return Answer(200, {"sandboxes": call.manager.sandboxes(phase)})


async def _put_sandbox(call: Call) -> Answer:
    body: SandboxBody = call.body
    spec = SandboxSpec(body.hypervisor, body.annotations, stated(body.resources), body.directory)
    outcome = await call.manager.put_sandbox(call.sandbox, spec)
    return Answer(201 if outcome.created else 200, outcome.sandbox)


async def _resize(call: Call) -> Answer:
    resources = bytes(call.body.resources)
    return _sandbox_answer(await call.manager.resize(call.sandbox, resources, queries.patience(call.query)))


async def _get_sandbox(call: Call) -> Answer:
    goal, wait = queries.choice(call.query, "for", tuple(Goal)), queries.seconds(call.query, "wait")
    full = queries.choice(call.query, "view", ("full",)) is not None
    if wait is not None and goal is None:
        raise Problem(Code.INVALID_QUERY, f"wait says how long; say for what with for={' or for='.join(Goal)}")
    if wait and goal is not None:
        sandbox = await _unless_closing(call, call.manager.wait_for(call.sandbox, Goal(goal), wait))
    else:
        sandbox = call.manager.sandbox(call.sandbox)
    return Answer(200, _full(sandbox, call.manager.containers(call.sandbox)) if full else sandbox)


async def _unless_closing(call: Call, waiting: Awaitable[view.Sandbox]) -> view.Sandbox:
    """Those who only look do not hold up the end of the daemon: they are told what is."""
    wait, closing = asyncio.ensure_future(waiting), asyncio.ensure_future(call.closing.wait())
    try:
        await asyncio.wait({wait, closing}, return_when=asyncio.FIRST_COMPLETED)
        return wait.result() if wait.done() else call.manager.sandbox(call.sandbox)
    finally:
        wait.cancel()
        closing.cancel()


async def _delete_sandbox(call: Call) -> Answer:
    await call.manager.delete_sandbox(call.sandbox)
    return Answer(204)


async def _attach(call: Call) -> Answer:
    vm: VmBody = call.body
    return Answer(200, await call.manager.attach(call.sandbox, vm.socket, vm.pid, vm.memory_block_bytes))


async def _detach(call: Call) -> Answer:
    await call.manager.detach(call.sandbox)
    return Answer(204)


async def _hold(call: Call) -> Answer:
    return Answer(200, await call.manager.hold(call.sandbox))


async def _release(call: Call) -> Answer:
    await call.manager.release(call.sandbox)
    return Answer(204)


async def _reconcile(call: Call) -> Answer:
    return _sandbox_answer(await call.manager.reconcile(call.sandbox, queries.patience(call.query)))


async def _explain(call: Call) -> Answer:
    return Answer(200, call.manager.explain(call.sandbox))


# Containers


async def _put_table(call: Call) -> Answer:
    table = read_table(call.body)
    return _sandbox_answer(await call.manager.put_containers(call.sandbox, table, queries.patience(call.query)))


async def _put_container(call: Call) -> Answer:
    resources = bytes(call.body.resources)
    patience = queries.patience(call.query)
    return _container_answer(*await call.manager.put_container(call.sandbox, call.container, resources, patience))


async def _patch_container(call: Call) -> Answer:
    resources = bytes(call.body.resources)
    patience = queries.patience(call.query)
    return _container_answer(*await call.manager.patch_container(call.sandbox, call.container, resources, patience))


async def _get_container(call: Call) -> Answer:
    return Answer(200, call.manager.container(call.sandbox, call.container))


async def _delete_container(call: Call) -> Answer:
    await call.manager.delete_container(call.sandbox, call.container, queries.patience(call.query))
    return Answer(204)


def _sandbox_answer(outcome: Outcome) -> Answer:
    return Answer(200 if outcome.settled else 202, outcome.sandbox)


def _container_answer(container: view.Container, outcome: Outcome) -> Answer:
    status = 202 if not outcome.settled else 201 if outcome.created else 200
    return Answer(status, view.ContainerResult(container, outcome.sandbox))


def _takes(body: type[Body]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body)


_ROUTES: dict[str, dict[str, Route]] = {
    "version": {"GET": Route(_version)},
    "healthz": {"GET": Route(_alive)},
    "readyz": {"GET": Route(_ready)},
    "metrics": {"GET": Route(_metrics)},
    "v1/plan": {"POST": Route(_plan, body=_takes(PlanBody), changes=False)},
    "v1/events": {"GET": Route(_events, frozenset({"since", "sandbox", "follow"}))},
    "v1/sandboxes": {"GET": Route(_list_sandboxes, frozenset({"phase"}))},
    "v1/sandboxes/*": {
        "GET": Route(_get_sandbox, frozenset({"wait", "for", "view"})),
        "PUT": Route(_put_sandbox, body=_takes(SandboxBody)),
        "PATCH": Route(_resize, queries.PATIENCE, body=_takes(ResizeBody)),
        "DELETE": Route(_delete_sandbox),
    },
    "v1/sandboxes/*/vm": {
        "PUT": Route(_attach, body=_takes(VmBody)),
        "DELETE": Route(_detach),
    },
    "v1/sandboxes/*/hold": {
        "PUT": Route(_hold, body=_takes(Nothing), body_optional=True),
        "DELETE": Route(_release),
    },
    "v1/sandboxes/*/reconcile": {
        "POST": Route(_reconcile, queries.PATIENCE, body=_takes(Nothing), body_optional=True),
    },
    "v1/sandboxes/*/explain": {"GET": Route(_explain)},
    "v1/sandboxes/*/containers": {"PUT": Route(_put_table, queries.PATIENCE, body=_takes(TableBody))},
    "v1/sandboxes/*/containers/*": {
        "GET": Route(_get_container),
        "PUT": Route(_put_container, queries.PATIENCE, body=_takes(ContainerBody)),
        "PATCH": Route(_patch_container, queries.PATIENCE, body=_takes(ContainerBody)),
        "DELETE": Route(_delete_container, queries.PATIENCE),
    },
}
