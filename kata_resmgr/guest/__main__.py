"""The guests from the command line.

``python -m kata_resmgr.guest`` installs and builds what they need, and says only what it does. It fetches a newer QEMU
for the tests, too, where the distribution has one in its backports; without it they make do with the installed one.
``python -m kata_resmgr.guest run FILE`` boots Linux as the sandbox in FILE (an answer of the daemon, JSON) says, prints
a line whenever the number of CPUs that the guest uses changes, and ends the guest when it is ended (Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from kata_resmgr.guest import GuestError, qemus
from kata_resmgr.guest.machine import LinuxGuest, prepare

LOOK_EVERY = 0.2
"""Seconds between two looks at the guest."""


def main() -> int:
    """0 when all went well, 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m kata_resmgr.guest", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["run"])
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if (arguments.action is None) != (arguments.file is None):
        parser.error("run takes one FILE: what the daemon answered when the sandbox was registered")
    try:
        prepare(say)
        if arguments.file is not None:
            run(arguments.file)
        else:
            fetch_second_qemu()
    except GuestError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def fetch_second_qemu() -> None:
    """Nothing stands or falls with it."""
    try:
        qemus.fetch_backports(say)
    except GuestError as error:
        say(f"no second QEMU: {error}")


def run(file: Path) -> None:
    """Boot Linux with the ``vmm`` of the sandbox in *file*, and tell of its CPUs for as long as it runs."""
    try:
        vmm = json.loads(file.read_text())["vmm"]
        args, kernel_params = vmm["args"], vmm["kernelParams"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GuestError(f"{file}: not a sandbox that the daemon answered ({error!r})") from None
    with LinuxGuest(args, kernel_params=kernel_params) as guest:
        guest.ready()
        online = 0
        while True:
            if (now := guest.online_cpus()) != online:
                print(f"guest: {now} CPU{'s' if now > 1 else ''} online", flush=True)
                online = now
            time.sleep(LOOK_EVERY)


def say(line: str) -> None:
    """One line on standard error."""
    print(f"kata-resmgr: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
