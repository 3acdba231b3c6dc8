"""What a sandbox tells about itself: the values that answers, the command line and tests read.

Member names are API.md's (camelCase on the wire); sizes are bytes; ``exact`` is the demand in lowest terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from hypervisors.ch_types import RateLimiterConfig, RateLimitGroupConfig
from kata_resmgr import oci
from kata_resmgr.limits import Effective, Limits
from kata_resmgr.sizing import BootSize


class View(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A value of an answer."""


class Boot(View, frozen=True):
    """What the VM is started with."""

    vcpus: int
    max_vcpus: int
    memory_bytes: int
    max_memory_bytes: int
    memory_slots: int
    memory_granularity_bytes: int

    @classmethod
    def of(cls, boot: BootSize) -> Boot:
        return cls(
            vcpus=boot.vcpus,
            max_vcpus=boot.max_vcpus,
            memory_bytes=boot.memory,
            max_memory_bytes=boot.max_memory,
            memory_slots=boot.memory_slots,
            memory_granularity_bytes=boot.granularity,
        )


class Vmm(View, frozen=True):
    """What the shim gives to the VMM so that the daemon can drive it."""

    args: list[str]
    kernel_params: list[str]
    monitor: str


class ClhCpus(msgspec.Struct, frozen=True, gc=False):
    """Cloud Hypervisor's CpusConfig. Names in these objects are the VMM's own."""

    boot_vcpus: int
    max_vcpus: int


class ClhMemory(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Cloud Hypervisor's MemoryConfig, in bytes; without a region for what comes later, nothing is said of one."""

    size: int
    hotplug_method: str
    hotplug_size: int = 0


class ClhConfig(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What belongs into Cloud Hypervisor's VmConfig; without groups, nothing is said of them."""

    cpus: ClhCpus
    memory: ClhMemory
    rate_limit_groups: tuple[RateLimitGroupConfig, ...] = ()


class ClhVmm(View, frozen=True):
    """As :class:`Vmm`, for Cloud Hypervisor. *limiters* are for each of the shim's own ``disk`` and ``net`` devices."""

    config: ClhConfig
    limiters: Mapping[str, RateLimiterConfig]


if TYPE_CHECKING:
    AnyVmm: TypeAlias = Vmm | ClhVmm
else:  # nobody decodes it, and msgspec describes no union of objects without a tag
    AnyVmm = Annotated[
        Any,
        msgspec.Meta(
            extra_json_schema={"anyOf": [{"$ref": "#/components/schemas/Vmm"}, {"$ref": "#/components/schemas/ClhVmm"}]}
        ),
    ]


class Vcpus(View, frozen=True):
    """``online`` is null: there is no channel yet by which a guest would tell."""

    exact: str
    desired: int
    plugged: int
    pending: int
    online: int | None = None


class Memory(View, frozen=True):
    """Bytes."""

    desired: int
    plugged: int
    pending: int


class Surplus(View, frozen=True):
    """What is plugged above what is desired, and why it is still there (SPEC 7)."""

    vcpus: int
    memory_bytes: int
    reason: str | None


class Condition(View, frozen=True):
    """Something that an operator should know, from SPEC 13's closed list."""

    type: str
    reason: str
    message: str
    since: str


class Counts(View, frozen=True):
    """How many of each the sandbox has."""

    containers: int
    disks: int = 0
    nets: int = 0


class Sandbox(View, frozen=True):
    """One sandbox. Before a VM is attached, *plugged* is 0."""

    id: str
    hypervisor: str
    mode: str
    phase: str
    generation: int
    boot: Boot
    vmm: AnyVmm
    vcpus: Vcpus
    memory: Memory
    satisfied: bool
    converged: bool
    surplus: Surplus
    shares: int
    cpu_weight: int | None
    conditions: list[Condition]
    counts: Counts


class Container(View, frozen=True):
    """One container's resources, exactly as they were given (members this program does not know included)."""

    id: str
    resources: oci.Given


class ContainerResult(View, frozen=True):
    """The answer to a change of one container."""

    container: Container
    sandbox: Sandbox


class Device(View, frozen=True):
    """One disk or net. ``config`` is what the VMM was given, without id, limiter and group.

    ``limits`` are those in force, null with a group; ``effective`` names the rates that differ from the asked ones;
    ``address`` is null while it is not there, and ``counters`` where the VMM cannot be asked.
    """

    id: str
    config: dict[str, Any]
    limits: Limits | None
    effective: Effective | None
    group: str | None
    address: str | None
    counters: dict[str, int] | None = None


class Input(View, frozen=True):
    """One input of a decision and where it came from."""

    name: str
    value: str
    source: str


class Explanation(View, frozen=True):
    """Every step from the inputs to the present target."""

    id: str
    inputs: list[Input]
    explain: list[str]
    vcpus: Vcpus
    memory: Memory


class Sandboxes(View, frozen=True):
    """All sandboxes, in id order."""

    sandboxes: list[Sandbox]


class Version(View, frozen=True):
    """This program's version, and the range of API versions that it serves."""

    version: str
    api_version: int
    min_api_version: int


class Health(View, frozen=True):
    """Whether the daemon can serve, and why not."""

    ok: bool
    reasons: list[str]
