"""RES: the options that stand for an OCI ``linux.resources`` object."""

from __future__ import annotations

import argparse
import json
import re
from math import gcd

from kata_resmgr.cli.asking import fail_usage

TYPE_CHECKING = False  # type checkers take it for true; see asking
if TYPE_CHECKING:
    from typing import Any

_PERIOD = 100_000
_LONGEST_PERIOD = 1_000_000
"""Microseconds; the kernel takes no longer one."""
_BUNDLE_LIMIT = 16 << 20
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def has_resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpus", metavar="N", type=_cpus, help="CPUs, such as 1.5; -1: no limit")
    parser.add_argument("--memory", metavar="SIZE", type=_memory, help="memory, such as 512M or 2G; -1: no limit")
    parser.add_argument("--cpuset", metavar="LIST", help="CPUs to run on, such as 0-3,7")
    parser.add_argument("--shares", metavar="N", type=int, help="CPU shares")
    parser.add_argument("--bundle", metavar="DIR", help="take linux.resources from DIR/config.json instead")


def resources(arguments: argparse.Namespace) -> dict[str, Any]:
    """The object that the options stand for."""
    cpu: dict[str, Any] = dict(arguments.cpus or {})
    if arguments.cpuset is not None:
        cpu["cpus"] = arguments.cpuset
    if arguments.shares is not None:
        cpu["shares"] = arguments.shares
    named: dict[str, Any] = {"cpu": cpu} if cpu else {}
    if arguments.memory is not None:
        named["memory"] = {"limit": arguments.memory}
    if arguments.bundle is None:
        return named
    if named:
        fail_usage("--bundle stands alone: leave out --cpus, --memory, --cpuset and --shares")
    return _of_bundle(arguments.bundle)


def _of_bundle(bundle: str) -> dict[str, Any]:
    from pathlib import Path

    file = Path(bundle, "config.json")
    try:
        with file.open("rb") as opened:
            data = opened.read(_BUNDLE_LIMIT + 1)
        if len(data) > _BUNDLE_LIMIT:
            fail_usage(f"{file} is larger than {_BUNDLE_LIMIT >> 20} MiB, which no bundle's is")
        found = (json.loads(data).get("linux") or {}).get("resources") or {}
    except OSError as error:
        fail_usage(f"{file}: {error.strerror}; name a bundle directory")
    except (ValueError, AttributeError, RecursionError):
        fail_usage(f"{file} is no OCI runtime configuration")
    if not isinstance(found, dict):
        fail_usage(f"{file}: linux.resources is no object")
    return found


def _cpus(text: str) -> dict[str, int]:
    """A quota and a period whose ratio is exactly what *text* says."""
    if text == "-1":
        return {"quota": -1}
    match = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a decimal number such as 1.5, or -1")
    fraction = match[2] or ""
    quota, period = int(match[1] + fraction), 10 ** len(fraction)
    if quota == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0; -1 lifts the limit")
    divisor = gcd(quota, period)
    quota, period = quota // divisor, period // divisor
    if period > _LONGEST_PERIOD:
        raise argparse.ArgumentTypeError(f"{text!r}: no period of at most 1 s gives exactly this; use fewer decimals")
    times = max(_PERIOD // period, 1)
    return {"quota": quota * times, "period": period * times}


def _memory(text: str) -> int:
    """Bytes; units are powers of 1024."""
    if text == "-1":
        return -1
    match = re.fullmatch(r"([0-9]{1,18})([KMGT]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a size such as 512M or 2G, or -1")
    return int(match[1]) << (10 * _POWERS[match[2].upper()])
