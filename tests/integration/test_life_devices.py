"""A life with devices through the socket: the real daemon, the real client, and the fake VMM in its releases."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import PROGRAM, Caller, Daemon, until

MIB = 1 << 20
SANDBOX = "/v1/sandboxes/s1"
DISK = f"{SANDBOX}/disks/d1"
LIMITS = {"bytesPerSecond": 10 * MIB + 5, "opsPerSecond": 1000}
CONFIG = '[hypervisor.clh]\ndefault_maxvcpus = 4\n[resmgr]\nshrink_delay = "0"\nhost_cpus = 8\nhost_memory = 8192\n'


class Vmm:
    """The fake VMM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, name: str, *arguments: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()


@contextmanager
def vmm(socket: Path, config: dict[str, Any], release: int) -> Iterator[Vmm]:
    command = [sys.executable, "-m", "tests.fakes.cloud_hypervisor", str(socket), "--config", json.dumps(config)]
    with subprocess.Popen(
        [*command, "--release", str(release)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield Vmm(process)


class Host:
    def __init__(self, daemon: Daemon, machine: Vmm, image: Path) -> None:
        self.daemon = daemon
        self.vmm = machine
        self.image = image
        self.caller = daemon.caller()

    def state(self, view: str = "") -> dict[str, Any]:
        answer = self.caller.ok("GET", SANDBOX + view)
        assert isinstance(answer, dict)
        return answer

    def disk(self, **more: object) -> dict[str, object]:
        return {"config": {"path": str(self.image), "readonly": True}, **more}

    def conditions(self) -> list[tuple[str, str]]:
        return [(condition["type"], condition["reason"]) for condition in self.state()["conditions"]]

    def events(self, caller: Caller | None = None) -> list[str]:
        caller = caller or self.caller
        caller.request("GET", "/v1/events?sandbox=s1")
        return [json.loads(line)["type"] for line in caller.getresponse().read().splitlines()]


@contextmanager
def host(directory: Path, release: int, spec: dict[str, object] | None = None, config: str = CONFIG) -> Iterator[Host]:
    image = directory / "disk.img"
    image.write_bytes(bytes(4096))
    with Daemon(directory, config, more=f'disk_roots = ["{directory}"]') as daemon:
        caller = daemon.caller()
        booted = caller.ok("PUT", SANDBOX, {"hypervisor": "clh", **(spec or {})})["vmm"]["config"]
        with vmm(directory / "ch", booted, release) as machine:
            caller.ok("PUT", f"{SANDBOX}/vm", {"socket": str(directory / "ch")})
            yield Host(daemon, machine, image)


def cpus(count: int) -> dict[str, object]:
    return {"resources": {"cpu": {"quota": count * 100_000, "period": 100_000}}}


@pytest.mark.parametrize("release", [46, 47, 52, 53, 54])
def test_a_life(tmp_path: Path, release: int) -> None:
    with host(tmp_path, release) as h:
        ask = h.caller.call
        status, grown = ask("PUT", f"{SANDBOX}/containers/c1", cpus(2))
        assert (status, grown["sandbox"]["vcpus"]["plugged"]) == (201, 3)
        assert ask("DELETE", f"{SANDBOX}/containers/c1?wait=50ms")[0] == 204
        assert h.state()["vcpus"] | {"exact": ""} == {
            "exact": "", "desired": 1, "plugged": 3, "pending": 2, "online": None,
        }  # fmt: skip
        h.vmm.do("eject_vcpus")
        assert h.caller.ok("GET", f"{SANDBOX}?wait=15s&for=converged")["vcpus"]["plugged"] == 1

        status, disk = ask("PUT", DISK, h.disk(limits=LIMITS))
        assert status == 201
        assert disk == {
            "id": "d1",
            "config": {"path": str(h.image), "readonly": True},
            "limits": {"bytesPerSecond": 10 * MIB + 5, "burstBytes": 0, "opsPerSecond": 1000, "burstOps": 0},
            "effective": {"bytesPerSecond": 10 * MIB},
            "group": None,
            "address": "0000:00:01.0",
            "counters": None,
        }
        assert ask("PUT", DISK, h.disk(limits=LIMITS)) == (200, disk)
        status, problem = ask("PUT", DISK, h.disk())
        assert (status, problem["code"], problem["retryable"]) == (409, "conflict", False)
        assert h.caller.ok("GET", DISK)["counters"]["read_bytes"] == 0
        assert h.state()["counts"] == {"containers": 0, "disks": 1, "nets": 0}
        assert h.state("?view=full")["disks"]["d1"]["limits"] == disk["limits"]

        assert ask("DELETE", f"{DISK}?wait=50ms") == (204, None)
        status, problem = ask("PUT", DISK, h.disk(limits=LIMITS))
        assert (status, problem["code"], problem["retryable"]) == (409, "shrink_pending", True)
        h.vmm.do("eject_device", "d1")
        assert ask("DELETE", f"{DISK}?wait=15s") == (204, None)
        status, problem = ask("GET", DISK)
        assert (status, problem["code"]) == (404, "not_found")
        assert h.conditions() == []
        assert [kind for kind in h.events() if kind.startswith("device")] == ["device.added", "device.removed"]


@pytest.mark.parametrize("release", [46, 54])
def test_a_vmm_that_drops_a_limiter_is_found_out_and_the_disk_taken_out_again(tmp_path: Path, release: int) -> None:
    with host(tmp_path, release) as h:
        h.vmm.do("drop_limiters")
        status, problem = h.caller.call("PUT", DISK, h.disk(limits=LIMITS))
        assert (status, problem["code"]) == (502, "hypervisor_refused")
        assert "rate_limiter_config" in problem["detail"]
        assert h.caller.call("PUT", DISK, h.disk())[1]["code"] == "shrink_pending"
        h.vmm.do("eject_device", "d1")
        until(lambda: h.caller.call("GET", DISK)[0] == 404, "the disk is gone")
        assert h.caller.call("PUT", DISK, h.disk())[0] == 201


def test_other_limits_come_by_replacing(tmp_path: Path) -> None:
    with host(tmp_path, 54) as h:
        h.caller.ok("PUT", DISK, h.disk(limits=LIMITS))
        status, problem = h.caller.call("PUT", f"{DISK}/limits", {"opsPerSecond": 50})
        assert (status, problem["code"]) == (409, "not_supported_live")
        status, problem = h.caller.call("PUT", f"{DISK}/limits?deadline=100ms", {"opsPerSecond": 50, "replace": True})
        assert (status, problem["code"]) == (409, "shrink_pending")
        h.vmm.do("cooperate", True)
        disk = h.caller.ok("PUT", f"{DISK}/limits", {"opsPerSecond": 50, "replace": True})
        assert (disk["limits"]["opsPerSecond"], disk["limits"]["bytesPerSecond"]) == (50, 0)
        assert h.caller.ok("PUT", f"{DISK}/limits", {"replace": True})["limits"]["opsPerSecond"] == 0
        assert h.caller.call("PUT", f"{DISK}/limits", {})[0] == 200  # none there are
        assert h.events().count("device.limits") == 2


def test_a_life_by_the_command_line(tmp_path: Path) -> None:
    with host(tmp_path, 54) as h:

        def run(*arguments: str, status: int = 0) -> str:
            command = [str(PROGRAM), "--socket", str(h.daemon.socket), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == status, done
            return done.stderr if status else done.stdout

        config = tmp_path / "disk.json"
        config.write_text(json.dumps(h.disk()["config"]))
        adding = ("disk", "add", "s1", "d1", "--config", str(config))
        h.vmm.do("cooperate", True)
        assert run(*adding, "--ops-per-second", "1005") == ("d1 at 0000:00:01.0, at most 1005 ops/s (in effect 1000)\n")
        assert "remove it first" in run(*adding, status=1)
        assert "limits" in json.loads(run("limits", "s1", "d1", "--ops-per-second", "50", "--replace", "--json"))
        assert "disk        d1 at 0000:00:01.0, at most 50 ops/s\n" in run("show", "s1")
        run("disk", "remove", "s1", "d1", "--wait", "15s")
        assert "disk        " not in run("show", "s1")


def test_devices_survive_the_daemon(tmp_path: Path) -> None:
    with host(tmp_path, 54) as h:
        h.caller.ok("PUT", DISK, h.disk(limits=LIMITS))
        h.caller.ok("PUT", f"{SANDBOX}/nets/n1", {"config": {"tap": "tap0"}, "limits": {"opsPerSecond": 100}})
        assert h.caller.call("DELETE", f"{SANDBOX}/nets/n1")[0] == 204
        h.daemon.kill()
        h.daemon.start_again()
        caller = h.daemon.caller()
        assert caller.ok("PUT", DISK, h.disk(limits=LIMITS))["effective"] == {"bytesPerSecond": 10 * MIB}
        assert caller.ok("GET", SANDBOX)["counts"] == {"containers": 0, "disks": 1, "nets": 1}
        h.vmm.do("cooperate", True)
        assert caller.call("DELETE", f"{SANDBOX}/nets/n1?wait=15s")[0] == 204
        assert caller.ok("GET", SANDBOX)["counts"]["nets"] == 0


def test_groups_are_given_at_boot_and_joined(tmp_path: Path) -> None:
    with host(tmp_path, 54, {"rateLimitGroups": {"gold": {"opsPerSecond": 1000}}}) as h:
        groups = h.state()["vmm"]["config"]["rate_limit_groups"]
        assert groups == [{"id": "gold", "rate_limiter_config": {"ops": {"size": 1000, "refill_time": 1000}}}]
        assert h.caller.ok("PUT", DISK, h.disk(group="gold"))["group"] == "gold"
        status, problem = h.caller.call("PUT", f"{SANDBOX}/disks/d2", h.disk(group="silver"))
        assert (status, problem["errors"][0]["pointer"]) == (400, "/group")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "pointer"),
    [
        ("disks/d1", {"config": {"rate_limter_config": {}}}, 400, "invalid_body", "/config/rate_limter_config"),
        ("disks/d1", {"config": {"rate_limiter_config": {}}}, 400, "invalid_body", "/config/rate_limiter_config"),
        ("disks/d1", {"config": {}}, 400, "invalid_body", "/config/path"),
        ("disks/d1", {"config": {"path": "/etc/passwd"}}, 422, "invalid_path", None),
        ("disks/d1", {"config": {}, "limits": {"opsPerSec": 1}}, 400, "invalid_body", "/limits/opsPerSec"),
        ("nets/n1", {"config": {"tap": "t", "num_queues": 8}}, 400, "invalid_body", "/config/num_queues"),
        ("nets/n1", {"config": {"fds": [3]}}, 409, "not_supported", None),
        ("nets/n1", {"config": {}, "limits": {"opsPerSecond": 5}}, 400, "invalid_body", "/limits/opsPerSecond"),
        ("nets/_n", {"config": {"tap": "t"}}, 400, "invalid_id", None),
    ],
)
def test_refusals(shared: Host, path: str, body: dict[str, Any], status: int, code: str, pointer: str | None) -> None:
    answered, problem = shared.caller.call("PUT", f"{SANDBOX}/{path}", body)
    assert (answered, problem["code"]) == (status, code), problem
    assert pointer is None or problem["errors"][0]["pointer"] == pointer
    assert shared.state()["counts"] == {"containers": 0, "disks": 0, "nets": 0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("rm"), 54) as made:
        yield made
