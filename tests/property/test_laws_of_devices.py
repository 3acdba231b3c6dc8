"""Laws of devices: rates, and what becomes of a record whatever happens to it (SPEC 7, 9, 10)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hypervisors.ch_types import DiskConfig, NetConfig
from kata_resmgr import config
from kata_resmgr.devices import (
    AnyRecord,
    Record,
    Spec,
    State,
    formed,
    kind_of,
    next_step,
    next_time,
    read_record,
    restored,
    settled,
    taken_back,
)
from kata_resmgr.host import Host
from kata_resmgr.ledger import registered
from kata_resmgr.limits import Limits
from kata_resmgr.removal import Removal

SANDBOX = registered(config.load(Path(os.devnull), Host(cpus=8, memory=16384)), "clh", {}, None).config
RATES = st.integers(1000, 1 << 40)


def a_spec(ops: int) -> Spec[DiskConfig]:
    return Spec(DiskConfig(id="d", path="/d"), Limits(ops_per_second=ops))


@st.composite
def records(draw: st.DrawFn) -> AnyRecord:
    spec, other = a_spec(draw(RATES)), a_spec(draw(RATES))
    state = draw(st.sampled_from(State))
    asked = draw(st.none() | st.builds(Removal, st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 9)))
    other_or_none = draw(st.sampled_from([None, other, spec]))
    if state is State.LEAVING:
        return Record(spec, state, asked, then=other_or_none)
    if state is State.RETURNING:
        return Record(spec, state, asked, fallback=None if other_or_none == spec else other_or_none)
    return Record(spec, state)


@given(st.integers(1, 64), RATES, RATES)
def test_the_queue_pairs_of_a_net_share_its_rate(pairs: int, bandwidth: int, ops: int) -> None:
    spec = Spec(
        NetConfig(id="n", tap="t", num_queues=2 * pairs), Limits(bytes_per_second=bandwidth, ops_per_second=ops)
    )
    made = formed(spec, SANDBOX)
    limiter = made.sent.rate_limiter_config
    assert limiter is not None
    assert limiter.bandwidth is not None
    assert limiter.ops is not None
    assert bandwidth - pairs < pairs * limiter.bandwidth.size <= bandwidth
    assert ops - pairs < pairs * limiter.ops.size <= ops
    assert made.limits == spec.limits


@given(records())
def test_a_record_is_read_as_it_was_kept(record: AnyRecord) -> None:
    assert read_record(kind_of(record.spec.config), msgspec.json.encode(record)) == record


@given(records(), st.booleans(), st.floats(0, 1e6))
def test_what_is_due_is_what_is_waited_for(record: AnyRecord, is_there: bool, now: float) -> None:
    there = {"d"} if is_there else set()
    when = next_time({"d": record}, there, now)
    step = next_step(now, {"d": record}, there, now)
    assert (step is not None) == (when is not None and when <= now)


@given(records(), st.booleans(), st.lists(st.booleans(), max_size=6), st.booleans())
def test_a_failed_operation_ends_in_the_device_as_it_was_or_in_none(
    record: AnyRecord, sent: bool, reads: list[bool], restart: bool
) -> None:
    """However often it is read, and whether the daemon restarts: what is left is never what was not answered."""
    wanted = {State.ADDING: None, State.RETURNING: record.fallback or record.spec}.get(record.state, record.spec)
    if record.state is State.LEAVING and record.then is None:
        wanted = None
    left = taken_back(record, sent)
    for is_there in [*reads, False, True]:
        if left is None:
            break
        left = settled(restored(left, 1e9) if restart else left, is_there)
    assert left is None or left.spec == wanted or (left.state is State.LEAVING and left.then == wanted)


@given(records())
def test_a_restart_undoes_an_addition_and_nothing_else(record: AnyRecord) -> None:
    after = restored(record, 1e9)
    assert after.state is (State.LEAVING if record.state is State.ADDING else record.state)
    assert (after.spec, after.then) == (record.spec, record.then)
