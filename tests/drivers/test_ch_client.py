"""The client of Cloud Hypervisor's API: what goes over the wire, what is made of answers, and how long it may take."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypervisors import ch_types
from hypervisors.base import Busy, HypervisorError, Refused, TimedOut, Unreachable
from hypervisors.ch_client import LONGEST_ANSWER, ApiError, Exchange, causes
from hypervisors.ch_types import (
    DiskConfig,
    NetConfig,
    RateLimiterConfig,
    RateLimitGroupConfig,
    TokenBucket,
    VmInfo,
    VmResize,
)
from kata_resmgr.limits import Limits, configured, requested
from tests.drivers.ch_rig import RELEASES, config, must_be_valid
from tests.drivers.test_ch_fake import dial
from tests.fakes.ch_config import Json
from tests.fakes.cloud_hypervisor import CloudHypervisorServer

LIMITS: Json = json.loads((Path(__file__).parents[1] / "data" / "limits.json").read_text())
BUCKET = TokenBucket(size=1000, refill_time=1000)


@pytest.fixture(params=RELEASES)
def server(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[CloudHypervisorServer]:
    with CloudHypervisorServer(short_tmp / "ch", config(), release=request.param) as server:
        yield server


@pytest.fixture
def newest(short_tmp: Path) -> Iterator[CloudHypervisorServer]:
    with CloudHypervisorServer(short_tmp / "ch", config()) as server:
        yield server


def exchange(server: CloudHypervisorServer, timeout: float = 5.0) -> Exchange:
    return Exchange(str(server.path), timeout)


# What is sent


def sent_limiter(server: CloudHypervisorServer, kind: str, limiter: RateLimiterConfig | None) -> bytes | None:
    """The text of the limiter, as the VMM gets it with a device of that kind."""
    device = (DiskConfig if kind == "disk" else NetConfig)(id="d", rate_limiter_config=limiter)
    with exchange(server) as api:
        api.add(device)
    name, body = server.vmm.calls[-1]
    assert body is not None
    must_be_valid(name, json.loads(body))
    head = b'{"id":"d"'
    assert body.startswith(head)
    rest = body.removeprefix(head)
    return None if rest == b"}" else rest.removeprefix(b',"rate_limiter_config":').removesuffix(b"}")


def as_sent(expected: Json | None) -> bytes | None:
    """Kata's expectation as the bytes of a body: what there is not, is left out."""
    if not expected:
        return None
    order = ("size", "one_time_burst", "refill_time")
    buckets = {
        name: {member: bucket[member] for member in order if bucket.get(member) is not None}
        for name in ("bandwidth", "ops")
        if (bucket := expected.get(name))
    }
    return json.dumps(buckets, separators=(",", ":")).encode()


@pytest.mark.parametrize("kind", ["disk", "net"])
@pytest.mark.parametrize("vector", LIMITS["go_limiter"], ids=lambda vector: str(list(vector["input"].values())))
def test_the_limiter_matrix_reaches_the_vmm(newest: CloudHypervisorServer, vector: Json, kind: str) -> None:
    settings = {f"{kind}_rate_limiter_{name}": value for name, value in vector["input"].items()}

    sent = sent_limiter(newest, kind, configured(kind, settings).limiter())

    assert sent == as_sent(vector["expected"]["config"])


@pytest.mark.parametrize("kind", ["disk", "net"])
@pytest.mark.parametrize("vector", LIMITS["rs_limiter"], ids=lambda vector: str(list(vector["input"].values())))
def test_the_rust_runtimes_matrix_reaches_the_vmm(newest: CloudHypervisorServer, vector: Json, kind: str) -> None:
    """Its bandwidth is in bytes, as a caller's is."""
    asked = {name: value or 0 for name, value in vector["input"].items()}
    limits = Limits(
        bytes_per_second=asked["band_rate"],
        burst_bytes=asked["band_onetime_burst"],
        ops_per_second=asked["ops_rate"],
        burst_ops=asked["ops_onetime_burst"],
    )

    assert sent_limiter(newest, kind, requested(limits).limiter()) == as_sent(vector["expected"])


def test_bodies_are_those_of_the_openapi_file(newest: CloudHypervisorServer) -> None:
    limiter = RateLimiterConfig(BUCKET, BUCKET)
    disk = DiskConfig(
        id="d",
        path="/x",
        readonly=True,
        direct=True,
        iommu=True,
        num_queues=2,
        queue_size=256,
        rate_limiter_config=limiter,
        serial="s",
        queue_affinity=(ch_types.QueueAffinity(0, (1, 2)),),
        backing_files=True,
        sparse=False,
        image_type="Raw",
        lock_granularity="Full",
        pci_segment=0,
        pci_device_id=5,
    )
    net = NetConfig(
        id="n",
        tap="tap0",
        ip="10.0.0.1",
        mask="255.0.0.0",
        mac="de:ad:be:ef:12:34",
        host_mac="de:ad:be:ef:12:35",
        mtu=1500,
        num_queues=4,
        queue_size=128,
        rate_limiter_config=limiter,
        offload_tso=False,
        offload_ufo=False,
        offload_csum=False,
    )
    with exchange(newest) as api:
        api.add(disk)
        api.add(net)
        api.resize(VmResize(desired_vcpus=3))
        api.resize(VmResize(desired_ram=1152 << 20))
        api.remove("d")

    bodies = [(name, json.loads(body)) for name, body in newest.vmm.calls if body is not None]
    assert [name for name, _ in bodies] == ["vm.add-disk", "vm.add-net", "vm.resize", "vm.resize", "vm.remove-device"]
    for name, body in bodies:
        must_be_valid(name, body)
    assert bodies[2:] == [
        ("vm.resize", {"desired_vcpus": 3}),
        ("vm.resize", {"desired_ram": 1152 << 20}),
        ("vm.remove-device", {"id": "d"}),
    ]


