"""What an operator should know about a sandbox: SPEC 13's closed list, each with the time since when it holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

from kata_resmgr import view
from kata_resmgr.problem import one_line


class Kind(StrEnum):
    """The closed list; those that nothing raises yet come with the work that needs them."""

    CLAMPED = "Clamped"
    SURPLUS = "Surplus"
    GROW_FAILED = "GrowFailed"
    DEMAND_EXCEEDS_SIZE = "DemandExceedsSize"
    HOTPLUG_UNSUPPORTED = "HotplugUnsupported"
    UNREACHABLE = "Unreachable"
    LOST = "Lost"
    HELD = "Held"
    FOREIGN_CHANGE = "ForeignChange"
    MEMORY_FLOOR = "MemoryFloor"
    ABOVE_HOST = "AboveHost"
    ANNOTATION_IGNORED = "AnnotationIgnored"
    BURST_WITHOUT_RATE = "BurstWithoutRate"


def timestamp() -> str:
    """The wall clock's reading as answers show it: UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Conditions:
    """The conditions of one sandbox: at most one of each kind and reason."""

    __slots__ = ("_held", "_now")

    def __init__(self, now: Callable[[], str] = timestamp) -> None:
        self._held: dict[tuple[Kind, str], view.Condition] = {}
        self._now = now

    def hold(self, kind: Kind, reason: str, message: str) -> None:
        """The condition is in force; *since* stays what it was while kind and reason stay."""
        present = self._held.get((kind, reason))
        line = one_line(message)
        if present is None or present.message != line:
            since = self._now() if present is None else present.since
            self._held[kind, reason] = view.Condition(type=kind, reason=reason, message=line, since=since)

    def only(self, kind: Kind, reason: str | None, message: str = "") -> None:
        """Of that kind, this reason alone is in force (None: none is)."""
        for key in [key for key in self._held if key[0] is kind and key[1] != reason]:
            del self._held[key]
        if reason is not None:
            self.hold(kind, reason, message)

    def clear(self, kind: Kind, reason: str) -> None:
        """That one is over."""
        self._held.pop((kind, reason), None)

    def listed(self) -> list[view.Condition]:
        """All that are in force, oldest first."""
        return list(self._held.values())
