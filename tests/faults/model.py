"""The oracle: what a sandbox's table may be after a kill, and the size that follows from a table. Pure.

It knows nothing of the daemon's own arithmetic: what is asked for is counted anew from the texts (SPEC 5, base "add").
"""

from __future__ import annotations

import copy
from fractions import Fraction
from math import ceil
from typing import Any, TypeAlias

Resources: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[str, Resources]
Change: TypeAlias = dict[str, Resources | None]
"""None: the container is no more."""

MIB = 1 << 20
GRANULE = 128 * MIB


class Wrong(Exception):
    """What was found is not what an answered or unanswered operation can have left."""


class Tables:
    """One sandbox's containers as the callers know them: what was answered, and what is under way.

    Callers change different containers, each one at a time, so each change under way concerns what no other does.
    """

    def __init__(self) -> None:
        self.answered: Table = {}
        self._under_way: list[Change] = []

    def begin(self, change: Change) -> None:
        """It is going to be sent."""
        self._under_way.append(change)

    def succeed(self, change: Change) -> None:
        """It was answered, and stands."""
        self._under_way.remove(change)
        self.answered = applied(self.answered, change)

    def fail(self, change: Change) -> None:
        """It was answered, and changed nothing."""
        self._under_way.remove(change)

    def settle(self, found: Table) -> int:
        """After a kill: *found* must be what was answered, with each change that was not either whole or not at all.

        Returns how many of those that were not answered are there. Raises :class:`Wrong`.
        """
        done = [change for change in self._under_way if applied(found, change) == found]
        whole = self.answered
        for change in done:
            whole = applied(whole, change)
        if whole != found:
            raise Wrong(f"answered {self.answered}, under way {self._under_way}, found {found}")
        # What changes nothing is there in any case.
        seen = sum(applied(self.answered, change) != self.answered for change in done)
        self.answered, self._under_way = copy.deepcopy(found), []
        return seen


def applied(table: Table, change: Change) -> Table:
    """*table* after *change*."""
    return {name: text for name, text in (table | change).items() if text is not None}


def merged(resources: Resources, patch: Resources) -> Resources:
    """*resources* after a PATCH whose members all say something (SPEC 4)."""
    result = dict(resources)
    for name, value in patch.items():
        result[name] = merged(result.get(name, {}), value) if isinstance(value, dict) else value
    return result


def desired_vcpus(table: Table, most: int) -> int:
    """vCPUs that a sandbox with ``default_vcpus`` = 1 and nothing declared asks for."""
    quotas = [
        Fraction(resources["cpu"]["quota"], resources["cpu"]["period"])
        for resources in table.values()
        if "quota" in resources.get("cpu", {})
    ]
    return min(ceil(1 + sum(quotas)), most)


def desired_memory(table: Table, boot: int) -> int:
    """Bytes that it asks for, with *boot* bytes of ``default_memory``."""
    limits: int = sum(resources.get("memory", {}).get("limit", 0) for resources in table.values())
    return boot + -(-limits // GRANULE) * GRANULE
