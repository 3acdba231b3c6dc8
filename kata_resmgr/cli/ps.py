"""``ps``: a table of the sandboxes."""

from __future__ import annotations

import argparse
import sys

from kata_resmgr.cli.asking import ask, has_json
from kata_resmgr.cli.telling import mib

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from typing import Any

_WIDE = 240
"""Columns where nobody looks at a terminal: enough for the longest id."""


def ps(parser: argparse.ArgumentParser) -> None:
    has_json(parser)
    parser.set_defaults(run=lambda arguments: ask(arguments, "GET", "sandboxes", show=_tell))


def _tell(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("SANDBOX", "PHASE", "MODE"):
        table.add_column(column, no_wrap=True)
    for column in ("VCPUS", "DESIRED", "MEMORY", "DESIRED", "CONTAINERS"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("CONVERGED", no_wrap=True)
    for sandbox in answer["sandboxes"]:
        vcpus, memory = sandbox["vcpus"], sandbox["memory"]
        table.add_row(
            sandbox["id"],
            sandbox["phase"],
            sandbox["mode"],
            str(vcpus["plugged"]),
            str(vcpus["desired"]),
            mib(memory["plugged"]),
            mib(memory["desired"]),
            str(sandbox["counts"]["containers"]),
            "yes" if sandbox["converged"] else "no",
        )
    width = None if sys.stdout.isatty() else _WIDE
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)
