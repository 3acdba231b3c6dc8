"""``make fleet``: hundreds of VMs (mini firmware, KVM) in one daemon, against bounds; exits 1 where one is missed.

- grow and shrink operations a second through the socket, one connection and one operation at a time for each VM,
  against a bare qemu.qmp client with read-back on the same machines, in blocks that take turns in one run: who has no
  turn is not connected, since QEMU tells every event to every client;
- the fewest against the most operations that one VM was put through;
- the daemon's memory for each sandbox that is attached and idle, as the slope between a tenth of the VMs and all;
- wake-ups in ten idle seconds;
- the time in which all are attached again: at once to a daemon that runs, and to one that was just started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from hypervisors.base import Accelerator
from kata_resmgr.guest.machine import FirmwareGuest
from tests.bench.shim import Shim
from tests.daemon import IN_MEMORY, Daemon, until
from tests.fleet import bare
from tests.fleet.shims import Shims

CONFIG: Final = "[resmgr]\nhost_cpus = 4\n[hypervisor.qemu]\ndefault_memory = 64\ndefault_maxmemory = 64\n"
RATE_BOUND: Final = 0.85
FAIR_BOUND: Final = 0.7
RSS_BOUND: Final = 48.0
ATTACH_BOUND: Final = 0.5
IDLE_SECONDS: Final = 10
REST_SECONDS: Final = 12
"""After the last call: until then the timers of its connection are at work."""
VM_MIB: Final = 24
"""Of the host's memory, for each VM; about 16 were measured."""
VM_DESCRIPTORS: Final = 8
GROW_BODY: Final = b'{"resources": {"cpu": {"quota": 100000, "period": 100000}}}'


