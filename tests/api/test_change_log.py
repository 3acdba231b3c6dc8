"""What the log tells of requests: changes, each with who asked and what it concerns, and nothing of what only looks."""

from __future__ import annotations

import os

from structlog.testing import capture_logs

from kata_resmgr.problem import Code, Problem
from tests.api.api_harness import serving, until


async def test_changes_are_told_and_what_only_looks_is_not() -> None:
    with capture_logs() as records:
        async with serving() as served:
            await served.ask("POST", "/v1/plan", "{}")
            await served.ask("GET", "/v1/sandboxes/s1")
            await served.ask("PUT", "/v1/sandboxes/s1/containers/c1?wait=1s", '{"resources": {}}')
            served.manager.raises = Problem(Code.HELD, "held")
            await served.ask("POST", "/v1/sandboxes/s1/reconcile")
            await until(lambda: len(records) == 2)
    created, refused = records
    assert {**created, "ms": 0, "pid": 0} == {
        "event": "change", "log_level": "info", "method": "PUT", "path": "/v1/sandboxes/s1/containers/c1?wait=1s",
        "sandbox": "s1", "container": "c1", "status": 200, "code": None, "pid": 0, "uid": os.geteuid(), "ms": 0,
    }  # fmt: skip
    assert (refused["sandbox"], refused["status"], refused["code"]) == ("s1", 409, "held")
    assert "container" not in refused