def test_a_group_is_what_the_openapi_file_says() -> None:
    group = msgspec.to_builtins(RateLimitGroupConfig("gold", RateLimiterConfig(ops=BUCKET)))

    must_be_valid("vm.create", {"payload": {}, "rate_limit_groups": [group]})


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "d", "rate_limter_config": {}}',
        '{"id": "d", "rate_limiter_config": {"bandwith": {"size": 10, "refill_time": 1000}}}',
        '{"id": "d", "rate_limiter_config": {"ops": {"size": 10, "refil_time": 1000}}}',
        '{"id": "d", "rate_limiter_config": {"ops": {"size": 10, "refill_time": 1000, "burst": 5}}}',
        '{"id": "__d"}',
        '{"id": "d", "num_queues": null}',
    ],
)
def test_a_misspelled_member_cannot_become_a_device(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=DiskConfig)


# What is answered


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'["Error from API","The VM info is not available"]', ("Error from API", "The VM info is not available")),
        (b'"a string"', ("a string",)),
        (b'{ "error": "Invalid request.\nAll previous unanswered requests will be dropped." }',
         ("Invalid request. All previous unanswered requests will be dropped.",)),
        (b'{ "error": "Too many open connections" }', ("Too many open connections",)),
        (b"plain text: of v46", ("plain text: of v46",)),
        (b"", ()),
        (b"[]", ()),
        (b"\xff\xfe", ("\ufffd\ufffd",)),
        (b'["' + b"x" * 1000 + b'"]', ("x" * 199 + "…",)),
        (b"[" * 100_000, ("[" * 199 + "…",)),
        (b"[1,2,3,4,5,6,7,8,9]", ("1", "2", "3", "4", "5", "6", "7", "8")),
    ],
)  # fmt: skip
def test_errors_are_understood_in_every_form(body: bytes, said: tuple[str, ...]) -> None:
    assert causes(body) == said


def test_an_error_tells_its_causes(server: CloudHypervisorServer) -> None:
    with exchange(server) as api, pytest.raises(ApiError, match="Requested vCPUs exceed maximum") as caught:
        api.resize(VmResize(desired_vcpus=9))

    assert caught.value.status == 500
    assert len(caught.value.causes) == (1 if server.vmm.release < 47 else 4)


def test_the_same_is_read_from_every_release(server: CloudHypervisorServer) -> None:
    with exchange(server) as api:
        assert api.ping().pid == api.peer == os.getpid()
        api.add(DiskConfig(id="d", path="/x", rate_limiter_config=RateLimiterConfig(ops=BUCKET)))
        info = api.info()

    assert info.config.cpus.max_vcpus == 8
    assert ch_types.limiter_shown(info.config.disks[0]) == RateLimiterConfig(ops=BUCKET)
    assert info.device_tree["_virtio-pci-d"].pci_bdf == "0000:00:01.0"
    assert info.memory_actual_size == 1 << 30


def test_null_and_missing_are_the_same() -> None:
    said = b'{"config":{"cpus":null,"memory":{"size":5,"hotplug_size":null}},"state":"Running","device_tree":null}'

    info = ch_types.read(said, VmInfo)

    assert (info.config.memory.size, info.config.memory.hotplug_size, info.device_tree) == (5, 0, {})


RAW_LF = b'{ "error": "Invalid request.\nAll previous unanswered requests will be dropped." }'


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, Unreachable),
        (b"HTTP/1.1 200 \r\nContent-Length: 100\r\n\r\n{", Unreachable),
        (b"HTTP/1.1 200 \r\nContent-Length: 1\r\n\r\n{", Unreachable),
        (b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", Unreachable),
        (b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n[]", Unreachable),
        (b"HTTP/1.1 200 \r\nContent-Length: x\r\n\r\n", Unreachable),
        (b"garbage\r\n\r\n", Unreachable),
        (b"\0" * 70_000, Unreachable),
        (b"HTTP/1.1 200 \r\n" + b"a: b\r\n" * 200 + b"\r\n", Unreachable),
        (b"HTTP/1.1 200 \r\n\r\n" + b" " * (LONGEST_ANSWER + 1), Unreachable),
        (b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Unreachable),
        (b"HTTP/1.1 307 \r\nLocation: http://localhost:1/\r\nContent-Length: 0\r\n\r\n", Refused),
        (b"HTTP/1.1 400 \r\nContent-Length: %d\r\n\r\n" % len(RAW_LF) + RAW_LF, Refused),
    ],
)
def test_a_broken_answer_is_an_error_and_the_next_call_succeeds(
    newest: CloudHypervisorServer, answer: bytes | None, error: type[HypervisorError]
) -> None:
    newest.vmm.spoilt["vm.info"] = answer
    with exchange(newest) as api, pytest.raises(error) as caught:
        api.info()
    assert len(str(caught.value).splitlines()) == 1

    with exchange(newest) as api:
        assert api.info().state == "Running"


