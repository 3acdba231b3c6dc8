"""Memory of real QEMUs by the driver: the arguments that the daemon returns, DIMMs by the dozen, and freed pages.

The mini firmware acknowledges DIMMs and lets go of them. Only Linux uses what is plugged, and drives virtio-mem: see
:mod:`tests.integration.test_life_memory`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hypervisors import qemu_args
from hypervisors.base import MemoryMethod, Plugged, Refused, RemovalRefused, SizeChanged
from hypervisors.qemu import QemuHypervisor
from tests.conftest import StartFirmware, StartLinux
from tests.drivers.backends import Hints

MIB = 1 << 20
BOOT = 32
PIECE = 128 * MIB
DEADLINE = 30.0


@asynccontextmanager
async def connected(directory: Path) -> AsyncIterator[tuple[QemuHypervisor, Hints]]:
    hints, driver = Hints(), QemuHypervisor(directory / "m")
    await driver.connect(hints)
    try:
        yield driver, hints
    finally:
        await driver.close()


async def becomes(driver: QemuHypervisor, true: Callable[[Plugged], bool]) -> Plugged:
    """What is read when it is so, at last."""
    async with asyncio.timeout(DEADLINE):
        while not true(plugged := await driver.read()):  # noqa: ASYNC110 - what QEMU tells of it is not all
            await asyncio.sleep(0.02)
    return plugged


async def forget_backend(driver: QemuHypervisor, name: str) -> str:
    """QEMU's answer to being asked to delete an object, by the driver's own monitor."""
    monitor = driver._session()
    monitor.deadline = asyncio.get_running_loop().time() + DEADLINE
    (answer,) = await monitor.pipeline([{"execute": "object-del", "arguments": {"id": name}}])
    return str(answer)


@pytest.mark.every_qemu
@pytest.mark.parametrize("virtio_mem", [False, True], ids=["dimm", "virtio-mem"])
@pytest.mark.parametrize("reclaim", [False, True], ids=["", "reclaim"])
async def test_what_the_daemon_returns_boots(
    minifw_guest: StartFirmware, short_tmp: Path, virtio_mem: bool, reclaim: bool
) -> None:
    arguments = qemu_args.vmm_arguments(
        1, 2, BOOT, 1024, 10, str(short_tmp / "m"),
        virtio_mem=virtio_mem, prealloc=True, free_page_reporting=reclaim,
    )  # fmt: skip
    minifw_guest(arguments).ready()
    driver = QemuHypervisor(short_tmp / "m")
    memory = (await driver.connect(Hints())).memory
    await driver.close()

    assert memory.method is (MemoryMethod.VIRTIO_MEM if virtio_mem else MemoryMethod.DIMM)
    assert memory.maximum == 1024 * MIB


def dimm_machine(directory: Path, *more: str) -> list[str]:
    return [*qemu_args.vmm_arguments(1, 2, BOOT, 4096, 10, str(directory / "m")), *more]


@pytest.mark.every_qemu
async def test_eleven_dimms_do_not_go_into_ten_slots_and_nothing_is_left_of_the_last(
    minifw_guest: StartFirmware, short_tmp: Path
) -> None:
    minifw_guest(dimm_machine(short_tmp)).ready()
    async with connected(short_tmp) as (driver, hints):
        for count in range(1, 11):
            plugged = await driver.grow_memory(BOOT * MIB + count * PIECE)
            assert (len(plugged.dimms), plugged.memory_grows_left) == (count, 10 - count)

        with pytest.raises(Refused, match="no free slots available"):
            await driver.grow_memory(BOOT * MIB + 11 * PIECE)
        assert "object 'resmgr-mem-11' not found" in await forget_backend(driver, "resmgr-mem-11")

        await driver.start_shrinking_memory(BOOT * MIB, [dimm.id for dimm in reversed(plugged.dimms)])
        await hints.next(SizeChanged)
        plugged = await becomes(driver, lambda plugged: not plugged.dimms)
        assert (plugged.memory, plugged.memory_grows_left) == (BOOT * MIB, 10)
        for count in range(1, 11):
            assert "not found" in await forget_backend(driver, f"resmgr-mem-{count}")


@pytest.mark.every_qemu
async def test_a_dimm_comes_and_goes_a_hundred_times(minifw_guest: StartFirmware, short_tmp: Path) -> None:
    minifw_guest(dimm_machine(short_tmp)).ready()
    async with connected(short_tmp) as (driver, hints):
        for _ in range(100):
            plugged = await driver.grow_memory(BOOT * MIB + PIECE)
            assert [dimm.size for dimm in plugged.dimms] == [PIECE]
            await driver.start_shrinking_memory(BOOT * MIB, [plugged.dimms[0].id])
            await hints.next(SizeChanged)
            assert (await driver.read()).memory == BOOT * MIB


@pytest.mark.every_qemu
async def test_a_guest_refuses_a_dimm_or_says_nothing_and_gives_it_back_later(
    minifw_guest: StartFirmware, short_tmp: Path
) -> None:
    guest = minifw_guest(dimm_machine(short_tmp))
    guest.ready()
    async with connected(short_tmp) as (driver, hints):
        plugged = await driver.grow_memory(BOOT * MIB + PIECE)
        await asyncio.to_thread(guest.mode, "r")
        await driver.start_shrinking_memory(BOOT * MIB, ["resmgr-mem-1"])
        assert (await hints.next(RemovalRefused)).id == "resmgr-mem-1"
        await asyncio.to_thread(guest.mode, "i")
        await driver.start_shrinking_memory(BOOT * MIB, ["resmgr-mem-1"])
        assert await driver.read() == plugged
        await asyncio.to_thread(guest.mode, "c")
        await hints.next(SizeChanged)
        assert (await driver.read()).memory == BOOT * MIB


@pytest.mark.parametrize(
    ("boot", "expected"),
    [
        pytest.param(
            "memory-backend-file,id=dimm1,mem-path=/dev/shm,share=on,prealloc=on",
            {"qom-type": "memory-backend-file", "mem-path": "/dev/shm", "share": True, "prealloc": True},  # noqa: S108
            id="a directory",
        ),
        pytest.param(
            "memory-backend-memfd,id=dimm1,share=on,merge=off",
            {"qom-type": "memory-backend-memfd", "hugetlb": False, "seal": True, "share": True, "merge": False},
            id="memfd",
        ),
        pytest.param(
            "memory-backend-file,id=dimm1,mem-path={file},share=on",
            {"qom-type": "memory-backend-memfd", "share": True},
            id="a file of its own",
        ),
    ],
)
@pytest.mark.parametrize("numa", [False, True], ids=["", "numa"])
async def test_a_dimm_is_lent_as_the_boot_memory_is(
    minifw_guest: StartFirmware, short_tmp: Path, boot: str, expected: dict[str, object], numa: bool
) -> None:
    backend = f"{boot.format(file=short_tmp / 'ram')},size={BOOT}M"
    use = ["-numa", "node,memdev=dimm1"] if numa else ["-machine", "memory-backend=dimm1"]
    minifw_guest(dimm_machine(short_tmp, "-object", backend, *use)).ready()
    async with connected(short_tmp) as (driver, _):
        await driver.grow_memory(BOOT * MIB + PIECE)
        lent = dict(driver._another_backend or {})

    lent.pop("prealloc-threads", None)
    assert lent == expected


# Linux


async def test_what_the_guest_frees_goes_back_to_the_host(linux_guest: StartLinux, short_tmp: Path) -> None:
    held = 100 * MIB
    arguments = qemu_args.vmm_arguments(1, 1, 256, 256, 0, str(short_tmp / "m"), free_page_reporting=True)
    guest = linux_guest(arguments, kernel_params=qemu_args.KERNEL_PARAMS)
    await asyncio.to_thread(guest.ready)
    await asyncio.to_thread(guest.hold_memory, held)
    resident = resident_memory(guest.pid)
    await asyncio.to_thread(guest.free_memory)
    async with asyncio.timeout(DEADLINE):
        while resident_memory(guest.pid) > resident - held // 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)


def resident_memory(pid: int) -> int:
    """Bytes of host memory that the process takes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))