class Fleet:
    """The VMs, each with a monitor for the daemon and one for the bare client, and what was measured and missed."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.count = count
        self.names = [f"s{number}" for number in range(count)]
        self.bare = [directory / f"{name}.bare" for name in self.names]
        self.missed: list[str] = []
        self._hz = os.sysconf("SC_CLK_TCK")

    def bounded(self, line: str, within: bool, bound: str) -> None:
        print(f"{line}   ({bound})", flush=True)
        if not within:
            self.missed.append(f"{line}: {bound}")

    # Starting

    def start(self, stack: ExitStack, daemon: Daemon) -> None:
        """One VM after the other: started, up, and attached. Measures the memory that each costs the daemon."""
        caller = daemon.caller()
        few = max(1, self.count // 10)
        for number, name in enumerate(self.names, start=1):
            args = caller.ok("PUT", f"/v1/sandboxes/{name}", {})["vmm"]["args"]
            args += ["-qmp", f"unix:{self.bare[number - 1]},server=on,wait=off"]
            stack.enter_context(FirmwareGuest(args, accelerator=Accelerator.KVM)).ready()
            caller.ok("PUT", f"/v1/sandboxes/{name}/vm", {})
            if number == few:
                first = rss(daemon)
        caller.close()
        if self.count == few:
            return
        slope = (rss(daemon) - first) / (self.count - few)
        self.bounded(f"RSS for each sandbox: {slope:.1f} KiB", slope <= RSS_BOUND, f"at most {RSS_BOUND:g}")
        print(f"  in all {rss(daemon) / 1024:.1f} MiB with {self.count} attached, {first / 1024:.1f} with {few}")

    # Measuring

    def idle(self, daemon: Daemon) -> None:
        time.sleep(REST_SECONDS)
        before = wake_ups(daemon)
        time.sleep(IDLE_SECONDS)  # what is measured is this time
        woken = wake_ups(daemon) - before
        self.bounded(f"wake-ups in {IDLE_SECONDS} idle seconds: {woken}", woken == 0, "0")

    def race(self, daemon: Daemon, seconds: float, rounds: int) -> None:
        """Blocks by turns: the bare fleet, then the daemon's."""
        operations = [
            [
                Shim.request("PUT", f"/v1/sandboxes/{name}/containers/c1", GROW_BODY),
                Shim.request("DELETE", f"/v1/sandboxes/{name}/containers/c1?wait=5s"),
            ]
            for name in self.names
        ]
        rates: list[tuple[float, float]] = []
        totals, bare_totals = [0] * self.count, [0] * self.count
        cpu, done = 0.0, 0
        attaching = []
        for _ in range(rounds):
            self.ask_all(daemon, "DELETE")
            counts = asyncio.run(bare.work(self.bare, seconds))
            bare_totals = add(bare_totals, counts)
            floor = sum(counts) / seconds
            attaching.append(self.ask_all(daemon, "PUT"))
            shims = Shims(daemon.socket, operations)
            before = self._cpu(daemon)
            counts = shims.work(seconds)
            cpu += self._cpu(daemon) - before
            shims.close()
            done += sum(counts)
            totals = add(totals, counts)
            rates.append((floor, sum(counts) / seconds))
        ratio = statistics.median(ours / floor for floor, ours in rates)
        shown = ", ".join(f"{ours:.0f}/{floor:.0f}" for floor, ours in rates)
        self.bounded(
            f"operations a second, daemon/bare by rounds: {shown}: x {ratio:.2f}",
            ratio >= RATE_BOUND,
            f"at least {RATE_BOUND}",
        )
        print(f"  the daemon's CPU for an operation: {cpu / done * 1e6:.0f} us; RSS {rss(daemon) / 1024:.1f} MiB")
        fair = min(totals) / max(totals)
        self.bounded(
            f"operations of one VM: {min(totals)} to {max(totals)}: x {fair:.2f}; bare {min(bare_totals)} to "
            f"{max(bare_totals)}: x {min(bare_totals) / max(bare_totals):.2f}",
            fair >= FAIR_BOUND,
            f"at least {FAIR_BOUND}",
        )
        self._attached("attached again, all at once", statistics.median(attaching))

    def restart(self, config: str) -> None:
        """A daemon that is started anew, until it has adopted all; less what it takes one that has nothing to adopt."""
        with tempfile.TemporaryDirectory(prefix="kr-", dir=IN_MEMORY) as nothing:
            began = time.monotonic()
            with Daemon(Path(nothing), config):
                empty = time.monotonic() - began
        began = time.monotonic()
        with Daemon(self.directory, config) as daemon:
            caller = daemon.caller()
            until(lambda: len(caller.ok("GET", "/v1/sandboxes?phase=running")["sandboxes"]) == self.count, "all run")
            seconds = time.monotonic() - began
        self._attached("attached again, by a restart", seconds - empty)
        print(f"  from its start {seconds:.3f} s; with nothing to adopt {empty:.3f}")

    def _attached(self, what: str, seconds: float) -> None:
        self.bounded(f"{what}: {seconds:.3f} s", seconds <= ATTACH_BOUND, f"at most {ATTACH_BOUND:g}")

    def ask_all(self, daemon: Daemon, method: str) -> float:
        """Attach or detach all at once, each over a connection of its own; the seconds from the first to the last."""
        body = b"{}" if method == "PUT" else b""
        shims = Shims(daemon.socket, [[Shim.request(method, f"/v1/sandboxes/{name}/vm", body)] for name in self.names])
        try:
            return shims.once()
        finally:
            shims.close()

    def _cpu(self, daemon: Daemon) -> float:
        """Seconds of CPU that the daemon has used."""
        stat = Path(f"/proc/{daemon.process.pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / self._hz


def add(some: list[int], more: list[int]) -> list[int]:
    return [one + other for one, other in zip(some, more, strict=True)]


def rss(daemon: Daemon) -> int:
    """KiB."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def wake_ups(daemon: Daemon) -> int:
    """Context switches of all its threads so far."""
    return sum(
        int(line.split()[1])
        for status in Path(f"/proc/{daemon.process.pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith(("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
    )


def make_room(count: int) -> None:
    """Descriptors for so many VMs, and whether the machine has the memory. Ends the program where it has not."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) // 1024
    if available < count * VM_MIB + 1024:
        sys.exit(
            f"{count} VMs take {count * VM_MIB} MiB and 1024 should be left; {available} are available: use --vms "
            f"{max(1, (available - 1024) // VM_MIB)}"
        )
    wanted = count * VM_DESCRIPTORS + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        sys.exit(f"{count} VMs take {wanted} descriptors, and {hard} are allowed (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description="many VMs in one daemon, with bounds")
    parser.add_argument("--vms", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each block (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="of two blocks each (default: 3)")
    options = parser.parse_args()
    make_room(options.vms)
    with tempfile.TemporaryDirectory(prefix="kr-", dir=IN_MEMORY) as name, ExitStack() as guests:
        fleet = Fleet(Path(name), options.vms)
        print(f"{options.vms} VMs, mini firmware, KVM", flush=True)
        with Daemon(fleet.directory, CONFIG) as daemon:
            fleet.start(guests, daemon)
            fleet.idle(daemon)
            fleet.race(daemon, options.seconds, options.rounds)
        fleet.restart(CONFIG)
    for line in fleet.missed:
        print(f"MISSED: {line}")
    return 1 if fleet.missed else 0


if __name__ == "__main__":
    sys.exit(main())
