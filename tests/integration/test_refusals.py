"""What a caller may do wrong, against the real daemon on an inherited socket that is open to everybody.

Each gets its problem, none is a 5xx, and none changes anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon

NOBODY = 65534
SANDBOX = "/v1/sandboxes/s1"
CONTAINER = f"{SANDBOX}/containers/c1"


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[Daemon]:
    path = short_tmp / "api.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        short_tmp.chmod(0o755)
        listener.listen(16)
        with Daemon(short_tmp, "[resmgr]\nhost_cpus = 8\n", inherit=listener) as daemon:
            yield daemon


def raw(daemon: Daemon, request: bytes, uid: int = 0) -> tuple[int, dict[str, Any]]:
    """Status and problem that *request* gets, sent by a process of *uid*."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(20)
                client.connect(str(daemon.socket))
                with contextlib.suppress(OSError):  # it may answer before it has all
                    client.sendall(request)
                while data := client.recv(65536):
                    theirs.sendall(data)
        finally:
            os._exit(0)
    theirs.close()
    answer = b""
    while data := ours.recv(65536):
        answer += data
    ours.close()
    os.waitpid(child, 0)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    return int(head.split()[1]), json.loads(body)


def put(path: str, body: bytes, kind: str = "application/json") -> bytes:
    return (
        f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def quota(text: str) -> bytes:
    return b'{"resources": {"cpu": {"quota": %s, "period": 100000}}}' % text.encode()


QUOTA = "/resources/cpu/quota"
BIG = b'{"resources": {"padding": "' + b"x" * (2 << 20) + b'"}}'


@pytest.mark.parametrize(
    ("request_", "status", "code", "pointer"),
    [
        pytest.param(put(CONTAINER, b"{not json"), 400, "invalid_body", "", id="not JSON"),
        pytest.param(put(CONTAINER, quota('"1"')), 422, "invalid_resources", QUOTA, id="quota is text"),
        pytest.param(put(CONTAINER, quota("100000.0")), 422, "invalid_resources", QUOTA, id="fraction"),
        pytest.param(put(CONTAINER, quota("1e30")), 422, "invalid_resources", QUOTA, id="exponent"),
        pytest.param(put(CONTAINER, quota("9" * 20)), 422, "invalid_resources", QUOTA, id="65 bits"),
        pytest.param(put(f"{SANDBOX}/containers/a%2Fb", quota("1")), 400, "invalid_id", None, id="slash in the id"),
        pytest.param(put(f"{SANDBOX}/containers/a/b", quota("1")), 404, "not_found", None, id="a path too long"),
        pytest.param(put(CONTAINER, BIG), 413, "too_large", None, id="2 MiB"),
        pytest.param(put("/v1/sandboxes/s2/containers/c1", quota("1")), 404, "not_found", None, id="unknown sandbox"),
        pytest.param(put(CONTAINER, b'{"resources": {}, "x": 1}'), 400, "invalid_body", "/x", id="unknown member"),
        pytest.param(put(CONTAINER, quota("1"), "text/plain"), 415, "unsupported_type", None, id="another type"),
        pytest.param(put(f"{CONTAINER}?wait=soon", quota("1")), 400, "invalid_query", None, id="no duration"),
    ],
)
def test_what_is_wrong_is_told_and_changes_nothing(
    daemon: Daemon, request_: bytes, status: int, code: str, pointer: str | None
) -> None:
    caller = daemon.caller()
    caller.ok("PUT", SANDBOX, {})
    caller.ok("PUT", CONTAINER, {"resources": {"cpu": {"quota": 150000}}})
    before = caller.ok("GET", f"{SANDBOX}?view=full")
    answered, problem = raw(daemon, request_)
    assert (answered, problem["code"], problem["type"]) == (status, code, f"urn:kata-resmgr:error:{code}")
    assert len(problem["detail"]) <= 256
    if pointer is not None:
        assert [error["pointer"] for error in problem["errors"]] == [pointer]
    assert caller.ok("GET", f"{SANDBOX}?view=full") == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_caller_who_may_not(daemon: Daemon) -> None:
    caller = daemon.caller()
    caller.ok("PUT", SANDBOX, {})
    before = caller.ok("GET", SANDBOX)
    status, problem = raw(daemon, put(CONTAINER, quota("1")), NOBODY)
    assert (status, problem["code"]) == (403, "forbidden")
    assert f"uid {NOBODY}" in problem["detail"]
    assert caller.ok("GET", SANDBOX) == before
