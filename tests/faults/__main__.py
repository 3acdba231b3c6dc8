"""``make faults``: the daemon is killed again and again, and two that are broken on purpose must be caught; 1 if not.

Each line that is printed tells what was counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.daemon import IN_MEMORY
from tests.faults.kills import Run, broken
from tests.faults.model import Wrong

CONTROL_KILLS = 100
"""A broken daemon has to be caught before so many."""


def killed(times: int) -> bool:
    """Whether the daemon kept its promises."""
    with tempfile.TemporaryDirectory(prefix="kr-", dir=IN_MEMORY) as name:
        run = Run(Path(name))
        began = time.monotonic()
        try:
            run.kill(times)
            verdict = "nothing answered was lost, nothing is half-applied, every sandbox satisfied, no slot leaked"
            sound = True
        except Wrong as wrong:
            verdict, sound = f"MISSED: {wrong}", False
        print(*run.total().lines(), f"{verdict} ({time.monotonic() - began:.0f} s)", sep="\n", flush=True)
    return sound


def caught(how: str) -> bool:
    """Whether the oracle finds out a daemon that breaks its promise."""
    with tempfile.TemporaryDirectory(prefix="kr-", dir=IN_MEMORY) as name:
        run = Run(Path(name), program=broken(how))
        try:
            run.kill(CONTROL_KILLS)
        except Wrong:
            print(f"negative control, {how}: caught after {run.counts.kills} kills", flush=True)
            return True
    print(f"MISSED: negative control, {how}: not caught in {run.counts.kills} kills", flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="kill -9 at random instants")
    parser.add_argument("--kills", type=int, default=1000, help="how many (default: 1000)")
    options = parser.parse_args()
    results = [caught("late"), caught("torn"), killed(options.kills)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
