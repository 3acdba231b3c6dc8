"""Answers on the wire: values as JSON, problems as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from kata_resmgr.problem import Problem, one_line

API_VERSION = 1

_ERRORS_SHOWN = 16
_POINTER_LIMIT = 256

_encode = msgspec.json.Encoder().encode
_JSON = {"Api-Version": str(API_VERSION), "Content-Type": "application/json"}
_PROBLEM = {"Api-Version": str(API_VERSION), "Content-Type": "application/problem+json"}
_EMPTY = {"Api-Version": str(API_VERSION)}


class Answer(NamedTuple):
    """A status, and the value that goes with it; None: no body."""

    status: int
    value: Any = None


class Fault(msgspec.Struct, frozen=True):
    """One place of the body that is at fault."""

    pointer: str
    detail: str


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """What API.md calls a problem."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    errors: tuple[Fault, ...] = ()


def render(answer: Answer) -> web.Response:
    """The response to a call that went well."""
    if answer.value is None:
        return web.Response(status=answer.status, headers=_EMPTY)
    return web.Response(status=answer.status, body=_encode(answer.value), headers=_JSON)


def render_problem(problem: Problem, **headers: str) -> web.Response:
    """The response to a call that did not."""
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    body = ProblemBody(
        type=f"urn:kata-resmgr:error:{problem.code.text}",
        title=problem.code.title,
        status=problem.code.status,
        detail=problem.detail,
        code=problem.code.text,
        retryable=problem.retryable,
        errors=tuple(Fault(at.pointer[:_POINTER_LIMIT], one_line(at.detail)) for at in problem.at[:_ERRORS_SHOWN]),
    )
    return web.Response(status=problem.code.status, body=_encode(body), headers={**_PROBLEM, **headers})
