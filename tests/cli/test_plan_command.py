"""``kata-resmgr plan``: what people and scripts see, what is refused, and that it needs no daemon."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import cli

CONFIG = """
[hypervisor.clh]
default_maxvcpus = 4
disk_rate_limiter_bw_max_rate = 838860800
disk_rate_limiter_bw_one_time_burst = 419430400
disk_rate_limiter_ops_max_rate = 15
net_rate_limiter_ops_max_rate = 20
net_rate_limiter_bw_one_time_burst = 80
[resmgr]
host_cpus = 8
host_memory = 16384
"""
REQUEST = {
    "steps": [
        {"op": "create", "container": "a", "resources": {"cpu": {"quota": 150000, "period": 100000, "shares": 1024}}},
        {"op": "update", "container": "b", "resources": {}},
        {"op": "resize", "resources": {"cpu": {"quota": 900000}}},
    ]
}


class Place:
    """A directory with a configuration and a request."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config = path / "config.toml"
        self.config.write_text(CONFIG)
        self.request = path / "plan.json"
        self.write(REQUEST)
        self._capsys = capsys

    def write(self, request: Any) -> None:  # noqa: ANN401
        self.request.write_text(json.dumps(request))

    def run(self, *arguments: object) -> tuple[int, str, str]:
        status = cli.main(["plan", *map(str, arguments), "--config", str(self.config)])
        told = self._capsys.readouterr()
        return status, told.out, told.err


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, capsys)


def test_what_people_see(place: Place) -> None:
    status, out, err = place.run(place.request)
    assert (status, err) == (0, "")
    table, explanation = ([line.rstrip() for line in part.split("\n")] for part in out.rstrip("\n").split("\n\n"))
    assert table == [
        "dynamic: boot with 1 of at most 4 vCPUs and 2048 MiB of at most 16384 MiB",
        "BurstWithoutRate (net_rate_limiter_bw_one_time_burst): net_rate_limiter_bw_one_time_burst = 80 counts for "
        "nothing without net_rate_limiter_bw_max_rate: set that too, or take this out",
        "STEP                EXACT  VCPUS    MEMORY",
        "create a              5/2      3  2048 MiB",
        'update b              5/2      3  2048 MiB  refused: there is no container "b": create it with PUT '
        "(not_found)",
        "resize the sandbox    5/2      4  2048 MiB  Clamped (demand): 9 vCPUs are asked for, the maximum is 4",
        "each disk: 109930072 bytes per 1000 ms, 54965024 more once, really 109930070 a second; "
        "15 operations per 1000 ms, really 10 a second",
        "each net: 20 operations per 1000 ms",
        "CPU weight 100 (1024 shares)",
    ]
    assert explanation[0] == "hypervisor = clh (the only table, [hypervisor.clh])"
    assert "default_maxvcpus = 4 (config.toml:3)" in explanation
    assert "1 + 1.5 = 2.5, rounded up once: 3" in explanation
    assert explanation[-2] == "above default_maxvcpus = 4: 9 cut to 4"


def test_a_sandbox_without_steps(place: Place) -> None:
    place.write({"hypervisor": "qemu"})
    status, out, _ = place.run(place.request)
    assert status == 0
    assert out.startswith("dynamic: boot with 1 of at most 8 vCPUs and 2048 MiB of at most 16384 MiB\n\nhypervisor = ")


def test_json(place: Place) -> None:
    status, out, err = place.run(place.request, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert [step["vcpus"]["desired"] for step in answer["steps"]] == [3, 3, 4]
    assert answer["limiters"]["disk"]["effective"] == {"bytesPerSecond": 109930070, "opsPerSecond": 10}


@pytest.mark.parametrize("named", [[], ["-"]])
def test_standard_input(place: Place, monkeypatch: pytest.MonkeyPatch, named: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"host": {"cpus": 2}}')))
    status, out, _ = place.run(*named, "--json")
    assert status == 0
    assert json.loads(out)["boot"]["maxVcpus"] == 2


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        ([], "invalid_body", "Expected object, got array"),
        ({"step": []}, "invalid_body", "/step: there is no such member"),
        ({"steps": [{"op": "delete", "container": "-a"}]}, "invalid_id", "container id '-a' must be"),
        ({"sandbox": {"resources": {"cpu": 1}}}, "invalid_resources", "/resources/cpu: Expected `object | null`"),
        ({"hypervisor": "xen"}, "invalid_config", 'hypervisor "xen" is not known'),
    ],
)
def test_a_refused_request(place: Place, request_: Any, code: str, words: str) -> None:  # noqa: ANN401
    place.write(request_)
    status, out, err = place.run(place.request)
    assert (status, out) == (1, "")
    assert err.startswith("kata-resmgr: ")
    assert err.endswith(f" ({code})\n")
    assert words in err
    status, out, err_too = place.run(place.request, "--json")
    problem = json.loads(out)
    assert (status, err_too, problem["code"]) == (1, err, code)
    assert problem["type"] == f"urn:kata-resmgr:error:{code}"


def test_a_refused_configuration(place: Place) -> None:
    place.config.write_text("[hypervisor.clh]\ndisk_rate_limiter_ops_max_rate = 5")
    status, out, err = place.run(place.request, "--json")
    assert status == 1
    assert json.loads(out)["code"] == "invalid_config"
    assert err == (
        f"kata-resmgr: {place.config}:2: [hypervisor.clh] disk_rate_limiter_ops_max_rate = 5: must be 0 (no limit) or "
        "at least 10 ops/s: a smaller one never refills\n"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere.json", "No such file or directory"), (".", "Is a directory"), ("a\0b", "null byte")],
)
def test_what_cannot_be_read(place: Place, name: str, words: str) -> None:
    status, out, err = place.run(place.request.parent / name)
    assert (status, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_request_has_a_bound(place: Place) -> None:
    place.request.write_text(" " * ((1 << 20) + 1))
    status, _, err = place.run(place.request)
    assert (status, "(too_large)" in err) == (1, True)


def test_it_asks_nobody_and_leaves_the_server_unloaded(place: Place) -> None:
    check = (
        "import sys; from kata_resmgr.cli import main; status = main(); "
        "print(sorted({'asyncio', 'httptools', 'qemu.qmp', 'structlog'} & set(sys.modules))); sys.exit(status)"
    )
    command = [sys.executable, "-c", check, "plan", str(place.request), "--config", str(place.config), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    assert done.stdout.decode().splitlines()[-1] == "[]"
