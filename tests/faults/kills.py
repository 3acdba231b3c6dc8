"""Kill -9 at random instants, while clients create, update and delete containers; and what must be true after each.

After each restart: each sandbox's table is what was answered, with what was not answered either whole or not at all;
what it asks for is what that table comes to; and it is satisfied within :data:`SATISFIED` seconds of the new daemon's
start. At the end, without containers, every VM is again as large as at its boot, as its hypervisor itself tells.
"""

from __future__ import annotations

import http.client
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon import PROGRAM, Caller, Daemon
from tests.faults.machines import BOOT_MIB, CONFIG, MAX_VCPUS, Kind, Machine
from tests.faults.model import MIB, Change, Resources, Table, Tables, Wrong, desired_memory, desired_vcpus, merged

SATISFIED = 5.0
CLIENTS = 8
OWNERS = 3
"""Of the clients: each has a sandbox of its own, and also changes the whole of its table."""
LONGEST_LIFE = 0.3
"""Seconds from the daemon's being ready to its end, at most."""
KILLED_EARLY = 0.15
"""Of all kills: in the start, within :data:`LONGEST_START` seconds of it."""
LONGEST_START = 0.5
CONVERGED = 20.0
"""Seconds for the end."""


@dataclass
class Counts:
    """What has happened."""

    kills: int = 0
    early: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    stood: int = 0
    """Of those that were not answered: whole."""
    slowest: float = 0.0
    """Seconds from a daemon's start until the last sandbox was satisfied."""
    surplus: int = 0
    """Sandboxes that were found with more than they asked for."""

    def lines(self) -> list[str]:
        operations = ", ".join(f"{count:,} {name}" for name, count in sorted(self.operations.items()))
        answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(self.answers.items()))
        return [
            f"kills: {self.kills:,}, of these in the start: {self.early:,}",
            f"operations: {sum(self.operations.values()):,} ({operations})",
            f"answers: {answers}; none: {self.unanswered:,}, of which {self.stood:,} were found whole",
            f"satisfied at the latest {self.slowest:.2f} s after the start; surplus found {self.surplus:,} times",
        ]


