"""The reference model against Cloud Hypervisor's own bucket: its unit tests, and what it was seen to do.

Left out is ``update_buckets``, which nothing in the VMM calls and the model does not have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypervisors.ch_types import TokenBucket
from kata_resmgr.limits import sustained_rate
from tests.token_bucket import Bucket, Clock, Limiter, Outcome, OverConsumption, bucket

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "token_bucket.json").read_text())


def known(*areas: str) -> list[Any]:
    return [pytest.param(entry, id=f"{area}-{index}") for area in areas for index, entry in enumerate(KNOWN[area])]


def a_bucket(given: dict[str, Any], clock: Clock) -> Bucket:
    made = bucket(given["size"], given["one_time_burst"], given["refill_time_ms"], clock=clock)
    assert made is not None
    return made


def a_limiter(args: list[int], clock: Clock) -> Limiter:
    return Limiter(bucket(*args[:3], clock=clock), bucket(*args[3:], clock=clock), clock=clock)


def told(outcome: Outcome | OverConsumption) -> object:
    return {"over_consumption": outcome.ratio} if isinstance(outcome, OverConsumption) else outcome.value


@pytest.mark.parametrize("entry", known("token_bucket.new"))
def test_a_new_bucket(entry: dict[str, Any]) -> None:
    given, expected = entry["input"], entry["expected"]
    made = bucket(given["size"], given["one_time_burst"], given["refill_time_ms"], clock=Clock())
    if expected is None:
        assert made is None
        return
    assert made is not None
    assert made.rate == (expected["processed_capacity"], expected["processed_refill_time"])
    assert made.budget == made.size == given["size"]


@pytest.mark.parametrize("entry", known("token_bucket.reduce", "token_bucket.burst"))
def test_a_bucket_step_by_step(entry: dict[str, Any]) -> None:
    given, expected, clock = entry["input"], entry["expected"], Clock()
    made = a_bucket(given, clock)
    for index, step in enumerate(given["steps"]):
        if "sleep_ms" in step:
            clock.advance(milliseconds=step["sleep_ms"])
            continue
        assert told(made.reduce(step["reduce"])) == expected["results"][index]
        if "budget_after" in expected:
            assert made.budget == expected["budget_after"][index]
        if "burst_after" in expected:
            assert made.burst == expected["burst_after"][index]
    assert made.budget == expected.get("budget", made.budget)
    assert made.burst == expected.get("burst", made.burst)


@pytest.mark.parametrize("entry", known("token_bucket.replenish"))
def test_a_burst_grows_when_tokens_are_given_back(entry: dict[str, Any]) -> None:
    made = a_bucket(entry["input"], Clock())
    made.replenish(entry["input"]["replenish"])
    assert {"burst": made.burst, "budget": made.budget} == entry["expected"]


@pytest.mark.parametrize("entry", known("token_bucket.sequence"))
def test_a_bucket_to_the_token(entry: dict[str, Any]) -> None:
    clock = Clock()
    made = Bucket(*entry["bucket"], clock=clock)
    for nanoseconds, tokens, result, budget, burst in entry["steps"]:
        clock.advance(nanoseconds=nanoseconds)
        assert (told(made.reduce(tokens)), made.budget, made.burst) == (result, budget, burst)


def test_a_product_above_64_bits_is_cut() -> None:
    clock = Clock()
    made = Bucket(2**63 - 1, 0, 1000, clock=clock)
    assert made.reduce(2**63 - 1) is Outcome.SUCCESS
    clock.advance(milliseconds=100)
    assert made.reduce(0) is Outcome.SUCCESS
    assert made.budget == 18446744073  # (2^64 - 10^8) // 10^9, where a tenth of the size is due


@pytest.mark.parametrize("entry", known("rate_limiter.new", "rate_limiter_group.new"))
def test_a_new_limiter(entry: dict[str, Any]) -> None:
    made = a_limiter(entry["input"]["args"], Clock())
    for kind, expected in zip(
        ("bytes", "ops"), (entry["expected"]["bandwidth"], entry["expected"]["ops"]), strict=True
    ):
        its = made.buckets[kind]
        assert its is not None
        assert {
            "capacity": its.size,
            "one_time_burst": its.burst,
            "refill_time_ms": its.refill_time,
            "budget": its.budget,
        } == expected


@pytest.mark.parametrize(
    "entry",
    known(
        "rate_limiter.default",
        "rate_limiter.manual_replenish",
        "rate_limiter.consume",
        "rate_limiter.overconsumption",
        "rate_limiter_group.manual_replenish",
        "rate_limiter_group.overconsumption",
    ),
)
def test_a_limiter_step_by_step(entry: dict[str, Any]) -> None:
    given, expected, clock = entry["input"], entry["expected"], Clock()
    made = a_limiter(given["args"], clock)
    results: list[object] = []
    blocked = []
    for step in given["steps"]:
        match step:
            case {"sleep_ms": pause}:
                clock.advance(milliseconds=pause)
                results.append(None)
            case {"consume": [kind, tokens]}:
                results.append(made.consume(kind, tokens))
            case {"replenish": [kind, tokens]}:
                its = made.buckets[kind]
                assert its is not None
                its.replenish(tokens)
                results.append(None)
            case {"event_handler": True}:
                results.append("ok" if made.wake() else "err")
            case _:
                pytest.fail(f"a step that is not known: {step}")
        blocked.append(made.blocked)
    if "results" in expected:
        assert results == expected["results"]
    after = expected.get("blocked_after", [])
    assert [(index, was) for index, was in enumerate(after) if was is not None and was != blocked[index]] == []
    assert made.blocked == expected.get("blocked", made.blocked)
    for kind, name in (("bytes", "bandwidth_budget"), ("ops", "ops_budget")):
        if name in expected:
            its = made.buckets[kind]
            assert its is not None
            assert its.budget == expected[name]


@pytest.mark.parametrize("entry", known("rate_limiter.sequence"))
def test_a_limiter_to_the_token(entry: dict[str, Any]) -> None:
    clock = Clock()
    made = a_limiter(entry["args"], clock)
    for nanoseconds, kind, tokens, woken, passed, blocked in entry["steps"]:
        clock.advance(nanoseconds=nanoseconds)
        assert (made.wake(), made.consume(kind, tokens), made.blocked) == (woken, passed, blocked)


@pytest.mark.parametrize("entry", known("rate_limiter.saturation"))
def test_what_a_guest_gets_that_always_asks(entry: dict[str, Any]) -> None:
    size, refill_time = entry["input"]["ops"]["size"], entry["input"]["ops"]["refill_time_ms"]
    wake_ups, clock = entry["expected"]["wakeups"], Clock()
    made = Limiter(None, Bucket(size, 0, refill_time, clock=clock), clock=clock)
    while made.consume("ops", 1):
        pass
    passed = 0
    for _ in range(wake_ups):
        clock.advance(milliseconds=100)
        assert made.wake()
        while made.consume("ops", 1):
            passed += 1
    assert passed == entry["expected"]["successes"]
    assert passed * 10 == wake_ups * sustained_rate(TokenBucket(size=size, refill_time=refill_time))


@pytest.mark.parametrize("entry", known("rate_limiter.hang"))
def test_a_pause_that_is_rounded_to_nothing_never_ends(entry: dict[str, Any]) -> None:
    given, expected, clock = entry["input"], entry["expected"], Clock()
    its = Bucket(given["bandwidth"]["size"], 0, given["bandwidth"]["refill_time_ms"], clock=clock)
    made = Limiter(its, None, clock=clock)
    assert made.consume(*given["consume"]) == expected["consume"]
    clock.advance(milliseconds=given["sleep_ms"])
    assert not made.wake()
    assert made.blocked == expected["blocked"]
