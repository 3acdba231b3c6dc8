"""``register``, ``attach``, ``detach``, ``hold``, ``reconcile``: the life of a sandbox."""

from __future__ import annotations

import argparse

from kata_resmgr.cli.asking import ask, has_json, has_patience
from kata_resmgr.cli.resources import has_resources, resources
from kata_resmgr.cli.telling import tell_boot, tell_size

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from typing import Any


def register(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--hypervisor", metavar="NAME", help="else as the configuration says")
    parser.add_argument(
        "--annotation", metavar="KEY=VALUE", action="append", default=[], type=_pair, help="may be repeated"
    )
    parser.add_argument("--directory", metavar="DIR", help="where the monitor's socket shall be")
    has_resources(parser)
    has_json(parser)
    parser.set_defaults(run=_register)


def _register(given: argparse.Namespace) -> int:
    body: dict[str, Any] = {"hypervisor": given.hypervisor, "directory": given.directory}
    body["annotations"] = dict(given.annotation) or None
    body["resources"] = resources(given) or None
    present = {name: value for name, value in body.items() if value is not None}
    return ask(given, "PUT", "sandboxes", given.id, body=present, show=tell_boot)


def attach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--vm-socket", metavar="PATH", help="the VM's monitor, else where the arguments put it")
    parser.add_argument("--pid", metavar="N", type=int, help="the VMM's process, checked against what the monitor says")
    has_json(parser)
    parser.set_defaults(run=_attach)


def _attach(given: argparse.Namespace) -> int:
    named = {"socket": given.vm_socket, "pid": given.pid}
    body = {name: value for name, value in named.items() if value is not None}
    return ask(given, "PUT", "sandboxes", given.id, "vm", body=body, show=tell_size)


def detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    has_json(parser)
    parser.set_defaults(run=lambda given: ask(given, "DELETE", "sandboxes", given.id, "vm"))


def hold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--release", action="store_true", help="end the hold: read back and converge")
    has_json(parser)
    parser.set_defaults(run=_hold)


def _hold(given: argparse.Namespace) -> int:
    if given.release:
        return ask(given, "DELETE", "sandboxes", given.id, "hold")
    return ask(given, "PUT", "sandboxes", given.id, "hold", show=tell_size)


def reconcile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    has_patience(parser)
    has_json(parser)
    parser.set_defaults(run=lambda given: ask(given, "POST", "sandboxes", given.id, "reconcile", show=tell_size))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE")
    return key, value
