"""A plan tells what a live sandbox then does: the same sizes, conditions and refusals, operation by operation."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypervisors.fake import FakeVm
from kata_resmgr import view
from kata_resmgr.plan import Op, Planned, Refusal, Request, Step, dry_run
from kata_resmgr.problem import Problem
from tests.property.strategies import containers
from tests.sandbox.rig import Rig, load, make_plan, rig
from tests.virtual_time import VirtualLoop

NAMES = st.sampled_from(["a", "b"])
TEXTS = st.integers(0, 9).flatmap(
    lambda number: containers() if number else st.sampled_from([b"null", b'{"cpu": 1}', b"{"])
)
STEPS = st.sampled_from([Op.CREATE, Op.CREATE, Op.UPDATE, Op.UPDATE, Op.DELETE, Op.RESIZE]).flatmap(
    lambda op: st.builds(
        Step, st.just(op), st.just("") if op is Op.RESIZE else NAMES, st.just(b"") if op is Op.DELETE else TEXTS
    )
)


@st.composite
def configurations(draw: st.DrawFn, /) -> str:
    """A configuration's text, with every key that bears on what an operation does."""
    keys: dict[str, dict[str, Any]] = {
        "hypervisor.qemu": {
            "default_vcpus": draw(st.sampled_from([0.1, 0.5, 1.0, 2.5])),
            "default_maxvcpus": draw(st.integers(1, 12)),
            "default_memory": draw(st.sampled_from([64, 512])),
            "default_maxmemory": draw(st.sampled_from([1024, 8192])),
            "overhead_memory": 64,
            "enable_virtio_mem": draw(st.booleans()),
        },
        "resmgr": {
            "static_sandbox_resource_mgmt": draw(st.sampled_from([False, False, False, True])),
            "base": draw(st.sampled_from(["add", "max"])),
            "cpuset_sizing": draw(st.sampled_from(["exclusive", "always"])),
            "over_max_vcpus": draw(st.sampled_from(["clamp", "refuse"])),
            "shares_sizing": draw(st.booleans()),
        }
        | draw(st.sampled_from([{}, {"compat": "kata"}])),
    }
    return "".join(
        f"[{table}]\n" + "".join(f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in values.items())
        for table, values in keys.items()
    )


@given(configurations(), st.none() | containers(), st.lists(STEPS, max_size=8))
def test_a_plan_is_what_then_happens(text: str, resources: bytes | None, steps: list[Step]) -> None:
    request = Request("qemu", resources=resources, steps=tuple(steps))
    try:
        make_plan(text, resources)
    except Problem as problem:
        with pytest.raises(Problem, match=f"^{re.escape(problem.detail)}$"):
            dry_run(load(text), request)
        return
    planned = dry_run(load(text), request)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(_lives_up_to(planned, text, request))


async def _lives_up_to(planned: Planned, text: str, request: Request) -> None:
    boot = planned.boot
    vm = FakeVm(boot_vcpus=boot.vcpus, max_vcpus=boot.max_vcpus, memory=boot.memory_bytes)
    async with rig(text, vm, resources=request.resources) as live:
        assert live.state.boot == boot
        assert live.state.mode == planned.mode
        own = [(told.type, told.reason, told.message) for told in planned.conditions]
        assert _conditions(live.state) == own
        for step, told in zip(request.steps, planned.steps, strict=True):
            error = await _take(live, step)
            state = live.state
            assert error == told.error
            assert (state.vcpus.exact, state.vcpus.desired) == (told.vcpus.exact, told.vcpus.desired)
            assert live.plugged >= told.vcpus.desired
            assert state.memory.desired == told.memory.desired
            in_force = [(told.type, told.reason, told.message) for told in told.conditions]
            assert _conditions(state) == own + in_force
        assert (live.state.shares, live.state.cpu_weight) == (planned.weight.shares, planned.weight.cpu_weight)
        explained = live.sandbox.explain().explain
        assert planned.explain[-len(explained) :] == explained


async def _take(live: Rig, step: Step) -> Refusal | None:
    try:
        match step.op:
            case Op.CREATE:
                await live.put(step.container, step.resources)
            case Op.UPDATE:
                await live.patch(step.container, step.resources)
            case Op.RESIZE:
                await live.resize(step.resources)
            case Op.DELETE:
                await live.delete(step.container)
    except Problem as problem:
        return Refusal(problem.code.text, problem.detail)
    return None


def _conditions(state: view.Sandbox) -> list[tuple[str, str, str]]:
    """Those that come of sizing alone: what a VM does, and that this driver adds no memory, is not planned."""
    return [
        (told.type, told.reason, told.message)
        for told in state.conditions
        if told.type not in ("Surplus", "HotplugUnsupported")
    ]
