"""What a device is to be, and the next step towards that, by value (SPEC 7, 9, 10)."""

from __future__ import annotations

import msgspec
import pytest

from hypervisors.base import Device, DeviceKind
from hypervisors.ch_types import DiskConfig, NetConfig, RateLimiterConfig, TokenBucket
from kata_resmgr.config import SandboxConfig
from kata_resmgr.devices import (
    Add,
    AnyRecord,
    AnySpec,
    LookForEnd,
    Record,
    Remove,
    Spec,
    State,
    Step,
    differs,
    formed,
    must_fit,
    next_step,
    next_time,
    read_record,
    settled,
    taken_back,
)
from kata_resmgr.ledger import registered
from kata_resmgr.limits import Effective, Limits
from kata_resmgr.problem import Code, Problem
from kata_resmgr.removal import Removal
from tests.sandbox.rig import load

DISK = DiskConfig(id="d", path="/d")
NET = NetConfig(id="n", tap="t", num_queues=4)
OLD, NEW = Spec(DISK, Limits(ops_per_second=10)), Spec(DISK, Limits(ops_per_second=20))


def sandbox(toml: str = "") -> SandboxConfig:
    return registered(load(f"[hypervisor.clh]\n{toml}"), "clh", {}, None).config


def bucket(size: int, burst: int = 0) -> TokenBucket:
    return TokenBucket(size=size, one_time_burst=burst, refill_time=1000)


CONFIGURED = "disk_rate_limiter_bw_max_rate = 838860800\nnet_rate_limiter_ops_max_rate = 100\n"


@pytest.mark.parametrize(
    ("spec", "limiter", "limits", "effective"),
    [
        (Spec(DISK), RateLimiterConfig(bucket(109930072)), Limits(109930072), Effective(bytes_per_second=109930070)),
        (Spec(DISK, Limits()), None, Limits(), None),
        (
            Spec(DISK, Limits(1005, 9, 20)),
            RateLimiterConfig(bucket(1005, 9), bucket(20)),
            Limits(1005, 9, 20),
            Effective(bytes_per_second=1000),
        ),
        (Spec(DISK, Limits(burst_ops=7)), None, Limits(), None),
        (Spec(NET), RateLimiterConfig(ops=bucket(50)), Limits(ops_per_second=100), None),
        (
            Spec(NET, Limits(ops_per_second=59)),
            RateLimiterConfig(ops=bucket(29)),
            Limits(ops_per_second=59),
            Effective(ops_per_second=40),
        ),
    ],
)
def test_the_limiter_of_each(
    spec: AnySpec, limiter: RateLimiterConfig | None, limits: Limits, effective: Effective | None
) -> None:
    made = formed(spec, sandbox(CONFIGURED))
    assert made.sent == msgspec.structs.replace(spec.config, rate_limiter_config=limiter)
    assert (made.limits, made.effective) == (limits, effective)


def test_a_group_stands_for_limits() -> None:
    made = formed(Spec(DISK, group="gold"), sandbox(CONFIGURED))
    assert made.sent == msgspec.structs.replace(DISK, rate_limit_group="gold")
    assert (made.limits, made.effective) == (None, None)


VHOST = DiskConfig(id="d", vhost_user=True, vhost_socket="/v")


@pytest.mark.parametrize(
    ("spec", "code", "says"),
    [
        (Spec(DISK, Limits(ops_per_second=9)), Code.INVALID_BODY, "/limits/opsPerSecond"),
        (Spec(DISK, Limits(bytes_per_second=-1)), Code.INVALID_BODY, "/limits/bytesPerSecond"),
        (Spec(NET, Limits(ops_per_second=19)), Code.INVALID_BODY, "at least 20 ops/s for 2 queue pairs"),
        (
            Spec(NetConfig(id="n", num_queues=22)),
            Code.INVALID_CONFIG,
            "net_rate_limiter_ops_max_rate = 100: must be 0 (no limit) or at least 110 ops/s for 11 queue pairs",
        ),
        (Spec(VHOST), Code.NOT_SUPPORTED, 'say "limits": {}'),
        (Spec(VHOST, group="gold"), Code.NOT_SUPPORTED, "leave out its group"),
    ],
)
def test_limits_that_cannot_be_kept(spec: AnySpec, code: Code, says: str) -> None:
    with pytest.raises(Problem) as caught:
        formed(spec, sandbox(CONFIGURED))
    assert caught.value.code is code
    assert says in caught.value.detail


def test_a_vhost_user_device_without_limits_is_taken() -> None:
    assert formed(Spec(VHOST, Limits()), sandbox(CONFIGURED)).sent == VHOST


