"""What Kata's own unit tests say of configuration files, drop-ins and annotations, held against this program.

The entries are Kata's; where SPEC 12 departs from Kata on purpose, its result is asserted instead. What an entry says
of values that this program does not have (paths, block devices, the agent) is not compared.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import config
from kata_resmgr.config import SandboxConfig, Settings
from kata_resmgr.config_layers import laid_over, settings_of
from kata_resmgr.host import Host
from kata_resmgr.problem import Code, Problem
from kata_resmgr.toml_file import read_toml

KATA = json.loads((Path(__file__).parents[1] / "data" / "kata_config.json").read_text())
HOST = Host(cpus=96, memory=65536)
HYPERVISOR = "io.katacontainers.config.hypervisor."

ELSEWHERE = {"go/config/clh_rate_limiter": "a rule of the limits: the configuration keeps the numbers as they are"}
"""Areas without a counterpart here."""

KEYS = {
    "NumVCPUsF": "default_vcpus",
    "DefaultMaxVCPUs": "default_maxvcpus",
    "MemorySize": "default_memory",
    "MemSlots": "memory_slots",
    "VirtioMem": "enable_virtio_mem",
    "SandboxCgroupOnly": "sandbox_cgroup_only",
}
"""What Go calls the fields that this program has too."""


TAKEN: set[str] = set(ELSEWHERE)


def entries(area: str) -> list[Any]:
    found = [
        pytest.param(entry["input"], entry["expected"], entry.get("departure"), id=f"{area}-{number}")
        for number, entry in enumerate(KATA["entries"])
        if entry["area"] == area
    ]
    assert found
    TAKEN.add(area)
    return found


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def load(tmp_path: Path, hypervisor: dict[str, Any], runtime: dict[str, Any] | None = None) -> Settings:
    lines = ["[runtime]", *(f"{key} = {toml(value)}" for key, value in (runtime or {}).items())]
    lines += ["[hypervisor.qemu]", *(f"{key} = {toml(value)}" for key, value in hypervisor.items())]
    file = tmp_path / "configuration.toml"
    file.write_text("\n".join(lines))
    return config.load(file, HOST)


def resolved(value: object) -> object:
    """The vectors' names for what depends on the host."""
    names = {
        "HOST_CPUS": HOST.cpus,
        "CURRENT_CPUS": HOST.cpus,
        "CURRENT_CPUS+1": HOST.cpus + 1,
        "govmm.MaxVCPUs()+1": 241,
    }
    return names.get(value, value) if isinstance(value, str) else value


def assert_has(found: SandboxConfig, expected: dict[str, Any]) -> None:
    """Every member that this program has too is as *expected*; there is at least one."""
    compared = 0
    for name, value in expected.items():
        field = KEYS.get(name, name)
        if field in SandboxConfig.__slots__:
            wanted = resolved(value)
            compared += 1
            assert getattr(found, field) == (Fraction(str(wanted)) if isinstance(wanted, float) else wanted), name
    assert compared


@pytest.mark.parametrize(
    ("given", "expected", "departure"),
    [
        *entries("rs/config/cpu_info_adjust"),
        *entries("rs/config/memory_info_adjust"),
        *entries("go/config/defaults"),
        *entries("go/config/getters"),
    ],
)
def test_adjusted_values(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any], departure: str | None
) -> None:
    assert departure is None
    said = {key: resolved(value) for key, value in given.items()}
    assert_has(load(tmp_path, said).for_sandbox(), expected)


@pytest.mark.parametrize(("given", "expected", "departure"), entries("rs/config/runtime"))
def test_a_runtime_table(tmp_path: Path, given: str, expected: dict[str, Any], departure: str | None) -> None:
    assert departure is None
    assert expected["unknown_key_ignored"]
    file = tmp_path / "configuration.toml"
    file.write_text(given)
    assert_has(config.load(file, HOST).for_sandbox(), expected)


@pytest.mark.parametrize(("given", "expected", "departure"), entries("rs/config/drop_in_merge"))
def test_merging(tmp_path: Path, given: dict[str, str], expected: dict[str, Any], departure: str | None) -> None:
    assert departure is None
    layers = []
    for name, text in given.items():
        (tmp_path / name).write_text(text)
        layers.append(settings_of(read_toml(tmp_path / name)))
    assert without_places(laid_over(*layers)) == expected


def without_places(settings: Any) -> Any:  # noqa: ANN401 - what TOML can hold
    if isinstance(settings, dict):
        return {key: without_places(setting.value) for key, setting in settings.items()}
    return settings


