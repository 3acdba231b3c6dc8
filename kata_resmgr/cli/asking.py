"""What the commands that ask the daemon share: its socket, their options, and how answers and failures are told."""

from __future__ import annotations

import argparse
import json
import os
import sys

from kata_resmgr.cli import client

TYPE_CHECKING = False  # type checkers take it for true; importing typing would cost a command a tenth of its time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

DEFAULT_SOCKET = "/run/kata-resmgr/api.sock"
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_UNITS = (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0))


def has_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print what the daemon answers, as it is")


def has_patience(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", metavar="TIME", help="how long the answer may be held back (5s, 500ms)")
    parser.add_argument("--deadline", metavar="TIME", help="how long the whole operation may take")


def ask(
    arguments: argparse.Namespace,
    method: str,
    *path: str,
    body: Any = None,  # noqa: ANN401 - what JSON can hold
    query: dict[str, str] | None = None,
    show: Callable[[Any], None] | None = None,
) -> int:
    """Ask, print the answer by *show* (or as it came, with ``--json``), and return the exit status."""
    target = "/v1/" + "/".join(quoted(part) for part in path)
    times = {name: value for name in ("wait", "deadline") if (value := getattr(arguments, name, None)) is not None}
    if asked := {**(query or {}), **times}:
        target += "?" + "&".join(f"{name}={quoted(value)}" for name, value in asked.items())
    data = None if body is None else json.dumps(body).encode()
    operation = max((_seconds(value) for value in times.values()), default=None)
    as_json = getattr(arguments, "json", False)
    try:
        reply = client.call(socket_of(arguments), method, target, data, operation=operation)
    except client.Unreachable as error:
        return tell_unreachable(error, as_json)
    if as_json and reply.body:
        sys.stdout.write(reply.body.decode() + "\n")
    if reply.status >= 400:
        return tell_refused(reply)
    if show is not None and not as_json:
        show(json.loads(reply.body))
    return 0


def socket_of(arguments: argparse.Namespace) -> str:
    """Where the daemon is asked."""
    return arguments.socket or os.environ.get("KATA_RESMGR_SOCKET") or DEFAULT_SOCKET


def tell_unreachable(error: client.Unreachable, as_json: bool) -> int:
    """There is no answer; the exit status."""
    if as_json:
        print(json.dumps({"code": "daemon_unreachable", "detail": str(error), "retryable": True}))
    print(f"kata-resmgr: {error}", file=sys.stderr)
    return 1


def tell_refused(reply: client.Reply) -> int:
    """The daemon said no; the exit status."""
    print(f"kata-resmgr: {_reason(reply)}", file=sys.stderr)
    return 1


def _reason(reply: client.Reply) -> str:
    try:
        problem = json.loads(reply.body)
        return f"{problem['detail']} ({problem['code']})"
    except (ValueError, KeyError, TypeError):
        return f"the daemon answered with status {reply.status} and no reason"


def quoted(text: str) -> str:
    """*text* for a path or a query; what is no id is for the daemon to refuse, not for a URL to break on."""
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in os.fsencode(text))


def _seconds(text: str) -> float:
    """How long to wait for the answer; what is no duration is for the daemon to refuse."""
    for unit, seconds in _UNITS:
        if text.endswith(unit):
            try:
                return min(max(float(text.removesuffix(unit)) * seconds, 0.0), 3600.0)
            except ValueError:
                break
    return 0.0


def fail_usage(message: str) -> NoReturn:
    """End as argparse does for wrong usage."""
    print(f"kata-resmgr: {message}", file=sys.stderr)
    raise SystemExit(2)
