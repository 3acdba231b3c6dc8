"""Laws of limits over numbers of any size, and the told rate against the reference model of the bucket."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hypervisors.ch_types import TokenBucket
from kata_resmgr.limits import (
    LimitRefused,
    Limits,
    Scaling,
    configured,
    requested,
    revert_bytes,
    sustained_rate,
)
from tests.token_bucket import Bucket, Clock, Limiter

LARGEST = 2**63 - 1
UNWRAPPED = 2**64 // 10**8
"""Tokens: above, 100 ms of them (in nanoseconds) pass 64 bits, and Cloud Hypervisor's own sum goes wrong."""

amounts = st.one_of(st.integers(-20, 200), st.integers(-(2**70), 2**70))
rates = st.one_of(st.just(0), st.integers(10, 5000), st.integers(10, LARGEST))
bursts = st.one_of(st.just(0), st.integers(1, LARGEST))
pairs = st.integers(1, 64)


def passed_in_a_wake_up(size: int, refill_time: int, wake_ups: int, at_once: int) -> list[int]:
    """The tokens that a guest gets at each look at a bucket that it keeps dry, asking for *at_once* at a time."""
    clock = Clock()
    bucket = Bucket(size, 0, refill_time, clock=clock)
    limiter = Limiter(None, bucket, clock=clock)
    assert limiter.consume("ops", size)
    assert not limiter.consume("ops", 1)
    passed = []
    for _ in range(wake_ups):
        clock.advance(milliseconds=100)
        assert limiter.wake()
        got = 0
        while limiter.consume("ops", 1):
            more = min(at_once - 1, bucket.budget)
            assert limiter.consume("ops", more)
            got += 1 + more
        passed.append(got)
    return passed


@given(size=st.integers(1, 3000), refill_time=st.integers(1, 20_000))
def test_the_told_rate_is_the_model_s(size: int, refill_time: int) -> None:
    each = sustained_rate(TokenBucket(size=size, refill_time=refill_time)) // 10
    assert passed_in_a_wake_up(size, refill_time, wake_ups=3, at_once=1) == [each] * 3


@given(size=st.integers(1, UNWRAPPED))
def test_the_told_rate_of_large_buckets_is_the_model_s(size: int) -> None:
    rate = sustained_rate(TokenBucket(size=size, refill_time=1000))
    assert rate == size // 10 * 10
    assert passed_in_a_wake_up(size, 1000, wake_ups=12, at_once=size) == [rate // 10] * 12


@given(number=st.integers(0, 2**70), more=st.integers(0, 2**70))
def test_revert_bytes_keeps_the_order(number: int, more: int) -> None:
    assert number <= revert_bytes(number) <= revert_bytes(number + more)


@given(power=st.integers(0, 7), digit=st.integers(0, 999))
def test_revert_bytes_turns_powers_of_1000_into_those_of_1024(power: int, digit: int) -> None:
    assert revert_bytes(digit * 1000**power) == digit * 1024**power


@given(rate=amounts, burst=amounts)
def test_limits_are_kept_or_refused(rate: int, burst: int) -> None:
    possible = (rate == 0 or 10 <= rate <= LARGEST) and 0 <= burst <= LARGEST
    try:
        limits = requested(Limits(bytes_per_second=rate, burst_bytes=burst))
    except LimitRefused:
        assert not possible
        return
    assert possible
    limiter = limits.limiter()
    assert (limiter is None) == (rate == 0)
    assert bool(limits.idle_bursts) == (rate == 0 < burst)
    if limiter is not None:
        assert limiter.ops is None
        assert limiter.bandwidth == TokenBucket(size=rate, one_time_burst=burst, refill_time=1000)


@given(bits=amounts, scaling=st.sampled_from(Scaling))
def test_bits_are_kept_or_refused(bits: int, scaling: Scaling) -> None:
    size = bits // 8 if scaling is Scaling.EXACT or bits < 0 else revert_bytes(bits // 8)
    try:
        limiter = configured("disk", {"disk_rate_limiter_bw_max_rate": bits}, scaling).limiter()
    except LimitRefused:
        assert bits < 80 or size > LARGEST
        return
    assert (limiter is None) == (bits == 0)
    if limiter is not None and limiter.bandwidth is not None:
        assert 10 <= limiter.bandwidth.size == size <= LARGEST


@given(rate=rates, burst=bursts, ops=rates, ops_burst=bursts)
def test_a_vmm_is_given_no_nulls_and_no_zeros(rate: int, burst: int, ops: int, ops_burst: int) -> None:
    limiter = requested(Limits(rate, burst, ops, ops_burst)).limiter()
    if limiter is None:
        assert rate == ops == 0
        return
    sent = json.loads(msgspec.json.encode(limiter))
    assert set(sent) == {name for name, asked in (("bandwidth", rate), ("ops", ops)) if asked}
    for bucket in sent.values():
        assert all(type(value) is int and value > 0 for value in bucket.values())
        assert set(bucket) - {"one_time_burst"} == {"size", "refill_time"}


@given(rate=st.integers(10, LARGEST), burst=bursts, queue_pairs=pairs)
def test_queue_pairs_never_have_more_than_was_asked_for(rate: int, burst: int, queue_pairs: int) -> None:
    limits = requested(Limits(ops_per_second=rate, burst_ops=burst))
    try:
        limiter, effective = limits.limiter(queue_pairs), limits.effective(queue_pairs)
    except LimitRefused:
        assert rate < 10 * queue_pairs
        return
    assert limiter is not None
    assert limiter.ops is not None
    assert rate - queue_pairs < limiter.ops.size * queue_pairs <= rate
    assert limiter.ops.one_time_burst * queue_pairs <= burst
    kept = rate if effective is None else effective.ops_per_second
    assert isinstance(kept, int)
    assert rate - 11 * queue_pairs < kept <= rate
    assert kept == rate or effective is not None
