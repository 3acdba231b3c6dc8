"""The configuration by value: what each file makes of one sandbox, and what is refused."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import config
from kata_resmgr.config import Base, ConfigError, CpusetSizing, OverMax, SandboxConfig, Settings, TcgUnplug
from kata_resmgr.host import Host, this_host
from kata_resmgr.problem import Code, Problem

HOST = Host(cpus=8, memory=16384)


def settings(tmp_path: Path, text: str, host: Host = HOST) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return config.load(file, host)


def sandbox(tmp_path: Path, text: str, host: Host = HOST) -> SandboxConfig:
    return settings(tmp_path, text, host).for_sandbox(None)


QEMU = "[hypervisor.qemu]\n"
RESMGR = "[resmgr]\n"
STATIC = "[runtime]\nstatic_sandbox_resource_mgmt = true\n"
HUGE_HOST = RESMGR + "host_cpus = 1000\nhost_memory = 4194304\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"hypervisor": "qemu", "static": False, "default_vcpus": 1, "default_maxvcpus": 8}),
        ("", {"default_memory": 2048, "default_maxmemory": 16384, "memory_slots": 10}),
        ("", {"overhead_vcpus": 0, "overhead_memory": 0, "machine_type": "q35"}),
        ("", {"confidential_guest": False, "enable_virtio_mem": False, "base": Base.ADD}),
        ("", {"cpuset_sizing": CpusetSizing.EXCLUSIVE, "shares_sizing": False, "over_max_vcpus": OverMax.CLAMP}),
        ("", {"shrink_delay": 5.0, "deadline": 10.0, "tcg_unplug": TcgUnplug.NEVER}),
        ("", {"host_cpus": 8, "host_memory": 16384}),
        (QEMU + "default_vcpus = 3", {"default_vcpus": 3}),
        (QEMU + "default_vcpus = 0.1", {"default_vcpus": Fraction(1, 10)}),
        (QEMU + "default_vcpus = 25e-1", {"default_vcpus": Fraction(5, 2)}),
        (QEMU + "default_vcpus = 0", {"default_vcpus": 1}),
        (QEMU + "default_vcpus = -0.0", {"default_vcpus": 1}),
        (QEMU + "default_vcpus = -1", {"default_vcpus": 8}),
        (QEMU + "default_vcpus = -0.5", {"default_vcpus": 8}),
        (QEMU + "default_vcpus = 9", {"default_vcpus": 8}),
        (QEMU + "default_vcpus = 1e999999999", {"default_vcpus": 8}),
        (QEMU + "default_vcpus = 4\ndefault_maxvcpus = 2", {"default_vcpus": 2, "default_maxvcpus": 2}),
        (QEMU + "default_vcpus = -1\ndefault_maxvcpus = 2", {"default_vcpus": 2}),
        (QEMU + "default_maxvcpus = 0", {"default_maxvcpus": 8}),
        (QEMU + "default_maxvcpus = 9", {"default_maxvcpus": 8}),
        (HUGE_HOST, {"default_maxvcpus": 240, "default_maxmemory": 4194304, "host_cpus": 1000}),
        (HUGE_HOST + QEMU + "default_vcpus = 300", {"default_vcpus": 240}),
        (QEMU + "default_memory = 0", {"default_memory": 2048}),
        (QEMU + "default_memory = 64", {"default_memory": 64}),
        (QEMU + "default_memory = 99999", {"default_memory": 16384}),
        (QEMU + "default_maxmemory = 1024", {"default_memory": 1024, "default_maxmemory": 1024}),
        (QEMU + "default_memory = 0\ndefault_maxmemory = 1024", {"default_memory": 1024}),
        (QEMU + "default_maxmemory = 0", {"default_maxmemory": 16384}),
        (QEMU + "default_maxmemory = 99999", {"default_maxmemory": 16384}),
        (STATIC, {"static": True, "default_memory": 2048}),
        (STATIC + QEMU + "default_memory = 0", {"default_memory": 0}),
        (STATIC + RESMGR + "static_sandbox_resource_mgmt = false", {"static": False}),
        (RESMGR + "static_sandbox_resource_mgmt = true", {"static": True}),
        (QEMU + "memory_slots = 0", {"memory_slots": 10}),
        (QEMU + "memory_slots = 256", {"memory_slots": 256}),
        (QEMU + "overhead_vcpus = 0.2\noverhead_memory = 3", {"overhead_vcpus": Fraction(1, 5), "overhead_memory": 3}),
        (QEMU + 'machine_type = "microvm"\nconfidential_guest = true\nenable_virtio_mem = true',
         {"machine_type": "microvm", "confidential_guest": True, "enable_virtio_mem": True}),
        (QEMU + 'machine_type = ""', {"machine_type": "q35"}),
        (RESMGR + 'base = "max"\ncpuset_sizing = "always"\nshares_sizing = true\nover_max_vcpus = "refuse"',
         {"base": Base.MAX, "cpuset_sizing": CpusetSizing.ALWAYS, "shares_sizing": True,
          "over_max_vcpus": OverMax.REFUSE}),
        (RESMGR + 'shrink_delay = "0"\ndeadline = "1.5m"\ntcg_unplug = "once"',
         {"shrink_delay": 0.0, "deadline": 90.0, "tcg_unplug": TcgUnplug.ONCE}),
        (RESMGR + 'shrink_delay = 0\ndeadline = "500ms"', {"shrink_delay": 0.0, "deadline": 0.5}),
        (RESMGR + "host_cpus = 4\nhost_memory = 1024", {"default_maxvcpus": 4, "default_memory": 1024}),
        ("hypervisor.qemu.default_vcpus = 2", {"default_vcpus": 2}),
        ("[agent.kata]\nanything = 1\n[hypervisor.firecracker]\ndefault_vcpus = 'x'\n[runtime]\nunknown = 1", {}),
        (QEMU + "a_key_of_kata = 1", {"default_vcpus": 1}),
    ],
)  # fmt: skip
def test_effective_values(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    found = sandbox(tmp_path, text)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (QEMU + "default_vcpus = nan", 2, "default_vcpus = nan: must be a number; it is not finite"),
        (QEMU + "default_vcpus = -inf", 2, "default_vcpus = -inf: must be a number; it is not finite"),
        (QEMU + "default_vcpus = 1e-9999", 2, "more than 1000 decimal places"),
        (QEMU + 'default_vcpus = "1"', 2, 'default_vcpus = "1": must be a number'),
        (QEMU + "default_vcpus = true", 2, "default_vcpus = true: must be a number"),
        (QEMU + "default_maxvcpus = -1", 2, "default_maxvcpus = -1: must be a whole number from 0 to 2147483647"),
        (QEMU + "default_maxvcpus = 2.0", 2, "default_maxvcpus = 2.0: must be a whole number"),
        (QEMU + "default_maxvcpus = 99999999999999999999", 2, "must be a whole number"),
        (QEMU + "default_memory = 63", 2, "default_memory = 63: must be 0 or at least 64 MiB"),
        (QEMU + "default_memory = -1", 2, "default_memory = -1: must be a whole number"),
        (QEMU + "default_maxmemory = 512\ndefault_memory = 1024", 3, "default_memory = 1024: must be at most"),
        (QEMU + "memory_slots = 257", 2, "memory_slots = 257: must be a whole number from 0 to 256"),
        (QEMU + "\noverhead_vcpus = -0.1", 3, "overhead_vcpus = -0.1: must be a number from 0 to"),
        (QEMU + "overhead_memory = -1", 2, "overhead_memory = -1: must be a whole number"),
        (QEMU + "confidential_guest = 1", 2, "confidential_guest = 1: must be true or false"),
        (QEMU + "machine_type = 1.0", 2, "machine_type = 1.0: must be a string"),
        (RESMGR + 'base = "sum"', 2, 'base = "sum": must be "add" or "max"'),
        (RESMGR + 'compat = "kata"', 2, 'compat = "kata": must be left out: it is not supported yet'),
        (RESMGR + 'rate_limiter_scaling = "exact"', 2, "not supported yet"),
        (RESMGR + 'deadline = "2h"', 2, 'deadline = "2h": must be a duration'),
        (RESMGR + 'deadline = "-1s"', 2, 'deadline = "-1s": must be a duration'),
        (RESMGR + "deadline = 5", 2, "deadline = 5: must be a duration"),
        (RESMGR + "deadline = false", 2, "deadline = false: must be a duration"),
        (RESMGR + "host_cpus = 0", 2, "host_cpus = 0: must be a whole number from 1"),
        (RESMGR + "shrink_dela = 1", 2, "[resmgr] shrink_dela: there is no such key; the nearest is shrink_delay"),
        ("[daemon]\nsocket = 'api.sock'", 2, 'socket = "api.sock": must be an absolute path'),
        ("[daemon]\nsocket = '/" + "x" * 107 + "'", 2, "must be a path of at most 107 bytes"),
        ("[daemon]\nvm_roots = ['/run', 'x']", 2, 'vm_roots = ["/run", "x"]: must be an array of absolute paths'),
        ("[daemon]\nlog_level = 'loud'", 2, 'must be "debug" or "info" or "warning" or "error"'),
        ("[runtime]\nhypervisor_name = 'firecracker'", 2, 'must be "qemu" or "clh" or "cloud-hypervisor"'),
        ("[resmg]\nbase = 'add'", 1, "[resmg]: there is no such table; the nearest is resmgr"),
        ("zzzzzzzz = 1", 1, "[zzzzzzzz]: there is no such table; there are hypervisor, runtime,"),
        ("\nresmgr = 1", 2, "resmgr = 1: must be a table"),
        ("[[daemon]]", 1, "daemon = [{…}]: must be a table"),
        ("[hypervisor]\nqemu = 1", 2, "hypervisor.qemu = 1: must be a table"),
        ("[hypervisor.clh]\n[hypervisor.cloud-hypervisor]", 2, "must not stand beside [hypervisor.clh]"),
        ("[kata]\nconfig_path = '/x'", 1, "[kata]: Kata's own files cannot be named here yet"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, text)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}/config.toml:{line}: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "data",
    [
        b"[resmgr\n",
        b"\xff\xfe",
        b"a = " + b"[" * 5000,
        b"a = " + b"9" * 5000,
        b"[resmgr]\nbase = 'add'\nbase = 'max'",
        b"#" * (1 << 20) + b"#",
    ],
)
def test_what_is_not_toml_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=str(file)) as refused:
        config.load(file, HOST)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        config.load(tmp_path / "nowhere.toml", HOST)


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "nowhere.toml")
    loaded = config.load(None, HOST)
    assert loaded.daemon == config.DaemonConfig(
        socket=Path("/run/kata-resmgr/api.sock"),
        socket_group=None,
        state=Path("/run/kata-resmgr/state.db"),
        vm_roots=(Path("/run/vc"), Path("/run/kata"), Path("/run/kata-resmgr")),
        disk_roots=(),
        log_level="info",
        log_format="auto",
    )
    assert set(loaded.for_sandbox(None).origins.values()) == {"default", "host"}


def test_the_origins_tell_the_line_and_the_cut(tmp_path: Path) -> None:
    text = """
