"""``check-config``: every effective value and where it comes from, without a daemon."""

from __future__ import annotations

import argparse
import json
import sys
from fractions import Fraction
from pathlib import Path

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kata_resmgr.config import Settings
    from kata_resmgr.config_check import Effective, Value

_COLUMN = 46
"""Where the origins stand; longer values push theirs to the right."""


def check_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", type=Path, help="else /etc/kata-resmgr/config.toml, if it is there"
    )
    parser.add_argument("--json", action="store_true", help="print values, origins and warnings as JSON")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from kata_resmgr import config, config_check

    try:
        settings = config.load(arguments.file)
    except config.ConfigError as error:
        if arguments.json:
            print(json.dumps({"code": "invalid_config", "detail": str(error), "retryable": False}))
        print(f"kata-resmgr: {error}", file=sys.stderr)
        return 1
    values = list(config_check.effective_values(settings))
    warnings = list(config_check.likely_mistakes(settings))
    if arguments.json:
        print(json.dumps(_as_json(settings, values, warnings), indent=2))
        return 0
    _tell(settings, values)
    sys.stdout.flush()  # before the warnings, where both go to one place
    for warning in warnings:
        print(f"kata-resmgr: warning: {warning}", file=sys.stderr)
    return 0


def _as_json(settings: Settings, values: Sequence[Effective], warnings: Sequence[str]) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {}
    for value in values:
        told: dict[str, Any] = {"value": _json_value(value.value), "origin": value.origin}
        if value.setting is not None:
            told |= {"file": str(value.setting.file), "line": value.setting.line}
        tables.setdefault(value.table, {})[value.key] = told
    return {
        "files": [str(file) for file in settings.layers.files],
        "hypervisor": settings.for_sandbox().hypervisor,
        "tables": tables,
        "warnings": list(warnings),
    }


def _json_value(value: Value) -> Any:  # noqa: ANN401 - what JSON can hold
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return list(value) if isinstance(value, tuple) else value


def _tell(settings: Settings, values: Sequence[Effective]) -> None:
    """As TOML, with the origins as comments."""
    from kata_resmgr.config_table import plain

    print("\n".join(f"# {plain(str(file))}" for file in settings.layers.files) or "# no file: the defaults hold")
    table = None
    for value in values:
        if value.table != table:
            table = value.table
            print(f"\n[{table}]")
        setting = f"# {value.key} is unset" if value.value is None else f"{value.key} = {_toml_value(value.value)}"
        print(f"{setting:<{_COLUMN}}  # {value.origin}")


def _toml_value(value: Value) -> str:
    from kata_resmgr.exact import decimal_text

    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Fraction):
        return decimal_text(value)
    text = json.dumps(value, ensure_ascii=False)  # TOML writes text, numbers and truth as JSON does,
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in text)  # but escapes the rest otherwise
