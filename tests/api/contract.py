"""Answers are held against the API's own description."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema

from kata_resmgr.api import openapi
from kata_resmgr.api.routes import ROUTES


@cache
def document() -> dict[str, Any]:
    """As a caller gets it."""
    described: dict[str, Any] = json.loads(json.dumps(openapi.describe(ROUTES)))
    return described


def operation(method: str, target: str) -> dict[str, Any] | None:
    """What is said of such a request, where its path and method are known."""
    path = target.partition("?")[0]
    for pattern, methods in document()["paths"].items():
        if re.fullmatch(re.sub(r"\{[a-z]+\}", "[^/]*", pattern), path) and method.lower() in methods:
            found: dict[str, Any] = methods[method.lower()]
            return found
    return None


def must_keep(method: str, target: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Fail where this answer is not among those that are described."""
    told = operation(method, target)
    if told is None:
        assert status >= 400, (method, target, status)
        return
    assert str(status) in told["responses"], f"{method} {target}: {status} is not described"
    content = told["responses"][str(status)].get("content", {})
    if not content:
        assert not body
        return
    kind = headers["content-type"]
    assert kind in content, f"{method} {target}: {status} as {kind}"
    texts = body.splitlines() if kind.endswith("ndjson") else [body] if "json" in kind else []
    for text in texts[:10]:
        for fault in _validator(json.dumps(content[kind]["schema"])).iter_errors(json.loads(text)):
            raise AssertionError(f"{method} {target}: {fault.json_path}: {fault.message}")


@cache
def _validator(schema: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**json.loads(schema), "components": document()["components"]})
