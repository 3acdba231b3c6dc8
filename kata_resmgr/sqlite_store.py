"""The durable store: SQLite in WAL mode with every commit synchronous, used from the event loop itself.

A commit takes some 20 us where the runtime directory is, which is less than handing it to a thread. Nothing here
waits: whoever else writes to the file makes a commit fail at once, not late.

What cannot be read is put aside, never deleted: a row goes to the table ``quarantine``, a file that is no database of
ours any more is renamed. Both are logged and counted.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import structlog

from kata_resmgr import oci
from kata_resmgr.conditions import timestamp
from kata_resmgr.devices import read_record
from kata_resmgr.ids import check_id
from kata_resmgr.problem import Problem
from kata_resmgr.removal import Removal
from kata_resmgr.state_lock import StateError, StateLock
from kata_resmgr.store import NO_CHANGES, Changes, Kept, SandboxRecord, StateUnavailable

APPLICATION = 0x6B72736D
"""``PRAGMA application_id``: by this a file is known to be ours."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = structlog.get_logger(__name__)


def _first(db: sqlite3.Connection) -> None:
    """Schema 1. A sandbox's OCI texts stand beside its record, byte for byte as they were given."""
    for table in (
        "meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "sandbox (id TEXT PRIMARY KEY, record TEXT NOT NULL, resources BLOB, resized BLOB)",
        "container (sandbox TEXT, id TEXT, resources BLOB NOT NULL, PRIMARY KEY (sandbox, id))",
        "removal (sandbox TEXT, id TEXT, record TEXT NOT NULL, PRIMARY KEY (sandbox, id))",
        "device (sandbox TEXT, kind TEXT, id TEXT, record BLOB NOT NULL, PRIMARY KEY (sandbox, kind, id))",
        "begun (sandbox TEXT, operation TEXT, PRIMARY KEY (sandbox, operation))",
    ):
        db.execute(f"CREATE TABLE {table} STRICT, WITHOUT ROWID")
    db.execute(
        "CREATE TABLE quarantine (number INTEGER PRIMARY KEY, at TEXT NOT NULL, reason TEXT NOT NULL, "
        "source TEXT NOT NULL, row TEXT NOT NULL) STRICT"
    )


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_first,)
"""What leads from each schema version to the next. Their number is the version that this program writes."""

_OF_A_VM = ("removal", "device")
_OF_A_SANDBOX = ("sandbox", "container", "removal", "device", "begun")
Statement: TypeAlias = tuple[str, tuple[str | bytes | None, ...]]
"""SQL, and the values that belong into it."""

_KEY = {"sandbox": "id"}  # of the other tables it is "sandbox"


