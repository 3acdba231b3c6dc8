"""What each path and method does. Nothing here knows about sockets, headers or bytes on a wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote

import msgspec

from hypervisors.base import DeviceKind
from kata_resmgr import __version__, metrics, view
from kata_resmgr.api import openapi, queries
from kata_resmgr.api.answers import API_VERSION, Answer, Stream, Text
from kata_resmgr.api.bodies import (
    Body,
    ContainerBody,
    DiskBody,
    LimitsBody,
    NetBody,
    Nothing,
    PlanBody,
    ResizeBody,
    SandboxBody,
    TableBody,
    VmBody,
    read_device,
    read_plan,
    read_table,
    stated,
)
from kata_resmgr.events import Event
from kata_resmgr.ids import check_id
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.plan import Planned
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


Answers: TypeAlias = Mapping[int, tuple[Any, ...]]


class Handler(Protocol):
    """Serves a route. Its name says what it does."""

    __name__: str

    async def __call__(self, call: Call, /) -> Answer:
        """Raises :class:`Problem`."""


@dataclass(frozen=True, slots=True)
class Route:
    """What serves one method of one path. ``body`` None: it takes none, and what is sent is not looked at."""

    handler: Handler
    answers: Answers = field(default_factory=dict)
    """What each status that is no problem comes with: one of these types, or no body."""
    problems: frozenset[Code] = frozenset()
    """What may be wrong, beside what can be wrong with any request of its kind."""
    query: frozenset[str] = frozenset()
    body: msgspec.json.Decoder[Any] | None = None
    body_optional: bool = False
    changes: bool = True
    """Whether it may change something, where its method is not GET."""
    media_type: str = "application/json"
    """What the body of an answer that is no problem is written in."""

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
    methods = ROUTES.get("/".join(segments))
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
    """Name and versions."""
    return Answer(200, view.Version(__version__, API_VERSION, API_VERSION))


async def _alive(call: Call) -> Answer:
    """Whether the daemon is alive."""
    return Answer(200, view.Health(ok=True, reasons=[]))


async def _ready(call: Call) -> Answer:
    """Whether the daemon can serve."""
    reasons = ["the daemon is stopping"] if call.closing.is_set() else []
    return Answer(503 if reasons else 200, view.Health(not reasons, reasons))


async def _openapi(call: Call) -> Answer:
    """This description."""
    return Answer(200, Text("application/json", _description()))


@cache
def _description() -> bytes:
    return msgspec.json.encode(openapi.describe(ROUTES))


async def _plan(call: Call) -> Answer:
    """Say what would be done, and why, without a VM."""
    return Answer(200, await call.manager.plan(read_plan(call.body)))


async def _metrics(call: Call) -> Answer:
    """Metrics, as Prometheus reads them."""
    return Answer(200, Text(metrics.CONTENT_TYPE, await call.manager.metrics_text()))


async def _events(call: Call) -> Answer:
    """What has happened to sandboxes, one JSON object a line; with follow also what happens."""
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
    disks: dict[str, view.Device]
    nets: dict[str, view.Device]


def _full(manager: ResourceManager, sandbox: view.Sandbox) -> FullSandbox:
    members = {name: getattr(sandbox, name) for name in sandbox.__struct_fields__}
    return FullSandbox(
        **members,
        containers={name: ContainerBody(held.resources) for name, held in manager.containers(sandbox.id).items()},
        disks=manager.devices(sandbox.id, DeviceKind.DISK),
        nets=manager.devices(sandbox.id, DeviceKind.NET),
    )


async def _list_sandboxes(call: Call) -> Answer:
    """All sandboxes."""
    phase = queries.choice(call.query, "phase", PHASES)
    return Answer(200, view.Sandboxes(call.manager.sandboxes(phase)))


async def _put_sandbox(call: Call) -> Answer:
    """Register a sandbox: boot size and VMM arguments are answered."""
    body: SandboxBody = call.body
    spec = SandboxSpec(
        body.hypervisor, body.annotations, stated(body.resources), body.directory, body.rate_limit_groups
    )
    for group in body.rate_limit_groups or ():
        check_id(group, "group")
    outcome = await call.manager.put_sandbox(call.sandbox, spec)
    return Answer(201 if outcome.created else 200, outcome.sandbox)


async def _resize(call: Call) -> Answer:
    """Merge resources into what the sandbox declares."""
    resources = bytes(call.body.resources)
    return _sandbox_answer(await call.manager.resize(call.sandbox, resources, queries.patience(call.query)))


async def _get_sandbox(call: Call) -> Answer:
    """One sandbox, at once or when it is as wanted."""
    goal, wait = queries.choice(call.query, "for", tuple(Goal)), queries.seconds(call.query, "wait")
    full = queries.choice(call.query, "view", ("full",)) is not None
    if wait is not None and goal is None:
        raise Problem(Code.INVALID_QUERY, f"wait says how long; say for what with for={' or for='.join(Goal)}")
    if wait and goal is not None:
        sandbox = await _unless_closing(call, call.manager.wait_for(call.sandbox, Goal(goal), wait))
    else:
        sandbox = call.manager.sandbox(call.sandbox)
    return Answer(200, _full(call.manager, sandbox) if full else sandbox)


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
    """Forget a sandbox; its VM is left alone."""
    await call.manager.delete_sandbox(call.sandbox)
    return Answer(204)


async def _attach(call: Call) -> Answer:
    """Drive the VM that runs: connect, read back, converge."""
    vm: VmBody = call.body
    return Answer(200, await call.manager.attach(call.sandbox, vm.socket, vm.pid, vm.memory_block_bytes))


async def _detach(call: Call) -> Answer:
    """Let go of the VM, which runs on."""
    await call.manager.detach(call.sandbox)
    return Answer(204)


async def _hold(call: Call) -> Answer:
    """No more calls to the hypervisor, around a snapshot or migration."""
    return Answer(200, await call.manager.hold(call.sandbox))


async def _release(call: Call) -> Answer:
    """The end of a hold: read back and converge."""
    await call.manager.release(call.sandbox)
    return Answer(204)


async def _reconcile(call: Call) -> Answer:
    """Read back and converge now, shrinks included."""
    return _sandbox_answer(await call.manager.reconcile(call.sandbox, queries.patience(call.query)))


async def _explain(call: Call) -> Answer:
    """Every step from the inputs to the present target."""
    return Answer(200, call.manager.explain(call.sandbox))


# Containers


async def _put_table(call: Call) -> Answer:
    """These containers and no others, in one resize."""
    table = read_table(call.body)
    return _sandbox_answer(await call.manager.put_containers(call.sandbox, table, queries.patience(call.query)))


async def _put_container(call: Call) -> Answer:
    """Create or replace a container; the answer comes when the VM is big enough."""
    resources = bytes(call.body.resources)
    patience = queries.patience(call.query)
    return _container_answer(*await call.manager.put_container(call.sandbox, call.container, resources, patience))


async def _patch_container(call: Call) -> Answer:
    """Update a container member by member."""
    resources = bytes(call.body.resources)
    patience = queries.patience(call.query)
    return _container_answer(*await call.manager.patch_container(call.sandbox, call.container, resources, patience))


async def _get_container(call: Call) -> Answer:
    """One container, as it was given."""
    return Answer(200, call.manager.container(call.sandbox, call.container))


async def _delete_container(call: Call) -> Answer:
    """Remove a container. It never fails for want of anything."""
    await call.manager.delete_container(call.sandbox, call.container, queries.patience(call.query))
    return Answer(204)


# Devices


async def _add(call: Call, kind: DeviceKind) -> Answer:
    spec = read_device(call.body, kind, call.container)
    shown, created = await call.manager.put_device(call.sandbox, spec, queries.patience(call.query))
    return Answer(201 if created else 200, shown)


async def _limit(call: Call, kind: DeviceKind) -> Answer:
    body: LimitsBody = call.body
    patience = queries.patience(call.query)
    return Answer(
        200,
        await call.manager.limit_device(call.sandbox, kind, call.container, body.limits, body.replace, patience),
    )


async def _take_out(call: Call, kind: DeviceKind) -> Answer:
    await call.manager.delete_device(call.sandbox, kind, call.container, queries.patience(call.query))
    return Answer(204)


async def _put_disk(call: Call) -> Answer:
    """Add a disk, with its limits; the answer comes when it is there."""
    return await _add(call, DeviceKind.DISK)


async def _get_disk(call: Call) -> Answer:
    """One disk, with what the VMM counts for it."""
    return Answer(200, await call.manager.device(call.sandbox, DeviceKind.DISK, call.container))


async def _delete_disk(call: Call) -> Answer:
    """Take a disk out; with a wait the answer comes when it is gone."""
    return await _take_out(call, DeviceKind.DISK)


async def _limit_disk(call: Call) -> Answer:
    """Other limits for a disk."""
    return await _limit(call, DeviceKind.DISK)


async def _put_net(call: Call) -> Answer:
    """Add a net device, with its limits; the answer comes when it is there."""
    return await _add(call, DeviceKind.NET)


async def _get_net(call: Call) -> Answer:
    """One net device, with what the VMM counts for it."""
    return Answer(200, await call.manager.device(call.sandbox, DeviceKind.NET, call.container))


async def _delete_net(call: Call) -> Answer:
    """Take a net device out; with a wait the answer comes when it is gone."""
    return await _take_out(call, DeviceKind.NET)


async def _limit_net(call: Call) -> Answer:
    """Other limits for a net device."""
    return await _limit(call, DeviceKind.NET)


def _sandbox_answer(outcome: Outcome) -> Answer:
    return Answer(200 if outcome.settled else 202, outcome.sandbox)


def _container_answer(container: view.Container, outcome: Outcome) -> Answer:
    status = 202 if not outcome.settled else 201 if outcome.created else 200
    return Answer(status, view.ContainerResult(container, outcome.sandbox))


def _takes(body: type[Body]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body)


_NOTHING: Answers = {204: ()}
_SANDBOX: Answers = {200: (view.Sandbox,)}
_RESIZED: Answers = {200: (view.Sandbox,), 202: (view.Sandbox,)}
_CONTAINER: Answers = {200: (view.ContainerResult,), 202: (view.ContainerResult,)}

_KNOWN = frozenset({Code.NOT_FOUND})
_SIZING = frozenset(
    {
        Code.INVALID_RESOURCES,
        Code.MEMORY_LIMIT_EXCEEDED,
        Code.VCPU_LIMIT_EXCEEDED,
    }
)
_REGISTERING = _SIZING | {Code.INVALID_ANNOTATION, Code.INVALID_CONFIG, Code.NO_MEMORY}
_REACHING = _KNOWN | {Code.HELD, Code.HYPERVISOR_TIMEOUT, Code.HYPERVISOR_UNREACHABLE}
_GROWING = (
    _REACHING
    | _SIZING
    | {Code.HYPERVISOR_REFUSED, Code.MEMORY_SLOTS_EXHAUSTED, Code.NOT_SUPPORTED, Code.SHRINK_PENDING}
)
_DEADLINE = frozenset({"deadline"})
_DRIVING = _REACHING | {Code.CONFLICT, Code.NOT_SUPPORTED, Code.SHRINK_PENDING, Code.HYPERVISOR_REFUSED}
_ADDING = _DRIVING | {Code.INVALID_CONFIG, Code.INVALID_PATH}
_LEAVING = _KNOWN | {Code.CONFLICT, Code.NOT_SUPPORTED, Code.HYPERVISOR_TIMEOUT}
_LIMITING = _DRIVING | {Code.INVALID_CONFIG, Code.NOT_SUPPORTED_LIVE}
_DEVICE: Answers = {200: (view.Device,)}
_ADDED: Answers = {**_DEVICE, 201: (view.Device,)}

ROUTES: Mapping[str, Mapping[str, Route]] = {
    "version": {"GET": Route(_version, {200: (view.Version,)})},
    "healthz": {"GET": Route(_alive, {200: (view.Health,)})},
    "readyz": {"GET": Route(_ready, {200: (view.Health,), 503: (view.Health,)})},
    "metrics": {"GET": Route(_metrics, {200: (str,)}, media_type=metrics.CONTENT_TYPE)},
    "openapi.json": {"GET": Route(_openapi, {200: (dict[str, Any],)})},
    "v1/plan": {
        "POST": Route(_plan, {200: (Planned,)}, _REGISTERING | {Code.INVALID_ID}, body=_takes(PlanBody), changes=False)
    },
    "v1/events": {
        "GET": Route(
            _events,
            {200: (Event,)},
            frozenset({Code.GONE, Code.INVALID_ID}),
            query=frozenset({"since", "sandbox", "follow"}),
            media_type=NDJSON,
        )
    },
    "v1/sandboxes": {"GET": Route(_list_sandboxes, {200: (view.Sandboxes,)}, query=frozenset({"phase"}))},
    "v1/sandboxes/*": {
        "GET": Route(
            _get_sandbox, {200: (view.Sandbox, FullSandbox)}, _KNOWN, query=frozenset({"wait", "for", "view"})
        ),
        "PUT": Route(
            _put_sandbox,
            {200: (view.Sandbox,), 201: (view.Sandbox,)},
            _REGISTERING | {Code.CONFLICT, Code.INVALID_PATH, Code.NOT_SUPPORTED},
            body=_takes(SandboxBody),
        ),
        "PATCH": Route(_resize, _RESIZED, _GROWING, queries.PATIENCE, _takes(ResizeBody)),
        "DELETE": Route(_delete_sandbox, _NOTHING),
    },
    "v1/sandboxes/*/vm": {
        "PUT": Route(
            _attach,
            _SANDBOX,
            _REACHING | {Code.CONFLICT, Code.INVALID_PATH, Code.MONITOR_BUSY},
            body=_takes(VmBody),
        ),
        "DELETE": Route(_detach, _NOTHING, _KNOWN),
    },
    "v1/sandboxes/*/hold": {
        "PUT": Route(_hold, _SANDBOX, _KNOWN | {Code.HYPERVISOR_TIMEOUT}, body=_takes(Nothing), body_optional=True),
        "DELETE": Route(_release, _NOTHING, _KNOWN),
    },
    "v1/sandboxes/*/reconcile": {
        "POST": Route(
            _reconcile,
            _RESIZED,
            _REACHING | {Code.CONFLICT},
            queries.PATIENCE,
            _takes(Nothing),
            body_optional=True,
        ),
    },
    "v1/sandboxes/*/explain": {"GET": Route(_explain, {200: (view.Explanation,)}, _KNOWN)},
    "v1/sandboxes/*/containers": {"PUT": Route(_put_table, _RESIZED, _GROWING, queries.PATIENCE, _takes(TableBody))},
    "v1/sandboxes/*/containers/*": {
        "GET": Route(_get_container, {200: (view.Container,)}, _KNOWN),
        "PUT": Route(
            _put_container,
            {**_CONTAINER, 201: (view.ContainerResult,)},
            _GROWING,
            queries.PATIENCE,
            _takes(ContainerBody),
        ),
        "PATCH": Route(_patch_container, _CONTAINER, _GROWING, queries.PATIENCE, _takes(ContainerBody)),
        "DELETE": Route(_delete_container, _NOTHING, _KNOWN | {Code.HYPERVISOR_TIMEOUT}, queries.PATIENCE),
    },
    "v1/sandboxes/*/disks/*": {
        "GET": Route(_get_disk, _DEVICE, _KNOWN),
        "PUT": Route(_put_disk, _ADDED, _ADDING, _DEADLINE, _takes(DiskBody)),
        "DELETE": Route(_delete_disk, _NOTHING, _LEAVING, queries.PATIENCE),
    },
    "v1/sandboxes/*/disks/*/limits": {
        "PUT": Route(_limit_disk, _DEVICE, _LIMITING, _DEADLINE, _takes(LimitsBody)),
    },
    "v1/sandboxes/*/nets/*": {
        "GET": Route(_get_net, _DEVICE, _KNOWN),
        "PUT": Route(_put_net, _ADDED, _ADDING, _DEADLINE, _takes(NetBody)),
        "DELETE": Route(_delete_net, _NOTHING, _LEAVING, queries.PATIENCE),
    },
    "v1/sandboxes/*/nets/*/limits": {
        "PUT": Route(_limit_net, _DEVICE, _LIMITING, _DEADLINE, _takes(LimitsBody)),
    },
}
