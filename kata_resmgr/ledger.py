"""What one sandbox asks for: its containers, the size declared now, and the target that follows. No I/O, no clock.

A live sandbox and a dry run keep one each, so that both count, refuse and tell alike (SPEC 4 to 6). An operation is
first looked at (what would it change?), then made, which refuses it or leads to another target. What was made can be
taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kata_resmgr import declared, demand, explain, oci, sizing
from kata_resmgr.config import SandboxConfig, Settings
from kata_resmgr.declared import Declaration, become
from kata_resmgr.demand import ContainerTable, Record, Sums
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sizing import BootSize, Change, Declared, Target

CONTAINERS_MAX = 200_000
"""Containers of one sandbox: far beyond any pod, and a bound on what a caller can make the daemon keep."""

NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Registered(NamedTuple):
    """What follows from how a sandbox is registered."""

    config: SandboxConfig
    declared: Declaration
    boot: BootSize
    notes: tuple[Note, ...]
    """The sandbox's own conditions."""


def registered(
    settings: Settings, hypervisor: str | None, annotations: Mapping[str, str], resources: bytes | None
) -> Registered:
    """Size a sandbox. Raises :class:`Problem`, as the configuration, the declared and the boot size do."""
    config = settings.for_sandbox(hypervisor, annotations)
    declaration = declared.declare(config, annotations, resources)
    boot, notes = sizing.boot_size(config, declaration.size)
    return Registered(config, declaration, boot, (*config.notes, *notes))


