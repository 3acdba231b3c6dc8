"""Limits by value: from Kata's keys and a caller's members to buckets, what is told about them, and what is refused.

Kata's vectors run by their area; where the entry names a departure, what SPEC says instead is asserted. Left to the
Cloud Hypervisor driver: the VMM's checks of groups and devices, and its command line, which is never written. The
``rx_`` and ``tx_rate_limiter_max_rate`` of QEMU in Kata bear on nothing here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypervisors.ch_types import RateLimiterConfig, TokenBucket
from kata_resmgr.limits import (
    Effective,
    IdleBurst,
    IoLimits,
    LimitRefused,
    Limits,
    Scaling,
    configured,
    requested,
    revert_bytes,
    sustained_rate,
)

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "limits.json").read_text())
LARGEST = 2**63 - 1


def kata(device: str = "disk", **keys: int) -> IoLimits:
    return configured(device, {f"{device}_rate_limiter_{key}": value for key, value in keys.items()})


def bucket(size: int, burst: int = 0) -> TokenBucket:
    return TokenBucket(size=size, one_time_burst=burst, refill_time=1000)


def for_a_vmm(limiter: RateLimiterConfig | None) -> Any:  # noqa: ANN401 - what JSON can hold
    return json.loads(msgspec.json.encode(limiter))


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - what JSON can hold
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    return value


# Kata's vectors


@pytest.mark.parametrize(("number", "reverted"), KNOWN["revert_bytes"])
def test_revert_bytes(number: int, reverted: int) -> None:
    assert revert_bytes(number) == reverted


@pytest.mark.parametrize("device", ["disk", "net"])
@pytest.mark.parametrize("entry", KNOWN["go_limiter"])
def test_the_limiter_of_the_go_runtime(device: str, entry: dict[str, Any]) -> None:
    given, expected = entry["input"], entry["expected"]
    limits = kata(device, **given)
    assert for_a_vmm(limits.limiter()) == without_nulls(expected["config"])
    assert (limits.bandwidth is not None, limits.ops is not None) == (expected["has_bandwidth"], expected["has_ops"])
    lonely = [key for key in ("bw", "ops") if given[f"{key}_one_time_burst"] and not given[f"{key}_max_rate"]]
    assert [idle.name for idle in limits.idle_bursts] == [
        f"{device}_rate_limiter_{key}_one_time_burst" for key in lonely
    ]


@pytest.mark.parametrize("entry", KNOWN["go_bits"])
def test_bits_of_the_go_runtime(entry: dict[str, Any]) -> None:
    if entry.get("departure") == 22:
        with pytest.raises(LimitRefused, match="never refills"):
            kata(bw_max_rate=entry["input"])
        return
    assert kata(bw_max_rate=entry["input"]).limiter() == RateLimiterConfig(bucket(entry["expected"]["size"]))


@pytest.mark.parametrize("entry", KNOWN["go_idle_burst"])
@pytest.mark.parametrize("device", ["disk", "net"])
def test_a_burst_without_its_rate_is_taken_as_none(device: str, entry: dict[str, Any]) -> None:
    limits = kata(device, **entry["input"][device])
    assert (
        limits.limiter() == kata(device, **entry["expected"][device]).limiter() == RateLimiterConfig(bucket(125, 125))
    )
    key = f"{device}_rate_limiter_ops"
    assert limits.idle_bursts == (IdleBurst(f"{key}_one_time_burst", 1000, f"{key}_max_rate"),)
    assert limits.idle_bursts[0].message == (
        f"{key}_one_time_burst = 1000 counts for nothing without {key}_max_rate: set that too, or take this out"
    )


@pytest.mark.parametrize("entry", KNOWN["rs_limiter"])
def test_the_limiter_of_the_rust_runtime(entry: dict[str, Any]) -> None:
    given, expected = entry["input"], without_nulls(entry["expected"])
    if entry.get("departure") == 10:  # its bandwidth is in bits: what the key is documented as
        for member, asked in (("size", given["band_rate"]), ("one_time_burst", given["band_onetime_burst"])):
            if asked:
                expected["bandwidth"][member] = asked // 8
    limits = kata(
        bw_max_rate=given["band_rate"],
        bw_one_time_burst=given["band_onetime_burst"] or 0,
        ops_max_rate=given["ops_rate"],
        ops_one_time_burst=given["ops_onetime_burst"] or 0,
    )
    assert for_a_vmm(limits.limiter()) == expected


@pytest.mark.parametrize("entry", KNOWN["rs_disk"])
def test_the_disk_of_the_rust_runtime(entry: dict[str, Any]) -> None:
    assert entry["departure"] == 10
    assert configured("disk", entry["input"]).limiter() == RateLimiterConfig(bucket(1304576))


# What this program adds


def test_a_plan() -> None:
    limits = kata(bw_max_rate=838860800, bw_one_time_burst=419430400)
    expected = {"size": 109930072, "one_time_burst": 54965024, "refill_time": 1000}
    assert json.loads(msgspec.json.encode(limits.planned("qemu"))) == {
        "bandwidth": expected,
        "ops": None,
        "effective": None,
    }
    assert json.loads(msgspec.json.encode(limits.planned("clh"))) == {
        "bandwidth": expected,
        "ops": None,
        "effective": {"bytesPerSecond": 109930070},
    }
    assert kata().planned("clh") is None


def test_exact_scaling() -> None:
    settings = {"disk_rate_limiter_bw_max_rate": 838860800, "disk_rate_limiter_bw_one_time_burst": 8191}
    limits = configured("disk", settings, Scaling.EXACT)
    assert limits.limiter() == RateLimiterConfig(bucket(104857600, 1023))
    assert limits.effective() is None


def test_operations_are_never_scaled() -> None:
    assert kata(ops_max_rate=5000, ops_one_time_burst=2000).limiter() == RateLimiterConfig(ops=bucket(5000, 2000))


def test_the_other_device_s_keys_do_not_bear() -> None:
    settings = {"net_rate_limiter_ops_max_rate": 100}
    assert configured("disk", settings).limiter() is None
    assert configured("net", settings).limiter() == RateLimiterConfig(ops=bucket(100))


def test_what_a_caller_asks_for_is_never_scaled() -> None:
    limits = msgspec.json.decode(
        b'{"bytesPerSecond": 104857600, "burstBytes": 52428800, "opsPerSecond": 10000, "burstOps": 0}', type=Limits
    )
    assert requested(limits).limiter() == RateLimiterConfig(bucket(104857600, 52428800), bucket(10000))
    assert requested(Limits()) == IoLimits(None, None, ())


def test_a_caller_s_burst_without_its_rate() -> None:
    limits = requested(Limits(burst_bytes=7, ops_per_second=20, burst_ops=1))
    assert limits.idle_bursts == (IdleBurst("burstBytes", 7, "bytesPerSecond"),)
    assert limits.limiter() == RateLimiterConfig(ops=bucket(20, 1))


@pytest.mark.parametrize("body", [b'{"bytesPerSecond": 100.0}', b'{"opsPerSecond": "100"}', b'{"iops": 100}'])
def test_other_bodies_are_no_limits(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Limits)


@pytest.mark.parametrize(
    ("limits", "effective"),
    [
        (Limits(ops_per_second=15), Effective(ops_per_second=10)),
        (Limits(ops_per_second=10), None),
        (Limits(bytes_per_second=1009, ops_per_second=1000), Effective(bytes_per_second=1000)),
        (Limits(bytes_per_second=19, ops_per_second=19), Effective(10, 10)),
        (Limits(burst_ops=19), None),
        (Limits(bytes_per_second=LARGEST), Effective(bytes_per_second=LARGEST // 10 * 10)),
    ],
)
def test_the_rate_that_is_kept(limits: Limits, effective: Effective | None) -> None:
    assert requested(limits).effective() == effective


def test_a_rate_that_was_scaled_is_not_the_asked_one() -> None:
    assert kata(bw_max_rate=80_000).effective() == Effective(bytes_per_second=10240)
    assert kata(bw_max_rate=7_920).effective() is None


def test_rates_are_told_only_where_they_differ() -> None:
    told = requested(Limits(bytes_per_second=1009, ops_per_second=1000)).effective()
    assert msgspec.json.encode(told) == b'{"bytesPerSecond":1000}'


@pytest.mark.parametrize(
    ("size", "refill_time", "rate"),
    [(15, 1000, 10), (10, 1000, 10), (9, 1000, 0), (10, 10, 100), (100, 100, 1000), (1000, 10_000, 100)],
)
def test_any_bucket_s_sustained_rate(size: int, refill_time: int, rate: int) -> None:
    assert sustained_rate(TokenBucket(size=size, refill_time=refill_time)) == rate


def test_queue_pairs_share_a_rate() -> None:
    limits = requested(Limits(bytes_per_second=1000, burst_bytes=10, ops_per_second=30, burst_ops=2))
    assert limits.limiter(queue_pairs=3) == RateLimiterConfig(bucket(333, 3), bucket(10))
    assert limits.effective(queue_pairs=3) == Effective(bytes_per_second=990)


def test_queue_pairs_share_what_was_scaled() -> None:
    assert kata("net", bw_max_rate=80_000).limiter(queue_pairs=4) == RateLimiterConfig(bucket(10240 // 4))


@pytest.mark.parametrize(
    ("limits", "pairs", "text"),
    [
        (
            kata("net", bw_max_rate=319),
            4,
            "net_rate_limiter_bw_max_rate = 319: must be 0 (no limit) or at least 320 bits/s for 4 queue pairs: "
            "a smaller one never refills",
        ),
        (
            requested(Limits(ops_per_second=19)),
            2,
            "opsPerSecond = 19: must be 0 (no limit) or at least 20 ops/s for 2 queue pairs: "
            "a smaller one never refills",
        ),
    ],
)
def test_a_share_that_would_never_refill(limits: IoLimits, pairs: int, text: str) -> None:
    for told in (limits.limiter, limits.effective):
        with pytest.raises(LimitRefused) as caught:
            told(pairs)
        assert str(caught.value) == text


STARVES = "must be 0 (no limit) or at least {}: a smaller one never refills"


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("bw_max_rate", -1, "must be 0 (none) or more"),
        ("bw_one_time_burst", -8, "must be 0 (none) or more"),
        ("ops_max_rate", -(2**63), "must be 0 (none) or more"),
        ("ops_one_time_burst", -1, "must be 0 (none) or more"),
        ("bw_max_rate", 1, STARVES.format("80 bits/s")),
        ("bw_max_rate", 79, STARVES.format("80 bits/s")),
        ("ops_max_rate", 1, STARVES.format("10 ops/s")),
        ("ops_max_rate", 9, STARVES.format("10 ops/s")),
        ("ops_max_rate", 2**63, f"must be at most {LARGEST}; 0 is no limit"),
        ("ops_one_time_burst", 2**63, f"must be at most {LARGEST}; 0 is no limit"),
        ("bw_max_rate", 2**66, f"must be at most {LARGEST * 8}; 0 is no limit"),
        (
            "bw_max_rate",
            LARGEST * 8,
            f"must be smaller: it makes a bucket of 10627778278564044583, the largest is {LARGEST}",
        ),
    ],
)
def test_configured_limits_that_are_refused(key: str, value: int, must: str) -> None:
    with pytest.raises(LimitRefused) as caught:
        kata("net", **{key: value})
    assert str(caught.value) == f"net_rate_limiter_{key} = {value}: {must}"
    assert (caught.value.name, caught.value.value) == (f"net_rate_limiter_{key}", value)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(bytes_per_second=9), "bytesPerSecond = 9: " + STARVES.format("10 bytes/s")),
        (Limits(ops_per_second=5), "opsPerSecond = 5: " + STARVES.format("10 ops/s")),
        (Limits(burst_bytes=-1), "burstBytes = -1: must be 0 (none) or more"),
        (Limits(burst_ops=2**63), f"burstOps = {2**63}: must be at most {LARGEST}; 0 is no limit"),
    ],
)
def test_a_caller_s_limits_that_are_refused(limits: Limits, text: str) -> None:
    with pytest.raises(LimitRefused) as caught:
        requested(limits)
    assert str(caught.value) == text


def test_the_smallest_and_the_largest_limits() -> None:
    assert kata(bw_max_rate=80, ops_max_rate=10).limiter() == RateLimiterConfig(bucket(10), bucket(10))
    most = {"net_rate_limiter_bw_max_rate": LARGEST * 8}
    assert configured("net", most, Scaling.EXACT).limiter() == RateLimiterConfig(bucket(LARGEST))
    assert requested(Limits(ops_per_second=LARGEST, burst_ops=LARGEST)).limiter() == RateLimiterConfig(
        ops=bucket(LARGEST, LARGEST)
    )


def test_a_refusal_is_one_short_line() -> None:
    with pytest.raises(LimitRefused) as caught:
        kata(bw_max_rate=1 << 100_000)
    assert len(str(caught.value)) <= 256
