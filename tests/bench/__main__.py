"""``make bench``: what the daemon costs, as ratios within one run. Absolute times are shown, and mean little elsewhere.

- plug and unplug through the socket against the bare exchange, on the same guest (mini firmware, KVM), in shuffled
  rounds; the daemon is detached while the bare script has its turn;
- operations a second on one container in tables of 10, 1,000 and 100,000;
- 50 VMs while another one hangs in the middle of a grow, against the same 50 while it does not;
- wake-ups of an idle daemon with 50 VMs attached.

Ends with 1 where a bound of the project is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hypervisors.base import Accelerator
from kata_resmgr.guest.machine import FirmwareGuest
from tests.bench.bare import BareQmp
from tests.bench.shim import Shim
from tests.daemon import IN_MEMORY, Caller, Daemon, until

CONFIG = "[resmgr]\nhost_cpus = 4\n[hypervisor.qemu]\ndefault_memory = 64\n"
PLUG_BOUND = 1.25
UNPLUG_BOUND = 1.70
FLAT_BOUND = 0.75
HUNG_BOUND = 1.2
HUNG_P90_BOUND = 1.5
ROUNDS = 30
CYCLES = 20
IDLE_VMS = 50
NEIGHBOURS_CYCLES = 3
"""Of each VM while another one hangs: together shorter than that hangs."""
IDLE_SECONDS = 10
REST_SECONDS = 12
"""After the last call: until then the timers of its connection are at work."""

_missed: list[str] = []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="what the daemon costs, as ratios")
    parser.add_argument("measure", nargs="*", help="exchanges, tables, neighbours, idle (default: all)")
    parser.add_argument("--operations", type=int, default=5000, help="beside a hung VM, and without (default: 5000)")
    options = parser.parse_args()
    measures: dict[str, Callable[[Path], None]] = {
        "exchanges": exchanges,
        "tables": tables,
        "neighbours": partial(neighbours, operations=options.operations),
        "idle": idle,
    }
    if unknown := set(options.measure) - measures.keys():
        parser.error(f"{min(unknown)} is not measured: {', '.join(measures)} are")
    for name in options.measure or measures:
        measure = measures[name]
        with tempfile.TemporaryDirectory(prefix="kr-", dir=IN_MEMORY) as directory:
            measure(Path(directory))
    for line in _missed:
        print(f"MISSED: {line}")
    return 1 if _missed else 0


def exchanges(directory: Path) -> None:
    with Daemon(directory, CONFIG) as daemon:
        caller = daemon.caller()
        vmm = caller.ok("PUT", "/v1/sandboxes/s1", {})["vmm"]
        bare_path = directory / "bare.sock"
        arguments = [*vmm["args"], "-qmp", f"unix:{bare_path},server=on,wait=off"]
        with FirmwareGuest(arguments, accelerator=Accelerator.KVM) as guest:
            guest.ready()
            times: dict[str, list[float]] = {"bare plug": [], "bare unplug": [], "plug": [], "unplug": []}

            def bare_turn() -> None:
                bare = BareQmp(bare_path)
                for _ in range(CYCLES):
                    timed(times["bare plug"], bare.plug)
                    timed(times["bare unplug"], bare.unplug)
                bare.close()

            shim = Shim(daemon.socket)
            container = "/v1/sandboxes/s1/containers/c1"
            create = Shim.request("PUT", container, b'{"resources": {"cpu": {"quota": 100000, "period": 100000}}}')
            delete = Shim.request("DELETE", f"{container}?wait=5s")

            def socket_turn() -> None:
                caller = daemon.caller()
                caller.ok("PUT", "/v1/sandboxes/s1/vm", {})
                shim.connect()
                for _ in range(CYCLES):
                    timed(times["plug"], partial(shim.call, create))
                    timed(times["unplug"], partial(shim.call, delete))
                shim.close()
                assert caller.ok("GET", "/v1/sandboxes/s1")["converged"]
                caller.ok("DELETE", "/v1/sandboxes/s1/vm")

            # Only who has its turn is connected: QEMU tells every event to every monitor that has a client.
            turns = [bare_turn, socket_turn] * ROUNDS
            random.shuffle(turns)
            for turn in turns:
                turn()
    print(
        f"plug and unplug, {ROUNDS * CYCLES} of each, ms (p50 / p99), and the ratio to the bare exchange with read-back"
    )
    for what, bound in (("plug", PLUG_BOUND), ("unplug", UNPLUG_BOUND)):
        ours, floor = times[what], times[f"bare {what}"]
        ratio = percentile(ours, 50) / percentile(floor, 50)
        print(
            f"  {what:7} bare {shown(floor)}   through the socket {shown(ours)}   "
            f"p50 x {ratio:.2f} (at most {bound})   p99 x {percentile(ours, 99) / percentile(floor, 99):.2f}"
        )
        bounded(ratio <= bound, f"{what}: {ratio:.2f} x bare, at most {bound}")


def tables(directory: Path) -> None:
    sizes = (10, 1_000, 100_000)
    with Daemon(directory) as daemon:
        caller = daemon.caller()
        for size in sizes:
            caller.ok("PUT", f"/v1/sandboxes/n{size}", {})
            fill(daemon, size)
        rates: dict[int, list[float]] = {size: [] for size in sizes}
        turns = list(sizes) * 12
        random.shuffle(turns)
        shim = Shim(daemon.socket)
        shim.connect()
        for size in turns:
            rates[size].append(rate(shim, size))
        shim.close()
    print("operations a second on one container (median of 12 rounds), and the ratio to a table of 10")
    smallest = statistics.median(rates[sizes[0]])
    for size in sizes:
        median = statistics.median(rates[size])
        print(f"  {size:7,} containers   {median:7,.0f}   x {median / smallest:.2f}")
    ratio = statistics.median(rates[sizes[-1]]) / smallest
    bounded(ratio >= FLAT_BOUND, f"{sizes[-1]:,} containers: {ratio:.2f} x the rate of 10, at least {FLAT_BOUND}")


def fill(daemon: Daemon, size: int) -> None:
    def some(first: int) -> None:
        caller = daemon.caller()
        for number in range(first, size, 4):
            caller.ok("PUT", f"/v1/sandboxes/n{size}/containers/c{number}", resources(1_000 + number))
        caller.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(some, range(4)))


def rate(shim: Shim, size: int) -> float:
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < 0.5:
        count += 1
        body = resources(random.randrange(1_000, 1_000_000))
        shim.call(Shim.request("PUT", f"/v1/sandboxes/n{size}/containers/c{random.randrange(size)}", body))
    return count / (time.perf_counter() - began)


def resources(quota: int) -> bytes:
    return b'{"resources": {"cpu": {"quota": %d, "period": 100000}, "memory": {"limit": 1}}}' % quota


def idle(directory: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(directory, CONFIG))
        caller = daemon.caller()
        for number in range(IDLE_VMS):
            path = f"/v1/sandboxes/s{number}"
            args = caller.ok("PUT", path, {})["vmm"]["args"]
            stack.enter_context(FirmwareGuest(args, accelerator=Accelerator.KVM)).ready()
            caller.ok("PUT", f"{path}/vm", {})
        caller.close()
        time.sleep(REST_SECONDS)
        before = wake_ups(daemon.process.pid)
        time.sleep(IDLE_SECONDS)  # what is measured is this time
        woken = wake_ups(daemon.process.pid) - before
        print(f"wake-ups of an idle daemon with {IDLE_VMS} VMs attached, in {IDLE_SECONDS} s: {woken}")
        bounded(woken == 0, f"{woken} wake-ups of an idle daemon")


def neighbours(directory: Path, operations: int) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(
            Daemon(directory, "[resmgr]\nhost_cpus = 4\n[hypervisor.qemu]\ndefault_memory = 64\n")
        )
        caller = daemon.caller()
        guests = []
        for number in range(IDLE_VMS + 1):
            path = f"/v1/sandboxes/s{number}"
            args = caller.ok("PUT", path, {})["vmm"]["args"]
            guests.append(stack.enter_context(FirmwareGuest(args, accelerator=Accelerator.KVM)))
            guests[-1].ready()
            caller.ok("PUT", f"{path}/vm", {})
        shim = Shim(daemon.socket)
        shim.connect()
        times: dict[bool, list[float]] = {False: [], True: []}
        turns = [False, True] * -(-operations // (2 * IDLE_VMS * NEIGHBOURS_CYCLES))
        random.shuffle(turns)
        for hung in turns:
            stuck = None
            if hung:
                guests[-1].pause()
                stuck = threading.Thread(target=failing_grow, args=(daemon, IDLE_VMS))
                stuck.start()
                until(lambda: caller.ok("GET", f"/v1/sandboxes/s{IDLE_VMS}")["vcpus"]["desired"] == 4, "the grow began")
            for number in [*range(IDLE_VMS)] * NEIGHBOURS_CYCLES:
                container = f"/v1/sandboxes/s{number}/containers/c1"
                for request in (
                    Shim.request("PUT", container, resources(100_000)),
                    Shim.request("DELETE", f"{container}?wait=5s"),
                ):
                    timed(times[hung], partial(shim.call, request))
            if stuck is not None:
                stuck.join()
                guests[-1].resume()
                until(lambda: caller.ok("GET", f"/v1/sandboxes/s{IDLE_VMS}")["phase"] == "running", "it is back")
                assert caller.ok("POST", f"/v1/sandboxes/s{IDLE_VMS}/reconcile?wait=5s")["converged"]
        shim.close()
    counts = f"{len(times[False]):,} operations without, {len(times[True]):,} with"
    print(f"{IDLE_VMS} VMs, each growing and shrinking in turn, while one more hangs in the middle of a grow: {counts}")
    for percent, bound in ((50, HUNG_BOUND), (90, HUNG_P90_BOUND)):
        without, beside = percentile(times[False], percent), percentile(times[True], percent)
        ratio = beside / without
        print(f"  p{percent} without {without:.3f}   with {beside:.3f}   x {ratio:.2f} (at most {bound})")
        bounded(ratio <= bound, f"beside a hung VM, p{percent}: {ratio:.2f} x, at most {bound}")


def failing_grow(daemon: Daemon, number: int) -> None:
    caller = Caller(daemon.socket)
    status, problem = caller.call("PUT", f"/v1/sandboxes/s{number}/containers/c1?deadline=2s", resources(300_000))
    assert (status, problem["code"]) == (504, "hypervisor_timeout"), problem
    caller.close()


def wake_ups(pid: int) -> int:
    """Context switches of all its threads so far."""
    return sum(
        int(line.split()[1])
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith(("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
    )


def timed(times: list[float], action: Callable[[], object]) -> None:
    began = time.perf_counter()
    action()
    times.append((time.perf_counter() - began) * 1000)


def percentile(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100)[percent - 1]


def shown(times: list[float]) -> str:
    return f"{percentile(times, 50):.2f} / {percentile(times, 99):.2f}"


def bounded(within: bool, line: str) -> None:
    if not within:
        _missed.append(line)


if __name__ == "__main__":
    sys.exit(main())
