"""What an operator should know about a sandbox: SPEC 13's closed list, each with the time since when it holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

from kata_resmgr import view
from kata_resmgr.events import Teller
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
    LIMITS_DIFFER = "LimitsDiffer"


def timestamp() -> str:
    """The wall clock's reading as answers show it: UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Conditions:
    """The conditions of one sandbox: at most one of each kind and reason."""

    __slots__ = ("_held", "_now", "_tell")

    def __init__(self, now: Callable[[], str] = timestamp) -> None:
        self._held: dict[tuple[Kind, str], view.Condition] = {}
        self._now = now
        self._tell: Teller | None = None

    def tell_to(self, tell: Teller) -> None:
        """From now on *tell* hears of what is raised and cleared; what is in force it hears at once."""
        self._tell = tell
        for condition in self._held.values():
            tell("condition.raised", type=condition.type, reason=condition.reason, message=condition.message)

    def hold(self, kind: Kind, reason: str, message: str, since: str | None = None) -> None:
        """The condition is in force, from now on or as given; *since* stays what it was while kind and reason stay."""
        present = self._held.get((kind, reason))
        line = one_line(message)
        if present is None or present.message != line:
            since = present.since if present is not None else since or self._now()
            self._held[kind, reason] = view.Condition(type=kind, reason=reason, message=line, since=since)
            if present is None and self._tell is not None:
                self._tell("condition.raised", type=kind, reason=reason, message=line)

    def only(self, kind: Kind, reason: str | None, message: str = "") -> None:
        """Of that kind, this reason alone is in force (None: none is)."""
        for key in [key for key in self._held if key[0] is kind and key[1] != reason]:
            self.clear(*key)
        if reason is not None:
            self.hold(kind, reason, message)

    def clear(self, kind: Kind, reason: str) -> None:
        """That one is over."""
        if self._held.pop((kind, reason), None) is not None and self._tell is not None:
            self._tell("condition.cleared", type=kind, reason=reason)

    def listed(self) -> list[view.Condition]:
        """All that are in force, oldest first."""
        return list(self._held.values())
