"""A part of ``make soak``, each time: enough that what grows with each event or connection shows."""

from __future__ import annotations

from pathlib import Path

from tests.soak import soak

MIB = 1024
"""KiB."""


async def test_a_flood_of_events_leaves_the_daemons_memory_as_it_was(short_tmp: Path) -> None:
    before, after = await soak.flooded(short_tmp, 50_000)
    assert after.rss - before.rss <= 10 * MIB  # kept, as the library would, they take 95
    assert after.log - before.log <= 64 << 10  # a line for each refusal and reset takes 1700 KiB
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)


async def test_hostile_monitors_cost_the_daemon_no_memory(short_tmp: Path) -> None:
    before, after = await soak.insulted(short_tmp, 1)
    assert after.rss - before.rss <= 10 * MIB
    assert after.peak - before.rss <= 32 * MIB
    assert after.threads == before.threads


async def test_attaching_many_times_leaves_nothing_in_the_daemon(short_tmp: Path) -> None:
    before, after = await soak.reconnected(short_tmp, 100)
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)


async def test_connecting_many_times_leaves_nothing_in_the_process(short_tmp: Path) -> None:
    before, after = await soak.driver_reconnected(short_tmp, 100)
    assert after == before
