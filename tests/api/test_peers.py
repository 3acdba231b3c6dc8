"""Who may call, by the credentials that the kernel recorded, on a socket that is open to everybody."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest

from tests.api.api_harness import Served, serving

NOBODY = 65534
GROUP = 47110

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


async def ask_as(served: Served, uid: int, gid: int, groups: list[int]) -> tuple[int, str | None]:
    """The status and problem code that a process of that user gets for a DELETE."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(10)
                client.connect(served.path)
                client.sendall(b"DELETE /v1/sandboxes/s1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                while data := client.recv(65536):
                    theirs.sendall(data)
        finally:
            os._exit(0)
    theirs.close()
    ours.setblocking(False)
    received = b""
    async with asyncio.timeout(20):
        while data := await asyncio.get_running_loop().sock_recv(ours, 65536):
            received += data
    ours.close()
    os.waitpid(child, 0)  # noqa: ASYNC222 - it has closed its end, and ends
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["code"] if body else None


@pytest.mark.parametrize(
    ("allowed", "uid", "gid", "groups", "expected"),
    [
        (None, 0, 0, [], (204, None)),
        (None, NOBODY, NOBODY, [], (403, "forbidden")),
        (None, NOBODY, 0, [0], (403, "forbidden")),
        (GROUP, NOBODY, NOBODY, [], (403, "forbidden")),
        (GROUP, NOBODY, NOBODY, [GROUP + 1], (403, "forbidden")),
        (GROUP, NOBODY, GROUP, [], (204, None)),
        (GROUP, NOBODY, NOBODY, [1, GROUP], (204, None)),
        (GROUP, NOBODY, NOBODY, list(range(100_000, 100_300)), (403, "forbidden")),
    ],
)
async def test_who_may_call(
    allowed: int | None, uid: int, gid: int, groups: list[int], expected: tuple[int, str | None]
) -> None:
    async with serving(group=allowed, mode=0o666) as served:
        assert await ask_as(served, uid, gid, groups) == expected
        assert bool(served.manager.calls) == (expected[0] == 204)
