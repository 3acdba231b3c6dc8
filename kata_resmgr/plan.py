"""The dry run: what a sandbox would be booted with, and what each operation would make of it, without a VM.

It keeps the same ledger as a live sandbox does, so it sizes, refuses and explains by the same rules. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from msgspec import UNSET, UnsetType

from kata_resmgr import explain, oci, view, vmm
from kata_resmgr.config import Settings
from kata_resmgr.ledger import Ledger, registered
from kata_resmgr.limits import PlannedLimiter
from kata_resmgr.note import Note
from kata_resmgr.problem import Problem, one_line
from kata_resmgr.sizing import exact_text
from kata_resmgr.weight import cpu_weight

SOME_ID = "<id>"
"""In the monitor's path: a sandbox that is not registered has no id."""


class Op(StrEnum):
    """What a step does."""

    CREATE = "create"
    UPDATE = "update"
    RESIZE = "resize"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. *container* is "" for a resize; *resources* is an OCI text, and empty for a delete."""

    op: Op
    container: str = ""
    resources: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned."""

    hypervisor: str | None = None
    host_cpus: int | None = None
    """None: what the configuration counts; likewise *host_memory*, in MiB."""
    host_memory: int | None = None
    annotations: Mapping[str, str] | None = None
    resources: bytes | None = None
    """The sandbox's own, an OCI text."""
    steps: tuple[Step, ...] = ()


# The answer, as API.md has it


class PlannedCondition(view.View, frozen=True):
    """A condition that would be in force; a plan has no times."""

    type: str
    reason: str
    message: str


class PlannedVcpus(view.View, frozen=True):
    exact: str
    desired: int


class PlannedMemory(view.View, frozen=True):
    desired: int


class Refusal(view.View, frozen=True):
    """Why a step would fail."""

    code: str
    detail: str


class PlannedStep(view.View, frozen=True, kw_only=True):
    """What holds after a step; after a refused one, what held before."""

    op: Op
    container: str | UnsetType = UNSET
    vcpus: PlannedVcpus
    memory: PlannedMemory
    conditions: list[PlannedCondition]
    error: Refusal | None


class Limiters(view.View, frozen=True):
    """For each device of a kind; None: not limited."""

    disk: PlannedLimiter | None
    net: PlannedLimiter | None


class Weight(view.View, frozen=True):
    shares: int
    cpu_weight: int | None


class Planned(view.View, frozen=True):
    """The whole answer. *conditions* are the sandbox's own, at boot; *weight* and *explain* are after the last step."""

    mode: str
    boot: view.Boot
    vmm: view.AnyVmm
    conditions: list[PlannedCondition]
    steps: list[PlannedStep]
    limiters: Limiters
    weight: Weight
    explain: list[str]


class DryRun:
    """One plan in the making, step by step, so that a daemon can do other work in between.

    Raises :class:`Problem` where the sandbox would be refused.
    """

    def __init__(self, settings: Settings, request: Request) -> None:
        self._settings = settings.for_host(request.host_cpus, request.host_memory)
        self._request = request
        self._annotations = request.annotations or {}
        try:
            self._registered = registered(self._settings, request.hypervisor, self._annotations, request.resources)
        except Problem as problem:
            raise problem.below("/sandbox") from None
        config, declared, boot, _ = self._registered
        self._ledger = Ledger(config, declared, boot)

    def steps(self) -> Iterator[PlannedStep]:
        """Take the next step of the request."""
        for step in self._request.steps:
            refusal = None
            try:
                self._take(step)
            except Problem as problem:
                refusal = Refusal(problem.code.text, problem.detail)
            target, excess = self._ledger.now.target, self._ledger.excess()
            yield PlannedStep(
                op=step.op,
                container=step.container or UNSET,
                vcpus=PlannedVcpus(exact_text(target.exact), target.vcpus),
                memory=PlannedMemory(target.memory),
                conditions=[] if excess is None else [_condition(excess)],
                error=refusal,
            )

    def _take(self, step: Step) -> None:
        ledger = self._ledger
        match step.op:
            case Op.CREATE:
                edit = ledger.put(step.container, ledger.record(step.resources))
            case Op.UPDATE:
                oci.decode(step.resources)
                edit = ledger.patch(step.container, step.resources)
            case Op.RESIZE:
                oci.decode(step.resources)
                edit = ledger.resize(step.resources)
            case Op.DELETE:
                edit = ledger.delete(step.container)
        if edit is not None:
            ledger.make(edit)

    def answer(self, steps: list[PlannedStep]) -> Planned:
        """The answer, with the *steps* that were taken."""
        config, _, boot, notes = self._registered
        shares = self._ledger.now.sums.shares
        monitor = self._settings.daemon.vm_directory(SOME_ID) / vmm.MONITOR
        return Planned(
            mode=boot.mode,
            boot=view.Boot.of(boot),
            vmm=vmm.cloud_hypervisor(config, boot)
            if config.hypervisor == "clh"
            else vmm.qemu(config, boot, str(monitor)),
            conditions=list({(note.type, note.reason): _condition(note) for note in notes}.values()),
            steps=steps,
            limiters=Limiters(*(config.io_limits(device).planned(config.hypervisor) for device in ("disk", "net"))),
            weight=Weight(shares, cpu_weight(shares)),
            explain=[*explain.premises(config, self._annotations), *self._ledger.steps()],
        )


def dry_run(settings: Settings, request: Request) -> Planned:
    """All at once. Raises :class:`Problem` where the sandbox would be refused."""
    run = DryRun(settings, request)
    return run.answer(list(run.steps()))


def _condition(note: Note) -> PlannedCondition:
    return PlannedCondition(note.type, note.reason, one_line(note.message))
