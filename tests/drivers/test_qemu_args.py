"""The arguments; that a QEMU takes them is shown by the behaviour tests, which start theirs with them."""

from __future__ import annotations

import pytest

from hypervisors.qemu_args import KERNEL_PARAMS, vmm_arguments


def test_a_machine_that_can_grow() -> None:
    assert vmm_arguments(3, 8, 2048, 16384, 10, "/run/vm/m.sock") == [
        "-smp",
        "3,maxcpus=8",
        "-m",
        "2048M,slots=10,maxmem=16384M",
        "-chardev",
        "socket,id=resmgr,path=/run/vm/m.sock,server=on,wait=off",
        "-mon",
        "chardev=resmgr,mode=control",
    ]


@pytest.mark.parametrize(
    ("max_memory", "slots"),
    [pytest.param(16384, 0, id="no slots"), pytest.param(2048, 10, id="boot memory is the maximum")],
)
def test_what_cannot_grow_is_only_a_size(max_memory: int, slots: int) -> None:
    arguments = vmm_arguments(3, 3, 2048, max_memory, slots, "/m")

    assert arguments[arguments.index("-m") + 1] == "2048M"
    assert arguments[arguments.index("-smp") + 1] == "3"


def test_virtio_mem_is_there_from_the_start_and_has_nothing() -> None:
    arguments = vmm_arguments(1, 1, 257, 1024, 10, "/m", virtio_mem=True)

    assert arguments[2:8] == [
        "-m",
        "257M,slots=10,maxmem=1023M",
        "-object",
        "memory-backend-memfd,id=resmgr-virtio-mem,size=766M,share=on,reserve=off",
        "-device",
        "virtio-mem-pci,id=resmgr-virtio-mem,memdev=resmgr-virtio-mem,requested-size=0,addr=0x1e",
    ]


@pytest.mark.parametrize(
    ("huge_pages", "prealloc", "lender", "device"),
    [
        (True, False, ",hugetlb=on", ",prealloc=on"),
        (True, True, ",hugetlb=on", ",prealloc=on"),
        (False, True, ",reserve=off", ",prealloc=on"),
        (False, False, ",reserve=off", ",addr=0x1e"),
    ],
)
def test_how_virtio_mem_is_lent(huge_pages: bool, prealloc: bool, lender: str, device: str) -> None:
    arguments = vmm_arguments(1, 1, 256, 512, 1, "/m", virtio_mem=True, huge_pages=huge_pages, prealloc=prealloc)

    assert arguments[5].endswith(lender)
    assert arguments[7].endswith(device)


@pytest.mark.parametrize(
    ("max_memory", "slots"), [(2048, 10), (2049, 10), (4096, 0)], ids=["no room", "less than a block", "static"]
)
def test_where_memory_cannot_grow_there_is_no_virtio_mem(max_memory: int, slots: int) -> None:
    arguments = vmm_arguments(1, 1, 2048, max_memory, slots, "/m", virtio_mem=True)

    assert arguments[3] == "2048M"
    assert not any("virtio-mem" in argument for argument in arguments)


@pytest.mark.parametrize(
    ("machine_type", "device"), [("q35", "virtio-balloon-pci,addr=0x1d"), ("microvm", "virtio-balloon-device")]
)
def test_freed_memory_is_told_where_it_is_to_be_reclaimed(machine_type: str, device: str) -> None:
    arguments = vmm_arguments(1, 1, 64, 64, 0, "/m", machine_type=machine_type, free_page_reporting=True)

    assert arguments[4:6] == ["-device", f"{device},id=resmgr-balloon,free-page-reporting=on,deflate-on-oom=on"]


def test_commas_in_the_path_are_doubled() -> None:
    assert "socket,id=resmgr,path=/a,,b,,,,c,server=on,wait=off" in vmm_arguments(1, 1, 64, 64, 0, "/a,b,,c")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 4, 64, 64, 0, "/m"), "vcpus is 0"),
        ((5, 4, 64, 64, 0, "/m"), "vcpus is 5"),
        ((1, 1, 0, 64, 0, "/m"), "memory_mib is 0"),
        ((1, 1, 65, 64, 0, "/m"), "memory_mib is 65"),
    ],
)
def test_a_size_above_its_maximum_is_a_mistake(arguments: tuple[int, int, int, int, int, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        vmm_arguments(*arguments)


def test_plugged_memory_comes_up_movable() -> None:
    assert KERNEL_PARAMS == ("memhp_default_state=online_movable",)
