"""Laws of the durable store: after every transaction a restart finds what a store in memory holds, whatever was done.

A kill -9 is played by copying the files as they lie there while the store is open: no more is left of a process.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hypervisors.base import Accelerator, Machine, MemoryHotplug, MemoryMethod
from hypervisors.ch_types import DiskConfig
from kata_resmgr.devices import Record, Spec, State
from kata_resmgr.limits import Limits
from kata_resmgr.note import Note
from kata_resmgr.process import Process
from kata_resmgr.removal import Removal
from kata_resmgr.sizing import BootSize
from kata_resmgr.sqlite_store import SqliteStore
from kata_resmgr.store import Attachment, Changes, Kept, KnownVm, MemoryStore, SandboxRecord, Store
from tests.property.strategies import NAMES, RESOURCES, configs

SANDBOXES = st.sampled_from(["s1", "s2"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COUNTS = st.integers(0, 2**40)
TIMES = st.floats(0, 1e9)

BOOTS = st.builds(
    BootSize,
    vcpus=COUNTS,
    max_vcpus=COUNTS,
    memory=COUNTS,
    max_memory=COUNTS,
    memory_slots=COUNTS,
    granularity=COUNTS,
    static=st.booleans(),
    exact=st.fractions(0, 100),
)
MACHINES = st.builds(
    Machine,
    identity=TEXT,
    pid=st.none() | COUNTS,
    max_vcpus=COUNTS,
    vcpu_hotplug=st.booleans(),
    accelerator=st.sampled_from(Accelerator),
    memory=st.builds(MemoryHotplug, st.sampled_from(MemoryMethod), COUNTS, COUNTS),
    tells_changes=st.booleans(),
    one_resize=st.booleans(),
)
REMOVALS = st.builds(
    Removal,
    first=TIMES,
    last=TIMES,
    attempts=COUNTS,
    refusal=st.none() | TEXT,
    refused_attempt=COUNTS,
    urgent=st.booleans(),
)
RECORDS = st.builds(
    SandboxRecord,
    id=SANDBOXES,
    config=configs(),
    boot=BOOTS,
    fitted=BOOTS,
    notes=st.lists(st.builds(Note, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    since=TEXT,
    resources=st.none() | RESOURCES,
    annotations=st.dictionaries(TEXT, TEXT, max_size=2),
    resized=st.none() | RESOURCES,
    held_vcpus=st.none() | COUNTS,
    monitor=TEXT,
    ever_attached=st.booleans(),
    attachment=st.none() | st.builds(Attachment, TEXT, st.none() | COUNTS, st.none() | COUNTS),
    vm=st.none() | st.builds(KnownVm, MACHINES, st.none() | st.builds(Process, COUNTS, COUNTS)),
    removed_any=st.booleans(),
    held=st.booleans(),
    lost_at=st.none() | TIMES,
    groups=st.dictionaries(NAMES, st.builds(Limits, COUNTS, COUNTS, COUNTS, COUNTS), max_size=2),
)
SPECS = st.builds(
    Spec[DiskConfig], st.builds(DiskConfig, id=NAMES), st.none() | st.builds(Limits, COUNTS), st.none() | TEXT
)
DEVICES = st.builds(Record[DiskConfig], SPECS, st.sampled_from(State), st.none() | REMOVALS, st.none() | SPECS).map(
    msgspec.json.encode
)
CHANGES: st.SearchStrategy[Changes] = st.dictionaries(NAMES, st.none() | RESOURCES, max_size=3)
OPERATIONS = NAMES | st.just("")

Transaction: TypeAlias = Callable[[Store], None]


@st.composite
def transactions(draw: st.DrawFn, /) -> tuple[str, Transaction]:
    """One call, and the sandbox that has to be registered for it ("" for the one that registers)."""
    record, name, operation = draw(RECORDS), draw(SANDBOXES), draw(OPERATIONS)
    changes, removals = draw(CHANGES), draw(st.dictionaries(NAMES, REMOVALS, max_size=3))
    device, ends = draw(st.none() | DEVICES), draw(st.none() | OPERATIONS)
    calls: list[tuple[str, Transaction]] = [
        ("", lambda store: store.save_sandbox(record, changes, ends)),
        (record.id, lambda store: store.save_containers(record.id, changes, ends)),
        (record.id, lambda store: store.save_removals(record.id, removals)),
        (record.id, lambda store: store.save_device(record.id, "disk", operation or "d", device)),
        (record.id, lambda store: store.begin(record.id, operation)),
        (record.id, lambda store: store.end(record.id, operation)),
        (name, lambda store: store.forget_sandbox(name)),
    ]
    return draw(st.sampled_from(calls))


def _after_a_kill(path: Path) -> list[Kept]:
    """What a restart finds of the files as they lie there now."""
    with tempfile.TemporaryDirectory(prefix="kr-") as name:
        for file in (path, path.with_name(f"{path.name}-wal")):
            shutil.copy(file, name)
        store = SqliteStore(Path(name, path.name))
        try:
            return _in_order(store.load())
        finally:
            assert store.quarantined == 0
            store.close()


def _in_order(found: list[Kept]) -> list[Kept]:
    return [replace(kept, undone=tuple(sorted(kept.undone))) for kept in found]


@settings(max_examples=40)
@given(st.lists(transactions(), min_size=1, max_size=8))
def test_after_every_transaction_a_restart_finds_all_of_it(life: list[tuple[str, Transaction]]) -> None:
    memory = MemoryStore()
    with tempfile.TemporaryDirectory(prefix="kr-") as name:
        path = Path(name, "state.db")
        with closing(SqliteStore(path)) as durable:
            for sandbox, transaction in life:
                if sandbox and sandbox not in memory.sandboxes:
                    continue
                for store in (memory, durable):
                    transaction(store)
                expected = _in_order(copy.deepcopy(memory).load())
                assert _after_a_kill(path) == expected
        with closing(SqliteStore(path)) as again:
            assert _in_order(again.load()) == _in_order(memory.load())
