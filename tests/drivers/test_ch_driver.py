"""The Cloud Hypervisor driver on the fake wire, with each release: proofs, traps and what an answer does not tell."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hypervisors.base import (
    Busy,
    ConnectionLost,
    DeviceKind,
    GuestReset,
    HypervisorError,
    MemoryMethod,
    Plugged,
    Refused,
    SizeChanged,
    TimedOut,
    Unreachable,
    Unsupported,
)
from hypervisors.ch_client import ApiError
from hypervisors.ch_pool import CallPool
from hypervisors.ch_types import DiskConfig, NetConfig, QueueAffinity, RateLimiterConfig, TokenBucket
from hypervisors.cloud_hypervisor import CloudHypervisor
from tests.drivers.backends import Hints
from tests.drivers.ch_rig import GIB, MIB, RELEASES, Rig, config, must_be_valid, new_driver, rig
from tests.fakes.cloud_hypervisor import CloudHypervisorServer

LIMITER = RateLimiterConfig(TokenBucket(size=1 << 20, one_time_burst=1 << 19, refill_time=1000))
DISK = DiskConfig(id="data", path="/x.raw", rate_limiter_config=LIMITER)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
async def ch(short_tmp: Path, release: int) -> AsyncIterator[Rig]:
    """A VM with 2 of 8 vCPUs, and 1 GiB that ACPI can make 5; whatever was sent is valid."""
    async with rig(short_tmp, release=release) as rigged:
        yield rigged
        for name, body in rigged.vmm.calls:
            if body is not None and name != "vm.create":
                must_be_valid(name, json.loads(body))


def names(plugged: Plugged) -> list[str]:
    return [vcpu.id for vcpu in plugged.vcpus]


def asked_vcpus(ch: Rig) -> list[int]:
    return [body["desired_vcpus"] for body in ch.vmm.bodies("vm.resize")]


# The machine


async def test_the_machine(ch: Rig) -> None:
    machine = ch.machine

    assert (machine.max_vcpus, machine.vcpu_hotplug, machine.pid) == (8, True, os.getpid())
    assert (machine.tells_changes, machine.one_resize) == (False, True)
    assert machine.memory.method is MemoryMethod.ACPI
    assert (machine.memory.granularity, machine.memory.maximum) == (128 * MIB, 5 * GIB)


async def test_a_vm_that_is_not_booted_is_unreachable_until_it_is(short_tmp: Path, release: int) -> None:
    pool = CallPool()
    with CloudHypervisorServer(short_tmp / "ch", None, release=release) as server:
        driver = CloudHypervisor(str(server.path), pool, boot_vcpus=2, boot_memory=GIB)
        with pytest.raises(Unreachable, match="VM is not created"):
            await driver.connect(Hints())
        server.vmm._create(json.dumps(config()).encode())
        with pytest.raises(Unreachable, match="not booted"):
            await driver.connect(Hints())
        server.vmm._boot()

        await driver.connect(Hints())

        assert names(await driver.read()) == ["vcpu0", "vcpu1"]
        await driver.close()
        await pool.close()


@pytest.mark.parametrize("platform", [{"tdx": True}, {"sev_snp": True}])
async def test_a_confidential_vm_keeps_its_size(short_tmp: Path, platform: dict[str, bool]) -> None:
    async with rig(short_tmp, config(platform=platform)) as ch:
        assert not ch.machine.vcpu_hotplug
        assert ch.machine.memory.method is MemoryMethod.NONE
        with pytest.raises(Unsupported, match="confidential"):
            await ch.driver.add_vcpus(1)
        with pytest.raises(Unsupported, match="confidential"):
            await ch.driver.grow_memory(2 * GIB)
        assert ch.vmm.bodies("vm.resize") == []


async def test_a_204_that_does_nothing_shows_in_the_read_back(ch: Rig) -> None:
    ch.vmm.static = True

    assert names(await ch.driver.add_vcpus(2)) == ["vcpu0", "vcpu1"]


async def test_the_platforms_uuid_is_the_identity(short_tmp: Path) -> None:
    async with rig(short_tmp, config(platform={"uuid": "5b2f"})) as ch:
        assert ch.machine.identity == "5b2f"


async def test_a_foreign_process_behind_the_socket_is_refused(short_tmp: Path) -> None:
    """The pid that the VMM tells is the one that listens, or no pid is believed."""
    pool = CallPool()
    with CloudHypervisorServer(short_tmp / "ch", config(), pid=os.getppid()) as server:
        driver = new_driver(server, pool)
        with pytest.raises(Unreachable, match=f"says that its process is {os.getppid()}, and {os.getpid()} listens"):
            await driver.connect(Hints())
        await driver.close()
        await pool.close()


# vCPUs


async def test_a_grow_is_proved_by_the_threads(ch: Rig) -> None:
    plugged = await ch.driver.add_vcpus(3)

    assert names(plugged) == ["vcpu0", "vcpu1", "vcpu2", "vcpu3", "vcpu4"]
    assert [vcpu.ours for vcpu in plugged.vcpus] == [False, False, True, True, True]
    assert asked_vcpus(ch) == [5]


async def test_no_more_than_there_are_slots(ch: Rig) -> None:
    with pytest.raises(Refused, match="7 vCPUs asked for, 6 of 8"):
        await ch.driver.add_vcpus(7)
    for count in (0, 9):
        with pytest.raises(ValueError, match="maximum of 8"):
            await ch.driver.add_vcpus(count)
    assert asked_vcpus(ch) == []


async def test_a_shrink_is_proved_by_the_threads_and_not_before(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)

    await ch.driver.start_removing_vcpus(["vcpu3"])
    assert names(await ch.driver.read())[-1] == "vcpu3"
    assert ch.vmm.config["cpus"]["boot_vcpus"] == 3  # what vm.info shows at once

    ch.vmm.eject_vcpus()
    assert names(await ch.driver.read()) == ["vcpu0", "vcpu1", "vcpu2"]


@pytest.mark.parametrize("release", [45, *RELEASES])
async def test_2_1_2_ends_at_2(short_tmp: Path, release: int) -> None:
    """The trap: while the removal is under way the VMM accepts the present number, and carries out the removal.

    Any other it refuses: with 429, or before v46 with 500.
    """
    async with rig(short_tmp, config(vcpus=1), release=release) as ch:
        await ch.driver.add_vcpus(1)
        for _ in range(2):
            await ch.driver.start_removing_vcpus(["vcpu1"])
        with pytest.raises(ApiError):  # 2 are wanted again; 1 + the one that is leaving
            await ch.driver.add_vcpus(1)
        assert len((await ch.driver.read()).vcpus) == 2
        ch.vmm.eject_vcpus()

        assert len((await ch.driver.read()).vcpus) == 1
        assert len((await ch.driver.add_vcpus(1)).vcpus) == 2

        assert 2 not in asked_vcpus(ch)[1:-1]
        ch.vmm.eject_vcpus()
        assert len((await ch.driver.read()).vcpus) == 2


async def test_a_removal_may_be_repeated(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)

    for _ in range(3):
        await ch.driver.start_removing_vcpus(["vcpu3", "vcpu2"])

    assert asked_vcpus(ch) == [4, 2, 2, 2]
    ch.vmm.eject_vcpus()
    assert names(await ch.driver.read()) == ["vcpu0", "vcpu1"]


async def test_another_removal_during_one_is_refused(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)
    await ch.driver.start_removing_vcpus(["vcpu3"])

    with pytest.raises(Refused):
        await ch.driver.start_removing_vcpus(["vcpu2"])

    ch.vmm.eject_vcpus()
    assert names(await ch.driver.read()) == ["vcpu0", "vcpu1", "vcpu2"]


async def test_the_last_one_leaves_first(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)

    with pytest.raises(Refused, match="vcpu2 cannot leave before vcpu3"):
        await ch.driver.start_removing_vcpus(["vcpu2"])

    assert asked_vcpus(ch) == [4]


async def test_boot_vcpus_are_not_asked(ch: Rig) -> None:
    await ch.driver.add_vcpus(1)

    for ids in (["vcpu2", "vcpu1"], ["vcpu0"]):
        with pytest.raises(Refused, match="Boot CPU is unpluggable"):
            await ch.driver.start_removing_vcpus(ids)

    assert asked_vcpus(ch) == [3]


async def test_who_has_gone_is_no_error(ch: Rig) -> None:
    await ch.driver.start_removing_vcpus(["vcpu7"])

    assert isinstance(await ch.hints.next(SizeChanged), SizeChanged)
    assert asked_vcpus(ch) == []


async def test_no_shrink_below_a_queue_count(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)
    ch.vmm.config["disks"] = [{"id": "foreign", "num_queues": 4}]
    assert (await ch.driver.read()).vcpu_floor == 4
    ch.vmm.config["disks"] = []
    assert (await ch.driver.read()).vcpu_floor == 1
    ch.vmm.config["net"] = [{"id": "foreign", "num_queues": 7}]  # come since it was last read

    with pytest.raises(Refused, match="3 vCPUs would be left, and a device has queues for 4"):
        await ch.driver.start_removing_vcpus(["vcpu3"])

    assert asked_vcpus(ch) == [4]


async def test_somebody_elses_grow_is_seen(ch: Rig) -> None:
    ch.vmm._resize(b'{"desired_vcpus": 4}')

    assert len((await ch.driver.read()).vcpus) == 4


async def test_a_reboot_is_told_and_ends_a_removal(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)
    await ch.driver.start_removing_vcpus(["vcpu3"])
    ch.vmm.reboot()

    assert names(await ch.driver.read()) == ["vcpu0", "vcpu1", "vcpu2"]

    await ch.hints.next(GuestReset)
    await ch.driver.read()
    assert ch.hints.heard == []


# Memory


async def test_acpi_grows_eight_times(ch: Rig) -> None:
    left = []
    for step in range(1, 9):
        plugged = await ch.driver.grow_memory(GIB + step * 128 * MIB)
        assert plugged.memory == GIB + step * 128 * MIB
        left.append(plugged.memory_grows_left)
    assert left == [7, 6, 5, 4, 3, 2, 1, 0]

    with pytest.raises(Refused, match="No ACPI slot available"):
        await ch.driver.grow_memory(GIB + 9 * 128 * MIB)

    assert len(ch.vmm.bodies("vm.resize")) == 8


async def test_grows_that_we_did_not_see_are_found_out(ch: Rig) -> None:
    """The VMM does not tell how often it has grown; a new connection knows only that it has."""
    for step in range(1, 9):
        await ch.driver.grow_memory(GIB + step * 128 * MIB)
    await ch.driver.close()
    await ch.driver.connect(Hints())
    assert (await ch.driver.read()).memory_grows_left == 7

    with pytest.raises(Refused, match="No ACPI slot available"):
        await ch.driver.grow_memory(GIB + 9 * 128 * MIB)

    assert (await ch.driver.read()).memory_grows_left == 0


async def test_a_reboot_frees_the_slots(ch: Rig) -> None:
    await ch.driver.grow_memory(GIB + 128 * MIB)
    ch.vmm.reboot()

    assert (await ch.driver.read()).memory_grows_left == 8


async def test_no_acpi_shrink_is_ever_sent(ch: Rig) -> None:
    await ch.driver.grow_memory(GIB + 256 * MIB)

    with pytest.raises(Unsupported, match="until the VM is started anew"):
        await ch.driver.start_shrinking_memory(GIB)

    assert [body["desired_ram"] for body in ch.vmm.bodies("vm.resize")] == [GIB + 256 * MIB]


@pytest.mark.parametrize("to", [GIB, GIB - 128 * MIB, GIB + MIB, 6 * GIB])
async def test_a_size_that_cannot_be_is_a_mistake(short_tmp: Path, to: int) -> None:
    async with rig(short_tmp) as ch:
        with pytest.raises(ValueError, match=f"{to} bytes of memory cannot be asked for"):
            await ch.driver.grow_memory(to)
        assert ch.vmm.bodies("vm.resize") == []


async def test_a_refused_grow_leaves_what_there_was(short_tmp: Path, release: int) -> None:
    async with rig(short_tmp, config(hotplug=128 * MIB), release=release) as ch:
        await ch.driver.grow_memory(GIB + 128 * MIB)
        with pytest.raises(ValueError, match="at most"):
            await ch.driver.grow_memory(GIB + 256 * MIB)


async def test_virtio_mem_comes_in_the_guests_own_time(short_tmp: Path, release: int) -> None:
    async with rig(short_tmp, config(method="VirtioMem"), release=release) as ch:
        assert ch.machine.memory.method is MemoryMethod.VIRTIO_MEM
        assert (ch.machine.memory.granularity, ch.machine.memory.maximum) == (2 * MIB, 5 * GIB)

        asked = await ch.driver.grow_memory(GIB + 64 * MIB)
        ch.vmm.plug(32 * MIB)
        part = await ch.driver.read()
        ch.vmm.plug(64 * MIB)
        whole = await ch.driver.read()

        if release >= 52:
            assert (asked.memory, asked.memory_asked) == (GIB, GIB + 64 * MIB)
            assert (part.memory, part.memory_asked) == (GIB + 32 * MIB, GIB + 64 * MIB)
        else:  # tells what was asked for
            assert (asked.memory, asked.memory_asked) == (part.memory, part.memory_asked) == (GIB + 64 * MIB, None)
        assert (whole.memory, whole.memory_asked, whole.memory_grows_left) == (GIB + 64 * MIB, None, None)


async def test_virtio_mem_is_not_asked_for_the_same_again(short_tmp: Path, release: int) -> None:
    async with rig(short_tmp, config(method="VirtioMem"), release=release) as ch:
        await ch.driver.grow_memory(GIB + 64 * MIB)
        if release >= 52:
            await ch.driver.grow_memory(GIB + 64 * MIB)  # not there yet: asking again is no mistake
        ch.vmm.plug(64 * MIB)
        for _ in range(2):
            await ch.driver.start_shrinking_memory(GIB)
        ch.vmm.plug(0)

        assert (await ch.driver.read()).memory == GIB
        assert [body["desired_ram"] for body in ch.vmm.bodies("vm.resize")] == [GIB + 64 * MIB, GIB]
        with pytest.raises(ValueError, match="cannot be asked for"):
            await ch.driver.start_shrinking_memory(GIB - 2 * MIB)


async def test_a_shrink_of_virtio_mem_is_stopped_short(short_tmp: Path, release: int) -> None:
    async with rig(short_tmp, config(method="VirtioMem"), release=release) as ch:
        await ch.driver.grow_memory(GIB + 64 * MIB)
        ch.vmm.plug(64 * MIB)
        await ch.driver.start_shrinking_memory(GIB)

        plugged = await ch.driver.grow_memory(GIB + 32 * MIB)

        assert plugged.memory_floor == GIB
        if release >= 52:
            assert (plugged.memory, plugged.memory_asked) == (GIB + 64 * MIB, GIB + 32 * MIB)
        with pytest.raises(ValueError, match="cannot be asked for"):
            await ch.driver.grow_memory(GIB + 16 * MIB)


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ({"size": 0, "zones": [{"id": "z", "size": GIB}]}, "memory zones are not resized"),
        ({"hotplug_size": None}, "booted without room to grow"),
    ],
)
async def test_memory_that_cannot_change_says_why(short_tmp: Path, memory: dict[str, object], reason: str) -> None:
    vm = config()
    vm["memory"] |= memory
    async with rig(short_tmp, vm) as ch:
        assert ch.machine.memory.method is MemoryMethod.NONE
        assert (await ch.driver.read()).memory == GIB
        for act in (ch.driver.grow_memory, ch.driver.start_shrinking_memory):
            with pytest.raises(Unsupported, match=reason):
                await act(2 * GIB)


async def test_what_a_balloon_holds_is_not_there(short_tmp: Path, release: int) -> None:
    async with rig(short_tmp, config(balloon={"size": 256 * MIB}), release=release) as ch:
        ch.vmm.balloon_to(256 * MIB)

        plugged = await ch.driver.read()

        assert (plugged.memory, plugged.memory_asked) == (768 * MIB, GIB)


# Devices


async def test_a_disk_comes_with_its_limiter_and_goes(ch: Rig) -> None:
    device = await ch.driver.add_device(DISK)
    assert (device.id, device.kind, device.limiter) == ("data", DeviceKind.DISK, LIMITER)
    assert device.address == "0000:00:01.0"
    assert (await ch.driver.read()).devices == (device,)

    for _ in range(2):
        await ch.driver.start_removing_device("data")
    assert (await ch.driver.read()).devices == (device,)

    ch.vmm.eject_device("data")
    assert (await ch.driver.read()).devices == ()
    await ch.driver.start_removing_device("data")  # has gone


async def test_a_disk_comes_with_its_queues_affinity(ch: Rig) -> None:
    affinity = (QueueAffinity(0, (0, 1)), QueueAffinity(1, (2,)))

    device = await ch.driver.add_device(DiskConfig(id="d", path="/x", num_queues=2, queue_affinity=affinity))

    assert device.id == "d"
    assert (await ch.driver.read()).vcpu_floor == 2


async def test_a_net_comes_by_its_taps_name(ch: Rig) -> None:
    net = NetConfig(id="n", tap="tap7", mac="DE:AD:BE:EF:12:34", num_queues=4, rate_limiter_config=LIMITER)

    device = await ch.driver.add_device(net)

    assert (device.kind, device.limiter) == (DeviceKind.NET, LIMITER)
    assert (await ch.driver.read()).vcpu_floor == 2


async def test_an_id_comes_back_only_when_it_has_left(ch: Rig) -> None:
    await ch.driver.add_device(DISK)
    with pytest.raises(Refused, match="Identifier data is not unique"):
        await ch.driver.add_device(DISK)
    await ch.driver.start_removing_device("data")
    with pytest.raises(Refused, match="Invalid identifier as it is not unique: data"):
        await ch.driver.add_device(DISK)
    ch.vmm.eject_device("data")

    assert (await ch.driver.add_device(DISK)).id == "data"


async def test_a_dropped_limiter_is_found_out_and_the_disk_taken_out(ch: Rig) -> None:
    ch.vmm.drops_limiters = True

    with pytest.raises(Refused, match=r"accepted it without rate_limiter_config\.bandwidth\.size"):
        await ch.driver.add_device(DISK)

    assert ch.vmm.leaving == {"data"}
    ch.vmm.eject_device("data")
    assert (await ch.driver.read()).devices == ()


async def test_a_disk_that_is_not_taken_out_again_is_told_as_such(ch: Rig) -> None:
    ch.vmm.drops_limiters = True
    ch.vmm.spoilt["vm.remove-device"] = b"HTTP/1.1 500 \r\nContent-Length: 4\r\n\r\nbusy"

    with pytest.raises(Refused, match=r"and does not take it out again: vm\.remove-device: busy \(HTTP 500\)"):
        await ch.driver.add_device(DISK)


async def test_a_member_that_an_old_release_does_not_know_is_found_out(ch: Rig) -> None:
    disk = DiskConfig(id="d", path="/x", lock_granularity="Full")
    if ch.vmm.release >= 52:
        await ch.driver.add_device(disk)
    else:
        with pytest.raises(Refused, match="without lock_granularity"):
            await ch.driver.add_device(disk)


async def test_groups_are_those_of_the_boot(short_tmp: Path, release: int) -> None:
    group = {"id": "gold", "rate_limiter_config": {"ops": {"size": 100, "refill_time": 1000}}}
    async with rig(short_tmp, config(rate_limit_groups=[group]), release=release) as ch:
        device = await ch.driver.add_device(DiskConfig(id="a", path="/x", rate_limit_group="gold"))
        assert (device.group, device.limiter) == ("gold", None)
        with pytest.raises(Refused, match="Invalid rate-limiter group"):
            await ch.driver.add_device(DiskConfig(id="b", path="/x", rate_limit_group="silver"))


async def test_no_more_queues_than_boot_vcpus(ch: Rig) -> None:
    await ch.driver.add_vcpus(2)

    for device in (DiskConfig(id="d", path="/x", num_queues=3), NetConfig(id="n", num_queues=6)):
        with pytest.raises(Refused, match="queues for 3 vCPUs, and the VM was booted with 2"):
            await ch.driver.add_device(device)

    assert not {"vm.add-disk", "vm.add-net"} & {name for name, _ in ch.vmm.calls}


async def test_a_removal_from_before_we_came_is_told(ch: Rig) -> None:
    """It is in the tree alone; what is counted for it tells what it is."""
    for device in (DISK, NetConfig(id="n", tap="t")):
        await ch.driver.add_device(device)
        await ch.driver.start_removing_device(device.id)
    ch.vmm._add("vm.add-fs", b'{"id": "share", "tag": "t", "socket": "/s"}')
    await ch.driver.close()

    await ch.driver.connect(Hints())

    found = {device.id: device.kind for device in (await ch.driver.read()).devices}
    assert found == {"data": DeviceKind.DISK, "n": DeviceKind.NET}
    calls = len(ch.vmm.calls)
    await ch.driver.read()
    assert [name for name, _ in ch.vmm.calls[calls:]] == ["vm.info"]  # is asked once


async def test_a_device_that_cannot_go_is_refused(ch: Rig) -> None:
    ch.vmm.config["disks"] = [{"id": "__boot", "num_queues": 1}]

    with pytest.raises(Refused, match="Not allowed to remove"):
        await ch.driver.start_removing_device("__boot")


async def test_counters_are_passed_through(ch: Rig) -> None:
    await ch.driver.add_device(DISK)

    counters = await ch.driver.counters()

    assert counters["data"]["read_latency_min"] == (1 << 64) - 1
    assert counters["data"]["write_ops"] == 0


# Trouble


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200 \r\nContent-Length: 100\r\n\r\n{", b"nonsense\r\n\r\n"])
@pytest.mark.parametrize("carried_out", [False, True])
async def test_an_answer_that_does_not_come_whole(ch: Rig, answer: bytes | None, carried_out: bool) -> None:
    """Whether it was carried out is read back; it is not sent again by the driver."""
    ch.vmm.spoilt["vm.resize"] = answer
    ch.vmm.spoils_after = carried_out

    with pytest.raises(Unreachable):
        await ch.driver.add_vcpus(1)

    assert len((await ch.driver.read()).vcpus) == 2 + carried_out
    assert asked_vcpus(ch) == [3]


async def test_a_raw_line_feed_is_a_refusal(ch: Rig) -> None:
    body = b'{ "error": "Invalid request.\nAll previous unanswered requests will be dropped." }'
    ch.vmm.spoilt["vm.resize"] = b"HTTP/1.1 400 \r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    with pytest.raises(Refused, match=r"vm\.resize: Invalid request\."):
        await ch.driver.add_vcpus(1)


async def test_a_vmm_that_hangs_is_timed_out_and_read_before_anything_else(short_tmp: Path, release: int) -> None:
    async with rig(short_tmp, release=release, patience=0.2) as ch:
        ch.vmm.hang()
        with pytest.raises(TimedOut, match=r"no answer in 0\.2 s"):
            await ch.driver.add_vcpus(1)
        ch.vmm.resume_answers()

        assert names(await ch.driver.add_vcpus(1))[-1] == "vcpu2"

        sent = [name for name, _ in ch.vmm.calls]
        assert sent[sent.index("vm.resize") - 1] == "vm.info"


async def test_ten_connections_taken(ch: Rig) -> None:
    held = [await asyncio.open_unix_connection(ch.server.path) for _ in range(10)]
    for reader, writer in held:
        writer.write(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n")
        await reader.read(1024)
    with pytest.raises(Busy, match="others hold all its connections"):
        await ch.driver.add_vcpus(1)
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    await asyncio.to_thread(ch.server.http.wait_until_free)

    assert len((await ch.driver.add_vcpus(1)).vcpus) == 3


async def test_closing_ends_a_call_under_way(ch: Rig) -> None:
    ch.vmm.hang()
    call = asyncio.create_task(ch.driver.read())
    await asyncio.to_thread(ch.vmm.wait_for_call, "vm.info")
    async with asyncio.timeout(3):
        await ch.driver.close()

    with pytest.raises(HypervisorError):
        await call
    with pytest.raises(Unreachable, match="closed"):
        await ch.driver.read()


async def test_a_cancelled_call_ends_its_thread(short_tmp: Path) -> None:
    async with rig(short_tmp, patience=60.0) as ch:
        ch.vmm.hang()
        call = asyncio.create_task(ch.driver.read())
        await asyncio.to_thread(ch.vmm.wait_for_call, "vm.info")
        async with asyncio.timeout(3):
            call.cancel()
            await asyncio.wait([call])
        ch.vmm.resume_answers()

        assert len((await ch.driver.read()).vcpus) == 2


async def test_a_vmm_that_dies_is_told_once_and_cannot_be_reached(short_tmp: Path) -> None:
    command = [sys.executable, "-m", "tests.fakes.cloud_hypervisor", str(short_tmp / "ch"), "--config"]
    pool = CallPool()
    driver = CloudHypervisor(str(short_tmp / "ch"), pool, boot_vcpus=2, boot_memory=GIB)
    hints = Hints()
    with subprocess.Popen(  # noqa: ASYNC220 - it is read from once, when it has nothing more to do
        [*command, json.dumps(config())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        (pid,) = json.loads(await asyncio.to_thread(process.stdout.readline))
        machine = await driver.connect(hints)
        assert machine.pid == pid != os.getpid()
        assert len((await driver.add_vcpus(2)).vcpus) == 4
        process.stdin.close()

        assert (await hints.next(ConnectionLost)).reason == "the VMM's process has ended"
        await asyncio.to_thread(process.wait)
    with pytest.raises(Unreachable, match="has ended"):
        await driver.read()
    with pytest.raises(Unreachable):
        await driver.connect(Hints())
    await driver.close()
    await pool.close()
    assert hints.heard == []