@pytest.mark.parametrize(
    ("spec", "pointer"),
    [
        (Spec(DISK), None),
        (Spec(DiskConfig(id="d", num_queues=2)), None),
        (Spec(DiskConfig(id="d", num_queues=3)), "/config/num_queues"),
        (Spec(NET), None),
        (Spec(NetConfig(id="n", num_queues=5)), "/config/num_queues"),
        (Spec(DISK, group="gold"), None),
        (Spec(DISK, Limits(), group="gold"), None),
        (Spec(DISK, Limits(100), group="gold"), "/group"),
        (Spec(DISK, group="silver"), "/group"),
    ],
)
def test_what_fits_into_a_vm_of_two_boot_vcpus(spec: AnySpec, pointer: str | None) -> None:
    if pointer is None:
        must_fit(spec, 2, {"gold"})
        return
    with pytest.raises(Problem) as caught:
        must_fit(spec, 2, {"gold"})
    assert (caught.value.code, [at.pointer for at in caught.value.at]) == (Code.INVALID_BODY, [pointer])


def test_how_what_is_shown_differs() -> None:
    sent = formed(OLD, sandbox()).sent
    limiter = RateLimiterConfig(ops=bucket(10))
    shown = Device("d", DeviceKind.DISK, "", limiter)
    assert differs(sent, shown) is None
    assert differs(sent, Device("d", DeviceKind.DISK, "")) == (
        '{"ops":{"size":10,"refill_time":1000}} is recorded, the VMM has no limiter'
    )
    grouped = msgspec.structs.replace(DISK, rate_limit_group="gold")
    assert differs(grouped, Device("d", DeviceKind.DISK, "", group="gold")) is None
    assert differs(grouped, Device("d", DeviceKind.DISK, "")) == "group gold is recorded, the VMM has no limiter"


ASKED = Removal(first=10.0, last=10.0)


@pytest.mark.parametrize(
    ("record", "there", "now", "step", "when"),
    [
        (Record(OLD, State.ADDING), False, 10.0, Add("d"), 0.0),
        (Record(OLD, State.PRESENT), True, 10.0, None, None),
        (Record(OLD, State.LEAVING), True, 10.0, Remove("d"), 0.0),
        (Record(OLD, State.LEAVING, ASKED), True, 10.01, None, 10.02),
        (Record(OLD, State.LEAVING, ASKED), True, 10.02, LookForEnd(), 10.02),
        (Record(OLD, State.LEAVING, ASKED), True, 11.0, Remove("d"), 10.02),
        (Record(OLD, State.LEAVING, ASKED.hurried()), True, 10.0, Remove("d"), 10.0),
        (Record(OLD, State.RETURNING), False, 10.0, Add("d"), 0.0),
        (Record(OLD, State.RETURNING, ASKED), False, 10.5, None, 11.0),
    ],
)
def test_the_next_step(record: AnyRecord, there: bool, now: float, step: Step | None, when: float | None) -> None:
    present = {"d"} if there else set()
    assert next_step(now, {"d": record}, present, 10.0) == step
    assert next_time({"d": record}, present, 10.0) == when


@pytest.mark.parametrize(
    ("record", "there", "after"),
    [
        (Record(OLD, State.LEAVING, ASKED), False, None),
        (Record(OLD, State.LEAVING, ASKED, then=NEW), False, Record(NEW, State.RETURNING, fallback=OLD)),
        (Record(OLD, State.LEAVING, ASKED, then=OLD), False, Record(OLD, State.RETURNING)),
        (Record(NEW, State.RETURNING, fallback=OLD), True, Record(NEW, State.PRESENT)),
        (Record(OLD, State.PRESENT), False, None),
        (Record(OLD, State.ADDING), True, Record(OLD, State.ADDING)),  # it may be somebody else's
    ],
)
def test_what_a_reading_settles(record: AnyRecord, there: bool, after: AnyRecord | None) -> None:
    assert settled(record, there) == after


@pytest.mark.parametrize(
    ("record", "sent", "after"),
    [
        (Record(OLD, State.ADDING), False, None),
        (Record(OLD, State.ADDING), True, Record(OLD, State.LEAVING)),
        (Record(OLD, State.LEAVING, then=NEW), False, Record(OLD, State.PRESENT)),
        (Record(OLD, State.LEAVING, ASKED, then=NEW), False, Record(OLD, State.LEAVING, ASKED, then=OLD)),
        (Record(NEW, State.RETURNING, fallback=OLD), False, Record(OLD, State.RETURNING)),
        (Record(NEW, State.RETURNING, fallback=OLD), True, Record(NEW, State.LEAVING, then=OLD)),
        (Record(OLD, State.LEAVING, ASKED), False, Record(OLD, State.LEAVING, ASKED)),
    ],
)
def test_what_a_failed_operation_leaves(record: AnyRecord, sent: bool, after: AnyRecord | None) -> None:
    assert taken_back(record, sent) == after


@pytest.mark.parametrize(
    ("kind", "text"), [("fs", "{}"), ("disk", "{"), ("disk", "{}"), ("net", '{"state": "present", "spec": {}}')]
)
def test_what_is_no_record_is_not_read(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"kind|malformed|truncated|required"):
        read_record(kind, text.encode())
