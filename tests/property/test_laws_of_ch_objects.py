"""Laws of what Cloud Hypervisor is sent: any disk or net, against its OpenAPI file and the fake's memory."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hypervisors.ch_types import (
    DiskConfig,
    NetConfig,
    QueueAffinity,
    RateLimiterConfig,
    TokenBucket,
    dropped,
    limiter_shown,
    without_nulls,
)
from tests.drivers.ch_rig import must_be_valid
from tests.fakes.ch_config import filled

NEWEST = 54

sizes = st.integers(0, (1 << 63) - 1)
buckets = st.builds(TokenBucket, size=sizes, one_time_burst=sizes, refill_time=sizes)
limiters = st.builds(RateLimiterConfig, st.none() | buckets, st.none() | buckets)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
small = st.integers(0, 0xFFFF)
flags = st.booleans()
disks = st.builds(
    DiskConfig,
    id=words,
    path=st.none() | words,
    readonly=flags,
    direct=flags,
    num_queues=st.integers(1, 0xFFFF),
    queue_size=small,
    rate_limiter_config=st.none() | limiters,
    rate_limit_group=st.none() | words,
    serial=st.none() | words,
    queue_affinity=st.none()
    | st.lists(st.builds(QueueAffinity, small, st.lists(small, max_size=3).map(tuple)), max_size=3).map(tuple),
    sparse=flags,
    image_type=st.sampled_from(["FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"]),
    lock_granularity=st.sampled_from(["ByteRange", "Full"]),
    pci_segment=small,
    pci_device_id=st.none() | st.integers(0, 0xFF),
)
nets = st.builds(
    NetConfig,
    id=words,
    tap=st.none() | words,
    ip=st.none() | words,
    mac=st.none() | words,
    mtu=st.none() | st.integers(1280, 0xFFFF),
    num_queues=st.integers(2, 0xFFFF),
    rate_limiter_config=st.none() | limiters,
    offload_tso=flags,
    offload_csum=flags,
)


def body_of(device: DiskConfig | NetConfig) -> Any:  # noqa: ANN401 - what JSON can hold
    return json.loads(msgspec.json.encode(device))


@given(disks | nets)
def test_every_body_is_valid_and_without_null(device: DiskConfig | NetConfig) -> None:
    body = body_of(device)

    must_be_valid("vm.add-disk" if isinstance(device, DiskConfig) else "vm.add-net", body)
    assert without_nulls(body) == body


@given(disks | nets)
def test_every_body_is_read_as_what_it_was_made_of(device: DiskConfig | NetConfig) -> None:
    assert msgspec.json.decode(msgspec.json.encode(device), type=type(device)) == device


@given(disks | nets)
def test_a_vmm_that_keeps_everything_is_not_blamed(device: DiskConfig | NetConfig) -> None:
    body = body_of(device)
    shown = filled("disks" if isinstance(device, DiskConfig) else "net", body, NEWEST)

    assert dropped(body, without_nulls(shown)) is None
    sent = device.rate_limiter_config
    assert limiter_shown(without_nulls(shown)) == (None if sent == RateLimiterConfig() else sent)


@given(disks | nets, st.data())
def test_a_vmm_that_drops_anything_is_found_out(device: DiskConfig | NetConfig, data: st.DataObject) -> None:
    body = body_of(device)
    member = data.draw(st.sampled_from(sorted(body)))
    shown = {name: value for name, value in body.items() if name != member}

    found = dropped(body, shown)

    assert found is None if body[member] == {} else str(found).split(".")[0] == member
