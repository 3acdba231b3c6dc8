"""``demo``: one pod's life on a real guest, through a daemon of its own.

Each step shows what was asked, what the daemon wants, what QEMU has, and how many CPUs the guest itself counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kata_resmgr.cli import client
from kata_resmgr.guest import GuestError
from kata_resmgr.guest.machine import LinuxGuest, accelerator_for, prepare

CONFIG = """\
[resmgr]
host_cpus = 8          # so that it is the same on a machine of two
tcg_unplug = "once"    # without KVM, removals come last, and QEMU survives them
[hypervisor.qemu]
default_memory = 256
"""
PATIENCE = 60.0
"""Seconds for each thing that is waited for; under emulation a guest may take a few."""


class Step(NamedTuple):
    """What one step came to; *online* is the guest's own count."""

    step: str
    desired: int
    plugged: int
    online: int


class DemoError(Exception):
    """The demo cannot go on; the text is one line."""


def demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line: step, desired, plugged, online")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        print(f"{'step':<40} {'desired':>8}  {'plugged':>8}  {'guest':>6}", flush=True)
    try:
        prepare(_say)
        for step in _life():
            if arguments.json:
                print(json.dumps(step._asdict()), flush=True)
            else:
                print(f"{step.step:<40} {step.desired:>8}  {step.plugged:>8}  {step.online:>6}", flush=True)
    except (GuestError, DemoError, client.Unreachable) as error:
        _say(str(error))
        return 1
    return 0


def _life() -> Iterator[Step]:
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp") as name, _daemon(Path(name)) as socket:
        sandbox = _ask(socket, "PUT", "/v1/sandboxes/demo", {"hypervisor": "qemu"})
        _say(f"booting Linux under {accelerator_for(LinuxGuest).upper()}")
        with LinuxGuest(sandbox["vmm"]["args"], kernel_params=sandbox["vmm"]["kernelParams"]) as guest:
            guest.ready()
            _ask(socket, "PUT", "/v1/sandboxes/demo/vm", {})
            yield _seen("boot", socket, guest)
            container = "/v1/sandboxes/demo/containers/c1"
            _ask(socket, "PUT", container, _resources(1.5))
            yield _seen("create c1 with 1.5 CPUs", socket, guest)
            _ask(socket, "PATCH", container, _resources(2.5))
            yield _seen("update c1 to 2.5 CPUs", socket, guest)
            _ask(socket, "DELETE", f"{container}?wait={PATIENCE:g}s&deadline={PATIENCE:g}s")
            yield _seen("delete c1", socket, guest)
            _ask(socket, "DELETE", "/v1/sandboxes/demo/vm")


def _seen(step: str, socket: str, guest: LinuxGuest) -> Step:
    """What has become of it, once the guest has brought online what it was given."""
    vcpus = _ask(socket, "GET", f"/v1/sandboxes/demo?wait={PATIENCE:g}s&for=converged")["vcpus"]
    until = time.monotonic() + PATIENCE
    while (online := guest.online_cpus()) != vcpus["plugged"]:
        if time.monotonic() > until:
            raise DemoError(f"{step}: {vcpus['plugged']} vCPUs are plugged, and the guest uses {online}")
        time.sleep(0.05)
    if vcpus["plugged"] != vcpus["desired"]:
        raise DemoError(f"{step}: {vcpus['desired']} vCPUs are desired, and {vcpus['plugged']} plugged")
    return Step(step, vcpus["desired"], vcpus["plugged"], online)


@contextmanager
def _daemon(directory: Path) -> Iterator[str]:
    """A daemon of our own, ended with the context; its socket's path."""
    socket, config, log = directory / "api.sock", directory / "config.toml", directory / "log"
    config.write_text(f'{CONFIG}[daemon]\nsocket = "{socket}"\nstate = "{directory / "state.db"}"\n')
    with log.open("wb") as output:
        command = [sys.executable, "-m", "kata_resmgr", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            until = time.monotonic() + PATIENCE
            while not _answers(str(socket)):
                if process.poll() is not None or time.monotonic() > until:
                    lines = log.read_text().splitlines() or ["it said nothing"]
                    raise DemoError(f"the daemon does not start: {lines[-1]}")
                time.sleep(0.02)
            yield str(socket)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(socket: str) -> bool:
    try:
        return client.call(socket, "GET", "/readyz", operation=1).status == 200
    except client.Unreachable:
        return False


def _ask(socket: str, method: str, target: str, body: object = None) -> Any:  # noqa: ANN401 - what JSON can hold
    data = None if body is None else json.dumps(body).encode()
    reply = client.call(socket, method, target, data, operation=PATIENCE)
    answer: Any = json.loads(reply.body) if reply.body else None
    if reply.status >= 400:
        raise DemoError(f"{method} {target}: {answer['detail']} ({answer['code']})")
    return answer


def _resources(cpus: float) -> dict[str, Any]:
    return {"resources": {"cpu": {"quota": round(cpus * 100_000), "period": 100_000}}}


def _say(line: str) -> None:
    print(f"kata-resmgr: {line}", file=sys.stderr, flush=True)
