"""Mutated HTTP messages, thrown at a real daemon: ``python -m tests.fuzz.raw [--messages N] [--seed S]``.

Each message is one or two good requests of every kind, bent in its body or as a whole: bytes changed, pieces cut,
doubled, swapped, and things put in that parsers trip over. After each one the caller ceases to ask and reads all
answers to their end. Every answer must be one that API.md gives, whole and well-formed; what was refused must have left
the state as it was; nothing may hang; and the daemon must be as large as before, with as many descriptors. Ends with 1
where one of these does not hold.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from kata_resmgr.problem import Code
from tests.daemon import Caller, Daemon, until

PATIENCE: Final = 10.0
"""Seconds for all answers to one message; the slowest good one asks to wait 20 ms, a bent one perhaps for 20 m."""
GROWTH: Final = 16 << 20
"""Bytes that the daemon may grow by, from the first tenth of the messages to the last."""
SANDBOXES: Final = ("s1", "s2")
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [ A-Za-z'-]+\r\n")
SUCCESSES: Final = {100, 200, 201, 202, 204}
PROBLEMS: Final = {code.text: code.status for code in Code if code is not Code.INTERNAL}

BODIES: Final = (
    b'{"resources": {"cpu": {"quota": 150000, "period": 100000, "cpus": "0-3,7"}, "memory": {"limit": 1048576}}}',
    b'{"resources": {"hugepageLimits": [{"pageSize": "2MB", "limit": 4194304}], "unified": {"x": "y"}}}',
    b'{"annotations": {"io.kubernetes.cri.sandbox-cpu-quota": "220000"}, "resources": {}}',
    b'{"containers": {"c1": {"resources": {}}, "c2": {"resources": {"cpu": {"shares": 512}}}}}',
    b'{"steps": [{"op": "create", "container": "a", "resources": {"cpu": {"quota": 1000}}}]}',
    b'{"socket": "/run/vc/vm/s1/resmgr.sock", "pid": 4242, "memoryBlockBytes": 134217728}',
    b"{}",
)
TARGETS: Final = (
    *(("GET", path) for path in ("/version", "/healthz", "/readyz", "/v1/sandboxes", "/v1/sandboxes?phase=sized")),
    ("POST", "/v1/plan"),
    ("GET", "/v1/sandboxes/s1?wait=20ms&for=satisfied&view=full"),
    ("PUT", "/v1/sandboxes/s2"),
    ("PATCH", "/v1/sandboxes/s1?wait=1ms&deadline=1s"),
    ("GET", "/v1/sandboxes/s1/explain"),
    ("PUT", "/v1/sandboxes/s1/vm"),
    ("PUT", "/v1/sandboxes/s1/hold"),
    ("DELETE", "/v1/sandboxes/s1/hold"),
    ("POST", "/v1/sandboxes/s1/reconcile?wait=1ms"),
    ("PUT", "/v1/sandboxes/s1/containers"),
    *((method, "/v1/sandboxes/s1/containers/c1") for method in ("GET", "PUT", "PATCH", "DELETE")),
)
TRIPS: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"%2F", b"%00", b"%", b"?", b"&", b"#", b"..", b"/", b"//"),
    *(
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[" * 2000,
        b"null",
        b"-1",
        b"1e999",
        b"NaN",
        b"0.5",
        b"9" * 400,
        b"18446744073709551616",
    ),
    *(b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x92\xa9", b"\\ud800", b"\\u0000", b"A" * 20000, b"-"),
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity, chunked\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 2000000\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: the unexpected\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Type: text/plain\r\n",
    b"X: " + b"y" * 17000 + b"\r\n",
    b"1\r\n{\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n",
)


def message(dice: random.Random) -> bytes:
    """One or two requests; about one in ten is left as it is."""
    text = b"".join(_request(dice) for _ in range(dice.choice((1, 1, 1, 2))))
    for _ in range(dice.choice((0, 0, 0, 1, 1, 2, 4))):
        text = _bent(dice, text)
    return text


def _request(dice: random.Random) -> bytes:
    method, target = dice.choice(TARGETS)
    body = dice.choice(BODIES) if method in ("PUT", "PATCH", "POST") else b""
    if body and dice.random() < 0.7:
        body = _bent(dice, body)
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
    if body and dice.random() < 0.2:
        lines.append("Transfer-Encoding: chunked")
        cut = dice.randrange(len(body)) + 1
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part) + b"0\r\n\r\n"
    elif body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _bent(dice: random.Random, text: bytes) -> bytes:
    start, end = sorted((dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)))
    end = min(end, start + dice.choice((1, 4, 40, 400)))
    match dice.randrange(7):
        case 0:
            return text[:start] + bytes([dice.randrange(256)]) + text[start + 1 :]
        case 1:
            return text[:start] + text[end:]
        case 2:
            return text[:end] + text[start:end] * dice.choice((1, 2, 50)) + text[end:]
        case 3:
            return text[:start] or text
        case 4:
            return text[:start] + _request(dice) + text[start:]
        case 5:
            lines = text.split(b"\r\n")
            lines.insert(dice.randrange(len(lines) + 1), dice.choice(TRIPS).removesuffix(b"\r\n"))
            return b"\r\n".join(lines)
        case _:
            return text[:start] + dice.choice(TRIPS) + text[start:]


class Malformed(AssertionError):
    """An answer that is not as API.md says."""


def answers(text: bytes) -> list[tuple[int, str | None]]:
    """Status and problem code of each answer in *text*, which ends with the connection."""
    found: list[tuple[int, str | None]] = []
    while text:
        line = STATUS.match(text)
        if line is None:
            raise Malformed(f"no status line: {text[:100]!r}")
        head, separator, text = text.partition(b"\r\n\r\n")
        if not separator:
            raise Malformed(f"a head without end: {head[:200]!r}")
        headers = dict(field.split(b": ", 1) for field in head.split(b"\r\n")[1:])
        status = int(line[1])
        if status == 100:
            continue
        if headers.get(b"Api-Version") != b"1":
            raise Malformed(f"no Api-Version: {head!r}")
        length = int(headers.get(b"Content-Length", b"0"))
        body, text = text[:length], text[length:]
        if len(body) < length:
            raise Malformed(f"a body that was cut: {head!r}")
        found.append((status, _code(status, headers, body)))
    return found


def _code(status: int, headers: dict[bytes, bytes], body: bytes) -> str | None:
    value: Any = json.loads(body) if body else None
    if status in SUCCESSES:
        return None
    if headers[b"Content-Type"] != b"application/problem+json":
        raise Malformed(f"{status} without a problem: {body[:200]!r}")
    if PROBLEMS.get(value["code"]) != status or len(value["detail"]) > 256 or "\n" in value["detail"]:
        raise Malformed(f"{status} is not what API.md gives: {value}")
    return str(value["code"])


def exchange(path: Path, text: bytes) -> bytes:
    """Send *text*, cease to ask, and read until the end. Raises :class:`TimeoutError`."""
    received = bytearray()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(path))
        try:
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered, and does not listen any more
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass  # with something of ours unread; what was answered has been read before
    return bytes(received)


def main() -> int:
    options = argparse.ArgumentParser(prog="tests.fuzz.raw", description=__doc__.split("\n", 1)[0] if __doc__ else "")
    options.add_argument("--messages", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp") as name, Daemon(Path(name)) as daemon:
        failures = throw(daemon, chosen.messages, chosen.seed)
    for line in failures:
        print(line)
    return 1 if failures else 0


def throw(daemon: Daemon, messages: int, seed: int) -> list[str]:
    """Throw them, print what came, and return what should not have."""
    caller = daemon.caller()
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    baseline = 0
    for number in range(messages):
        if number == messages // 10:
            baseline = resident(daemon)
        present(caller)
        before = state(caller)
        text = message(random.Random(f"{seed} {number}"))
        try:
            found = answers(exchange(daemon.socket, text))
        except (Malformed, ValueError, KeyError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and b"wait=" in text:
                counts["waits"] += 1  # up to an hour, as it was asked to
                continue
            failures.append(f"message {number} of seed {seed}: {error!r}: {text[:300]!r}")
            continue
        counts.update(code or str(status) for status, code in found)
        counts["no answer"] += not found
        if all(status >= 400 for status, _ in found) and found and state(caller) != before:
            failures.append(f"message {number} of seed {seed}: refused, and the state changed: {text[:300]!r}")
    growth = resident(daemon) - baseline
    print(f"{messages} mutated messages, seed {seed}: {dict(counts.most_common())}")
    print(f"the daemon grew by {growth >> 10} KiB since the first tenth (at most {GROWTH >> 10})")
    if growth > GROWTH:
        failures.append(f"the daemon grew by {growth} bytes, at most {GROWTH}")
    caller.close()
    until(lambda: descriptors(daemon) <= BARE_DESCRIPTORS, "all descriptors are closed")
    return failures


BARE_DESCRIPTORS: Final = 24
"""More than a daemon without connections and VMs holds, and less than would be left of a leak."""


def present(caller: Caller) -> None:
    for sandbox in SANDBOXES:
        caller.call("PUT", f"/v1/sandboxes/{sandbox}", {})


def state(caller: Caller) -> Any:  # noqa: ANN401 - JSON
    return [caller.call("GET", "/v1/sandboxes")[1]] + [
        caller.call("GET", f"/v1/sandboxes/{sandbox}?view=full")[1] for sandbox in SANDBOXES
    ]


def resident(daemon: Daemon) -> int:
    """Bytes of memory that the daemon holds."""
    return int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]) * 4096


def descriptors(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


if __name__ == "__main__":
    sys.exit(main())
