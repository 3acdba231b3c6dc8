"""What ``check-config`` rests on: every value with its origin, and what is worth a warning."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kata_resmgr import config
from kata_resmgr.config import Settings
from kata_resmgr.config_check import Effective, effective_values, likely_mistakes
from kata_resmgr.config_keys import OUR_KEYS, READ_KEYS
from kata_resmgr.host import Host

KATA = Path(__file__).parents[1] / "data" / "kata"
HOST = Host(cpus=8, memory=16384)


def load(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return config.load(file, HOST)


def values(settings: Settings) -> dict[tuple[str, str], Effective]:
    return {(value.table, value.key): value for value in effective_values(settings)}


def test_every_key_that_is_read_is_told(tmp_path: Path) -> None:
    told = values(load(tmp_path, ""))
    for table, keys in (
        ("runtime", READ_KEYS["runtime"]),
        ("hypervisor.qemu", READ_KEYS["hypervisor"]),
        ("daemon", OUR_KEYS["daemon"]),
    ):
        assert [key for found, key in told if found == table] == list(keys)
    ours = {key for table, key in told if table == "resmgr"}
    assert ours == set(OUR_KEYS["resmgr"]) - {"static_sandbox_resource_mgmt"}  # told as [runtime]'s, which it overrules
    assert {value.origin for value in told.values()} == {"default", "host"}


@pytest.mark.parametrize(
    ("text", "hypervisors"),
    [
        ("", ["qemu"]),
        ("[hypervisor.clh]", ["clh"]),
        ("[hypervisor.qemu]\n[hypervisor.clh]", ["qemu", "clh"]),
        ("[runtime]\nhypervisor_name = 'clh'\n[hypervisor.qemu]\n[hypervisor.clh]", ["clh", "qemu"]),
        ("[hypervisor.qemu]\n[hypervisor.firecracker]", ["qemu"]),
    ],
)
def test_the_hypervisors_that_are_told(tmp_path: Path, text: str, hypervisors: list[str]) -> None:
    tables = dict.fromkeys(table for table, _ in values(load(tmp_path, text)))
    assert [table for table in tables if table.startswith("hypervisor.")] == [f"hypervisor.{x}" for x in hypervisors]
    assert ("hypervisor.clh", "machine_type") not in values(load(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "table", "key", "value", "origin", "line"),
    [
        ("[hypervisor.qemu]\ndefault_vcpus = 0.1", "hypervisor.qemu", "default_vcpus", Fraction(1, 10),
         "config.toml:2", 2),
        ("[hypervisor.qemu]\ndefault_vcpus = 9", "hypervisor.qemu", "default_vcpus", 8,
         "cut to the host (config.toml:2)", 2),
        ("[hypervisor.qemu]\ndefault_memory = 0", "hypervisor.qemu", "default_memory", 2048, "default", 2),
        ("[hypervisor.qemu]\nenable_annotations = ['a']", "hypervisor.qemu", "enable_annotations", ("a",),
         "config.toml:2", 2),
        ("[hypervisor.clh]\ndisk_rate_limiter_ops_max_rate = 50", "hypervisor.clh", "disk_rate_limiter_ops_max_rate",
         50, "config.toml:2", 2),
        ("[hypervisor.clh]", "runtime", "hypervisor_name", "clh", "the only table, [hypervisor.clh]", None),
        ("[resmgr]\nstatic_sandbox_resource_mgmt = false\n[runtime]\nstatic_sandbox_resource_mgmt = true",
         "runtime", "static_sandbox_resource_mgmt", False, "config.toml:2", 2),
        ("[resmgr]\ndeadline = '1.5m'", "resmgr", "deadline", "90s", "config.toml:2", 2),
        ("[resmgr]\ndeadline = '1ms'", "resmgr", "deadline", "0.001s", "config.toml:2", 2),
        ("[resmgr]\nhost_cpus = 3", "hypervisor.qemu", "default_maxvcpus", 3, "host", None),
        ("[resmgr]\nbase = 'max'", "resmgr", "base", "max", "config.toml:2", 2),
        ("", "resmgr", "compat", None, "default", None),
        ("[daemon]\ndisk_roots = ['/a']", "daemon", "disk_roots", ("/a",), "config.toml:2", 2),
    ],
)  # fmt: skip
def test_values_and_origins(
    tmp_path: Path, text: str, table: str, key: str, value: object, origin: str, line: int | None
) -> None:
    told = values(load(tmp_path, text))[table, key]
    assert (told.value, told.origin) == (value, origin)
    assert (told.setting.line if told.setting else None) == line


def test_config_path_is_told(tmp_path: Path) -> None:
    file = KATA / "configuration-qemu.toml"
    told = values(load(tmp_path, f'[kata]\nconfig_path = "{file}"'))
    assert told["kata", "config_path"].value == str(file)
    assert told["hypervisor.qemu", "default_vcpus"].origin == "configuration-qemu.toml:16"


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[hypervisor.qemu]\ndefault_vcpu = 2",
         "2: [hypervisor.qemu] default_vcpu: there is no such key; did you mean default_vcpus?"),
        ("[hypervisor.qemu]\ndefault_max_vcpus = 2", "2: [hypervisor.qemu] default_max_vcpus: there is no such key; "
         "did you mean default_maxvcpus?"),
        ("[hypervisor.cloud-hypervisor]\nDefault_Memory = 2",
         "2: [hypervisor.clh] Default_Memory: there is no such key; did you mean default_memory?"),
        ("[hypervisor.qemu]\nkernel_param = 2",
         "2: [hypervisor.qemu] kernel_param: there is no such key; did you mean kernel_params?"),
        ("[runtime]\nsandbox_cgroups_only = true",
         "2: [runtime] sandbox_cgroups_only: there is no such key; did you mean sandbox_cgroup_only?"),
        ("[runtime]\ndefault_vcpus = 2",
         "2: [runtime] default_vcpus: has no meaning here; it belongs into [hypervisor.<name>]"),
        ("[hypervisor.qemu]\nstatic_sandbox_resource_mgmt = true",
         "2: [hypervisor.qemu] static_sandbox_resource_mgmt: has no meaning here; it belongs into [runtime]"),
        ("[runtime]\nshrink_delay = 1", "2: [runtime] shrink_delay: has no meaning here; it belongs into [resmgr]"),
        ("[hypervisor.qmeu]\ndefault_vcpus = 2", "1: [hypervisor.qmeu]: is left alone; did you mean qemu?"),
        ("[hypervisor.qemu]\ndefault_vcpus = 4\ndefault_maxvcpus = 2",
         "2: [hypervisor.qemu] default_vcpus = 4: above default_maxvcpus, which is 2 (config.toml:3), and cut to it"),
        ("[hypervisor.qemu]\nenable_annotations = ['default_vcpu']",
         '2: [hypervisor.qemu] enable_annotations: "default_vcpu" matches the whole of no annotation that Kata has'),
        ("[hypervisor.clh]\nnet_rate_limiter_ops_one_time_burst = 9",
         "2: [hypervisor.clh] net_rate_limiter_ops_one_time_burst = 9 counts for nothing without "
         "net_rate_limiter_ops_max_rate: set that too, or take this out"),
        ("[runtime]\nhypervisor_name = 'clh'\n[hypervisor.qemu]",
         '2: [runtime] hypervisor_name = "clh": there is no [hypervisor.clh]; its defaults hold'),
    ],
)  # fmt: skip
def test_a_warning(tmp_path: Path, text: str, warning: str) -> None:
    assert list(likely_mistakes(load(tmp_path, text))) == [f"{tmp_path}/config.toml:{warning}"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[hypervisor.qemu]\nsomething_quite_new = 1\n[hypervisor.qemu.default_vcpu]\na = 1",
        "[hypervisor.firecracker]\ndefault_vcpu = 1\n[hypervisor.entirely_else]\ndefault_vcpu = 1",
        "[hypervisor.qemu]\ndefault_vcpus = 99\nenable_annotations = ['.*', 'virtio_fs_.*', 'default_memory']",
        "[runtime]\nhypervisor_name = 'clh'",
        "[agent.kata]\ndefault_vcpu = 1",
    ],
)
def test_nothing_to_warn_of(tmp_path: Path, text: str) -> None:
    assert list(likely_mistakes(load(tmp_path, text))) == []


@pytest.mark.parametrize("file", sorted(KATA.iterdir()), ids=lambda file: file.stem)
def test_katas_own_files_give_no_warning(file: Path) -> None:
    assert list(likely_mistakes(config.load(file, HOST))) == []
