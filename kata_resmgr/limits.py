"""I/O limits: from what was asked for to Cloud Hypervisor's token buckets, and to the rate that they let through.

Limits come from Kata's configuration (bits a second) or from a caller (bytes a second). Both become :class:`IoLimits`,
one :class:`Rate` for bandwidth and one for operations, and these become what a VMM is given. Pure (SPEC 10).

Every bucket holds what may pass in a second. Cloud Hypervisor looks at one that ran dry every 100 ms and each time
drops what is less than a whole token: its sustained rate is a multiple of ten a second, and a size below ten never
refills.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from hypervisors.ch_types import RateLimiterConfig, TokenBucket

REFILL_TIME = 1000
"""Milliseconds in which an empty bucket fills: its size is then the rate a second."""
WAKE_UPS = 10
"""How often a second Cloud Hypervisor looks at a bucket that ran dry."""
SMALLEST_SIZE = WAKE_UPS
"""Tokens: with fewer, none is earned from one look to the next."""
LARGEST_SIZE = (1 << 63) - 1


class Scaling(StrEnum):
    """``[resmgr] rate_limiter_scaling``: what a configured bandwidth is multiplied with."""

    KATA = "kata"
    """Kata's RevertBytes: each 1000 is taken to mean 1024."""
    EXACT = "exact"


class Limits(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, gc=False):
    """What a caller asks for one device (API.md): 0 or absent is not limited. Never scaled."""

    bytes_per_second: int = 0
    burst_bytes: int = 0
    ops_per_second: int = 0
    burst_ops: int = 0