class SqliteStore:
    """The state at *path*. See :class:`kata_resmgr.store.Store`."""

    def __init__(self, path: Path) -> None:
        """Open or make it. Raises :class:`StateError`: held by another daemon, of a newer program, or not usable."""
        self._path = Path(os.path.realpath(path))
        self._quarantined = 0
        self._lock = StateLock(self._path)
        try:
            self._db = self._open()
        except (sqlite3.Error, OSError) as error:
            self._lock.release()
            raise StateError(f"{self._path}: the state cannot be opened: {error}") from error
        except StateError:
            self._lock.release()
            raise

    @property
    def quarantined(self) -> int:
        return self._quarantined

    # Reading

    def load(self) -> list[Kept]:
        """Raises :class:`StateUnavailable` where what cannot be read cannot be put aside either."""
        with self._transaction() as db:
            same_boot = self._note_boot(db)
            containers, removals, devices = self._containers(db), self._removals(db), self._devices(db)
            begun: dict[str, list[str]] = defaultdict(list)
            for name, operation in db.execute("SELECT sandbox, operation FROM begun").fetchall():
                begun[name].append(operation)
            db.execute("DELETE FROM begun")
            kept = []
            for name, text, resources, resized in db.execute("SELECT * FROM sandbox").fetchall():
                try:
                    check_id(name, "sandbox")
                    record = _RECORD.decode(text)
                    if record.id != name:
                        raise ValueError(f"the record is of {record.id[:128]!r}")
                except (ValueError, Problem) as error:
                    self._put_sandbox_aside(db, name, str(error))
                    continue
                record = replace(record, resources=resources, resized=resized)
                table, complete = containers.pop(name, ({}, True))
                pending = removals.pop(name, {})
                if not same_boot:
                    record, pending = _of_another_boot(record, pending)
                    for statement in (_sandbox(record), *_removals(name, pending)):
                        db.execute(*statement)
                kept.append(Kept(record, table, pending, devices.pop(name, {}), tuple(begun.pop(name, ())), complete))
            for name in {*containers, *removals, *devices} & self._names(db):
                self._put_sandbox_aside(db, name, "it belongs to no sandbox")
        return kept

    def set_aside(self, sandbox_id: str, reason: str) -> None:
        with self._transaction() as db:
            self._put_sandbox_aside(db, sandbox_id, reason)

    # Writing

    def begin(self, sandbox_id: str, operation: str) -> None:
        self._write(("INSERT OR REPLACE INTO begun VALUES (?, ?)", (sandbox_id, operation)))

    def end(self, sandbox_id: str, operation: str) -> None:
        self._write(*_end(sandbox_id, operation))

    def save_sandbox(self, record: SandboxRecord, containers: Changes = NO_CHANGES, ends: str | None = None) -> None:
        tables = _OF_A_VM if record.vm is None else ()
        of_another = [(f"DELETE FROM {table} WHERE sandbox = ?", (record.id,)) for table in tables]  # noqa: S608
        self._write(_sandbox(record), *of_another, *_containers(record.id, containers), *_end(record.id, ends))

    def forget_sandbox(self, sandbox_id: str) -> None:
        self._write(
            *(
                (f"DELETE FROM {table} WHERE {_KEY.get(table, 'sandbox')} = ?", (sandbox_id,))  # noqa: S608
                for table in _OF_A_SANDBOX
            )
        )

    def save_containers(self, sandbox_id: str, changes: Changes, ends: str | None = None) -> None:
        self._write(*_containers(sandbox_id, changes), *_end(sandbox_id, ends))

    def save_removals(self, sandbox_id: str, removals: Mapping[str, Removal]) -> None:
        self._write(*_removals(sandbox_id, removals))

    def save_device(self, sandbox_id: str, kind: str, device_id: str, text: bytes | None) -> None:
        if text is None:
            self._write(("DELETE FROM device WHERE sandbox = ? AND kind = ? AND id = ?", (sandbox_id, kind, device_id)))
        else:
            self._write(("INSERT OR REPLACE INTO device VALUES (?, ?, ?, ?)", (sandbox_id, kind, device_id, text)))

    def last_event(self) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE key = 'event'").fetchone()
        return 0 if row is None else int(row[0])

    def reserve_events(self, last: int) -> None:
        self._write(("INSERT OR REPLACE INTO meta VALUES ('event', ?)", (str(last),)))

    def close(self) -> None:
        self._db.close()
        self._lock.release()

    def _write(self, *statements: Statement) -> None:
        """All of them or none, kept when this returns. One alone is a transaction anyway, and a third cheaper so."""
        if len(statements) > 1:
            with self._transaction() as db:
                for text, values in statements:
                    db.execute(text, values)
            return
        try:
            for text, values in statements:
                self._db.execute(text, values)
        except sqlite3.Error as error:
            raise StateUnavailable(str(error)) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StateUnavailable(str(error)) from error
        finally:
            if db.in_transaction:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")

    # Opening

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite quotes what it stumbles over
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise  # the place is at fault, not what is in it
            self._put_file_aside(str(error))
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would let others read it
        db = sqlite3.connect(self._path, timeout=0, isolation_level=None, cached_statements=64)
        try:
            db.text_factory = _text
            if (fault := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(fault)
            self._must_be_ours(db)
            # Nobody else has any business in it: what is locked once need not be locked for each transaction. Most
            # transactions change a row or two, and each page that they touch is summed and copied.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA page_size = 1024")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            version = _pragma(db, "user_version")
            if version > len(MIGRATIONS):
                raise StateError(
                    f"{self._path}: the state has schema {version}, this program knows up to {len(MIGRATIONS)}: "
                    "start the newer program, or name another [daemon] state"
                )
            if version < len(MIGRATIONS):
                try:
                    _migrate(db, version)
                except sqlite3.OperationalError as error:  # nothing says that what is in the file is at fault
                    raise StateError(f"{self._path}: the state cannot be opened: {error}") from error
            if _schema(db) != _sound_schema():  # no check of SQLite's looks at names
                raise sqlite3.DatabaseError("the schema is damaged")
        except BaseException:
            db.close()
            raise
        return db

    def _must_be_ours(self, db: sqlite3.Connection) -> None:
        if _pragma(db, "application_id") == APPLICATION:
            return
        if db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise StateError(f"{self._path}: this is another program's database; name another [daemon] state")

    def _put_file_aside(self, reason: str) -> None:
        number = 1
        while (aside := self._path.with_name(f"{self._path.name}.corrupt-{number}")).exists():
            number += 1
        for suffix in ("-wal", "-shm", ""):  # the file last: a crash in between must not leave its log to a new one
            with suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").rename(f"{aside}{suffix}")
        self._quarantined += 1
        log.error("the state cannot be read: it is put aside, and begun anew", reason=reason, aside=str(aside))

    # What cannot be read

    def _containers(self, db: sqlite3.Connection) -> dict[str, tuple[dict[str, bytes], bool]]:
        """By sandbox: its table, and whether all of it could be read."""
        tables: dict[str, tuple[dict[str, bytes], bool]] = {}
        for name, container, text in db.execute("SELECT * FROM container").fetchall():
            table, complete = tables.get(name, ({}, True))
            try:
                check_id(container, "container")
                oci.decode(text)
                table[container] = text
            except Problem as error:
                self._put_aside(db, "container", (name, container), text, error.detail)
                complete = False
            tables[name] = table, complete
        return tables

    def _removals(self, db: sqlite3.Connection) -> dict[str, dict[str, Removal]]:
        removals: dict[str, dict[str, Removal]] = defaultdict(dict)
        for name, unit, text in db.execute("SELECT * FROM removal").fetchall():
            try:
                removals[name][unit] = _REMOVAL.decode(text)
            except msgspec.DecodeError as error:
                self._put_aside(db, "removal", (name, unit), text, str(error))
        return dict(removals)

    def _devices(self, db: sqlite3.Connection) -> dict[str, dict[tuple[str, str], bytes]]:
        devices: dict[str, dict[tuple[str, str], bytes]] = defaultdict(dict)
        for name, kind, device, text in db.execute("SELECT * FROM device").fetchall():
            try:
                read_record(kind, text)
                devices[name][kind, device] = text
            except ValueError as error:
                self._put_aside(db, "device", (name, kind, device), text, str(error))
        return dict(devices)

    def _put_sandbox_aside(self, db: sqlite3.Connection, name: str, reason: str) -> None:
        for table in _OF_A_SANDBOX[:-1]:
            key = _KEY.get(table, "sandbox")
            for row in db.execute(f"SELECT * FROM {table} WHERE {key} = ?", (name,)).fetchall():  # noqa: S608
                self._note_aside(db, table, row, reason)
            db.execute(f"DELETE FROM {table} WHERE {key} = ?", (name,))  # noqa: S608

    def _put_aside(self, db: sqlite3.Connection, table: str, key: tuple[str, ...], text: bytes | str, why: str) -> None:
        self._note_aside(db, table, (*key, text), why)
        columns = ("sandbox", "kind", "id") if table == "device" else ("sandbox", "id")
        db.execute(f"DELETE FROM {table} WHERE {' AND '.join(f'{column} = ?' for column in columns)}", key)  # noqa: S608

    def _note_aside(self, db: sqlite3.Connection, table: str, row: tuple[Any, ...], reason: str) -> None:
        said = repr([value.decode(errors="replace") if isinstance(value, bytes) else value for value in row])
        db.execute(
            "INSERT INTO quarantine (at, reason, source, row) VALUES (?, ?, ?, ?)", (timestamp(), reason, table, said)
        )
        self._quarantined += 1
        log.error("a row of the state cannot be read: it is put aside", table=table, sandbox=row[0], reason=reason)

    def _names(self, db: sqlite3.Connection) -> set[str]:
        """Of whom there is anything."""
        tables = ("container", "removal", "device")
        return {name for table in tables for (name,) in db.execute(f"SELECT sandbox FROM {table}")}  # noqa: S608

    def _note_boot(self, db: sqlite3.Connection) -> bool:
        """Whether the host runs as it did when the state was written: then clock and start times are comparable."""
        boot = BOOT_ID.read_text().strip()
        before = db.execute("SELECT value FROM meta WHERE key = 'boot'").fetchone()
        db.execute("INSERT OR REPLACE INTO meta VALUES ('boot', ?)", (boot,))
        return before is None or before[0] == boot


def _of_another_boot(record: SandboxRecord, pending: dict[str, Removal]) -> tuple[SandboxRecord, dict[str, Removal]]:
    """The host was started anew: its VMs are gone, whatever has their pids now."""
    vm = record.vm
    if vm is not None and vm.process is not None:
        vm = replace(vm, process=replace(vm.process, started=-1))
    return (
        replace(record, vm=vm, lost_at=None),
        {name: msgspec.structs.replace(removal, first=0.0, last=0.0) for name, removal in pending.items()},
    )


def _sandbox(record: SandboxRecord) -> Statement:
    text = encode(replace(record, resources=None, resized=None))
    return "INSERT OR REPLACE INTO sandbox VALUES (?, ?, ?, ?)", (record.id, text, record.resources, record.resized)


def _removals(sandbox_id: str, removals: Mapping[str, Removal]) -> Iterator[Statement]:
    yield "DELETE FROM removal WHERE sandbox = ?", (sandbox_id,)
    for name, removal in removals.items():
        yield "INSERT INTO removal VALUES (?, ?, ?)", (sandbox_id, name, encode(removal))


def _containers(sandbox_id: str, changes: Changes) -> Iterator[Statement]:
    for container_id, text in changes.items():
        if text is None:
            yield "DELETE FROM container WHERE sandbox = ? AND id = ?", (sandbox_id, container_id)
        else:
            yield "INSERT OR REPLACE INTO container VALUES (?, ?, ?)", (sandbox_id, container_id, text)


def _end(sandbox_id: str, operation: str | None) -> Iterator[Statement]:
    if operation is not None:
        yield "DELETE FROM begun WHERE sandbox = ? AND operation = ?", (sandbox_id, operation)


def _migrate(db: sqlite3.Connection, version: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    for migrate in MIGRATIONS[version:]:
        migrate(db)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    db.execute("COMMIT")


def _schema(db: sqlite3.Connection) -> list[Any]:
    """Each table, and how it was made."""
    return db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()


def _sound_schema() -> list[Any]:
    """As this program makes it."""
    with closing(sqlite3.connect(":memory:")) as db:
        for migrate in MIGRATIONS:
            migrate(db)
        return _schema(db)


def _pragma(db: sqlite3.Connection, name: str) -> int:
    value = db.execute(f"PRAGMA {name}").fetchone()[0]
    assert isinstance(value, int)  # noqa: S101 - of these two it always is
    return value


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


# Records as JSON: fractions are text in lowest terms


def _encode(value: object) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is not kept")


def _decode(kind: type, value: object) -> object:
    if kind is Fraction and isinstance(value, str):
        return Fraction(value)
    raise ValueError(f"no {kind.__name__}: {str(value)[:80]!r}")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode)
_RECORD = msgspec.json.Decoder(SandboxRecord, dec_hook=_decode)
_REMOVAL = msgspec.json.Decoder(Removal)


def encode(value: object) -> str:
    """A record as it is kept."""
    return _ENCODER.encode(value).decode()
