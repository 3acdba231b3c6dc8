"""Laws of a sandbox's life, whatever the order of its operations: what is wanted, and what a restart would know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kata_resmgr import demand, oci, sizing, view
from kata_resmgr.config import Base, Compat, OverMax, SandboxConfig
from kata_resmgr.declared import declare, of_resources
from kata_resmgr.demand import ContainerTable
from kata_resmgr.events import Events, Teller
from kata_resmgr.problem import Problem
from kata_resmgr.sandbox import Patience, Plan, Sandbox
from kata_resmgr.sizing import Target
from kata_resmgr.store import MemoryStore
from tests.examples import record
from tests.property.strategies import NAMES, configs, containers

NO_PATIENCE = Patience()


@dataclass(frozen=True)
class Step:
    """One operation on a sandbox."""

    op: str
    name: str
    text: bytes

    async def carry_out(self, sandbox: Sandbox) -> None:
        match self.op:
            case "put":
                await sandbox.put(self.name, self.text, NO_PATIENCE)
            case "patch" if self.name in sandbox.containers():
                await sandbox.patch(self.name, self.text, NO_PATIENCE)
            case "delete":
                await sandbox.delete(self.name, NO_PATIENCE)
            case "table":
                await sandbox.put_all({self.name: Raw(self.text)}, NO_PATIENCE)
            case "resize":
                await sandbox.resize(self.text, NO_PATIENCE)


CONTAINER_STEPS = st.builds(Step, st.sampled_from(["put", "put", "patch", "delete", "table"]), NAMES, containers())
STEPS = CONTAINER_STEPS | st.builds(Step, st.just("resize"), NAMES, containers())
LIVES = st.lists(STEPS, max_size=8)
KATA = configs(compat=Compat.KATA)


def _plan(config: SandboxConfig, resources: bytes | None) -> Plan:
    declaration = declare(config, {}, resources)
    boot, notes = sizing.boot_size(config, declaration.size)
    return Plan(config, resources, {}, declaration, boot, tuple(notes), view.Vmm([], [], "/run/s1.sock"))


Look = Callable[[Sandbox, MemoryStore, Step, view.Sandbox, Problem | None], None]
"""What is looked at after a step: the sandbox, its store, the step, the state before it, and why it was refused."""


def _nothing(*_: object) -> None:
    """Do not look."""


async def _ends(*_: object) -> None:
    """Do nothing more."""


def _live(
    config: SandboxConfig,
    resources: bytes | None,
    life: list[Step],
    look: Look = _nothing,
    then: Callable[[Sandbox, MemoryStore], Coroutine[Any, Any, None]] = _ends,
) -> None:
    """Lead that life, looking after each step."""

    async def lead() -> None:
        store = MemoryStore()
        sandbox = Sandbox("s1", _plan(config, resources), store, Teller(Events(store), "s1"))
        for step in life:
            before = sandbox.state()
            refused = None
            try:
                await step.carry_out(sandbox)
            except Problem as problem:
                refused = problem
            look(sandbox, store, step, before, refused)
        await then(sandbox, store)

    asyncio.run(lead())


def _restarted(store: MemoryStore) -> Target:
    """The target as a daemon that starts finds it in the store."""
    kept = store.sandboxes["s1"]
    table = ContainerTable()
    for name, text in store.containers.get("s1", {}).items():
        table.set(name, record(text, demand.counting(kept.config)))
    return sizing.target(
        kept.config,
        kept.boot,
        declare(kept.config, kept.annotations, kept.resources).size,
        table.sums(),
        resized=None if kept.resized is None else of_resources(oci.decode(kept.resized), kept.config),
        held=kept.held_vcpus,
    )


def _wanted(state: view.Sandbox) -> tuple[str, int, int]:
    return state.vcpus.exact, state.vcpus.desired, state.memory.desired


@given(configs() | KATA, st.none() | containers(), LIVES)
def test_a_restart_finds_what_was_wanted(config: SandboxConfig, resources: bytes | None, life: list[Step]) -> None:
    def look(sandbox: Sandbox, store: MemoryStore, *_: object) -> None:
        target = _restarted(store)
        assert _wanted(sandbox.state()) == (str(target.exact), target.vcpus, target.memory)

    _live(config, resources, life, look)


@given(configs(), st.none() | containers(), LIVES)
def test_what_is_wanted_depends_on_what_is_there_alone(
    config: SandboxConfig, resources: bytes | None, life: list[Step]
) -> None:
    async def begin_where_it_is(lived: Sandbox, store: MemoryStore) -> None:
        new = MemoryStore()
        fresh = Sandbox("s1", _plan(config, resources), new, Teller(Events(new), "s1"))
        kept = store.sandboxes["s1"].resized
        if kept is not None:
            await fresh.resize(kept, NO_PATIENCE)
        table = {name: Raw(text) for name, text in store.containers.get("s1", {}).items()}
        await fresh.put_all(table, NO_PATIENCE)
        if fresh.explain().inputs == lived.explain().inputs:  # what a resize has lifted cannot be said at once
            assert _wanted(fresh.state()) == _wanted(lived.state())

    _live(config, resources, life, then=begin_where_it_is)


@given(st.sampled_from(OverMax).flatmap(lambda over: configs(over_max_vcpus=over, default_maxmemory=4096)), LIVES)
def test_a_refused_operation_changes_nothing(config: SandboxConfig, life: list[Step]) -> None:
    def look(sandbox: Sandbox, store: MemoryStore, step: Step, before: view.Sandbox, refused: Problem | None) -> None:
        if refused is not None:
            assert step.op != "delete"
            assert sandbox.state() == before
        assert sandbox.state().memory.desired <= max(before.memory.desired, config.default_maxmemory << 20)
        if config.over_max_vcpus is OverMax.REFUSE:
            assert not [held for held in sandbox.state().conditions if held.type == "Clamped"]

    _live(config, None, life, look)


@given(configs() | KATA, LIVES)
def test_an_operation_with_the_present_values_changes_nothing(config: SandboxConfig, life: list[Step]) -> None:
    async def repeat(sandbox: Sandbox, store: MemoryStore) -> None:
        before = sandbox.state()
        texts = dict(store.containers.get("s1", {}))
        for name, text in texts.items():
            await sandbox.put(name, text, NO_PATIENCE)
            if b'"limit":0}' not in text:  # a huge page entry of 0 goes when it is said again
                await sandbox.patch(name, text, NO_PATIENCE)
        await sandbox.put_all({name: Raw(text) for name, text in texts.items()}, NO_PATIENCE)
        await sandbox.resize(store.sandboxes["s1"].resized or b"{}", NO_PATIENCE)
        assert sandbox.state() == before

    _live(config, None, life, then=repeat)


@given(configs(compat=Compat.KATA, base=Base.ADD), st.lists(CONTAINER_STEPS, max_size=8))
def test_compat_sizes_as_runtime_rs_does(config: SandboxConfig, life: list[Step]) -> None:
    """Against the rules of facts on runtime-rs, told once more: D + Q, else C, else D; who adds lowers nothing, who
    deletes raises nothing."""
    d, boot = config.default_vcpus, max(ceil(config.default_vcpus), 1)
    current = boot

    def look(sandbox: Sandbox, store: MemoryStore, step: Step, before: view.Sandbox, refused: Problem | None) -> None:
        nonlocal current
        here = {name: oci.decode(text) for name, text in store.containers.get("s1", {}).items()}
        quotas = sum((Fraction(c.quota, c.period) for c in here.values() if c.quota > 0), start=Fraction())
        cpus = len(frozenset().union(*(c.cpus for c in here.values())))
        required = d + quotas if quotas else Fraction(cpus) or d
        wanted = min(max(ceil(required), boot), config.default_maxvcpus)
        state = sandbox.state()
        if state.generation != before.generation:
            added = state.counts.containers - before.counts.containers
            if step.op == "put" and added == 1:
                current = max(current, wanted)
            elif step.op == "delete":
                current = min(current, wanted)
            elif step.op in ("put", "patch"):
                current = wanted
            else:
                current = state.vcpus.desired  # a whole table: no operation of runtime-rs
        assert state.vcpus.desired == current
        assert state.vcpus.exact == str(required)
        assert refused is None

    _live(config, None, life, look)
