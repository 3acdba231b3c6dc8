"""``python -m kata_resmgr.guest`` installs and builds what the guests need, and says only what it does."""

from __future__ import annotations

import sys

from kata_resmgr.guest import GuestError
from kata_resmgr.guest.machine import prepare


def main() -> int:
    """0 when both guests can be started, 1 with the reason on standard error."""
    try:
        prepare(say)
    except GuestError as error:
        say(str(error))
        return 1
    return 0


def say(line: str) -> None:
    """One line on standard error."""
    print(f"kata-resmgr: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
