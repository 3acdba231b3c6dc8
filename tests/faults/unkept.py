"""Daemons that are broken on purpose, to see the oracle catch them: ``python -m tests.faults.unkept HOW serve ...``.

- ``late``: answers come before what they tell is committed, by up to :data:`LATE` seconds;
- ``torn``: the statements of one change are committed one by one.
"""

from __future__ import annotations

import asyncio
import sys
import time

from kata_resmgr.cli import main
from kata_resmgr.sqlite_store import SqliteStore, Statement

LATE = 0.05
PAUSE = 0.005
"""Seconds between the commits of one change."""

_write = SqliteStore._write


def late(store: SqliteStore, *statements: Statement) -> None:
    try:
        asyncio.get_running_loop().call_later(LATE, _write, store, *statements)  # in the order of these calls
    except RuntimeError:
        _write(store, *statements)


def torn(store: SqliteStore, *statements: Statement) -> None:
    for statement in statements:
        _write(store, statement)
        time.sleep(PAUSE)


if __name__ == "__main__":
    setattr(SqliteStore, "_write", {"late": late, "torn": torn}[sys.argv[1]])  # noqa: B010 - for the type checker
    sys.exit(main(sys.argv[2:]))
