"""``create``, ``update``, ``delete``: a sandbox's containers."""

from __future__ import annotations

import argparse

from kata_resmgr.cli.asking import ask, fail_usage, has_json, has_patience
from kata_resmgr.cli.resources import has_resources, resources
from kata_resmgr.cli.telling import tell_result


def create(parser: argparse.ArgumentParser) -> None:
    _has_all(parser)
    parser.set_defaults(run=lambda given: _change(given, "PUT"))


def update(parser: argparse.ArgumentParser) -> None:
    _has_all(parser)
    parser.set_defaults(run=lambda given: _change(given, "PATCH"))


def delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("container", metavar="CID", nargs="?", help="only this container; else the whole sandbox")
    has_patience(parser)
    has_json(parser)
    parser.set_defaults(run=_delete)


def _has_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    parser.add_argument("container", metavar="CID")
    has_resources(parser)
    has_patience(parser)
    has_json(parser)


def _change(given: argparse.Namespace, method: str) -> int:
    body = {"resources": resources(given)}
    return ask(given, method, "sandboxes", given.id, "containers", given.container, body=body, show=tell_result)


def _delete(given: argparse.Namespace) -> int:
    if given.container is not None:
        return ask(given, "DELETE", "sandboxes", given.id, "containers", given.container)
    if given.wait is not None or given.deadline is not None:
        fail_usage("--wait and --deadline go with a container: a sandbox is forgotten at once")
    return ask(given, "DELETE", "sandboxes", given.id)
