"""What a QEMU's memory can do and has, from what it answers; and what it is asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypervisors.base import Dimm, MemoryHotplug, MemoryMethod
from hypervisors.qemu_memory import (
    Ability,
    Backend,
    Configured,
    Memory,
    MemoryDevice,
    ability,
    another,
    boot_backend,
    memory,
    piece,
    requested_size,
    seconds_to_lend,
)

MIB = 1 << 20
GIB = 1 << 30


def dimm(name: str, mib: int, slot: int = 0, **more: object) -> MemoryDevice:
    data = {"id": name, "memdev": f"/objects/{name}", "size": mib * MIB, "slot": slot, "addr": GIB, "node": 0, **more}
    return msgspec.convert({"type": "dimm", "data": data}, MemoryDevice)


def virtio_mem(name: str, mib: int, requested: int, most: int = 1024) -> MemoryDevice:
    sizes = {"size": mib * MIB, "requested-size": requested * MIB, "max-size": most * MIB, "block-size": 2 * MIB}
    return msgspec.convert({"type": "virtio-mem", "data": {"id": name, "memdev": "/objects/v", **sizes}}, MemoryDevice)


NVDIMM = msgspec.convert(
    {"type": "nvdimm", "data": {"id": "image", "memdev": "/objects/i", "size": 64 * MIB, "slot": 0}}, MemoryDevice
)
SGX = msgspec.convert(
    {"type": "sgx-epc", "data": {"memaddr": 1, "size": 64 * MIB, "memdev": "/objects/s"}}, MemoryDevice
)


@pytest.mark.parametrize(
    ("configured", "devices", "expected"),
    [
        pytest.param(Configured(), [], MemoryHotplug(MemoryMethod.NONE), id="nothing"),
        pytest.param(Configured(GIB, 0), [], MemoryHotplug(MemoryMethod.NONE), id="room and no slots"),
        pytest.param(Configured(GIB, 2), [], MemoryHotplug(MemoryMethod.DIMM, 128 * MIB, GIB), id="slots"),
        pytest.param(
            Configured(GIB, 2), [NVDIMM], MemoryHotplug(MemoryMethod.DIMM, 128 * MIB, GIB - 64 * MIB), id="an NVDIMM"
        ),
        pytest.param(
            Configured(4 * GIB, 2),
            [virtio_mem("vm0", 0, 0)],
            MemoryHotplug(MemoryMethod.VIRTIO_MEM, 2 * MIB, (256 + 1024) * MIB),
            id="virtio-mem before DIMMs",
        ),
        pytest.param(
            Configured(4 * GIB, 2),
            [dimm("d", 128), virtio_mem("vm0", 512, 512)],
            MemoryHotplug(MemoryMethod.VIRTIO_MEM, 2 * MIB, (256 + 128 + 1024) * MIB),
            id="virtio-mem beside a DIMM",
        ),
        pytest.param(
            Configured(4 * GIB, 0), [virtio_mem("", 0, 0)], MemoryHotplug(MemoryMethod.NONE), id="without an id"
        ),
        pytest.param(Configured(GIB, 2), [SGX], MemoryHotplug(MemoryMethod.DIMM, 128 * MIB, GIB - 64 * MIB), id="sgx"),
    ],
)
def test_the_method_is_what_the_machine_has(
    configured: Configured, devices: list[MemoryDevice], expected: MemoryHotplug
) -> None:
    assert ability(256 * MIB, configured, devices).hotplug == expected


def test_of_two_virtio_mem_devices_ours_is_asked() -> None:
    devices = [virtio_mem("numa1", 64, 64), virtio_mem("resmgr-virtio-mem", 0, 0)]
    able = ability(256 * MIB, Configured(4 * GIB), devices)

    assert able.device == "resmgr-virtio-mem"
    assert able.hotplug.maximum == (256 + 64 + 1024) * MIB
    assert requested_size(able, memory(able, devices), 512 * MIB) == (512 - 256 - 64) * MIB


DIMMS = Ability(MemoryHotplug(MemoryMethod.DIMM, 128 * MIB, 2 * GIB), 256 * MIB, 4)
VIRTIO = Ability(MemoryHotplug(MemoryMethod.VIRTIO_MEM, 2 * MIB, 1280 * MIB), 256 * MIB, 4, "vm0")


def test_dimms_are_told_in_the_order_of_plugging_others_first() -> None:
    devices = [dimm("resmgr-mem-10", 128, 0), dimm("resmgr-mem-9", 256, 1), dimm("other", 128, 2), NVDIMM]
    read = memory(DIMMS, devices)

    assert read.total == (256 + 128 + 256 + 128) * MIB
    assert read.dimms == (
        Dimm("other", 128 * MIB, ours=False),
        Dimm("resmgr-mem-9", 256 * MIB, ours=True),
        Dimm("resmgr-mem-10", 128 * MIB, ours=True),
    )
    assert read.highest == 10
    assert read.asked is None


def test_a_dimm_without_an_id_is_told_by_its_backend() -> None:
    row = msgspec.convert({"type": "dimm", "data": {"memdev": "/objects/x", "size": MIB, "slot": 3}}, MemoryDevice)

    assert memory(DIMMS, [row]).dimms == (Dimm("/objects/x", MIB, ours=False),)


def test_an_nvdimm_is_no_memory_and_takes_a_slot() -> None:
    read = memory(DIMMS, [NVDIMM, dimm("resmgr-mem-1", 128, 1)])

    assert read.total == (256 + 128) * MIB
    assert read.grows_left == 2


def test_what_is_asked_of_virtio_mem_is_told_until_it_is_there() -> None:
    assert memory(VIRTIO, [virtio_mem("vm0", 128, 512)]).asked == (256 + 512) * MIB
    assert memory(VIRTIO, [virtio_mem("vm0", 512, 512)]).asked is None
    assert memory(VIRTIO, [virtio_mem("vm0", 384, 0), dimm("d", 128)]).asked == (256 + 128) * MIB
    assert memory(VIRTIO, [virtio_mem("vm0", 384, 0)]).grows_left is None


def test_backends_of_ours_that_nobody_uses_are_orphans() -> None:
    backends = [Backend(name) for name in ("pc.ram", "resmgr-mem-1", "resmgr-mem-2", "resmgr-mem-x", "mine", "")]
    read = memory(DIMMS, [dimm("resmgr-mem-1", 128)], backends)

    assert read.orphans == ("resmgr-mem-2",)
    assert read.highest == 2


@pytest.mark.parametrize(
    "to",
    [
        pytest.param(256, id="nothing"),
        pytest.param(128, id="less"),
        pytest.param(300, id="not whole"),
        pytest.param(2048 + 128, id="above the maximum"),
    ],
)
def test_a_dimm_that_cannot_be(to: int) -> None:
    with pytest.raises(ValueError, match=r"bytes"):
        piece(DIMMS, Memory(total=256 * MIB), to * MIB)


def test_the_size_of_a_dimm() -> None:
    assert piece(DIMMS, Memory(total=384 * MIB), 2048 * MIB) == (2048 - 384) * MIB


@pytest.mark.parametrize("to", [128, 257, 1282], ids=["below boot", "not whole", "above the maximum"])
def test_what_virtio_mem_cannot_be_asked_for(to: int) -> None:
    with pytest.raises(ValueError, match=r"bytes"):
        requested_size(VIRTIO, Memory(total=256 * MIB, beside=256 * MIB), to * MIB)


@given(st.integers(0, 512), st.integers(0, 512), st.integers(0, 512))
def test_what_is_asked_for_is_what_is_told_as_asked(there: int, asked: int, wanted: int) -> None:
    device = virtio_mem("vm0", there * 2, asked * 2)
    wants = (256 + wanted * 2) * MIB
    size = requested_size(VIRTIO, memory(VIRTIO, [device]), wants)

    after = memory(VIRTIO, [virtio_mem("vm0", there * 2, size // MIB)])
    assert (after.asked or after.total) == wants


# Backends


def test_the_boot_backend_is_the_one_that_the_machine_names() -> None:
    backends = [Backend("a"), Backend("pc.ram"), Backend("resmgr-mem-1")]

    assert boot_backend("/objects/pc.ram", backends, []) == backends[1]
    assert boot_backend("pc.ram", backends, []) == backends[1]


def test_with_numa_nodes_it_is_the_first_that_no_device_uses() -> None:
    backends = [Backend("node1"), Backend("node0"), Backend("a-dimm"), Backend("resmgr-mem-1")]

    assert boot_backend("", backends, [dimm("a-dimm", 128)]) == backends[1]
    assert boot_backend("", [], []) is None


FILE = {"mem-path": "/dev/shm", "prealloc-threads": 4}  # noqa: S108
MEMFD = {"hugetlb": True, "hugetlbsize": 2 * MIB, "seal": True}


@pytest.mark.parametrize(
    ("like", "kind", "told", "expected"),
    [
        pytest.param(Backend(), "memory-backend-ram", {}, {"share": False}, id="plain"),
        pytest.param(
            Backend(share=True),
            "memory-backend-file",
            FILE,
            {"share": True, "mem-path": "/dev/shm"},  # noqa: S108
            id="virtio-fs",
        ),
        pytest.param(
            Backend(share=True, prealloc=True),
            "memory-backend-file",
            FILE,
            {"share": True, "mem-path": "/dev/shm", "prealloc": True, "prealloc-threads": 4},  # noqa: S108
            id="preallocated",
        ),
        pytest.param(Backend(share=True), "memory-backend-memfd", MEMFD, {"share": True, **MEMFD}, id="huge pages"),
        pytest.param(
            Backend(share=True),
            "memory-backend-memfd",
            {"hugetlb": False, "hugetlbsize": 0, "seal": True},
            {"share": True, "hugetlb": False, "seal": True},
            id="memfd",
        ),
        pytest.param(
            Backend(host_nodes=[1], policy="bind", merge=False, dump=False, reserve=False),
            "memory-backend-ram",
            {},
            {"share": False, "host-nodes": [1], "policy": "bind", "merge": False, "dump": False, "reserve": False},
            id="bound to a node",
        ),
    ],
)
def test_another_backend_is_as_the_boot_memorys(
    like: Backend, kind: str, told: dict[str, object], expected: dict[str, Any]
) -> None:
    assert another(like, kind, told, private_path=False) == {"qom-type": kind, **expected}


def test_a_preallocated_dimm_takes_its_time() -> None:
    assert seconds_to_lend(1024 * MIB, [Backend(), Backend(prealloc=True)]) == 4.0
    assert seconds_to_lend(1024 * MIB, [Backend()]) == 0.0


def test_two_backends_never_share_a_file() -> None:
    like = Backend(share=True)

    assert another(like, "memory-backend-file", {"mem-path": "/templates/memory"}, private_path=True) == {
        "qom-type": "memory-backend-memfd",
        "share": True,
    }


def test_a_backend_of_another_kind_is_plain_memory() -> None:
    assert another(Backend(), "memory-backend-epc", {}, private_path=False)["qom-type"] == "memory-backend-ram"
