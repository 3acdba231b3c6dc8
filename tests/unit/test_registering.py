"""How a sandbox is registered: what its annotations and resources come to, through the manager without any VM."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypervisors.base import Hypervisor
from kata_resmgr import config, view
from kata_resmgr.annotations import CONTAINERD, CRIO, TYPE_KEYS
from kata_resmgr.host import Host
from kata_resmgr.manager import ResourceManager, SandboxSpec
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience, Plan
from kata_resmgr.sizing import MIB
from kata_resmgr.store import MemoryStore
from tests.examples import resources

KATA = "io.katacontainers.config.hypervisor."
POD = {TYPE_KEYS[1]: "sandbox", CONTAINERD["quota"]: "220000", CONTAINERD["limit"]: str(4095 * MIB)}


def _no_driver(_: Plan, socket: str) -> Hypervisor:
    raise AssertionError(f"nothing is attached in these tests: {socket}")


def _manager(directory: Path, toml: str = "") -> ResourceManager:
    file = directory / "config.toml"
    file.write_text(f'[daemon]\nsocket = "{directory}/api.sock"\n{toml}')
    return ResourceManager(config.load(file, Host(cpus=8, memory=16384)), MemoryStore(), _no_driver)


async def test_a_pods_annotations_size_it(short_tmp: Path) -> None:
    manager = _manager(short_tmp)
    spec = SandboxSpec(annotations=POD, resources=resources(quota=700_000))
    sandbox = (await manager.put_sandbox("s1", spec)).sandbox
    assert (sandbox.boot.vcpus, sandbox.boot.memory_bytes // MIB) == (3, 4096)
    assert isinstance(sandbox.vmm, view.Vmm)
    assert sandbox.vmm.args[:4] == ["-smp", "3,maxcpus=8", "-m", "4096M,slots=10,maxmem=16384M"]
    assert not (await manager.put_sandbox("s1", spec)).created


GROWS = ["-smp", "3,maxcpus=8", "-m", "4096M,slots=10,maxmem=16384M"]
FIXED = ["-smp", "3", "-m", "4096M"]


@pytest.mark.parametrize(
    ("hypervisor", "arguments"),
    [
        ('machine_type = "q35"', GROWS),
        ('machine_type = "pc"', GROWS),
        ('machine_type = "pc-q35-7.2"', GROWS),
        ('machine_type = "microvm"', FIXED),
        ("confidential_guest = true", FIXED),
    ],
)
async def test_a_machine_that_cannot_hot_plug_is_started_without_room(
    short_tmp: Path, hypervisor: str, arguments: list[str]
) -> None:
    manager = _manager(short_tmp, f"[hypervisor.qemu]\n{hypervisor}\n")
    sandbox = (await manager.put_sandbox("s1", SandboxSpec(annotations=POD))).sandbox
    assert isinstance(sandbox.vmm, view.Vmm)
    assert sandbox.vmm.args[:4] == arguments
    told = [(condition.type, condition.reason) for condition in sandbox.conditions]
    assert told == ([("HotplugUnsupported", "vcpus")] if arguments is FIXED else [])


async def test_the_last_put_before_a_vm_fixes_the_size(short_tmp: Path) -> None:
    manager = _manager(short_tmp)
    await manager.put_sandbox("s1", SandboxSpec(annotations=POD))
    await manager.resize("s1", resources(quota=500_000), Patience())
    again = (await manager.put_sandbox("s1", SandboxSpec(annotations=POD))).sandbox
    assert (again.boot.vcpus, again.vcpus.desired) == (3, 5)  # the same again changes nothing
    other = SandboxSpec(annotations={CRIO[0]: '{"cpu_quota": 100000}'})
    assert (await manager.put_sandbox("s1", other)).sandbox.vcpus.desired == 1
    with pytest.raises(Problem) as refusal:
        await manager.put_sandbox("s1", SandboxSpec(annotations={CONTAINERD["quota"]: "x"}))
    assert refusal.value.code is Code.INVALID_ANNOTATION
    assert manager.sandbox("s1").boot.vcpus == 1


async def test_annotations_that_change_the_configuration_are_told(short_tmp: Path) -> None:
    manager = _manager(short_tmp, '[hypervisor.qemu]\nenable_annotations = ["default_vcpus"]\n')
    annotations = {KATA + "default_vcpus": "2.5", KATA + "default_memory": "4096"}
    sandbox = (await manager.put_sandbox("s1", SandboxSpec(annotations=annotations))).sandbox
    assert (sandbox.boot.vcpus, sandbox.boot.memory_bytes // MIB) == (3, 2048)
    assert [(told.type, told.reason) for told in sandbox.conditions] == [("AnnotationIgnored", "default_memory")]
    told = {given.name: given.source for given in manager.explain("s1").inputs}
    assert told["default_vcpus"] == KATA + "default_vcpus"
    assert told["default_memory"] == "default"


async def test_what_is_cut_at_boot_is_told_for_good(short_tmp: Path) -> None:
    manager = _manager(short_tmp)
    pod = SandboxSpec(annotations={CONTAINERD["quota"]: "850000"})
    sandbox = (await manager.put_sandbox("s1", pod)).sandbox
    assert [(told.type, told.reason) for told in sandbox.conditions] == [("Clamped", "boot")]
    _, outcome = await manager.put_container("s1", "c1", resources(quota=800_000), Patience())
    assert [told.reason for told in outcome.sandbox.conditions] == ["boot", "demand"]
    assert await manager.delete_container("s1", "c1", Patience())
    assert [told.reason for told in manager.sandbox("s1").conditions] == ["boot"]


async def test_a_pod_above_a_maximum_is_refused_where_it_is_not_cut(short_tmp: Path) -> None:
    manager = _manager(short_tmp, '[resmgr]\nover_max_vcpus = "refuse"\n')
    for pod, code in (
        ({CONTAINERD["quota"]: "850000"}, Code.VCPU_LIMIT_EXCEEDED),
        ({CONTAINERD["limit"]: str(16385 * MIB)}, Code.MEMORY_LIMIT_EXCEEDED),
    ):
        with pytest.raises(Problem) as refusal:
            await manager.put_sandbox("s1", SandboxSpec(annotations=pod))
        assert refusal.value.code is code
    assert manager.sandboxes() == []


async def test_a_sandbox_that_is_not_there_cannot_be_resized(short_tmp: Path) -> None:
    with pytest.raises(Problem) as refusal:
        await _manager(short_tmp).resize("s1", b"{}", Patience())
    assert refusal.value.code is Code.NOT_FOUND


async def test_cloud_hypervisor_gets_a_configuration_and_no_directory(short_tmp: Path) -> None:
    manager = _manager(short_tmp)
    spec = SandboxSpec(hypervisor="clh", annotations=POD)

    sandbox = (await manager.put_sandbox("s1", spec)).sandbox

    assert isinstance(sandbox.vmm, view.ClhVmm)
    assert (sandbox.vmm.config.cpus.boot_vcpus, sandbox.vmm.config.memory.size) == (3, 4096 * MIB)
    assert not (await manager.put_sandbox("s1", spec)).created
    assert not manager.settings.daemon.vm_directory("s1").exists()
    with pytest.raises(Problem, match="name the API socket") as refusal:
        await manager.put_sandbox("s1", SandboxSpec(hypervisor="clh", annotations=POD, directory=str(short_tmp)))
    assert refusal.value.code is Code.INVALID_PATH


async def test_cloud_hypervisors_socket_is_the_callers_to_name(short_tmp: Path) -> None:
    manager = _manager(short_tmp)
    await manager.put_sandbox("s1", SandboxSpec(hypervisor="clh"))
    with pytest.raises(Problem, match="--api-socket") as refusal:
        await manager.attach("s1", None, None, None)
    assert refusal.value.code is Code.INVALID_BODY


@pytest.mark.parametrize("name", ["\0", "a" * 300])
async def test_a_directory_that_cannot_be_is_refused_each_time(short_tmp: Path, name: str) -> None:
    manager = _manager(short_tmp)
    await manager.put_sandbox("s1", SandboxSpec())
    for sandbox in ("s1", "s2"):
        with pytest.raises(Problem) as refusal:
            await manager.put_sandbox(sandbox, SandboxSpec(directory=f"{short_tmp}/{name}"))
        assert refusal.value.code is Code.INVALID_PATH