class Effective(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """The sustained rates that differ from the asked ones; the others are left out."""

    bytes_per_second: int | UnsetType = UNSET
    ops_per_second: int | UnsetType = UNSET


class PlannedLimiter(msgspec.Struct, frozen=True, gc=False):
    """A limiter as a Plan shows it: what there is not, is null."""

    bandwidth: TokenBucket | None
    ops: TokenBucket | None
    effective: Effective | None


class LimitRefused(ValueError):
    """A limit that cannot be kept.

    *name*: the configuration's key or the caller's member; *value*: what it said; *must*: what it must be, so that
    ``name = value: must be`` *must* is one line with value, bound and next step.
    """

    def __init__(self, name: str, value: int, must: str) -> None:
        self.name, self.value, self.must = name, value, must
        super().__init__(f"{name} = {_shown(value)}: must be {must}")


class Terms(NamedTuple):
    """How one limit is written where it is asked for."""

    rate: str
    """The name of the rate, and of its burst: configuration keys, or members of :class:`Limits`."""
    burst: str
    unit: str
    per_token: int
    """How many of the unit make one token."""
    scaling: Scaling

    def tokens(self, value: int) -> int:
        whole = value // self.per_token
        return revert_bytes(whole) if self.scaling is Scaling.KATA else whole


class IdleBurst(NamedTuple):
    """A burst without its rate: it counts for nothing (condition ``BurstWithoutRate``)."""

    name: str
    value: int
    rate: str

    @property
    def message(self) -> str:
        return f"{self.name} = {self.value} counts for nothing without {self.rate}: set that too, or take this out"


class Rate(NamedTuple):
    """One thing that is limited: *value* is the rate as it was asked for, *size* and *burst* are tokens."""

    terms: Terms
    value: int
    size: int
    burst: int

    def bucket(self, sharers: int) -> TokenBucket:
        """One of the *sharers* that together have this rate. Raises :class:`LimitRefused` if it would never refill."""
        size = self.size // sharers
        if size < SMALLEST_SIZE:
            least = f"at least {SMALLEST_SIZE * self.terms.per_token * sharers} {self.terms.unit}"
            among = "" if sharers == 1 else f" for {sharers} queue pairs"
            raise LimitRefused(
                self.terms.rate, self.value, f"0 (no limit) or {least}{among}: a smaller one never refills"
            )
        return TokenBucket(size=size, one_time_burst=self.burst // sharers, refill_time=REFILL_TIME)

    def unlike_asked(self, sharers: int) -> int | UnsetType:
        """The sustained rate of all *sharers* together, where it is not what was asked for."""
        sustained = sharers * sustained_rate(self.bucket(sharers))
        return UNSET if sustained == self.value // self.terms.per_token else sustained


class IoLimits(NamedTuple):
    """The limits of one device, for each direction; None: not limited."""

    bandwidth: Rate | None
    ops: Rate | None
    idle_bursts: tuple[IdleBurst, ...]

    def limiter(self, queue_pairs: int = 1) -> RateLimiterConfig | None:
        """What the VMM is given; None: no limiter.

        *queue_pairs* is that of a net device: Cloud Hypervisor gives each pair buckets of its own, so rates and bursts
        are divided among them. All queues of a disk share one limiter.

        Raises :class:`LimitRefused` where a pair's share would never refill.
        """
        if self.bandwidth is None and self.ops is None:
            return None
        return RateLimiterConfig(
            bandwidth=None if self.bandwidth is None else self.bandwidth.bucket(queue_pairs),
            ops=None if self.ops is None else self.ops.bucket(queue_pairs),
        )

    def effective(self, queue_pairs: int = 1) -> Effective | None:
        """The rates that Cloud Hypervisor sustains under steady demand; None where they are the asked ones.

        Raises :class:`LimitRefused` as :meth:`limiter` does.
        """
        bandwidth = UNSET if self.bandwidth is None else self.bandwidth.unlike_asked(queue_pairs)
        ops = UNSET if self.ops is None else self.ops.unlike_asked(queue_pairs)
        return None if bandwidth is UNSET and ops is UNSET else Effective(bandwidth, ops)

    def planned(self, hypervisor: str) -> PlannedLimiter | None:
        """What a Plan tells. For QEMU no limiter is applied yet, so it has no effective rate."""
        limiter = self.limiter()
        if limiter is None:
            return None
        return PlannedLimiter(limiter.bandwidth, limiter.ops, self.effective() if hypervisor == "clh" else None)


def configured(device: str, settings: Mapping[str, int], scaling: Scaling = Scaling.KATA) -> IoLimits:
    """What Kata's configuration says for every ``"disk"`` or every ``"net"``.

    *settings* are the values of ``<device>_rate_limiter_bw_max_rate`` (bits/s), ``..._bw_one_time_burst`` (bits),
    ``..._ops_max_rate`` and ``..._ops_one_time_burst``, by these names; absent and 0 are the same. *scaling* bears on
    bandwidth alone. Raises :class:`LimitRefused`.
    """
    key = f"{device}_rate_limiter_"
    bandwidth = Terms(f"{key}bw_max_rate", f"{key}bw_one_time_burst", "bits/s", 8, scaling)
    ops = Terms(f"{key}ops_max_rate", f"{key}ops_one_time_burst", "ops/s", 1, Scaling.EXACT)
    return _io_limits(bandwidth, ops, settings)


def requested(limits: Limits) -> IoLimits:
    """What a caller asks for, never scaled. Raises :class:`LimitRefused`."""
    bandwidth = Terms("bytesPerSecond", "burstBytes", "bytes/s", 1, Scaling.EXACT)
    ops = Terms("opsPerSecond", "burstOps", "ops/s", 1, Scaling.EXACT)
    return _io_limits(bandwidth, ops, msgspec.to_builtins(limits))


def revert_bytes(number: int) -> int:
    """Kata's RevertBytes: *number* (0 or more) with every 1000 in it taken for 1024, so 1250 is 1274."""
    thousands, rest = divmod(number, 1000)
    return 1024 * revert_bytes(thousands) + rest if thousands else rest


def sustained_rate(bucket: TokenBucket) -> int:
    """Tokens a second that Cloud Hypervisor lets through while there is always a request of one token waiting.

    A bucket that ran dry is looked at ten times a second, and has then earned what 100 ms bring, at most its size,
    without the fraction. With a refill time of 1000 ms that is ``size // 10 * 10`` (SPEC 10).
    """
    earned = (1000 // WAKE_UPS) * bucket.size // bucket.refill_time
    return WAKE_UPS * min(bucket.size, earned)


def _io_limits(bandwidth: Terms, ops: Terms, values: Mapping[str, int]) -> IoLimits:
    idle = tuple(
        IdleBurst(terms.burst, values[terms.burst], terms.rate)
        for terms in (bandwidth, ops)
        if values.get(terms.burst) and not values.get(terms.rate)
    )
    return IoLimits(_rate(bandwidth, values), _rate(ops, values), idle)


def _rate(terms: Terms, values: Mapping[str, int]) -> Rate | None:
    size, burst = (_tokens(terms, name, values.get(name, 0)) for name in (terms.rate, terms.burst))
    value = values.get(terms.rate, 0)
    if value == 0:
        return None
    rate = Rate(terms, value, size, burst)
    rate.bucket(sharers=1)  # for its refusal: a limit is judged where it is set, not at the first device
    return rate


def _tokens(terms: Terms, name: str, value: int) -> int:
    """The tokens of a rate or a burst, both of which a VMM holds in 63 bits."""
    if value < 0:
        raise LimitRefused(name, value, "0 (none) or more")
    if value > LARGEST_SIZE * terms.per_token:
        raise LimitRefused(name, value, f"at most {LARGEST_SIZE * terms.per_token}; 0 is no limit")
    tokens = terms.tokens(value)
    if tokens > LARGEST_SIZE:
        raise LimitRefused(name, value, f"smaller: it makes a bucket of {tokens}, the largest is {LARGEST_SIZE}")
    return tokens


def _shown(value: int) -> str:
    """A number of any size in a few characters."""
    return str(value) if value.bit_length() <= 128 else f"{value:#x}"[:40] + "..."
