"""``disk``, ``net``, ``limits``: devices of a sandbox's VM, and how fast they may be."""

from __future__ import annotations

import argparse
import json
import sys

from kata_resmgr.cli.asking import ask, fail_usage, has_json, has_patience
from kata_resmgr.cli.telling import tell_device

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from typing import Any

_LIMITS = (
    ("--bytes-per-second", "bytesPerSecond"),
    ("--burst-bytes", "burstBytes"),
    ("--ops-per-second", "opsPerSecond"),
    ("--burst-ops", "burstOps"),
)


def disk(parser: argparse.ArgumentParser) -> None:
    _has_actions(parser, "disks")


def net(parser: argparse.ArgumentParser) -> None:
    _has_actions(parser, "nets")


def limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("device", metavar="DID")
    parser.add_argument("--net", action="store_true", help="it is a net device; else a disk")
    parser.add_argument("--replace", action="store_true", help="take it out and add it again, which the guest sees")
    _has_limits(parser)
    parser.add_argument("--deadline", metavar="TIME", help="how long the whole operation may take")
    has_json(parser)
    parser.set_defaults(run=_limit)


def _has_actions(parser: argparse.ArgumentParser, kind: str) -> None:
    actions = parser.add_subparsers(dest="action", metavar="add|remove", required=True)
    add = actions.add_parser("add", help="add it, with its limits")
    add.add_argument("id", metavar="ID")
    add.add_argument("device", metavar="DID")
    add.add_argument("--config", metavar="FILE", required=True, help="the VMM's object for it, as JSON; - is stdin")
    _has_limits(add)
    add.add_argument("--no-limits", action="store_true", help="none, whatever the configuration says")
    if kind == "disks":
        add.add_argument("--group", metavar="NAME", help="share the limits of this group")
    add.add_argument("--deadline", metavar="TIME", help="how long the whole operation may take")
    has_json(add)
    add.set_defaults(run=lambda given: _add(given, kind))
    remove = actions.add_parser("remove", help="take it out")
    remove.add_argument("id", metavar="ID")
    remove.add_argument("device", metavar="DID")
    has_patience(remove)
    has_json(remove)
    remove.set_defaults(run=lambda given: ask(given, "DELETE", "sandboxes", given.id, kind, given.device))


def _has_limits(parser: argparse.ArgumentParser) -> None:
    for option, name in _LIMITS:
        parser.add_argument(option, dest=name, metavar="N", type=int)


def _limits(given: argparse.Namespace) -> dict[str, int]:
    return {name: value for _, name in _LIMITS if (value := getattr(given, name)) is not None}


def _add(given: argparse.Namespace, kind: str) -> int:
    asked = _limits(given)
    if asked and given.no_limits:
        fail_usage("--no-limits contradicts the limits that are given: leave one of them out")
    body: dict[str, Any] = {"config": _read(given.config)}
    if asked or given.no_limits:
        body["limits"] = asked
    if getattr(given, "group", None) is not None:
        body["group"] = given.group
    return ask(given, "PUT", "sandboxes", given.id, kind, given.device, body=body, show=tell_device)


def _limit(given: argparse.Namespace) -> int:
    body = {**_limits(given), **({"replace": True} if given.replace else {})}
    kind = "nets" if given.net else "disks"
    return ask(given, "PUT", "sandboxes", given.id, kind, given.device, "limits", body=body, show=tell_device)


def _read(name: str) -> Any:  # noqa: ANN401 - what JSON can hold
    try:
        if name == "-":
            return json.load(sys.stdin)
        with open(name) as file:  # noqa: PTH123 - pathlib would cost a tenth of the start
            return json.load(file)
    except OSError as error:
        fail_usage(f"{name}: {error.strerror}")
    except ValueError as error:
        fail_usage(f"{name} is not JSON: {error}")
