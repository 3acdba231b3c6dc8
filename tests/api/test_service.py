"""The daemon as a process, as a service manager sees it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr.cli import client

PROGRAM = [sys.executable, "-c", "import sys; from kata_resmgr.cli import main; sys.exit(main())"]
PATIENCE = 30.0


class Place:
    """A directory with a configuration, for one daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = path / "api.sock"
        self.config = path / "config.toml"
        self.log = path / "log"
        self.configure("")

    def configure(self, more: str) -> None:
        roots = f'vm_roots = ["{self.path}"]\nstate = "{self.path}/state.db"\n'
        self.config.write_text(f'[daemon]\nsocket = "{self.socket}"\n{roots}{more}')

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def reasons(self) -> list[str]:
        """What was told of what went wrong."""
        return [record["reason"] for record in self.records() if "reason" in record]

    def events(self) -> list[str]:
        return [record["event"] for record in self.records()]

    def ask(self, method: str, target: str, body: bytes | None = None) -> tuple[int, Any]:
        reply = client.call(str(self.socket), method, target, body)
        return reply.status, json.loads(reply.body) if reply.body else None


@pytest.fixture
def place() -> Iterator[Place]:
    directory = tempfile.mkdtemp(prefix="rm-")
    yield Place(Path(directory))
    shutil.rmtree(directory)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def daemon(place: Place, prefix: tuple[str, ...] = (), **options: Any) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401
    """A running daemon, from its first word on; it is ended, if it has not ended by itself."""
    with place.log.open("wb") as log:
        process = subprocess.Popen([*prefix, *PROGRAM, "serve", "--config", str(place.config)], stderr=log, **options)
    try:
        until(lambda: process.poll() is not None or "serving" in place.log.read_text())
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def handing_over(listener: socket.socket) -> tuple[str, ...]:
    """What starts a program as systemd does for a socket unit."""
    code = (
        f"import os, sys; os.dup2({listener.fileno()}, 3); "
        "os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid())); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return sys.executable, "-c", code


def refused(place: Place) -> str:
    """The one line with which the daemon does not start."""
    done = subprocess.run(
        [*PROGRAM, "serve", "--config", str(place.config)], capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    return line


def test_a_life(place: Place) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place.path / "notify"))
        manager.settimeout(PATIENCE)
        environment = os.environ | {"NOTIFY_SOCKET": str(place.path / "notify")}
        with daemon(place, env=environment) as process:
            assert manager.recv(100) == b"READY=1"
            assert stat.S_IMODE(place.socket.stat().st_mode) == 0o600
            assert place.ask("GET", "/readyz") == (200, {"ok": True, "reasons": []})
            assert place.ask("PUT", "/v1/sandboxes/s1", b"{}")[0] == 201
            until(lambda: "change" in place.events())
            process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(PATIENCE) == 0
    assert not place.socket.exists()
    assert place.events() == ["serving", "change", "stopping", "stopped"]
    change = place.records()[1]
    assert (change["pid"], change["uid"], change["status"]) == (os.getpid(), os.geteuid(), 201)


def test_ctrl_c_ends_it_as_well(place: Place) -> None:
    with daemon(place) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_a_plan_is_the_same_with_a_daemon_and_without(place: Place) -> None:
    place.configure("[hypervisor.clh]\ndisk_rate_limiter_ops_max_rate = 15\n[hypervisor.qemu]\n")
    request = (
        b'{"host": {"cpus": 4}, "steps": [{"op": "create", "container": "a", "resources": {"cpu": {"quota": 900000}}},'
        b' {"op": "update", "container": "b", "resources": {}}]}'
    )
    refused = b'{"sandbox": {"resources": {"cpu": {"cpus": "x"}}}}'
    command = [*PROGRAM, "plan", "--json", "--config", str(place.config)]
    with daemon(place):
        for text, status in ((request, 200), (refused, 422)):
            done = subprocess.run(command, input=text, capture_output=True, timeout=PATIENCE, check=False)
            assert done.returncode == (status != 200)
            assert place.ask("POST", "/v1/plan", text) == (status, json.loads(done.stdout))
        assert place.ask("GET", "/v1/sandboxes") == (200, {"sandboxes": []})


