"""Something to tell about a sandbox, found by a pure rule: the material of a condition (SPEC 13)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """A condition's type, reason and message."""

    type: str
    reason: str
    message: str
