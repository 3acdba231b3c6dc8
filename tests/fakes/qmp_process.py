"""The fake of a QMP monitor as a process of its own, as QEMU is: ``python -m tests.fakes.qmp_process SOCKET``.

It says so with a line on stdout when it listens, and ends with stdin. With *memory* there are slots for DIMMs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.fakes.qmp_memory import Memory
from tests.fakes.qmp_server import QmpServer


async def _serve(arguments: argparse.Namespace) -> None:
    memory = Memory(arguments.memory, maximum=arguments.max_memory, slots=arguments.slots)
    server = QmpServer(arguments.socket, max_vcpus=arguments.max_vcpus, memory=memory)
    async with server:
        print(flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--max-vcpus", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True, help="bytes at boot")
    parser.add_argument("--max-memory", type=int, required=True, help="bytes")
    parser.add_argument("--slots", type=int, required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