def test_sighup(place: Place) -> None:
    with daemon(place) as process:
        place.configure("[hypervisor.qemu]\ndefault_memory = 63\n")
        process.send_signal(signal.SIGHUP)
        until(lambda: "configuration left as it was" in place.events())
        assert "default_memory = 63: must be 0 or at least 64 MiB" in place.reasons()[-1]
        assert place.ask("PUT", "/v1/sandboxes/s1", b"{}")[1]["boot"]["memoryBytes"] > 64 << 20
        place.configure("[hypervisor.qemu]\ndefault_memory = 64\n")
        process.send_signal(signal.SIGHUP)
        until(lambda: "configuration read again" in place.events())
        assert place.ask("PUT", "/v1/sandboxes/s2", b"{}")[1]["boot"]["memoryBytes"] == 64 << 20


def test_sighup_reads_every_layer_again_and_all_or_nothing(place: Place) -> None:
    kata, drop_in = place.path / "configuration.toml", place.path / "config.d" / "10.toml"
    drop_in.parent.mkdir()

    def reload(process: subprocess.Popen[bytes], event: str) -> None:
        seen = place.events().count(event)
        process.send_signal(signal.SIGHUP)
        until(lambda: place.events().count(event) > seen)

    def boot(name: str) -> tuple[int, int]:
        size = place.ask("PUT", f"/v1/sandboxes/{name}", b"{}")[1]["boot"]
        return size["vcpus"], size["memoryBytes"] >> 20

    place.configure('[kata]\nconfig_path = "configuration.toml"\n[resmgr]\nhost_cpus = 8\nhost_memory = 8192\n')
    kata.write_text("[hypervisor.qemu]\ndefault_vcpus = 2\ndefault_memory = 128\n")
    with daemon(place) as process:
        assert boot("s1") == (2, 128)
        kata.write_text("[hypervisor.qemu]\ndefault_vcpus = 3\ndefault_memory = 256\n")
        drop_in.write_text("[hypervisor.qemu]\ndefault_memory = -1\n")
        reload(process, "configuration left as it was")
        assert f"{drop_in}:2: [hypervisor.qemu] default_memory = -1" in place.reasons()[-1]
        assert boot("s2") == (2, 128)
        drop_in.write_text("[hypervisor.qemu]\ndefault_memory = 512\n")
        reload(process, "configuration read again")
        assert boot("s3") == (3, 512)
        assert place.ask("GET", "/v1/sandboxes/s1")[1]["boot"]["vcpus"] == 2
        kata.unlink()
        reload(process, "configuration left as it was")
        assert boot("s4") == (3, 512)


def test_a_second_daemon_is_refused_and_the_first_serves_on(place: Place) -> None:
    with daemon(place) as process:
        assert f"another daemon, pid {process.pid}, owns this state" in refused(place)
        assert place.ask("GET", "/healthz")[0] == 200


def test_after_a_kill_the_next_one_takes_the_socket_over(place: Place) -> None:
    with daemon(place) as process:
        process.kill()
        process.wait()
    assert place.socket.exists()
    with daemon(place):
        assert place.ask("GET", "/healthz")[0] == 200


def test_an_inherited_socket(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.socket))
        listener.listen()
        with daemon(place, handing_over(listener), pass_fds=[listener.fileno()]) as process:
            assert place.ask("GET", "/healthz")[0] == 200
            process.terminate()
            assert process.wait(PATIENCE) == 0
    assert place.socket.exists()  # it is not the daemon's to remove
    assert place.records()[0]["inherited"] == 1


def test_an_inherited_descriptor_that_is_of_no_use(place: Place) -> None:
    with (
        socket.socket(socket.AF_UNIX) as idle,
        daemon(place, handing_over(idle), pass_fds=[idle.fileno()]) as process,
    ):
        assert process.wait(PATIENCE) == 1
    assert place.log.read_text() == (
        "kata-resmgr: inherited descriptor 3 is no listening Unix stream socket (ListenStream=)\n"
    )


def test_what_it_cannot_start_with(place: Place) -> None:
    place.configure('socket_group = "no-such-group"\n')
    assert '[daemon] socket_group = "no-such-group": there is no such group' in refused(place)
    place.configure("[resmgr]\nbase = 1\n")
    assert f"kata-resmgr: {place.config}:6: [resmgr] base = 1: must be a string" in refused(place)
    place.config.unlink()
    assert f"kata-resmgr: {place.config}: cannot be read: No such file" in refused(place)
