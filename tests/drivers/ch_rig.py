"""What the tests of the Cloud Hypervisor driver share: a VM on the fake wire, and a driver of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from hypervisors.base import Machine
from hypervisors.ch_pool import CallPool
from hypervisors.cloud_hypervisor import CloudHypervisor
from tests.drivers.backends import Hints
from tests.fakes.ch_config import Json
from tests.fakes.ch_vmm import Vmm
from tests.fakes.cloud_hypervisor import CloudHypervisorServer

MIB: Final = 1 << 20
GIB: Final = 1 << 30
RELEASES: Final = (46, 47, 52, 53, 54)
OPENAPI: Final = json.loads((Path(__file__).parents[1] / "data" / "cloud_hypervisor_openapi.json").read_text())


def config(
    *,
    vcpus: int = 2,
    max_vcpus: int = 8,
    memory: int = GIB,
    hotplug: int = 4 * GIB,
    method: str = "Acpi",
    **more: object,
) -> Json:
    """A VmConfig, as a shim gives it to its VMM."""
    return {
        "cpus": {"boot_vcpus": vcpus, "max_vcpus": max_vcpus},
        "memory": {"size": memory, "hotplug_method": method, "hotplug_size": hotplug or None},
        **more,
    }


class Rig:
    """One VM, and the driver that is connected to it."""

    def __init__(self, server: CloudHypervisorServer, driver: CloudHypervisor, hints: Hints, machine: Machine) -> None:
        self.server = server
        self.driver = driver
        self.hints = hints
        self.machine = machine

    @property
    def vmm(self) -> Vmm:
        return self.server.vmm


@asynccontextmanager
async def rig(
    directory: Path, vm: Json | None = None, *, release: int = 54, patience: float = 5.0
) -> AsyncIterator[Rig]:
    """A rig on a VM with this configuration (:func:`config` by default)."""
    vm = config() if vm is None else vm
    pool = CallPool()
    with CloudHypervisorServer(directory / "ch", vm, release=release) as server:
        driver = new_driver(server, pool, patience)
        hints = Hints()
        try:
            machine = await driver.connect(hints)
            yield Rig(server, driver, hints, machine)
        finally:
            server.vmm.resume_answers()
            await driver.close()
            await pool.close()


def new_driver(server: CloudHypervisorServer, pool: CallPool, timeout: float = 5.0) -> CloudHypervisor:
    vm = server.vmm.config
    memory = vm["memory"]["size"] if vm else GIB
    vcpus = vm["cpus"]["boot_vcpus"] if vm else 1
    return CloudHypervisor(str(server.path), pool, boot_vcpus=vcpus, boot_memory=memory, timeout=timeout)


def must_be_valid(call: str, body: Any) -> None:  # noqa: ANN401 - what JSON can hold
    """That *body* is what Cloud Hypervisor's own OpenAPI file says of *call*, and has no member that it lacks."""
    name = OPENAPI["calls"][call]["body"]
    _validator(name).validate(body)
    _must_be_named(body, OPENAPI["components"]["schemas"][name], call)


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": OPENAPI["components"]})


def _must_be_named(value: Any, schema: Json, where: str) -> None:  # noqa: ANN401
    while "$ref" in schema:
        schema = OPENAPI["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if isinstance(value, dict):
        for name, member in value.items():
            assert name in schema["properties"], f"{where}.{name}"
            _must_be_named(member, schema["properties"][name], f"{where}.{name}")
    elif isinstance(value, list):
        for member in value:
            _must_be_named(member, schema["items"], where)
