"""The command line: each command lives in a module that imports only what it needs.

Commands that a shim's script calls for each container must start fast: nothing here, in :mod:`client` or in their
modules imports asyncio, httptools, msgspec or rich.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from kata_resmgr import __version__

_COMMANDS = {
    "serve": ("serve", "run the daemon"),
    "check-config": ("check_config", "show what a configuration comes to, and warn of likely mistakes in it"),
    "plan": ("plan", "show what would be done, and why, without a VM or a daemon"),
    "ps": ("ps", "list the sandboxes"),
    "show": ("looking", "show one sandbox"),
    "explain": ("looking", "show how a sandbox's size comes about"),
    "events": ("events", "show what has happened, and what happens"),
    "register": ("sandboxes", "make a sandbox known, and get its boot size and VMM arguments"),
    "attach": ("sandboxes", "drive the VM of a sandbox"),
    "detach": ("sandboxes", "let go of the VM of a sandbox"),
    "hold": ("sandboxes", "leave the hypervisor alone, or stop doing so"),
    "reconcile": ("sandboxes", "read back and converge now"),
    "create": ("containers", "create or replace a container"),
    "update": ("containers", "update a container member by member"),
    "resize": ("sandboxes", "change what a sandbox declares, member by member"),
    "delete": ("containers", "remove a container, or forget a sandbox"),
    "disk": ("devices", "add or remove a disk of a running VM"),
    "net": ("devices", "add or remove a net device of a running VM"),
    "limits": ("devices", "give a disk or net device other limits"),
    "weight": ("weight", "convert CPU shares or milliCPU to a cgroup v2 weight, and back"),
    "demo": ("demo", "drive one pod's life on a small real guest"),
}
"""The module of each command, which has a function of the command's name that defines its arguments."""
_ASK_NOBODY = ("serve", "weight", "check-config", "plan")
"""Those without a daemon's socket to name."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 after a failure, 2 for wrong usage, 130 after Ctrl-C."""
    given = sys.argv[1:] if argv is None else argv
    socket = None
    if given and given[0] in _COMMANDS:  # the usual case needs one parser less
        name, *rest = given
    else:
        common = _program().parse_args(given)
        name, rest, socket = common.command, common.arguments, common.socket
    module, says = _COMMANDS[name]
    command = argparse.ArgumentParser(
        prog=f"kata-resmgr {name}", description=f"{says[0].upper()}{says[1:]}.", formatter_class=_Help
    )
    getattr(import_module(f"kata_resmgr.cli.{module}"), name.replace("-", "_"))(command)
    if name not in _ASK_NOBODY:
        _takes_socket(command, default=socket)
    arguments = command.parse_args(rest)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has what it wanted, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # where the answer is written to: what the daemon does fails by its own names
        print(f"kata-resmgr: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _program() -> argparse.ArgumentParser:
    width = max(len(name) for name in _COMMANDS)
    parser = argparse.ArgumentParser(
        prog="kata-resmgr",
        description="The resource manager for sandboxes that run containers in virtual machines.",
        epilog="commands:\n" + "\n".join(f"  {name:<{width}}  {says}" for name, (_, says) in _COMMANDS.items()),
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"kata-resmgr {__version__}")
    _takes_socket(parser, default=None)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """Of a fixed width: to ask for the terminal's, argparse imports shutil at every start."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def _takes_socket(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=default,
        help="the daemon's socket (else KATA_RESMGR_SOCKET, else the default)",
    )