[hypervisor.qemu]   # line 2
note = \"\"\"
default_vcpus = 7
[resmgr]
\"\"\"
list = [
  "a", # ]
  "b",
]
default_vcpus = 4   # line 11
default_maxvcpus = 2
default_maxmemory = 99999
[resmgr]
host_cpus = 6
"""
    found = sandbox(tmp_path, text).origins
    assert found["default_vcpus"] == "cut to default_maxvcpus (config.toml:11)"
    assert found["default_maxvcpus"] == "config.toml:12"
    assert found["default_maxmemory"] == "cut to the host (config.toml:13)"
    assert found["host_cpus"] == "config.toml:15"
    assert found["host_memory"] == "host"
    assert found["base"] == "default"


def test_every_field_has_an_origin(tmp_path: Path) -> None:
    fields = set(SandboxConfig.__slots__) - {"origins"}
    assert set(sandbox(tmp_path, "").origins) == fields


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", "clh"),
        ("", "cloud-hypervisor"),
        ("", "firecracker"),
        ("[hypervisor.clh]", None),
        ("[runtime]\nhypervisor_name = 'clh'", None),
    ],
)
def test_a_hypervisor_that_cannot_be_had(tmp_path: Path, text: str, asked: str | None) -> None:
    with pytest.raises(Problem) as refused:
        settings(tmp_path, text).for_sandbox(asked)
    assert refused.value.code is Code.INVALID_CONFIG
    assert (asked or "clh") in refused.value.detail


def test_the_sandbox_chooses_before_the_configuration(tmp_path: Path) -> None:
    assert settings(tmp_path, "[runtime]\nhypervisor_name = 'clh'").for_sandbox("qemu").hypervisor == "qemu"


def test_the_sample_names_every_key_with_its_default(tmp_path: Path) -> None:
    sample = (Path(__file__).parents[2] / "configs" / "config.toml").read_text()
    assert sandbox(tmp_path, sample).origins == sandbox(tmp_path, "").origins
    uncommented = "\n".join(line[1:] if line[:1] == "#" and line[1:2] != " " else line for line in sample.split("\n"))
    loaded = settings(tmp_path, uncommented)
    for key in {key for table in loaded.tables.values() for key in table.settings}:
        assert f"\n#{key} = " in sample
    ours = {key for name in ("resmgr", "daemon") for key in loaded.tables[name].settings}
    assert ours == set(sum(config.OUR_KEYS.values(), ())) - {"compat", "rate_limiter_scaling"}
    found, expected = loaded.for_sandbox(None), sandbox(tmp_path, "")
    for field in set(SandboxConfig.__slots__) - {"origins"}:
        assert getattr(found, field) == getattr(expected, field)
    daemon = settings(tmp_path, "").daemon
    assert dataclasses.replace(loaded.daemon, socket_group=daemon.socket_group) == daemon


def test_this_host(tmp_path: Path) -> None:
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-3,8,10-11\n")
    (tmp_path / "meminfo").write_text("MemTotal:       16384000 kB\nMemFree: 1 kB\n")
    assert this_host(tmp_path, tmp_path) == Host(cpus=7, memory=16000)
    assert this_host().cpus >= 1
