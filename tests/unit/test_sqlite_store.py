"""The durable store: what it keeps, what it refuses, and what it puts aside. Its laws are in tests/property."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hypervisors.base import Accelerator, Machine
from hypervisors.ch_types import DiskConfig
from kata_resmgr import sqlite_store
from kata_resmgr.devices import Record, Spec, State
from kata_resmgr.process import Process
from kata_resmgr.removal import Removal
from kata_resmgr.sqlite_store import SqliteStore
from kata_resmgr.state_lock import StateError
from kata_resmgr.store import Attachment, Kept, KnownVm, SandboxRecord, StateUnavailable
from tests.sandbox.rig import cpus, make_plan

MACHINE = Machine("5b2f2f0e", 42, 8, True, Accelerator.KVM)
HOLD_IT = """
import sys
from pathlib import Path
from kata_resmgr.sqlite_store import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


DISK = msgspec.json.encode(Record(Spec(DiskConfig(id="d1")), State.PRESENT))


def record(name: str = "s1", toml: str = "", resources: bytes | None = None) -> SandboxRecord:
    """A sandbox with an attached VM."""
    plan = make_plan(toml, resources)
    return SandboxRecord(
        id=name,
        config=plan.config,
        boot=plan.boot,
        fitted=replace(plan.boot, max_vcpus=8),
        notes=plan.notes,
        since="2026-12-01T00:00:00.000Z",
        resources=resources,
        annotations={},
        resized=None,
        held_vcpus=None,
        monitor="/run/s1.sock",
        ever_attached=True,
        attachment=Attachment("/run/s1.sock", None, None),
        vm=KnownVm(MACHINE, Process(42, 4711)),
        removed_any=True,
        held=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path)) as store:
        yield store


def loaded(path: Path) -> list[Kept]:
    with opened(path) as store:
        return store.load()


