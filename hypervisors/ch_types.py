"""Cloud Hypervisor's own objects, under the names and in the units that its API gives them.

What is not set is left out, never null: the VMM refuses null, and a member it does not know it drops in silence.
"""

from __future__ import annotations

import msgspec


class TokenBucket(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Bytes, or operations; times in milliseconds. No burst is left out."""

    size: int
    one_time_burst: int = 0
    refill_time: int


class RateLimiterConfig(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What is not limited is left out."""

    bandwidth: TokenBucket | None = None
    ops: TokenBucket | None = None


class DiskConfig(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A disk, as ``vm.add-disk`` takes it."""

    id: str


class NetConfig(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A net device, as ``vm.add-net`` takes it."""

    id: str