class Edit(msgspec.Struct, frozen=True, gc=False):
    """What an operation changes."""

    change: Change
    records: Mapping[str, Record | None] = MappingProxyType({})
    """None: the container goes."""
    resized: Declaration | None = None
    """What is declared from now on; None: what was."""


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What is asked for at one moment."""

    sums: Sums
    target: Target
    held: int | None
    """The vCPUs that ``compat`` holds against the table."""


class Made(msgspec.Struct, frozen=True, gc=False):
    """An edit that was made, and all that it takes to take it back."""

    edit: Edit
    before: Standing
    after: Standing
    undone: Mapping[str, Record | None]
    resized: Declaration | None

    @property
    def rises(self) -> bool:
        """Whether it asks for more vCPUs than it did: where the VM has less, the operation has to wait for them."""
        return self.edit.change is not Change.DELETE and self.after.target.asks_more_than(self.before.target)

    @property
    def memory_rises(self) -> bool:
        """The same for memory."""
        before, after = self.before.target, self.after.target
        return self.edit.change is not Change.DELETE and after.memory_asked > before.memory_asked


class Ledger:
    """One sandbox's. Every method that raises :class:`Problem` leaves all as it was."""

    def __init__(
        self,
        config: SandboxConfig,
        declared: Declaration,
        boot: BootSize,
        containers: Mapping[str, bytes] = NOTHING,
        *,
        resized: bytes | None = None,
        held: int | None = None,
    ) -> None:
        """*resized* and *held*: what a resize has made of the declared record, and what ``compat`` holds."""
        self._config = config
        self._declared = declared
        self._boot = boot
        self._counting = demand.counting(config)
        self.table = ContainerTable()
        for name, text in containers.items():
            self.table.set(name, self.record(text))
        self.resized = None if resized is None else become(config, declared, resized)
        """What a pod-level resize has made of the declared size; None: never resized."""
        self.now = self._assess(held)

    @property
    def boot(self) -> BootSize:
        """The boot size, with the maxima of the machine once one is attached."""
        return self._boot

    def fit(self, boot: BootSize) -> None:
        """Another machine, or none: the target follows."""
        self._boot = boot
        self.now = self._assess(self.now.held)

    # What an operation would change; None: nothing

    def record(self, text: bytes, where: str = "/resources") -> Record:
        """A container's record. Raises :class:`Problem` ``invalid_resources`` with pointers that begin with *where*."""
        return Record(text, demand.of(oci.decode(text, where), self._counting))

    def put(self, container_id: str, record: Record) -> Edit | None:
        """Create or replace."""
        present = self.table.get(container_id)
        if present is not None and oci.same(present.text, record.text):
            return None
        return Edit(Change.ADD if present is None else Change.UPDATE, {container_id: record})

    def patch(self, container_id: str, text: bytes) -> Edit | None:
        """Merge *text*, which :func:`oci.decode` accepts. Raises :class:`Problem`, also ``not_found``."""
        present = self.must_have(container_id)
        merged = self.record(oci.merge(present.text, text))
        return None if oci.same(present.text, merged.text) else Edit(Change.UPDATE, {container_id: merged})

    def put_all(self, records: Mapping[str, Record]) -> Edit | None:
        """These containers and no others."""
        changes: dict[str, Record | None] = {name: None for name in self.table if name not in records}
        kinds = {Change.DELETE} if changes else set()
        for name, record in records.items():
            if (edit := self.put(name, record)) is not None:
                changes[name] = record
                kinds.add(edit.change)
        return Edit(kinds.pop() if len(kinds) == 1 else Change.UPDATE, changes) if changes else None

    def delete(self, container_id: str) -> Edit | None:
        return None if self.table.get(container_id) is None else Edit(Change.DELETE, {container_id: None})

    def resize(self, text: bytes) -> Edit | None:
        """A pod-level resize: merge *text*, which :func:`oci.decode` accepts, into what is declared."""
        present = self.resized or self._declared
        resized = declared.resized(self._config, present, text)
        return None if oci.same(present.text, resized.text) else Edit(Change.UPDATE, resized=resized)

    def must_have(self, container_id: str) -> Record:
        """The container's record. Raises :class:`Problem` ``not_found``."""
        record = self.table.get(container_id)
        if record is None:
            raise Problem(Code.NOT_FOUND, f'there is no container "{container_id}": create it with PUT')
        return record

    # Changing

    def make(self, edit: Edit) -> Made:
        """Change what is asked for, or raise :class:`Problem` where it may not be; a delete always may."""
        before, resized = self.now, self.resized
        undone = self._write(edit.records, edit.resized or resized)
        after = self._assess(None)
        held = sizing.held_vcpus(self._config, edit.change, before.target, after.target)
        if held is not None:
            after = self._assess(held)
        try:
            if edit.change is not Change.DELETE:
                self._must_be_allowed(before.target, after.target)
        except Problem:
            self._write(undone, resized)
            raise
        self.now = after
        return Made(edit, before, after, undone, resized)

    def take_back(self, made: Made) -> None:
        """Undo that one edit; what others have changed since stays."""
        self._write(made.undone, self.resized if made.edit.resized is None else made.resized)
        if self.now is made.after:
            self.now = made.before
        else:  # another operation has decided what is held
            self.now = self._assess(self.now.held)

    def _must_be_allowed(self, before: Target, after: Target) -> None:
        if len(self.table) > CONTAINERS_MAX:
            raise Problem(Code.TOO_MANY, f"a sandbox has at most {CONTAINERS_MAX} containers: delete some first")
        sizing.must_be_allowed(self._config, self._boot, before, after)

    def _write(self, records: Mapping[str, Record | None], resized: Declaration | None) -> dict[str, Record | None]:
        """Put these in place; what takes it back is returned."""
        self.resized = resized
        return {name: self.table.set(name, record) for name, record in records.items()}

    def _assess(self, held: int | None) -> Standing:
        """What is asked for as things are, where *held* vCPUs are held."""
        sums = self.table.sums()
        target = sizing.target(
            self._config, self._boot, self._declared.size, sums, resized=self._resized_size(), held=held
        )
        return Standing(sums, target, held)

    def _resized_size(self) -> Declared | None:
        return None if self.resized is None else self.resized.size

    # What there is to say

    def excess(self) -> Note | None:
        """What is asked for beyond what there can be: the condition that is in force as long as that is so."""
        now = self.now
        return sizing.excess(self._config, self._boot, self._declared.size, now.sums, now.target, self._resized_size())

    def steps(self) -> list[str]:
        """How the target comes about, line by line."""
        now, records = self.now, self.table.records
        return list(
            explain.lines(self._config, self._boot, self._declared, records, now.sums, now.target, resized=self.resized)
        )
