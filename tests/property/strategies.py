"""What containers ask for and what callers send, at random but always within what the API takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
from hypothesis import strategies as st

from kata_resmgr.config import Base, CpusetSizing, OverMax, SandboxConfig
from kata_resmgr.sizing import MIB, Declared
from tests.examples import resources, sandbox_config

NAMES = st.sampled_from(["a", "b", "c", "d"])
CPUSETS = st.sampled_from(["", "0", "0-3", "2-5", "1,7", " 4\n", "0-8"])


@st.composite
def containers(draw: st.DrawFn, /) -> bytes:
    """The resources of one container such as runtimes send them: some of every kind of member."""
    return resources(
        quota=draw(st.none() | st.integers(-1, 0) | st.integers(1, 900_000)),
        period=draw(st.none() | st.sampled_from([0, 3, 7, 50_000, 100_000, 1_000_000])),
        shares=draw(st.none() | st.integers(0, 3) | st.sampled_from([1023, 1024, 4096, 262_144])),
        cpus=draw(st.none() | CPUSETS),
        limit=draw(st.none() | st.integers(-1, 1) | st.integers(0, 4096).map(lambda size: size * MIB)),
        hugepages=draw(st.none() | st.dictionaries(st.sampled_from(["2MB", "1GB"]), st.integers(0, 512 * MIB))),
    )


@st.composite
def configs(draw: st.DrawFn, /, **fixed: Any) -> SandboxConfig:  # noqa: ANN401 - each field has its own type
    """The configuration of one sandbox, with every switch that bears on its size."""
    maximum = draw(st.integers(1, 16))
    drawn: dict[str, Any] = {
        "default_vcpus": draw(st.fractions(Fraction(1, 10), maximum, max_denominator=20)),
        "default_maxvcpus": maximum,
        "default_memory": draw(st.sampled_from([64, 100, 2048])),
        "default_maxmemory": 1 << 30,
        "base": draw(st.sampled_from(Base)),
        "cpuset_sizing": draw(st.sampled_from(CpusetSizing)),
        "over_max_vcpus": OverMax.CLAMP,
        "enable_virtio_mem": draw(st.booleans()),
        "overhead_vcpus": draw(st.sampled_from([Fraction(0), Fraction(1, 4)])),
        "overhead_memory": draw(st.sampled_from([0, 64])),
    }
    return sandbox_config(**(drawn | fixed))


DECLARED = st.builds(
    Declared,
    vcpus=st.none() | st.fractions(Fraction(1, 100), 20, max_denominator=100),
    memory=st.none() | st.integers(1, 4096).map(lambda size: 2 * size * MIB),
)

_INT64 = st.none() | st.integers(-1, 1) | st.integers(-(2**63), 2**63 - 1)
_UINT64 = st.none() | st.integers(0, 1) | st.integers(0, 2**64 - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["p", "q"]), inner, max_size=2),
    max_leaves=4,
)


def _object(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with some of these members, and some that this program does not know."""
    return st.fixed_dictionaries({}, optional=members | {"x": _JSON, "y": _JSON})


RESOURCES: st.SearchStrategy[bytes] = _object(
    cpu=st.none()
    | _object(quota=_INT64, period=_UINT64, shares=_UINT64, cpus=st.none() | CPUSETS, mems=st.none() | CPUSETS),
    memory=st.none() | _object(limit=_INT64, swap=_INT64, disableOOMKiller=st.none() | st.booleans()),
    hugepageLimits=st.none()
    | st.lists(
        st.fixed_dictionaries({"pageSize": st.sampled_from(["2MB", "1GB"])}, optional={"limit": _UINT64}), max_size=3
    ),
    pids=st.none() | _object(limit=_INT64),
    unified=st.none() | st.dictionaries(_TEXT, _TEXT, max_size=2),
).map(msgspec.json.encode)
"""Any ``linux.resources`` text that is taken."""
