"""Answers on the wire: values, and problems, as JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from kata_resmgr.api.problems import ProblemBody
from kata_resmgr.problem import Problem

API_VERSION = 1

_encode = msgspec.json.Encoder().encode
_JSON = {"Api-Version": str(API_VERSION), "Content-Type": "application/json"}
_PROBLEM = {"Api-Version": str(API_VERSION), "Content-Type": "application/problem+json"}
_EMPTY = {"Api-Version": str(API_VERSION)}


class Answer(NamedTuple):
    """A status, and the value that goes with it; None: no body."""

    status: int
    value: Any = None


def render(answer: Answer) -> web.Response:
    """The response to a call that went well."""
    if answer.value is None:
        return web.Response(status=answer.status, headers=_EMPTY)
    return web.Response(status=answer.status, body=_encode(answer.value), headers=_JSON)


def render_problem(problem: Problem, **headers: str) -> web.Response:
    """The response to a call that did not."""
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    body = ProblemBody.of(problem)
    return web.Response(status=problem.code.status, body=_encode(body), headers={**_PROBLEM, **headers})