class Client:
    """Who changes its own containers, one at a time, in any of its sandboxes."""

    def __init__(self, number: int, machines: Sequence[Machine], tables: dict[str, Tables], owner: bool) -> None:
        self._names = [f"c{number}-{index}" for index in range(3)]
        self._machines = machines
        self._tables = tables
        self._owner = owner
        self._random = random.Random(number)
        self.counts = Counts()

    def work(self, socket: Path) -> None:
        """Until the daemon is gone."""
        caller = Caller(socket, timeout=30)
        with suppress(OSError, http.client.HTTPException):
            while True:
                self._operation(caller)
        caller.close()

    def _operation(self, caller: Caller) -> None:
        machine = self._random.choice(self._machines)
        tables = self._tables[machine.name]
        name = self._random.choice(self._names)
        path = f"{machine.path}/containers/{name}"
        present = tables.answered.get(name)
        body: object
        change: Change
        match self._random.choice(["put", "put", "patch", "delete", "delete and wait", "table"]):
            case "table" if self._owner:
                some = {name: self._resources(machine) for name in self._names if self._random.random() < 0.6}
                change = {name: some.get(name) for name in self._names}
                what, method, path = "whole table", "PUT", f"{machine.path}/containers"
                body = {"containers": {name: {"resources": resources} for name, resources in some.items()}}
            case "patch" if present is not None:
                patch = self._resources(machine)
                what, method, body, change = "update", "PATCH", {"resources": patch}, {name: merged(present, patch)}
            case "delete":
                what, method, body, change = "delete", "DELETE", None, {name: None}
            case "delete and wait":
                what, method, body, change = "delete, waiting", "DELETE", None, {name: None}
                path += "?wait=1s"
            case _:
                resources = self._resources(machine)
                what, method, body, change = "create", "PUT", {"resources": resources}, {name: resources}
        tables.begin(change)
        self.counts.unanswered += 1
        self.counts.operations[what] += 1
        status, answer = caller.call(method, path, body)
        self.counts.unanswered -= 1
        self.counts.answers[status] += 1
        if status < 300:
            tables.succeed(change)
        elif status in (404, 409, 503, 504):
            tables.fail(change)
        else:
            raise Wrong(f"{method} {path}: {status} {answer}")

    def _resources(self, machine: Machine) -> Resources:
        """Several members, so that half of a change would show."""
        quota = self._random.randrange(1, 30) * 10_000
        resources: Resources = {"cpu": {"quota": quota, "period": 100_000, "shares": 2 + quota // 1000}}
        if machine.memory and self._random.random() < 0.5:
            resources["memory"] = {"limit": self._random.randrange(1, 200) * MIB}
        resources["note"] = {"of": quota}
        return resources


class Run:
    """One daemon after the other on one state, with its VMs and clients."""

    def __init__(self, directory: Path, kinds: Sequence[Kind] = tuple(Kind), program: Sequence[str] = ()) -> None:
        self._random = random.Random(len(kinds))
        self.counts = Counts()
        self._daemon = Daemon(directory, CONFIG, program=program or (str(PROGRAM),))
        self._shared = [Machine(kind, f"shared-{kind.name.lower()}", directory) for kind in kinds]
        self._owned = [Machine(kinds[number % len(kinds)], f"owned-{number}", directory) for number in range(OWNERS)]
        self._machines = [*self._shared, *self._owned]
        self._tables = {machine.name: Tables() for machine in self._machines}
        self._clients = [Client(number, self._shared, self._tables, False) for number in range(CLIENTS - OWNERS)]
        self._clients += [
            Client(CLIENTS - OWNERS + number, [machine], self._tables, True)
            for number, machine in enumerate(self._owned)
        ]

    def kill(self, times: int) -> None:
        """Lead it through so many kills, and to its end. Raises :class:`Wrong`."""
        with ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as threads:
            stack.enter_context(self._daemon)
            caller = self._daemon.caller()
            for machine in self._machines:
                machine.start(caller, stack)
            caller.close()
            for _ in range(times):
                self._live_and_die(threads)
                while self._random.random() < KILLED_EARLY:
                    self._daemon.start_and_kill(self._random.uniform(0, LONGEST_START))
                    self.counts.early += 1
                    self.counts.kills += 1
                self._daemon.start_again()
                self._check()
                if self.counts.kills >= times:
                    break
            self._end()

    def _live_and_die(self, threads: ThreadPoolExecutor) -> None:
        at_work = [threads.submit(client.work, self._daemon.socket) for client in self._clients]
        time.sleep(self._random.uniform(0, LONGEST_LIFE))  # any instant will do
        self._daemon.kill()
        self.counts.kills += 1
        for one in at_work:
            one.result(60)

    def _check(self) -> None:
        caller = self._daemon.caller()
        for machine in self._machines:
            # The table first: nobody changes it, and it tells what is asked for.
            state = caller.ok("GET", f"{machine.path}?view=full")
            table = {name: container["resources"] for name, container in state["containers"].items()}
            try:
                self.counts.stood += self._tables[machine.name].settle(table)
            except Wrong as wrong:
                raise Wrong(f"{machine.kind}, {machine.name}, after {self.counts.kills} kills: {wrong}") from None
            asked = {"vcpus": state["vcpus"]["desired"], "memory": state["memory"]["desired"]}
            if (wanted := self._wanted(machine, table)) != asked:
                raise Wrong(f"{machine.kind}: {table} asks for {wanted}, {asked} is desired")
            self.counts.surplus += bool(state["surplus"]["vcpus"] or state["surplus"]["memoryBytes"])
        for machine in self._machines:
            left = max(0.0, self._daemon.started + SATISFIED - time.monotonic())
            state = caller.ok("GET", f"{machine.path}?wait={left:.3f}s&for=satisfied")
            if not state["satisfied"]:
                raise Wrong(f"{machine.kind}: not satisfied {SATISFIED:g} s after the start: {state}")
            if foreign := [each for each in state["conditions"] if each["type"] in ("ForeignChange", "GrowFailed")]:
                raise Wrong(f"{machine.kind}: nobody else was at it, and it tells of {foreign}")
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - self._daemon.started)
        caller.close()

    def _wanted(self, machine: Machine, table: Table) -> dict[str, int]:
        boot = BOOT_MIB * MIB
        return {"vcpus": desired_vcpus(table, MAX_VCPUS), "memory": desired_memory(table, boot)}

    def _end(self) -> None:
        caller = self._daemon.caller()
        for machine in self._machines:
            caller.ok("PUT", f"{machine.path}/containers", {"containers": {}})
        for machine in self._machines:
            state = caller.ok("POST", f"{machine.path}/reconcile?wait={CONVERGED:g}s&deadline={CONVERGED + 1:g}s")
            left = state["vcpus"]["plugged"], state["memory"]["plugged"], state["converged"]
            if left != (1, BOOT_MIB * MIB, True):
                raise Wrong(f"{machine.kind}: without containers it has {left}: {state}")
            caller.ok("DELETE", f"{machine.path}/vm")
            if (vcpus := machine.vcpus()) != 1:
                raise Wrong(f"{machine.kind}: detached, and without containers, it has {vcpus} vCPUs")
        caller.close()

    def total(self) -> Counts:
        """Of the run and its clients."""
        total = self.counts
        for client in self._clients:
            total.answers += client.counts.answers
            total.operations += client.counts.operations
            total.unanswered += client.counts.unanswered
            client.counts = Counts()
        return total


def broken(how: str) -> tuple[str, ...]:
    """The daemon that breaks its promise; see :mod:`tests.faults.unkept`."""
    return sys.executable, "-m", "tests.faults.unkept", how