def test_a_vmm_that_hangs_is_cut_off_as_a_whole(newest: CloudHypervisorServer) -> None:
    newest.vmm.hang()
    began = time.monotonic()
    with exchange(newest, timeout=0.2) as api, pytest.raises(TimedOut):
        api.info()
    assert 0.15 < time.monotonic() - began < 2

    newest.vmm.resume_answers()
    with exchange(newest) as api:
        assert api.info().state == "Running"


def test_one_that_answers_byte_by_byte_is_cut_off_too(newest: CloudHypervisorServer) -> None:
    """Each byte comes in time; the whole does not."""
    newest.vmm.spoilt["vm.info"] = b"HTTP/1.1 200 \r\nContent-Length: 50\r\n\r\n" + b"{"
    api = exchange(newest, timeout=30.0)
    timer = threading.Timer(0.1, api.cut, [TimedOut("no answer in 0.1 s")])
    newest.vmm.hang()
    timer.start()
    began = time.monotonic()
    with api, pytest.raises(TimedOut, match=r"no answer in 0\.1 s"):
        api.info()
    timer.join()
    assert time.monotonic() - began < 5


def test_what_was_cut_sends_nothing_more(newest: CloudHypervisorServer) -> None:
    api = exchange(newest)
    with api:
        api.info()
        api.cut(Unreachable("given up"))
        with pytest.raises(Unreachable, match=r"vm\.resize: given up"):
            api.resize(VmResize(desired_vcpus=3))

    assert newest.vmm.bodies("vm.resize") == []


def test_ten_connections_taken_is_busy_and_passes(newest: CloudHypervisorServer) -> None:
    held = []
    for _ in range(10):
        held.append(dial(newest.path))
        held[-1].sendall(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n")
        assert held[-1].recv(1024)
    with exchange(newest) as api, pytest.raises(Busy, match="Too many open connections"):
        api.info()
    for connection in held:
        connection.close()

    newest.http.wait_until_free()
    with exchange(newest) as api:
        assert api.info().state == "Running"


@pytest.mark.parametrize("name", ["A b", "%2F", "ü", "a:1", "u@h", "x#y", "x?y", "[::1]", "*"])
def test_a_socket_may_be_called_anything(short_tmp: Path, name: str) -> None:
    with CloudHypervisorServer(short_tmp / name, config()) as server, exchange(server) as api:
        assert api.ping().pid == os.getpid()


def test_nobody_listens(short_tmp: Path) -> None:
    with Exchange(str(short_tmp / "no"), 1) as api, pytest.raises(Unreachable, match="No such file"):
        api.info()


def test_an_exchange_uses_one_connection_and_keeps_none(newest: CloudHypervisorServer) -> None:
    with exchange(newest) as api:
        api.ping()
        api.info()
        api.counters()
        assert newest.http.connections == 1

    newest.http.wait_until_free()


# What was sent, and what is shown


@pytest.mark.parametrize(
    ("sent", "shown", "member"),
    [
        ({"id": "d"}, {"id": "d", "path": "/x"}, None),
        ({"id": "d", "mac": "AA:bb:cc:dd:ee:ff"}, {"id": "d", "mac": "aa:bb:cc:dd:ee:ff"}, None),
        ({"id": "d", "path": "/X"}, {"id": "d", "path": "/x"}, "path"),
        ({"rate_limiter_config": {"ops": {"size": 10}}}, {}, "rate_limiter_config.ops.size"),
        ({"rate_limiter_config": {"ops": {"size": 10}}}, {"rate_limiter_config": {"ops": {"size": 11}}},
         "rate_limiter_config.ops.size"),
        ({"queue_affinity": [{"queue_index": 0}]}, {"queue_affinity": [{"queue_index": 0}]}, None),
    ],
)  # fmt: skip
def test_dropped_members_are_found(sent: dict[str, Any], shown: dict[str, Any], member: str | None) -> None:
    assert ch_types.dropped(sent, shown) == member


@pytest.mark.parametrize(
    ("devices", "floor"),
    [
        ({}, 1),
        ({"disks": ({"num_queues": 4},)}, 4),
        ({"net": ({"num_queues": 8},)}, 4),
        ({"net": ({"num_queues": 7},)}, 4),
        ({"fs": ({"num_queues": 3},), "net": ({},), "disks": ({},)}, 3),
    ],
)
def test_queue_floor(devices: dict[str, Any], floor: int) -> None:
    assert ch_types.queue_floor(ch_types.ConfigInfo(**devices)) == floor
