"""What a sandbox tells, and when: each event at the moment it reports, and nothing twice for one fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hypervisors.fake import FakeVm, Guest
from kata_resmgr.problem import Problem
from kata_resmgr.sandbox import Patience
from tests.sandbox.rig import Rig, cpus, rig
from tests.virtual_time import virtual


class Ear:
    """Hears what a sandbox tells, from one question to the next."""

    def __init__(self, made: Rig) -> None:
        self._events = made.events
        self._last = 0

    async def events(self) -> list[tuple[str, dict[str, Any]]]:
        lines = (await self._events.lines(self._last, None)).splitlines()
        heard = [json.loads(line) for line in lines]
        self._last += len(heard)
        return [(event["type"], event["data"]) for event in heard]

    async def types(self) -> list[str]:
        return [kind for kind, _ in await self.events()]


@virtual
async def test_a_life() -> None:
    async with rig(attached=False) as made:
        ear = Ear(made)
        assert await ear.events() == [("sandbox.created", {"vcpus": 1, "memoryBytes": 2 << 30})]
        await made.attach()
        assert (await ear.events())[0] == ("sandbox.running", {"before": "sized"})
        await made.put("a", cpus(2))
        assert await ear.events() == [
            ("vcpus.desired", {"vcpus": 3, "before": 1}),
            ("vcpus.plugged", {"added": 2, "plugged": 3}),
            ("container.created", {"container": "a"}),
        ]
        await made.patch("a", cpus(1), Patience(wait=5))
        (desired, updated, removing, removed) = await ear.events()
        assert desired == ("vcpus.desired", {"vcpus": 2, "before": 3})
        assert updated == ("container.updated", {"container": "a"})
        assert removing == ("vcpus.removing", {"count": 1})
        assert removed == ("vcpus.removed", {"count": 1, "plugged": 2})
        await made.put("a", cpus(1))  # as it is
        assert await ear.types() == []
        await made.sandbox.hold()
        made.sandbox.release()
        assert await ear.types() == [
            "sandbox.held", "condition.raised", "sandbox.running", "condition.cleared",
        ]  # fmt: skip
        await made.delete("a")
        assert await ear.types() == ["vcpus.desired", "container.deleted"]
        await made.sandbox.forget()
        assert (await ear.types())[-1] == "sandbox.deleted"


@virtual
async def test_a_grow_that_is_refused_is_no_container() -> None:
    async with rig(vm=FakeVm(boot_vcpus=1, max_vcpus=8)) as made:
        ear = Ear(made)
        await ear.events()
        made.vm.vcpus_until_refusal = 0
        with pytest.raises(Problem, match="refused"):
            await made.put("a", cpus(2))
        types = await ear.types()
        assert types.count("vcpus.refused") == 1
        assert types[-1] == "vcpus.desired"  # as before
        assert not any(kind.startswith("container.") for kind in types)


@virtual
async def test_a_guest_that_refuses_for_an_hour_is_told_once() -> None:
    async with rig() as made:
        await made.put("a", cpus(1))
        ear = Ear(made)
        await ear.events()
        made.vm.guest = Guest.REFUSE
        await made.delete("a", Patience(wait=1))
        await made.pass_time(3600)
        types = await ear.types()
        assert types.count("vcpus.removing") == 1
        assert types.count("vcpus.refused") == 1
        assert types.count("condition.raised") == 1
        made.vm.guest = Guest.COOPERATE
        await made.pass_time(61)
        assert await ear.types() == ["vcpus.removed", "condition.cleared"]


@virtual
async def test_a_vm_that_cannot_be_reached_for_an_hour_is_told_once() -> None:
    async with rig() as made:
        ear = Ear(made)
        await ear.events()
        made.vm.die()
        await made.pass_time(3600)
        assert [(kind, data.get("type")) for kind, data in await ear.events()] == [
            ("sandbox.unreachable", None),
            ("condition.raised", "Unreachable"),
        ]
        made.vm.back()
        await made.pass_time(6)
        assert await ear.types() == ["sandbox.running", "condition.cleared"]
        assert made.events.reconnects == 1


@virtual
async def test_what_is_said_of_a_sandbox_from_the_start_follows_its_creation() -> None:
    async with rig(annotations={"io.katacontainers.config.hypervisor.default_vcpus": "2"}) as made:
        await asyncio.sleep(0)
        ear = Ear(made)
        assert (await ear.types())[:2] == ["sandbox.created", "condition.raised"]
