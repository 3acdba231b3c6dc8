"""``make soak``: a million events, a thousand connections, and every misdeed, against bounds; 1 where one is missed."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak import soak

GROWTH_MIB = 10
PEAK_MIB = 32
LOG_KIB = 64
MISDEEDS_EACH = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="floods and reconnects, with bounds")
    parser.add_argument("--events", type=int, default=1_000_000, help="default: 1000000")
    parser.add_argument("--cycles", type=int, default=1_000, help="of connecting and disconnecting (default: 1000)")
    options = parser.parse_args()
    missed = 0

    def bounded(line: str, within: bool, bound: str) -> None:
        nonlocal missed
        missed += not within
        print(f"{'' if within else 'MISSED: '}{line}   ({bound})", flush=True)

    def grown(what: str, kib: int, most: int) -> None:
        bounded(f"{what}: {kib / 1024:+.1f} MiB", kib <= most * 1024, f"at most {most}")

    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp") as name:  # a socket's path must be short
        root = Path(name)
        for part in "abcd":
            (root / part).mkdir()
        before, after = asyncio.run(soak.flooded(root / "a", options.events))
        grown(f"the daemon's memory after {options.events:,} events", after.rss - before.rss, GROWTH_MIB)

        log = (after.log - before.log) / 1024
        bounded(f"  its log: {log:+.0f} KiB", log <= LOG_KIB, f"at most {LOG_KIB}")

        before, after = asyncio.run(soak.insulted(root / "b", MISDEEDS_EACH))
        grown(f"after every misdeed of a monitor, {MISDEEDS_EACH} times", after.rss - before.rss, GROWTH_MIB)
        grown("  at the most meanwhile", after.peak - before.rss, PEAK_MIB)

        before, after = asyncio.run(soak.reconnected(root / "c", options.cycles))
        grown(f"after attaching and detaching {options.cycles:,} times", after.rss - before.rss, GROWTH_MIB)
        for what, was, now in (
            ("threads", before.threads, after.threads),
            ("descriptors", before.descriptors, after.descriptors),
        ):
            bounded(f"  {what}: {was} before, {now} after", now == was, "the same")

        held, holds = asyncio.run(soak.driver_reconnected(root / "d", options.cycles))
        bounded(
            f"a driver connected {options.cycles:,} times leaves: tasks {holds.tasks - held.tasks:+d}, threads "
            f"{holds.threads - held.threads:+d}, descriptors {holds.descriptors - held.descriptors:+d}",
            holds == held,
            "nothing",
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
