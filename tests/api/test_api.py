"""Each call as a shim makes it, and everything a caller can do wrong, over a real socket."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kata_resmgr import __version__
from kata_resmgr.api import connection
from kata_resmgr.manager import SandboxSpec
from kata_resmgr.plan import Op, Request, Step
from kata_resmgr.problem import At, Code, Problem
from kata_resmgr.sandbox import Patience
from tests.api.api_harness import SANDBOX, Served, read_reply, serving, until
from tests.daemon import Caller

NO_PATIENCE = Patience()
C1 = "/v1/sandboxes/s1/containers/c1"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


# What is asked reaches the manager, and what it says reaches the caller


@pytest.mark.parametrize(
    ("method", "path", "body", "call", "status"),
    [
        ("PUT", "/v1/sandboxes/s1", "{}", ("put_sandbox", "s1", SandboxSpec()), 200),
        (
            "PUT",
            "/v1/sandboxes/s1",
            '{"hypervisor": "qemu", "annotations": {"a": "b"}, "resources": {"cpu": {"q": 1.0}}, "directory": "/d"}',
            ("put_sandbox", "s1", SandboxSpec("qemu", {"a": "b"}, b'{"cpu": {"q": 1.0}}', "/d")),
            200,
        ),
        ("PUT", "/v1/sandboxes/s1", '{"resources": null}', ("put_sandbox", "s1", SandboxSpec()), 200),
        ("POST", "/v1/plan", "{}", ("plan", Request()), 200),
        (
            "POST",
            "/v1/plan",
            '{"hypervisor": "clh", "host": {"cpus": 4, "memoryBytes": 8589934591},'
            ' "sandbox": {"annotations": {"a": "b"}, "resources": {}},'
            ' "steps": [{"op": "create", "container": "a", "resources": {"x": 1.50}},'
            ' {"op": "update", "container": "a", "resources": null}, {"op": "resize", "resources": {}},'
            ' {"op": "delete", "container": "a", "resources": 7}]}',
            (
                "plan",
                Request(
                    hypervisor="clh",
                    host_cpus=4,
                    host_memory=8191,
                    annotations={"a": "b"},
                    resources=b"{}",
                    steps=(
                        Step(Op.CREATE, "a", b'{"x": 1.50}'),
                        Step(Op.UPDATE, "a", b"null"),
                        Step(Op.RESIZE, "", b"{}"),
                        Step(Op.DELETE, "a"),
                    ),
                ),
            ),
            200,
        ),
        ("GET", "/v1/sandboxes", None, ("sandboxes", None), 200),
        ("GET", "/v1/sandboxes?phase=held", None, ("sandboxes", "held"), 200),
        ("GET", "/v1/sandboxes/s1", None, ("sandbox", "s1"), 200),
        ("GET", "/v1/sandboxes/%73%31", None, ("sandbox", "s1"), 200),
        ("GET", "/v1/sandboxes/s1?for=converged", None, ("sandbox", "s1"), 200),
        ("GET", "/v1/sandboxes/s1?wait=5s&for=satisfied", None, ("wait_for", "s1", "satisfied", 5.0), 200),
        ("DELETE", "/v1/sandboxes/s1", None, ("delete_sandbox", "s1"), 204),
        (
            "PATCH",
            "/v1/sandboxes/s1?wait=2s",
            '{"resources": {"cpu": {"quota": 1}}}',
            ("resize", "s1", b'{"cpu": {"quota": 1}}', Patience(None, 2.0)),
            200,
        ),
        ("PUT", "/v1/sandboxes/s1/vm", "{}", ("attach", "s1", None, None, None), 200),
        (
            "PUT",
            "/v1/sandboxes/s1/vm",
            '{"socket": "/s", "pid": 42, "memoryBlockBytes": 134217728}',
            ("attach", "s1", "/s", 42, 134217728),
            200,
        ),
        ("DELETE", "/v1/sandboxes/s1/vm", None, ("detach", "s1"), 204),
        ("PUT", "/v1/sandboxes/s1/hold", None, ("hold", "s1"), 200),
        ("PUT", "/v1/sandboxes/s1/hold", "{}", ("hold", "s1"), 200),
        ("DELETE", "/v1/sandboxes/s1/hold", None, ("release", "s1"), 204),
        ("POST", "/v1/sandboxes/s1/reconcile", None, ("reconcile", "s1", NO_PATIENCE), 200),
        ("POST", "/v1/sandboxes/s1/reconcile?wait=1s", "", ("reconcile", "s1", Patience(None, 1.0)), 200),
        ("GET", "/v1/sandboxes/s1/explain", None, ("explain", "s1"), 200),
        (
            "PUT",
            "/v1/sandboxes/s1/containers?deadline=3s",
            '{"containers": {"c1": {"resources": {"a": 1}}, "c2": {"resources": {}}}}',
            ("put_containers", "s1", {"c1": b'{"a": 1}', "c2": b"{}"}, Patience(3.0, None)),
            200,
        ),
        ("PUT", C1, '{"resources": {"a": 1.50}}', ("put_container", "s1", "c1", b'{"a": 1.50}', NO_PATIENCE), 200),
        (
            "PATCH",
            C1 + "?wait=9s&deadline=500ms",
            '{"resources": {}}',
            ("patch_container", "s1", "c1", b"{}", Patience(0.5, 0.5)),
            200,
        ),
        ("GET", C1, None, ("container", "s1", "c1"), 200),
        ("DELETE", C1 + "?wait=0", None, ("delete_container", "s1", "c1", Patience(None, 0.0)), 204),
    ],
)
async def test_each_call(
    served: Served, method: str, path: str, body: str | None, call: tuple[Any, ...], status: int
) -> None:
    reply = await served.ask(method, path, body)
    assert served.manager.calls == [call]
    assert reply.status == status
    assert reply.headers["api-version"] == "1"
    assert bool(reply.body) == (status != 204)
    if reply.body:
        assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("settled", "created", "container", "others", "sandbox"),
    [(True, True, 201, 200, 201), (True, False, 200, 200, 200), (False, True, 202, 202, 201)],
)
async def test_the_status_tells_the_outcome(
    served: Served, settled: bool, created: bool, container: int, others: int, sandbox: int
) -> None:
    served.manager.settled, served.manager.created = settled, created
    assert (await served.ask("PUT", C1, '{"resources": {}}')).status == container
    assert (await served.ask("PUT", "/v1/sandboxes/s1/containers", '{"containers": {}}')).status == others
    assert (await served.ask("POST", "/v1/sandboxes/s1/reconcile")).status == others
    assert (await served.ask("PATCH", "/v1/sandboxes/s1", '{"resources": {}}')).status == others
    assert (await served.ask("DELETE", C1)).status == 204
    assert (await served.ask("PUT", "/v1/sandboxes/s1", "{}")).status == sandbox


async def test_answers_have_the_names_and_forms_of_the_contract(served: Served) -> None:
    sandbox = (await served.ask("GET", "/v1/sandboxes/s1")).json
    assert sandbox["boot"] == {
        "vcpus": 1,
        "maxVcpus": 8,
        "memoryBytes": 2147483648,
        "maxMemoryBytes": 17179869184,
        "memorySlots": 10,
        "memoryGranularityBytes": 134217728,
    }
    assert sandbox["vcpus"] == {"exact": "16/5", "desired": 4, "plugged": 5, "pending": 1, "online": None}
    assert "containers" not in sandbox
    result = await served.ask("PUT", C1, '{"resources": {"unknown": 1.50}}')
    assert result.json["sandbox"] == sandbox
    assert b'"resources":{"unknown": 1.50}' in result.body
    full = await served.ask("GET", "/v1/sandboxes/s1?view=full")
    assert full.json == {**sandbox, "containers": {"c1": {"resources": {"x-unknown": 1.5}}}, "disks": {}, "nets": {}}
    listed = (await served.ask("GET", "/v1/sandboxes")).json
    assert listed == {"sandboxes": [sandbox]}
    explained = (await served.ask("GET", "/v1/sandboxes/s1/explain")).json
    assert explained["inputs"] == [{"name": "default_vcpus", "value": "1", "source": "config.toml:16"}]


async def test_the_daemon_tells_about_itself(served: Served) -> None:
    assert (await served.ask("GET", "/version")).json == {"version": __version__, "apiVersion": 1, "minApiVersion": 1}
    assert (await served.ask("GET", "/healthz")).json == {"ok": True, "reasons": []}
    assert (await served.ask("GET", "/readyz")).json == {"ok": True, "reasons": []}


async def test_an_ordinary_client_with_one_connection_for_many_calls(served: Served) -> None:
    def calls() -> None:
        caller = Caller(Path(served.path))
        for _ in range(3):
            answer = caller.ok("PUT", C1, {"resources": {}})
            assert answer["container"] == {"id": "c1", "resources": {}}
            assert caller.call("GET", "/v1/sandboxes/none")[0] == 404
        caller.close()

    await asyncio.to_thread(calls)


# What callers do wrong


def in_order(pieces: tuple[str, ...], text: str) -> bool:
    position = 0
    for piece in pieces:
        position = text.find(piece, position)
        if position < 0:
            return False
    return True


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "words", "pointers"),
    [
        ("PUT", C1, "", 400, "invalid_body", ("not JSON",), [""]),
        ("PUT", C1, "no json", 400, "invalid_body", ("not JSON", "invalid character"), [""]),
        ("PUT", C1, '{"resources": {}}x', 400, "invalid_body", ("trailing",), [""]),
        ("PUT", C1, '\ufeff{"resources": {}}', 400, "invalid_body", ("not JSON",), [""]),
        ("PUT", C1, '{"resources": {"a": NaN}}', 400, "invalid_body", ("not JSON",), [""]),
        ("PUT", C1, b'{"resources": {"a": "\xff"}}', 400, "invalid_body", ("utf-8",), [""]),
        ("PUT", C1, "[" * 300_000, 400, "invalid_body", ("array",), [""]),
        ("PUT", C1, '{"resources": ' + "[" * 300_000 + "]" * 300_000 + "}", 400, "invalid_body", ("too deep",), [""]),
        ("PUT", C1, '{"resources": ' + '{"a":' * 100_000, 400, "invalid_body", ("too deep",), [""]),
        ("PUT", C1, "[]", 400, "invalid_body", ("array",), [""]),
        ("PUT", C1, "{}", 400, "invalid_body", ("/resources", "missing"), ["/resources"]),
        ("PUT", C1, '{"resources": {}, "a/~": 1}', 400, "invalid_body", ("no such member",), ["/a~1~0"]),
        ("PATCH", C1, '{"resorces": {}}', 400, "invalid_body", ("/resorces", "no such member"), ["/resorces"]),
        ("PUT", C1, '{"' + "x" * 5000 + '": 1}', 400, "invalid_body", ("/xxx",), ["/" + "x" * 255]),
        ("PUT", "/v1/sandboxes/s1", '{"annotations": {"a": 1}}', 400, "invalid_body", ("str",), ["/annotations"]),
        ("PUT", "/v1/sandboxes/s1", '{"hypervisor": 1}', 400, "invalid_body", ("str",), ["/hypervisor"]),
        ("PUT", "/v1/sandboxes/s1", '{"Hypervisor": "qemu"}', 400, "invalid_body", ("member",), ["/Hypervisor"]),
        ("POST", "/v1/plan", "", 400, "invalid_body", ("not JSON",), [""]),
        ("POST", "/v1/plan", '{"step": []}', 400, "invalid_body", ("no such member",), ["/step"]),
        ("POST", "/v1/plan", '{"host": {"cpus": 0}}', 400, "invalid_body", (">= 1",), ["/host/cpus"]),
        ("POST", "/v1/plan", '{"host": {"cpus": 4294967296}}', 400, "invalid_body", ("<=",), ["/host/cpus"]),
        (
            "POST",
            "/v1/plan",
            '{"host": {"memoryBytes": 1048575}}',
            400,
            "invalid_body",
            (">= 1048576",),
            ["/host/memoryBytes"],
        ),
        (
            "POST",
            "/v1/plan",
            '{"steps": [{"op": "delete", "container": "a"}, 3]}',
            400,
            "invalid_body",
            ("object",),
            ["/steps/1"],
        ),
        ("POST", "/v1/plan", '{"steps": [{"op": "start"}]}', 400, "invalid_body", ("'start'",), ["/steps/0/op"]),
        (
            "POST",
            "/v1/plan",
            '{"steps": [{"op": "create", "resources": {}}]}',
            400,
            "invalid_body",
            ("missing",),
            ["/steps/0/container"],
        ),
        (
            "POST",
            "/v1/plan",
            '{"steps": [{"op": "update", "container": "a"}]}',
            400,
            "invalid_body",
            ("missing",),
            ["/steps/0/resources"],
        ),
        (
            "POST",
            "/v1/plan",
            '{"steps": [{"op": "resize", "container": "a", "resources": {}}]}',
            400,
            "invalid_body",
            ("no such member",),
            ["/steps/0/container"],
        ),
        (
            "POST",
            "/v1/plan",
            '{"steps": [{"op": "delete", "container": "../a"}]}',
            400,
            "invalid_id",
            ("'../a'",),
            None,
        ),
        ("PUT", "/v1/sandboxes/s1/vm", '{"pid": "1"}', 400, "invalid_body", ("int",), ["/pid"]),
        ("PUT", "/v1/sandboxes/s1/vm", '{"pid": 1.0}', 400, "invalid_body", ("int",), ["/pid"]),
        ("PUT", "/v1/sandboxes/s1/vm", '{"pid": 0}', 400, "invalid_body", (">= 1",), ["/pid"]),
        (
            "PUT",
            "/v1/sandboxes/s1/vm",
            '{"memoryBlockBytes": 99999999999999999999}',
            400,
            "invalid_body",
            ("<= 9223372036854775807",),
            ["/memoryBlockBytes"],
        ),
        ("PUT", "/v1/sandboxes/s1/hold", '{"on": true}', 400, "invalid_body", ("/on",), ["/on"]),
        (
            "PUT",
            "/v1/sandboxes/s1/containers",
            '{"containers": {"c1": {"resources": {}, "more": 1}}}',
            400,
            "invalid_body",
            ("more",),
            ["/containers/c1/more"],
        ),
        ("PUT", "/v1/sandboxes/s1/containers", '{"containers": []}', 400, "invalid_body", ("array",), ["/containers"]),
        (
            "PUT",
            "/v1/sandboxes/s1/containers",
            '{"containers": {"a/b": {"resources": {}}}}',
            400,
            "invalid_id",
            ("container id 'a/b'",),
            None,
        ),
        ("GET", "/v1/sandboxes/a%2Fb", None, 400, "invalid_id", ("'a/b'", "1 to 128"), None),
        ("GET", "/v1/sandboxes/", None, 400, "invalid_id", ("''",), None),
        ("GET", "/v1/sandboxes/.a", None, 400, "invalid_id", ("'.a'",), None),
        ("GET", "/v1/sandboxes/-a", None, 400, "invalid_id", ("'-a'",), None),
        ("GET", "/v1/sandboxes/a%0A", None, 400, "invalid_id", ("'a\\n'",), None),
        ("GET", "/v1/sandboxes/%FF", None, 400, "invalid_id", ("id",), None),
        ("GET", "/v1/sandboxes/" + "x" * 129, None, 400, "invalid_id", ("id",), None),
        ("DELETE", "/v1/sandboxes/s1/containers/a%2e%2e%2fb", None, 400, "invalid_id", ("container id",), None),
        ("GET", "/v1/sandboxes/none", None, 404, "not_found", ("no sandbox none",), None),
        ("GET", "/v1/sandboxes/s1/containers/a/b", None, 404, "not_found", ("no path",), None),
        ("GET", "/", None, 404, "not_found", ("no path",), None),
        ("GET", "/v2/sandboxes", None, 404, "not_found", ("no path",), None),
        ("POST", "/v1/plans", "{}", 404, "not_found", ("no path",), None),
        ("GET", "/v1/plan", None, 405, "method_not_allowed", ("POST",), None),
        ("PATCH", "/v1/sandboxes/s1", "{}", 400, "invalid_body", ("missing",), ["/resources"]),
        ("PATCH", "/v1/sandboxes/s1", '{"resources": {}, "x": 1}', 400, "invalid_body", ("no such member",), ["/x"]),
        ("POST", "/v1/sandboxes/s1", "{}", 405, "method_not_allowed", ("GET, PUT, PATCH, DELETE",), None),
        ("GET", "/v1/sandboxes?phase=up", None, 400, "invalid_query", ("phase='up'", "sized or running"), None),
        ("GET", "/v1/sandboxes?x=1", None, 400, "invalid_query", ("'x'", "there are phase"), None),
        ("GET", "/version?x", None, 400, "invalid_query", ("takes none",), None),
        ("GET", "/v1/sandboxes/s1?wait=5", None, 400, "invalid_query", ("wait", "'5'", "ms, s, m or h"), None),
        ("GET", "/v1/sandboxes/s1?wait=5s", None, 400, "invalid_query", ("for=satisfied",), None),
        ("GET", "/v1/sandboxes/s1?wait=5s&for=bliss", None, 400, "invalid_query", ("for='bliss'",), None),
        ("GET", "/v1/sandboxes/s1?view=half", None, 400, "invalid_query", ("must be full",), None),
        ("DELETE", C1 + "?wait=1s&wait=2s", None, 400, "invalid_query", ("more than once",), None),
        ("DELETE", C1 + "?deadline=2h", None, 400, "invalid_query", ("longer than 1h",), None),
        ("DELETE", C1 + "?deadline=%31%FF", None, 400, "invalid_query", ("deadline",), None),
        ("DELETE", C1 + "?wait=1s&", None, 400, "invalid_query", ("''",), None),
        ("PUT", C1, b"{" + b" " * (1 << 20), 413, "too_large", ("1048576",), None),
    ],
)
async def test_what_callers_do_wrong(
    served: Served,
    method: str,
    path: str,
    body: bytes | str | None,
    status: int,
    code: str,
    words: tuple[str, ...],
    pointers: list[str] | None,
) -> None:
    reply = await served.ask(method, path, body)
    problem = reply.json
    assert (reply.status, problem["status"], problem["code"]) == (status, status, code)
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["api-version"] == "1"
    assert problem["type"] == f"urn:kata-resmgr:error:{code}"
    assert problem["title"] == Code[code.upper()].title
    assert problem["retryable"] is False
    assert in_order(words, problem["detail"]), problem["detail"]
    assert len(problem["detail"]) <= 256
    assert [fault["pointer"] for fault in problem.get("errors", [])] == (pointers or [])
    assert all(call[0] == "sandbox" for call in served.manager.calls)  # nothing was changed
    assert ("allow" in reply.headers) == (status == 405)


async def test_405_tells_the_methods(served: Served) -> None:
    assert (await served.ask("PUT", "/version", "{}")).headers["allow"] == "GET"
    assert (await served.ask("POST", C1, "{}")).headers["allow"] == "GET, PUT, PATCH, DELETE"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        (None, 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("", 415),
    ],
)
async def test_the_content_type(served: Served, kind: str | None, status: int) -> None:
    head = f"PUT {C1} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17\r\n"
    head += "" if kind is None else f"Content-Type: {kind}\r\n"
    reply = await served.raw(head.encode() + b'\r\n{"resources": {}}')
    assert reply.status == status
    assert status == 200 or reply.json["code"] == "unsupported_type"


async def test_a_compressed_body_is_refused(served: Served) -> None:
    reply = await served.ask("PUT", C1, b"\x1f\x8b", "Content-Encoding: gzip")
    assert (reply.status, reply.json["code"]) == (415, "unsupported_type")


CHUNKED = f"PUT {C1} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_a_chunked_body(served: Served) -> None:
    reply = await served.raw(CHUNKED + chunk(b'{"resources"') + chunk(b": {}}") + chunk(b""))
    assert reply.status == 200


async def test_a_chunked_body_that_does_not_end_is_cut_off(served: Served) -> None:
    reply = await served.raw(CHUNKED + 40 * chunk(b" " * 65536))
    assert (reply.status, reply.json["code"]) == (413, "too_large")


async def test_a_malformed_chunk(served: Served) -> None:
    reply = await served.raw(CHUNKED + b"zz\r\n")
    assert (reply.status, reply.json["code"]) == (400, "invalid_body")
    assert served.manager.calls == []


async def test_a_body_of_the_limit_is_taken(served: Served) -> None:
    body = b'{"resources": {}}'
    assert (await served.ask("PUT", C1, body + b" " * ((1 << 20) - len(body)))).status == 200


async def test_100_continue(served: Served) -> None:
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(f"PUT {C1} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17\r\nExpect: 100-continue\r\n\r\n".encode())
    async with asyncio.timeout(10):
        assert (await read_reply(reader)).status == 100
        writer.write(b'{"resources": {}}')
        assert (await read_reply(reader)).status == 200
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000,
        b"GET /version HTTP/1.1\r\nHost: localhost" + b"".join(b"\r\nX%d: %s" % (i, b"x" * 2000) for i in range(9)),
        b"GET /version HTTP/1.1\r\nHost: localhost" + b"".join(b"\r\nX%d: x" % i for i in range(2000)),
        b"GET /v1/sandboxes/" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost",
    ],
    ids=["one long field", "many fields", "too many fields", "long path"],
)
async def test_a_large_head(served: Served, head: bytes) -> None:
    reply = await served.raw(head + b"\r\n\r\n")
    assert (reply.status, reply.json["code"]) == (431, "headers_too_large")
    assert reply.headers["api-version"] == "1"


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET /version HTTP/9.9\r\n\r\n",
        b"GET /version HTTP/1.1\r\nno colon\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_what_is_not_http(served: Served, data: bytes) -> None:
    reply = await served.raw(data)
    assert (reply.status, reply.json["code"]) == (400, "invalid_body")
    assert len(reply.json["detail"]) <= 256
    assert (await served.ask("GET", "/healthz")).status == 200


async def test_a_body_that_arrives_too_slowly(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_TIME", 0.05)
    reply = await served.raw(f"PUT {C1} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17\r\n\r\n{{".encode())
    assert (reply.status, reply.json["code"], reply.json["retryable"]) == (408, "timeout", True)
    assert served.manager.calls == []


async def test_a_caller_that_does_not_read_its_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_TIME", 0.05)
    monkeypatch.setattr(served.manager, "sandboxes", lambda _: [SANDBOX] * 5000)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(served.path)
        caller.send(b"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n")
        state = select.poll()
        state.register(caller, 0)
        await until(lambda: any(event & select.POLLHUP for _, event in state.poll(0)))
    monkeypatch.undo()
    assert (await served.ask("GET", "/v1/sandboxes")).status == 200


async def test_a_body_of_which_the_caller_goes_away(served: Served) -> None:
    _, writer = await asyncio.open_unix_connection(served.path)
    writer.write(f"PUT {C1} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    assert (await served.ask("GET", "/healthz")).status == 200
    assert served.manager.calls == []


# What the manager says


async def test_a_problem_is_rendered_whole(served: Served) -> None:
    at = (At("/resources/cpu/quota", 'it is the text "1"'), At("/resources/cpu/period", "it is negative"))
    served.manager.raises = Problem(Code.INVALID_RESOURCES, 'cpu.quota is "1"; send\na number', at=at)
    reply = await served.ask("PUT", C1, '{"resources": {"cpu": {"quota": "1"}}}')
    assert reply.status == 422
    assert reply.json == {
        "type": "urn:kata-resmgr:error:invalid_resources",
        "title": "The resources cannot be understood",
        "status": 422,
        "detail": 'cpu.quota is "1"; send a number',
        "code": "invalid_resources",
        "retryable": False,
        "errors": [
            {"pointer": "/resources/cpu/quota", "detail": 'it is the text "1"'},
            {"pointer": "/resources/cpu/period", "detail": "it is negative"},
        ],
    }


async def test_retry_after(served: Served) -> None:
    served.manager.raises = Problem(Code.HELD, "s1 is held", retry_after=3)
    reply = await served.ask("POST", "/v1/sandboxes/s1/reconcile")
    assert (reply.status, reply.headers["retry-after"], reply.json["retryable"]) == (409, "3", True)
    served.manager.raises = Problem(Code.HYPERVISOR_UNREACHABLE, "it is lost", retryable=False)
    reply = await served.ask("POST", "/v1/sandboxes/s1/reconcile")
    assert (reply.status, reply.json["retryable"]) == (503, False)
    assert "retry-after" not in reply.headers


async def test_a_defect_is_told_as_one_and_nothing_of_it_leaks(served: Served) -> None:
    served.manager.raises = RuntimeError("secret")
    reply = await served.ask("GET", C1)
    assert (reply.status, reply.json["code"]) == (500, "internal")
    assert b"secret" not in reply.body
    served.manager.raises = None
    assert (await served.ask("GET", C1)).status == 200


async def test_nesting_that_only_the_core_cannot_take(served: Served) -> None:
    served.manager.raises = RecursionError()
    reply = await served.ask("PUT", C1, '{"resources": {}}')
    assert (reply.status, reply.json["code"]) == (400, "invalid_body")


# The life of an operation


async def test_a_caller_that_goes_away_does_not_stop_the_operation(served: Served) -> None:
    served.manager.gate = asyncio.Event()
    _, writer = await asyncio.open_unix_connection(served.path)
    writer.write(f"DELETE {C1} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await until(lambda: bool(served.manager.calls))
    writer.transport.abort()
    assert (await served.ask("GET", "/healthz")).status == 200
    served.manager.gate.set()
    await until(lambda: served.manager.finished == 1)


async def test_a_wait_ends_with_its_caller(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()
    waiting = asyncio.Event()

    async def wait_for(*_: object) -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(served.manager, "wait_for", wait_for)
    _, writer = await asyncio.open_unix_connection(served.path)
    writer.write(b"GET /v1/sandboxes/s1?wait=1h&for=satisfied HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(10):
        await waiting.wait()
        writer.close()
        await ended.wait()
    assert (await served.ask("GET", "/healthz")).status == 200


async def test_stopping_waits_for_operations_and_refuses_new_ones(served: Served) -> None:
    served.manager.gate = asyncio.Event()
    idle_reader, idle = await asyncio.open_unix_connection(served.path)
    idle.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await read_reply(idle_reader)).status == 200
    running = asyncio.create_task(served.ask("DELETE", C1))
    looking = asyncio.create_task(served.ask("GET", "/v1/sandboxes/s1?wait=1h&for=converged"))
    await until(lambda: len(served.manager.calls) == 2)
    stopping = asyncio.create_task(served.api.stop(10))
    assert (await looking).json["id"] == SANDBOX.id  # it is told what is, and holds nothing up
    idle.write(f"DELETE {C1} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    refused = await read_reply(idle_reader)
    assert (refused.status, refused.json["code"], refused.headers["retry-after"]) == (503, "shutting_down", "1")
    idle.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    ready = await read_reply(idle_reader)
    assert (ready.status, ready.json) == (503, {"ok": False, "reasons": ["the daemon is stopping"]})
    assert not stopping.done()
    served.manager.gate.set()
    assert (await running).status == 204
    async with asyncio.timeout(10):
        await stopping
        assert await idle_reader.read() == b""
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(served.path)


async def test_stopping_does_not_wait_for_ever(served: Served) -> None:
    served.manager.gate = asyncio.Event()
    running = asyncio.create_task(served.ask("DELETE", C1))
    await until(lambda: bool(served.manager.calls))
    async with asyncio.timeout(10):
        await served.api.stop(0.05)
        with pytest.raises(asyncio.IncompleteReadError):
            await running
