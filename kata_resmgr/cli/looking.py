"""``show`` and ``explain``: one sandbox."""

from __future__ import annotations

import argparse

from kata_resmgr.cli.asking import ask, has_json
from kata_resmgr.cli.telling import tell_explanation, tell_sandbox


def show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    has_json(parser)
    parser.set_defaults(run=_show)


def _show(given: argparse.Namespace) -> int:
    return ask(given, "GET", "sandboxes", given.id, query={"view": "full"}, show=tell_sandbox)


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID")
    has_json(parser)
    parser.set_defaults(run=lambda given: ask(given, "GET", "sandboxes", given.id, "explain", show=tell_explanation))
