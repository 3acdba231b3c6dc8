"""The description of the API: sound, whole, and what is served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from kata_resmgr.api.problems import ProblemBody
from kata_resmgr.api.routes import PHASES, ROUTES
from kata_resmgr.problem import Code, Problem
from kata_resmgr.vm import Phase
from tests.api.api_harness import serving
from tests.api.contract import document, must_keep, operation


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document()["paths"].items():
        for method, told in methods.items():
            yield path, method.upper(), told


def test_it_is_openapi_3_1() -> None:
    OpenAPIV31SpecValidator(document()).validate()
    for schema in document()["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_route_is_in_it_and_nothing_else() -> None:
    routes = {(method, re.sub(r"\*", "x", f"/{path}")) for path, methods in ROUTES.items() for method in methods}
    assert {(method, re.sub(r"\{[a-z]+\}", "x", path)) for path, method, _ in operations()} == routes


def test_names_of_operations_are_unique_and_each_is_summed_up() -> None:
    told = [operation for _, _, operation in operations()]
    assert len({one["operationId"] for one in told}) == len(told)
    assert all(one["summary"].endswith(".") for one in told)


def test_every_operation_says_what_it_answers() -> None:
    for path, method, told in operations():
        assert any(status < "300" for status in told["responses"]), (method, path)


def test_every_code_can_occur_somewhere() -> None:
    found = set(re.findall(r'"enum": (\[[^\]]*\])', json.dumps([told for _, _, told in operations()])))
    codes = {code for listed in found for code in json.loads(listed)}
    nowhere = {code.text for code in Code} - codes
    assert nowhere == {Code.METHOD_NOT_ALLOWED.text}  # the answer where there is no operation


def test_the_ids_of_paths_and_the_parameters_of_queries_are_described() -> None:
    told = operation("PATCH", "/v1/sandboxes/s1/containers/c1")
    assert told is not None
    assert [(one["name"], one["in"]) for one in told["parameters"]] == [
        ("id", "path"), ("cid", "path"), ("deadline", "query"), ("wait", "query"),
    ]  # fmt: skip
    assert told["requestBody"]["required"]
    assert document()["components"]["schemas"]["LinuxResources"]["properties"]["cpu"]
    assert set(PHASES) == set(Phase)


async def test_it_is_served() -> None:
    async with serving() as served:
        reply = await served.ask("GET", "/openapi.json")
        assert reply.headers["content-type"] == "application/json"
        assert reply.json == document()


_GONE = msgspec.json.encode(ProblemBody.of(Problem(Code.GONE, "")))


@pytest.mark.parametrize(
    ("status", "kind", "body", "words"),
    [
        (418, "application/json", b"{}", "418 is not described"),
        (200, "text/plain", b"x", "as text/plain"),
        (200, "application/json", b'{"id": "s1"}', "not valid under any"),
        (404, "application/problem+json", _GONE, "'gone' is not one of"),
    ],
)
def test_an_answer_that_is_not_described_is_found_out(status: int, kind: str, body: bytes, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        must_keep("GET", "/v1/sandboxes/s1", status, {"content-type": kind}, body)