def query(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute(statement, values).fetchall()
        db.commit()
        return rows


def test_what_was_saved_is_there_after_a_restart(path: Path) -> None:
    kept = record(toml="[hypervisor.qemu]\ndefault_vcpus = 0.1\n", resources=b'{"x": 1.50, "cpu":{}}')
    with opened(path) as store:
        assert store.load() == []
        store.save_sandbox(kept, {"b": cpus(2), "a": b"{ }"})
        store.save_removals("s1", {"v2": Removal(1.5, 2.5, 3, "no", 2)})
        store.save_device("s1", "disk", "d1", DISK)
        store.begin("s1", "c")
        assert store.last_event() == 0
        store.reserve_events(1000)
    with opened(path) as store:
        assert store.load() == [
            Kept(
                kept,
                {"a": b"{ }", "b": cpus(2)},
                {"v2": Removal(1.5, 2.5, 3, "no", 2)},
                {("disk", "d1"): DISK},
                ("c",),
            )
        ]
        assert kept.config.default_vcpus == Fraction(1, 10)
        assert (store.quarantined, store.last_event()) == (0, 1000)
    assert loaded(path)[0].undone == ()  # that was told once


@pytest.mark.parametrize("attachment", [None, Attachment("/run/another.sock", None, None)])
def test_without_a_vm_neither_removals_nor_devices_are_kept(path: Path, attachment: Attachment | None) -> None:
    with opened(path) as store:
        store.save_sandbox(record())
        store.save_removals("s1", {"v2": Removal(1.0, 1.0)})
        store.save_device("s1", "disk", "d1", DISK)
        store.save_sandbox(replace(record(), vm=None, attachment=attachment))
    assert (loaded(path)[0].removals, loaded(path)[0].devices) == ({}, {})


def test_nobody_else_may_read_it(path: Path) -> None:
    with opened(path) as store:
        store.save_sandbox(record())
        assert {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {
            "state.db": 0o600,
            "state.db-wal": 0o600,
            "state.db.lock": 0o600,
        }


# One state, one daemon


def test_a_second_daemon_is_told_who_holds_it_and_a_killed_one_holds_nothing(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_IT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StateError, match=f"another daemon, pid {holder.pid}, owns this state; stop it"):
            SqliteStore(path)
        other = path.with_name("link.db")
        other.symlink_to(path)
        with pytest.raises(StateError, match=f"pid {holder.pid}"):
            SqliteStore(other)
        holder.send_signal(signal.SIGKILL)
    assert loaded(path) == []


def test_while_it_is_open_it_is_nobody_else_s(path: Path) -> None:
    locked = pytest.raises(sqlite3.OperationalError, match="locked")
    with opened(path), closing(sqlite3.connect(path, timeout=0)) as db, locked:
        db.execute("SELECT * FROM sandbox")


# What cannot be written


def test_what_cannot_be_written_is_refused_and_changes_nothing(path: Path) -> None:
    with opened(path) as store:
        store.save_sandbox(record(), {"a": b"{}"})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)  # files may grow no more
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("state.db-wal").stat().st_size, before[1]))
        try:
            for attempt in (
                partial(store.save_sandbox, replace(record(), held=True)),
                partial(store.save_containers, "s1", {"a": None, "b": cpus(1)}),
                partial(store.save_removals, "s1", {"v2": Removal(1.0, 1.0)}),
                partial(store.begin, "s1", "b"),
                partial(store.forget_sandbox, "s1"),
                partial(store.reserve_events, 7),
            ):
                with pytest.raises(StateUnavailable, match="the state cannot be written") as failure:
                    attempt()
                assert (failure.value.code.status, failure.value.retryable) == (503, True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.save_containers("s1", {"c": b"{}"})
    assert loaded(path) == [Kept(record(), {"a": b"{}", "c": b"{}"})]


def test_a_place_where_nothing_can_be(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="the lock of the state cannot be made: No such file"):
        SqliteStore(tmp_path / "absent" / "state.db")
    with pytest.raises(StateError, match=r"the state cannot be opened: .*Is a directory"):
        SqliteStore(tmp_path)
    tmp_path.with_name(f"{tmp_path.name}.lock").unlink()


# What cannot be read


@pytest.mark.parametrize("junk", [b"no database at all, and long enough to be looked at" * 100, b"SQLite format 3\0"])
def test_a_file_that_is_no_database_is_put_aside(path: Path, junk: bytes) -> None:
    path.write_bytes(junk)
    with opened(path) as store:
        assert store.load() == []
        assert store.quarantined == 1
        store.save_sandbox(record())
    assert path.with_name("state.db.corrupt-1").read_bytes() == junk
    assert len(loaded(path)) == 1


@pytest.mark.parametrize(
    "text", [b"source TEXT", b"TABLE sandbox", b"row TEXT NOT"], ids=["column", "table", "keyword"]
)
@pytest.mark.parametrize("byte", [b"t", b"\xac"], ids=["letter", "no UTF-8"])
def test_a_damaged_schema_is_noticed_and_put_aside(path: Path, text: bytes, byte: bytes) -> None:
    with opened(path) as store:
        store.save_sandbox(record())
    good = path.read_bytes()
    assert good.count(text) == 1
    path.write_bytes(good.replace(text, text[:-2] + byte + text[-1:]))
    with opened(path) as store:
        assert (store.load(), store.quarantined) == ([], 1)
    assert path.with_name("state.db.corrupt-1").exists()


def test_pages_that_were_overwritten_are_noticed_and_put_aside_beside_the_earlier_ones(path: Path) -> None:
    path.with_name("state.db.corrupt-1").write_bytes(b"an earlier one")
    with opened(path) as store:
        store.save_sandbox(record(), {f"c{number}": cpus(1) for number in range(200)})
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(os.urandom(4096 * 3))
    with opened(path) as store:
        assert (store.load(), store.quarantined) == ([], 1)
    assert path.with_name("state.db.corrupt-2").exists()
    assert path.with_name("state.db.corrupt-1").read_bytes() == b"an earlier one"


@pytest.mark.parametrize(
    ("spoil", "reason", "left"),
    [
        ("UPDATE sandbox SET record = '{}' WHERE id = 's1'", "missing required field", {"s2": 1}),
        ("UPDATE sandbox SET record = 'x' WHERE id = 's1'", "malformed", {"s2": 1}),
        ("UPDATE sandbox SET id = '../x' WHERE id = 's1'", "../x", {"s2": 1}),
        ("UPDATE sandbox SET id = 's3' WHERE id = 's1'", "the record is of 's1'", {"s2": 1}),
        ("DELETE FROM sandbox WHERE id = 's1'", "belongs to no sandbox", {"s2": 1}),
        ("UPDATE container SET resources = x'7b' WHERE sandbox = 's1'", "truncated", {"s1": 0, "s2": 1}),
        (
            """UPDATE container SET resources = CAST('{"cpu": {"cpus": "x"}}' AS BLOB) WHERE sandbox = 's1'""",
            "/resources/cpu/cpus",
            {"s1": 0, "s2": 1},
        ),
        ("UPDATE removal SET record = '{\"first\": true}'", "first", {"s1": 1, "s2": 1}),
        ("UPDATE device SET record = x'00'", "malformed", {"s1": 1, "s2": 1}),
        ('UPDATE device SET record = CAST(\'{"state": "gone"}\' AS BLOB)', "state", {"s1": 1, "s2": 1}),
        ("UPDATE device SET kind = 'fs'", "no devices of the kind 'fs'", {"s1": 1, "s2": 1}),
    ],
)
def test_a_row_that_cannot_be_read_is_put_aside(path: Path, spoil: str, reason: str, left: dict[str, int]) -> None:
    with opened(path) as store:
        for name in ("s1", "s2"):
            store.save_sandbox(record(name), {"a": b"{}"})
        store.save_removals("s1", {"v2": Removal(1.0, 1.0)})
        store.save_device("s1", "disk", "d1", DISK)
    query(path, spoil)
    with opened(path) as store:
        kept = store.load()
        assert {sandbox.record.id: len(sandbox.containers) for sandbox in kept} == left
        assert store.quarantined >= 1
        assert all(sandbox.complete == bool(sandbox.containers) for sandbox in kept)
    reasons = [str(row[0]) for row in query(path, "SELECT reason FROM quarantine")]
    assert len(reasons) == store.quarantined
    assert any(reason in text for text in reasons)
    assert len(loaded(path)) == len(left)  # and it is not put aside again
    assert len(query(path, "SELECT reason FROM quarantine")) == len(reasons)


def test_a_sandbox_of_which_nothing_can_be_made_is_put_aside_whole(path: Path) -> None:
    with opened(path) as store:
        store.save_sandbox(record(), {"a": b"{}"})
        store.set_aside("s1", "for a test")
        assert store.quarantined == 2
    assert loaded(path) == []
    assert {row[1] for row in query(path, "SELECT reason, source FROM quarantine")} == {"sandbox", "container"}


# Versions


def test_a_newer_schema_is_left_alone(path: Path) -> None:
    with opened(path) as store:
        store.save_sandbox(record())
    query(path, "PRAGMA user_version = 7")
    before = path.read_bytes()
    with pytest.raises(StateError, match="the state has schema 7, this program knows up to 1: start the newer program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_an_older_schema_is_brought_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as store:
        store.save_sandbox(record())

    def second(db: sqlite3.Connection) -> None:
        db.execute("UPDATE sandbox SET record = json_set(record, '$.held', json('true'))")

    monkeypatch.setattr(sqlite_store, "MIGRATIONS", (*sqlite_store.MIGRATIONS, second))
    for _ in range(2):  # the second time there is nothing to do
        assert [kept.record.held for kept in loaded(path)] == [True]
        assert query(path, "PRAGMA user_version") == [(2,)]


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as store:
        store.save_sandbox(record())

    def second(db: sqlite3.Connection) -> None:
        db.execute("DROP TABLE sandbox")
        db.execute("SELECT * FROM absent")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_store, "MIGRATIONS", (*sqlite_store.MIGRATIONS, second))
        with pytest.raises(StateError, match="no such table"):
            SqliteStore(path)
    assert loaded(path) == [Kept(record())]


def test_another_programs_database_is_left_alone(path: Path) -> None:
    query(path, "CREATE TABLE t (x)")
    with pytest.raises(StateError, match="this is another program's database; name another"):
        SqliteStore(path)


def test_after_a_boot_of_the_host_its_clock_and_its_processes_are_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with opened(path) as store:
        store.load()
        store.save_sandbox(replace(record(), lost_at=7.0))
        store.save_removals("s1", {"v2": Removal(5.0, 6.0, 3)})
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(sqlite_store, "BOOT_ID", boot)
    for _ in range(2):
        (kept,) = loaded(path)
        assert kept.record.vm == KnownVm(MACHINE, Process(42, -1))
        assert kept.record.lost_at is None
        assert kept.removals == {"v2": Removal(0.0, 0.0, 3)}