def write(tmp_path: Path, files: dict[str, str | None]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if text is None else path.write_text(text)
    return tmp_path / "runtime.toml"


def assert_says(settings: Settings, expected: dict[str, Any]) -> None:
    """*expected* names values as ``table.key``."""
    for name, value in expected.items():
        table, key = name.rsplit(".", 1)
        found = settings.layers.tables[table].settings[key].value
        assert (float(found) if isinstance(value, float) else found) == value


@pytest.mark.parametrize(("given", "expected", "departure"), entries("rs/config/drop_in_dir"))
def test_no_drop_ins(
    tmp_path: Path, given: dict[str, str | None], expected: dict[str, Any], departure: str | None
) -> None:
    assert departure is None
    assert_says(config.load(write(tmp_path, given), HOST), expected)


@pytest.mark.parametrize(("given", "expected", "departure"), entries("go/config/drop_in"))
def test_drop_ins(tmp_path: Path, given: dict[str, str | None], expected: dict[str, Any], departure: str) -> None:
    """Departure 25: a drop-in is what is called ``*.toml``; with such names they come to what Kata makes of them."""
    assert departure.startswith("25")
    only_base = config.load(write(tmp_path, given), HOST)
    assert "default_vcpus" not in only_base.layers.tables["hypervisor.qemu"].settings
    assert only_base.for_sandbox().sandbox_cgroup_only is False
    named = {name if name.endswith(".toml") else f"{name}.toml": text for name, text in given.items()}
    loaded = config.load(write(tmp_path, named), HOST)
    assert_says(loaded, expected)
    assert loaded.for_sandbox().default_vcpus == 2
    assert loaded.for_sandbox().sandbox_cgroup_only is True


@pytest.mark.parametrize(("given", "expected", "departure"), entries("rs/annotations/convert_to_megabytes"))
def test_sizes(tmp_path: Path, given: str, expected: dict[str, Any], departure: str | None) -> None:
    settings = load(tmp_path, {"enable_annotations": ["default_memory"]})
    annotations = {HYPERVISOR + "default_memory": given}
    if departure is None:
        assert settings.for_sandbox(None, annotations).default_memory == expected["ok"]
    else:
        assert departure.startswith("28")  # malformed: refused, where Kata goes on without it
        assert expected == {"ok": None}
        assert_refused(settings, annotations)


def assert_refused(settings: Settings, annotations: dict[str, str]) -> None:
    with pytest.raises(Problem) as refused:
        settings.for_sandbox(None, annotations)
    assert refused.value.code is Code.INVALID_ANNOTATION
    assert any(key in refused.value.detail for key in annotations)


@pytest.mark.parametrize(("given", "expected", "departure"), entries("rs/annotations/update_config"))
def test_annotations_of_runtime_rs(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any], departure: str | None
) -> None:
    base = dict(KATA["bases"][given["base"]])
    settings = load(tmp_path, base, base.pop("runtime", None))
    annotations = given["annotations"]
    if departure is not None and departure.startswith("14"):
        found = settings.for_sandbox(None, annotations)
        assert_has(found, expected)
        ignored = {"disable_guest_seccomp", "enable_pprof", "experimental"}  # runtime annotations are gated too
        assert {note.reason for note in found.notes} == ignored
    elif departure is not None:
        assert departure.startswith("27")  # values that do not bear on this program are not checked
        assert expected == {"error": True}
        unchanged = settings.for_sandbox()
        assert settings.for_sandbox(None, annotations) == unchanged
    elif expected == {"error": True}:
        assert_refused(settings, annotations)
    else:
        found = settings.for_sandbox(None, annotations)
        unchanged = settings.for_sandbox()
        assert expected["ok"]
        assert found.default_vcpus == unchanged.default_vcpus == 2
        gate = unchanged.enable_annotations
        names = [key.removeprefix(HYPERVISOR) for key in annotations]
        assert [note.reason for note in found.notes] == [name for name in names if name not in gate]


@pytest.mark.parametrize(("given", "expected", "departure"), entries("go/oci/hypervisor_annotations"))
def test_hypervisor_annotations_of_go(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any], departure: str | None
) -> None:
    settings = load(tmp_path, {"enable_annotations": given["enable_annotations"]})
    if departure is not None:
        assert departure.startswith("runtime-rs followed")  # not enabled: ignored, where Go refuses
        notes = settings.for_sandbox(None, given["annotations"]).notes
        assert [(note.type, note.reason) for note in notes] == [("AnnotationIgnored", "kernel_params")]
    elif expected == {"error": True}:
        assert_refused(settings, given["annotations"])
    else:
        found = settings.for_sandbox(None, given["annotations"])
        assert_has(found, expected)
        assert found.notes == ()


@pytest.mark.parametrize(("given", "expected", "departure"), entries("go/oci/runtime_annotations"))
def test_runtime_annotations_of_go(
    tmp_path: Path, given: dict[str, str], expected: dict[str, Any], departure: str
) -> None:
    """Departure 14: they are gated as well; let in, they have Kata's effect."""
    assert departure.startswith("14")
    found = load(tmp_path, {}).for_sandbox(None, given)
    assert found.sandbox_cgroup_only is False
    assert len(found.notes) == len(given)
    found = load(tmp_path, {"enable_annotations": [".*"]}).for_sandbox(None, given)
    assert_has(found, expected)
    assert found.notes == ()


def test_no_entry_is_left_out() -> None:
    assert {entry["area"] for entry in KATA["entries"]} == TAKEN
