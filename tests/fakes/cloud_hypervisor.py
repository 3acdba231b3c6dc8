"""Cloud Hypervisor's API socket with a VM behind it: in this process, or in processes of their own.

In this process (:class:`CloudHypervisorServer`) a test has the VM at hand, and may have one at a time: all share the
process whose ``vcpuN`` threads are counted. ``python -m tests.fakes.cloud_hypervisor SOCKET... --config JSON`` serves
each socket by a process of its own, and says so with a line on stdout when all of them listen; they end with stdin. A
line on stdin, ``["name", arguments...]``, calls that method of the only VM, and is answered by a line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Self

from tests.fakes.ch_config import Json
from tests.fakes.ch_vmm import Vmm
from tests.fakes.micro_http import MicroHttp


class CloudHypervisorServer:
    """The VMM at *path*, with a VM of this *config* that is booted; ``with`` it. None: nothing is created."""

    def __init__(self, path: Path, config: Json | None, *, release: int = 54, pid: int | None = None) -> None:
        self.path = path
        self.vmm = Vmm(release, pid=pid)
        if config is not None:
            self.vmm.boot(config)
        self.http = MicroHttp(path, self.vmm.handle, limit=self.vmm.limit, methods=self.vmm.methods)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.vmm.resume_answers()
        self.http.close()
        self.vmm.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", nargs="+", type=Path)
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--release", type=int, default=54)
    arguments = parser.parse_args()
    if len(arguments.socket) == 1:
        _obey(CloudHypervisorServer(arguments.socket[0], arguments.config, release=arguments.release))
        return
    children = [_serve(path, arguments.config, arguments.release) for path in arguments.socket]
    print(json.dumps(children), flush=True)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _obey(server: CloudHypervisorServer) -> None:
    with server:
        print(json.dumps([os.getpid()]), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            getattr(server.vmm, name)(*arguments)
            print(flush=True)


def _serve(path: Path, config: Json, release: int) -> int:
    """In a child, which listens when this returns its pid."""
    listens, tell = os.pipe()
    child = os.fork()
    if child == 0:
        CloudHypervisorServer(path, config, release=release)
        os.write(tell, b"x")
        os.close(tell)
        os.close(listens)
        while True:
            signal.pause()
    os.close(tell)
    os.read(listens, 1)
    os.close(listens)
    return child


if __name__ == "__main__":
    main()
