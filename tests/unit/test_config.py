"""The configuration by value: what each file makes of one sandbox, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import config
from kata_resmgr.config import (
    Base,
    Compat,
    ConfigError,
    CpusetSizing,
    OverMax,
    SandboxConfig,
    Settings,
    TcgUnplug,
)
from kata_resmgr.config_daemon import LogFormat, LogLevel
from kata_resmgr.config_keys import OUR_KEYS, RATE_LIMITERS, READ_KEYS
from kata_resmgr.host import Host, this_host
from kata_resmgr.limits import Scaling
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem

HOST = Host(cpus=8, memory=16384)


def settings(tmp_path: Path, text: str, host: Host = HOST) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return config.load(file, host)


def sandbox(tmp_path: Path, text: str, host: Host = HOST) -> SandboxConfig:
    return settings(tmp_path, text, host).for_sandbox(None)


QEMU = "[hypervisor.qemu]\n"
CLH = "[hypervisor.clh]\n"
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
        ("", {"host_cpus": 8, "host_memory": 16384, "enable_annotations": (), "compat": None, "notes": ()}),
        ("", {"reclaim_guest_freed_memory": False, "sandbox_cgroup_only": False, "enable_vcpus_pinning": False}),
        ("", {"rate_limiter_scaling": Scaling.KATA, "rate_limits": dict.fromkeys(RATE_LIMITERS, 0)}),
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
        (QEMU + "reclaim_guest_freed_memory = true", {"reclaim_guest_freed_memory": True}),
        (QEMU + "enable_annotations = ['default_.*', '']", {"enable_annotations": ("default_.*", "")}),
        (QEMU + "enable_annotations = ['[[a]']", {"enable_annotations": ("[[a]",)}),  # Python warns of it
        (QEMU + "disk_rate_limiter_bw_max_rate = 80\nnet_rate_limiter_ops_one_time_burst = 9223372036854775807",
         {"rate_limits": dict.fromkeys(RATE_LIMITERS, 0) | {"disk_rate_limiter_bw_max_rate": 80,
          "net_rate_limiter_ops_one_time_burst": 2**63 - 1}}),
        ("[runtime]\nsandbox_cgroup_only = true\nenable_vcpus_pinning = true",
         {"sandbox_cgroup_only": True, "enable_vcpus_pinning": True}),
        (RESMGR + "compat = 'kata'\nrate_limiter_scaling = 'exact'",
         {"compat": Compat.KATA, "rate_limiter_scaling": Scaling.EXACT}),
        (HUGE_HOST + CLH, {"hypervisor": "clh", "default_maxvcpus": 254, "machine_type": ""}),
        (HUGE_HOST + CLH + "default_vcpus = 300\ndefault_maxvcpus = 300", {"default_vcpus": 254}),
        (CLH + "default_vcpus = 3\nmachine_type = 5", {"hypervisor": "clh", "default_vcpus": 3}),
        ("[hypervisor.cloud-hypervisor]\ndefault_vcpus = 3", {"hypervisor": "clh", "default_vcpus": 3}),
        ("[hypervisor.clh]\n[hypervisor.firecracker]", {"hypervisor": "clh"}),
        (QEMU + CLH + "default_vcpus = 3", {"hypervisor": "qemu", "default_vcpus": 1}),
        ("runtime.hypervisor_name = 'clh'\n" + QEMU + CLH + "default_vcpus = 3",
         {"hypervisor": "clh", "default_vcpus": 3}),
        ("runtime.hypervisor_name = 'cloud-hypervisor'\n" + QEMU, {"hypervisor": "clh"}),
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
        (QEMU + "default_maxvcpus = -1", 2, "default_maxvcpus = -1: must be a whole number from 0 to 4294967295"),
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
        (RESMGR + 'compat = "go"', 2, 'compat = "go": must be "kata"'),
        (RESMGR + 'rate_limiter_scaling = "si"', 2, 'rate_limiter_scaling = "si": must be "kata" or "exact"'),
        (QEMU + "disk_rate_limiter_bw_max_rate = -1", 2, "must be a whole number from 0 to 9223372036854775807"),
        (CLH + "disk_rate_limiter_ops_max_rate = 5", 2, "[hypervisor.clh] disk_rate_limiter_ops_max_rate = 5: must be "
         "0 (no limit) or at least 10 ops/s: a smaller one never refills"),
        (QEMU + "net_rate_limiter_bw_max_rate = 79", 2, "net_rate_limiter_bw_max_rate = 79: must be 0 (no limit) or at "
         "least 80 bits/s: a smaller one never refills"),
        (CLH + "net_rate_limiter_ops_max_rate = 1.0", 2, "net_rate_limiter_ops_max_rate = 1.0: must be a whole number"),
        (CLH + "default_memory = 63", 2, "[hypervisor.clh] default_memory = 63: must be 0 or at least 64 MiB"),
        ("[hypervisor.cloud-hypervisor]\ndefault_memory = 63", 2, "[hypervisor.clh] default_memory = 63: must be"),
        (QEMU + "enable_annotations = '.*'", 2, 'enable_annotations = ".*": must be an array of regular expressions'),
        (QEMU + "enable_annotations = ['a', 1]", 2, 'enable_annotations = ["a", 1]: must be an array of regular'),
        (QEMU + "enable_annotations = ['a', '(b']", 2, '"(b" is none: missing ), unterminated subpattern'),
        (QEMU + "enable_annotations = ['" + "(" * 5000 + "']", 2, "is none: "),
        (QEMU + "enable_annotations = ['a{99999999999}']", 2, "is none: the repetition number is too large"),
        (QEMU + "[hypervisor.qemu.default_vcpus]\na = 1", 2, "default_vcpus = {…}: must be a number"),
        ("[runtime]\nenable_vcpus_pinning = 1", 2, "enable_vcpus_pinning = 1: must be true or false"),
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
        ("[hypervisor.clh]\n[hypervisor.cloud-hypervisor]", 2, "must not stand beside another [hypervisor.clh]"),
        ("[hypervisor.cloud-hypervisor]\n[hypervisor.clh]", 2, "clh and cloud-hypervisor are the same"),
        ("[kata]\nconfig = '/x'", 2, "[kata] config: there is no such key; the nearest is config_path"),
        ("[kata]\nconfig_path = 1", 2, "[kata] config_path = 1: must be the path of a file"),
        ("[kata]\nconfig_path = ''", 2, 'config_path = "": must be the path of a file'),
        ('[kata]\nconfig_path = "\\u0000"', 2, "must be the path of a file"),
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
        b"a." * 3000 + b"b = 1",
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
        log_level=LogLevel.INFO,
        log_format=LogFormat.AUTO,
        origins=dict.fromkeys(OUR_KEYS["daemon"], "default"),
    )
    assert set(loaded.for_sandbox(None).origins.values()) == {"default", "host"}


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.toml"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"/config\.toml: cannot be read: "):
        config.load(path, HOST)


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


def test_a_burst_without_its_rate_is_told(tmp_path: Path) -> None:
    text = CLH + "disk_rate_limiter_bw_one_time_burst = 8000\nenable_annotations = []"
    loaded = settings(tmp_path, text)
    told = Note(
        "BurstWithoutRate",
        "disk_rate_limiter_bw_one_time_burst",
        "disk_rate_limiter_bw_one_time_burst = 8000 counts for nothing without disk_rate_limiter_bw_max_rate: set that "
        "too, or take this out",
    )
    assert loaded.for_sandbox().notes == (told,)
    assert loaded.for_sandbox("qemu").notes == ()
    name = "io.katacontainers.config.runtime.sandbox_cgroup_only"
    assert [note.type for note in loaded.for_sandbox(None, {name: "true"}).notes] == [told.type, "AnnotationIgnored"]


def test_the_limits_of_every_device(tmp_path: Path) -> None:
    text = CLH + "disk_rate_limiter_bw_max_rate = 838860800"
    limiter = sandbox(tmp_path, text).io_limits("disk").limiter()
    assert limiter is not None
    assert limiter.bandwidth is not None
    assert limiter.bandwidth.size == 109930072
    assert sandbox(tmp_path, text).io_limits("net").limiter() is None
    limiter = sandbox(tmp_path, text + "\n" + RESMGR + "rate_limiter_scaling = 'exact'").io_limits("disk").limiter()
    assert limiter is not None
    assert limiter.bandwidth is not None
    assert limiter.bandwidth.size == 104857600


def test_every_field_has_an_origin(tmp_path: Path) -> None:
    fields = set(SandboxConfig.__slots__) - {"origins", "notes", "rate_limits"}
    assert set(sandbox(tmp_path, "").origins) == fields | set(RATE_LIMITERS)


@pytest.mark.parametrize(
    ("text", "asked", "hypervisor", "origin"),
    [
        ("", None, "qemu", "default"),
        ("", "qemu", "qemu", "sandbox"),
        ("", "clh", "clh", "sandbox"),
        ("", "cloud-hypervisor", "clh", "sandbox"),
        (CLH, None, "clh", "the only table, [hypervisor.clh]"),
        (QEMU, None, "qemu", "the only table, [hypervisor.qemu]"),
        (QEMU + CLH, None, "qemu", "default"),
        ("runtime.hypervisor_name = 'clh'", None, "clh", "config.toml:1"),
        ("runtime.hypervisor_name = 'clh'", "qemu", "qemu", "sandbox"),
    ],
)
def test_the_choice_of_the_hypervisor(
    tmp_path: Path, text: str, asked: str | None, hypervisor: str, origin: str
) -> None:
    found = settings(tmp_path, text).for_sandbox(asked)
    assert (found.hypervisor, found.origins["hypervisor"]) == (hypervisor, origin)


def test_a_hypervisor_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(Problem) as refused:
        settings(tmp_path, "").for_sandbox("firecracker")
    assert refused.value.code is Code.INVALID_CONFIG
    assert refused.value.detail == ('hypervisor "firecracker" is not known: use "qemu" or "clh" or "cloud-hypervisor"')


SAMPLE = (Path(__file__).parents[2] / "configs" / "config.toml").read_text()


def test_the_sample_says_what_holds_without_it(tmp_path: Path) -> None:
    found, expected = sandbox(tmp_path, SAMPLE), sandbox(tmp_path, "")
    assert dataclasses.replace(found, origins={}) == dataclasses.replace(expected, origins={})


def test_the_sample_names_every_key_with_its_default(tmp_path: Path) -> None:
    lines = [line[1:] if line[:1] == "#" and line[1:2] != " " else line for line in SAMPLE.split("\n")]
    examples = ("config_path = ", "compat = ", "socket_group = ", "host_cpus = ", "host_memory = ")
    assert all(any(line.startswith(example) for line in lines) for example in examples)  # these have no default
    loaded = settings(tmp_path, "\n".join(line for line in lines if not line.startswith(examples)))
    named = {name: set(table.settings) for name, table in loaded.layers.tables.items()}
    assert named["resmgr"] == set(OUR_KEYS["resmgr"]) - {"compat", "host_cpus", "host_memory"}
    assert named["daemon"] == set(OUR_KEYS["daemon"]) - {"socket_group"}
    assert named["runtime"] == set(READ_KEYS["runtime"])
    assert named["hypervisor.qemu"] | named["hypervisor.clh"] == set(READ_KEYS["hypervisor"])
    for hypervisor in ("qemu", "clh"):
        found, expected = loaded.for_sandbox(hypervisor), settings(tmp_path, "").for_sandbox(hypervisor)
        assert dataclasses.replace(found, origins={}) == dataclasses.replace(expected, origins={})
    assert dataclasses.replace(loaded.daemon, origins={}) == dataclasses.replace(
        settings(tmp_path, "").daemon, origins={}
    )


def test_this_host(tmp_path: Path) -> None:
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-3,8,10-11\n")
    (tmp_path / "meminfo").write_text("MemTotal:       16384000 kB\nMemFree: 1 kB\n")
    assert this_host(tmp_path, tmp_path) == Host(cpus=7, memory=16000)
    assert this_host().cpus >= 1
