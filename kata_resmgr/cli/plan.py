"""``plan``: the dry run, without a daemon."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kata_resmgr.cli.telling import boot_line, mib

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from typing import Any

    from kata_resmgr.plan import Planned

_REQUEST_LIMIT = 1 << 20
"""Bytes, as the daemon's."""
_WIDE = 400
"""Columns where nobody looks at a terminal: enough for the longest id and what is said of a step."""


def plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="a Plan request, JSON; - or nothing: standard input"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="else /etc/kata-resmgr/config.toml, if it is there")
    parser.add_argument("--json", action="store_true", help="print the plan as POST /v1/plan answers it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import msgspec

    from kata_resmgr.api.problems import ProblemBody
    from kata_resmgr.config import ConfigError
    from kata_resmgr.problem import Code, Problem

    try:
        answer = _plan(arguments.file, arguments.config)
    except (Problem, ConfigError) as error:
        problem = error if isinstance(error, Problem) else Problem(Code.INVALID_CONFIG, str(error))
        if arguments.json:
            print(msgspec.json.encode(ProblemBody.of(problem)).decode())
        told = f"{error} ({error.code.text})" if isinstance(error, Problem) else str(error)
        print(f"kata-resmgr: {told}", file=sys.stderr)
        return 1
    text = msgspec.json.encode(answer)
    if arguments.json:
        print(text.decode())
    else:
        _tell(msgspec.json.decode(text))
    return 0


def _plan(file: str, config_file: Path | None) -> Planned:
    """Raises :class:`Problem` or :class:`ConfigError`."""
    import msgspec

    from kata_resmgr import config
    from kata_resmgr.api.bodies import PlanBody, read_body, read_plan
    from kata_resmgr.plan import dry_run
    from kata_resmgr.problem import Code, Problem

    try:
        if file == "-":
            text = sys.stdin.buffer.read(_REQUEST_LIMIT + 1)
        else:
            with Path(file).open("rb") as opened:
                text = opened.read(_REQUEST_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Problem(Code.INVALID_BODY, f"{file}: {reason}; name a file with a Plan request") from None
    if len(text) > _REQUEST_LIMIT:
        raise Problem(Code.TOO_LARGE, f"a Plan request has at most {_REQUEST_LIMIT} bytes; plan fewer steps at once")
    request = read_plan(read_body(msgspec.json.Decoder(PlanBody), text))
    return dry_run(config.load(config_file), request)


def _tell(answer: dict[str, Any]) -> None:
    """The sizes as a table, what goes with all of them, and how the last one comes about."""
    print(f"{answer['mode']}: {boot_line(answer['boot'])}")
    for condition in answer["conditions"]:
        print(_condition(condition))
    if answer["steps"]:
        _tell_steps(answer["steps"])
    for device in ("disk", "net"):
        if (limiter := answer["limiters"][device]) is not None:
            print(f"each {device}: {_limiter(limiter)}")
    weight = answer["weight"]
    if weight["cpuWeight"] is not None:
        print(f"CPU weight {weight['cpuWeight']} ({weight['shares']} shares)")
    print()
    for line in answer["explain"]:
        print(line)


def _tell_steps(steps: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("STEP", no_wrap=True)
    for column in ("EXACT", "VCPUS", "MEMORY"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column()
    for step in steps:
        error = step["error"]
        remarks = [] if error is None else [f"refused: {error['detail']} ({error['code']})"]
        remarks += map(_condition, step["conditions"])
        table.add_row(
            " ".join((step["op"], step.get("container", "the sandbox"))),
            step["vcpus"]["exact"],
            str(step["vcpus"]["desired"]),
            mib(step["memory"]["desired"]),
            "; ".join(remarks),
        )
    sys.stdout.flush()
    width = None if sys.stdout.isatty() else _WIDE
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)


def _condition(condition: dict[str, Any]) -> str:
    return f"{condition['type']} ({condition['reason']}): {condition['message']}"


def _limiter(limiter: dict[str, Any]) -> str:
    effective = limiter["effective"] or {}
    told = []
    for name, unit, rate in (("bandwidth", "bytes", "bytesPerSecond"), ("ops", "operations", "opsPerSecond")):
        if (bucket := limiter[name]) is not None:
            burst = bucket.get("one_time_burst")
            first = "" if burst is None else f", {burst} more once"
            really = f", really {effective[rate]} a second" if rate in effective else ""
            told.append(f"{bucket['size']} {unit} per {bucket['refill_time']} ms{first}{really}")
    return "; ".join(told)
