"""Guests for the demo and the tests: two small machines, and what builds and starts them under real QEMU.

``mini firmware``
    64 KiB that answer ACPI hot-plug by its registers, as an operating system would, and nothing else. It is up at
    once, costs no CPU when idle, and can be told to cooperate, to ignore removals, to refuse them or to spin.
    It proves what a hypervisor does. It proves nothing about Linux.

``Linux``
    the distribution's own kernel with busybox and a hot-plug handler, which can be asked from the host what it
    sees. It proves that the capacity reaches a guest.

:mod:`.packages` finds or fetches what is needed, :mod:`.build` makes the two, :mod:`.machine` runs them. All of it
is synchronous: from asyncio, call it in a thread.
"""

from __future__ import annotations


class GuestError(Exception):
    """A guest cannot be built or run, or does not answer. The text says what, and what to do about it."""
