"""``events``: what has happened to sandboxes, and with ``--follow`` what happens."""

from __future__ import annotations

import argparse
import json
import sys

from kata_resmgr.cli import client
from kata_resmgr.cli.asking import quoted, socket_of, tell_refused, tell_unreachable


def events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on with what happens, until the daemon ends")
    parser.add_argument("--since", metavar="SEQ", help="only what came after the event of that number")
    parser.add_argument("--sandbox", metavar="ID", help="only what concerns this sandbox")
    parser.add_argument("--json", action="store_true", help="print the events as they are, one a line")
    parser.set_defaults(run=_events)


def _events(arguments: argparse.Namespace) -> int:
    asked = {"since": arguments.since, "sandbox": arguments.sandbox, "follow": "true" if arguments.follow else None}
    query = "&".join(f"{name}={quoted(value)}" for name, value in asked.items() if value is not None)
    target = "/v1/events" + ("?" + query if query else "")
    last = arguments.since

    def tell(line: bytes) -> None:
        nonlocal last
        event = json.loads(line)
        last = event["seq"]
        print(line.decode() if arguments.json else _in_words(event), flush=arguments.follow)

    try:
        if arguments.follow:
            reply = client.follow(socket_of(arguments), target, tell)
        else:
            reply = client.call(socket_of(arguments), "GET", target)
    except client.Unreachable as error:
        return tell_unreachable(error, arguments.json)
    if reply.status >= 400:
        if arguments.json:
            print(reply.body.decode())
        return tell_refused(reply)
    if arguments.follow:
        more = "" if last is None else f"; go on with --since {last} when it is back"
        print(f"kata-resmgr: the daemon has ended{more}", file=sys.stderr)
        return 1
    for line in reply.body.splitlines():
        tell(line)
    return 0


def _in_words(event: dict[str, object]) -> str:
    """``time  seq  sandbox  type  name=value ...``."""
    data = event["data"]
    told = " ".join(f"{name}={json.dumps(value)}" for name, value in data.items()) if isinstance(data, dict) else ""
    return f"{event['time']}  {event['seq']}  {event['sandbox'] or '-'}  {event['type']}  {told}".rstrip()
