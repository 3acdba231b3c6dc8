"""``serve``: the daemon."""

from __future__ import annotations

import argparse
from pathlib import Path


def serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, help="else /etc/kata-resmgr/config.toml, if it is there")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from kata_resmgr import service

    return service.serve(arguments.config)
