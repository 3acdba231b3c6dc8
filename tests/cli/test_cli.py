"""The commands against a server that answers by script, and what they do when there is none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import cli
from kata_resmgr.cli import client

SANDBOX = {
    "id": "s1",
    "hypervisor": "qemu",
    "mode": "dynamic",
    "phase": "running",
    "boot": {"vcpus": 1, "maxVcpus": 8, "memoryBytes": 1 << 31, "maxMemoryBytes": 1 << 34, "memorySlots": 10},
    "vmm": {"args": ["-smp", "1,maxcpus=8", "a b"], "kernelParams": ["memhp_default_state=online_movable"]},
    "vcpus": {"exact": "16/5", "desired": 4, "plugged": 3, "pending": 1},
    "memory": {"desired": 2684354560, "plugged": 2147483649, "pending": 0},
    "satisfied": False,
    "converged": False,
    "surplus": {"vcpus": 0, "memoryBytes": 0, "reason": None},
    "shares": 1024,
    "cpuWeight": 100,
    "conditions": [
        {"type": "Clamped", "reason": "max", "message": "9 vCPUs cut to 8", "since": "2026-01-01T00:00:00Z"}
    ],
    "counts": {"containers": 1},
}
PROBLEM = {"detail": "there is no sandbox x", "code": "not_found", "status": 404}


class Daemon:
    """Answers each connection with ``answer``, and keeps what it was asked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.requests: list[bytes] = []
        self.answer = b""
        self.say(200, SANDBOX)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def say(self, status: int, body: Any = None) -> None:  # noqa: ANN401
        text = b"" if body is None else json.dumps(body).encode()
        self.answer = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nApi-Version: 1\r\n\r\n%s" % (status, len(text), text)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    @property
    def asked(self) -> tuple[str, Any]:
        """The last request: its line, and its body."""
        head, _, body = self.requests[-1].partition(b"\r\n\r\n")
        return head.split(b" HTTP/1.1")[0].decode(), json.loads(body) if body else None

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                request = connection.recv(1 << 20)
                head, _, body = request.partition(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0] or b"0")
                while len(body) < length:
                    body += connection.recv(1 << 20)
                self.requests.append(head + b"\r\n\r\n" + body)
                connection.sendall(self.answer)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rm-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    running = Daemon(str(directory / "api.sock"))
    monkeypatch.setenv("KATA_RESMGR_SOCKET", running.path)
    yield running
    running.stop()


def run(*arguments: str) -> int:
    try:
        return cli.main(list(arguments))
    except SystemExit as ended:  # argparse's way
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("command", "line", "body"),
    [
        ("ps", "GET /v1/sandboxes", None),
        ("show s1", "GET /v1/sandboxes/s1?view=full", None),
        ("show a/b", "GET /v1/sandboxes/a%2Fb?view=full", None),
        ("explain s1", "GET /v1/sandboxes/s1/explain", None),
        ("register s1", "PUT /v1/sandboxes/s1", {}),
        (
            "register s1 --hypervisor qemu --annotation a=b=c --annotation d= --directory /d --cpus 2",
            "PUT /v1/sandboxes/s1",
            {
                "hypervisor": "qemu",
                "directory": "/d",
                "annotations": {"a": "b=c", "d": ""},
                "resources": {"cpu": {"quota": 200000, "period": 100000}},
            },
        ),
        ("attach s1", "PUT /v1/sandboxes/s1/vm", {}),
        ("attach s1 --vm-socket /s --pid 7", "PUT /v1/sandboxes/s1/vm", {"socket": "/s", "pid": 7}),
        ("detach s1", "DELETE /v1/sandboxes/s1/vm", None),
        ("hold s1", "PUT /v1/sandboxes/s1/hold", None),
        ("hold s1 --release", "DELETE /v1/sandboxes/s1/hold", None),
        ("reconcile s1 --wait 5s", "POST /v1/sandboxes/s1/reconcile?wait=5s", None),
        ("create s1 c1", "PUT /v1/sandboxes/s1/containers/c1", {"resources": {}}),
        (
            "create s1 c1 --cpus 1.5 --memory 512M --cpuset 0-3 --shares 512 --wait 1s --deadline 2s",
            "PUT /v1/sandboxes/s1/containers/c1?wait=1s&deadline=2s",
            {
                "resources": {
                    "cpu": {"quota": 150000, "period": 100000, "cpus": "0-3", "shares": 512},
                    "memory": {"limit": 536870912},
                }
            },
        ),
        (
            "update s1 c1 --cpus -1 --memory -1",
            "PATCH /v1/sandboxes/s1/containers/c1",
            {"resources": {"cpu": {"quota": -1}, "memory": {"limit": -1}}},
        ),
        (
            "resize s1 --cpus 2 --memory 1G --wait 3s",
            "PATCH /v1/sandboxes/s1?wait=3s",
            {"resources": {"cpu": {"quota": 200000, "period": 100000}, "memory": {"limit": 1 << 30}}},
        ),
        ("delete s1 c1 --wait 5&", "DELETE /v1/sandboxes/s1/containers/c1?wait=5%26", None),
        ("delete s1", "DELETE /v1/sandboxes/s1", None),
        ("disk remove s1 d1 --wait 5s", "DELETE /v1/sandboxes/s1/disks/d1?wait=5s", None),
        ("net remove s1 n1", "DELETE /v1/sandboxes/s1/nets/n1", None),
        (
            "limits s1 d1 --ops-per-second 100 --burst-ops 5 --replace --deadline 3s",
            "PUT /v1/sandboxes/s1/disks/d1/limits?deadline=3s",
            {"opsPerSecond": 100, "burstOps": 5, "replace": True},
        ),
        ("limits s1 n1 --net", "PUT /v1/sandboxes/s1/nets/n1/limits", {}),
    ],
)
def test_what_each_command_asks(daemon: Daemon, command: str, line: str, body: Any) -> None:  # noqa: ANN401
    assert run(*command.split(), "--json") == 0
    assert daemon.asked == (line, body)


@pytest.mark.parametrize(
    ("text", "quota", "period"),
    [
        ("1", 100000, 100000),
        ("0.1", 10000, 100000),
        ("1.25", 125000, 100000),
        ("0.001", 100, 100000),
        ("0.123456", 11574, 93750),
        ("0.000001", 1, 1000000),
        ("0.3", 30000, 100000),
    ],
)
def test_cpus_are_exact(daemon: Daemon, text: str, quota: int, period: int) -> None:
    assert run("create", "s1", "c1", "--cpus", text, "--json") == 0
    assert daemon.asked[1] == {"resources": {"cpu": {"quota": quota, "period": period}}}


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("64m", 64 << 20), ("2GiB", 2 << 30), ("3kb", 3072), ("1T", 1 << 40), ("0", 0)]
)
def test_sizes(daemon: Daemon, text: str, size: int) -> None:
    assert run("create", "s1", "c1", "--memory", text, "--json") == 0
    assert daemon.asked[1] == {"resources": {"memory": {"limit": size}}}


@pytest.mark.parametrize(
    "command",
    [
        "",
        "no-such-command",
        "show",
        "create s1",
        "create s1 c1 --cpus x",
        "create s1 c1 --cpus 0",
        "create s1 c1 --cpus 1e3",
        "create s1 c1 --cpus 0.0000001",
        "create s1 c1 --memory 1.5G",
        "create s1 c1 --memory 1X",
        "create s1 c1 --shares x",
        "create s1 c1 --bundle /b --cpus 1",
        "create s1 c1 --bundle /does/not/exist",
        "register s1 --annotation novalue",
        "delete s1 --wait 5s",
        "attach s1 --pid x",
    ],
)
def test_wrong_usage(daemon: Daemon, capfd: pytest.CaptureFixture[str], command: str) -> None:
    assert run(*command.split()) == 2
    assert daemon.requests == []
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err


def test_a_bundle(daemon: Daemon, directory: Path) -> None:
    resources = {"cpu": {"quota": 5, "x": 1.5}, "memory": {"limit": 7}}
    (directory / "config.json").write_text(json.dumps({"linux": {"resources": resources}}))
    assert run("create", "s1", "c1", "--bundle", str(directory), "--json") == 0
    assert daemon.asked[1] == {"resources": resources}


@pytest.mark.parametrize("text", ["", "[]", "no", '{"linux": 1}', '{"linux": {"resources": []}}x', "[" * 100_000])
def test_a_broken_bundle(daemon: Daemon, directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    assert run("create", "s1", "c1", "--bundle", str(directory)) == 2
    assert daemon.requests == []


def test_show_tells_what_there_is(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("show", "s1") == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0] == "s1: qemu, dynamic, running"
    for text in ("4 desired (exactly 16/5), 3 plugged", "2147483649 bytes", "9 vCPUs cut to 8"):
        assert text in out


def test_a_change_tells_the_size(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.say(202, {"container": {}, "sandbox": SANDBOX})
    assert run("update", "s1", "c1", "--cpus", "2") == 0
    told = "s1: 3 of 4 vCPUs and 2147483649 bytes of 2560 MiB, not reached yet\n"
    assert capfd.readouterr().out == told


def test_register_tells_how_to_start_the_vm(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.say(201, SANDBOX)
    assert run("register", "s1") == 0
    out = capfd.readouterr().out
    assert "s1: boot with 1 of at most 8 vCPUs and 2048 MiB of at most 16384 MiB\n" in out
    assert "arguments: -smp 1,maxcpus=8 'a b'\n" in out


def test_register_tells_cloud_hypervisors_configuration(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    limiter = {"ops": {"size": 100, "refill_time": 1000}}
    vmm = {"config": {"cpus": {"boot_vcpus": 1, "max_vcpus": 8}}, "limiters": {"disk": limiter}}
    daemon.say(201, {**SANDBOX, "hypervisor": "clh", "vmm": vmm})
    assert run("register", "s1", "--hypervisor", "clh") == 0
    out = capfd.readouterr().out
    assert 'VmConfig: {"cpus": {"boot_vcpus": 1, "max_vcpus": 8}}\n' in out
    assert 'rate_limiter_config of each disk: {"ops": {"size": 100, "refill_time": 1000}}\n' in out


def test_explain_tells_inputs_and_steps(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.say(200, {"inputs": [{"name": "d", "value": "1", "source": "config.toml:3"}], "explain": ["1 + 1 = 2"]})
    assert run("explain", "s1") == 0
    assert capfd.readouterr().out == "d = 1 (config.toml:3)\n1 + 1 = 2\n"


def test_ps_draws_a_table(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    long = {**SANDBOX, "id": "x" * 128}
    daemon.say(200, {"sandboxes": [SANDBOX, long]})
    assert run("ps") == 0
    header, first, second = capfd.readouterr().out.splitlines()
    assert header.split()[:3] == ["SANDBOX", "PHASE", "MODE"]
    assert first.split() == ["s1", "running", "dynamic", "3", "4", "2147483649", "bytes", "2560", "MiB", "1", "no"]
    assert second.startswith("x" * 128 + " ")


def test_json_is_what_the_daemon_said(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("show", "s1", "--json") == 0
    assert json.loads(capfd.readouterr().out) == SANDBOX


def test_a_refusal_is_one_line(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.say(404, PROBLEM)
    assert run("show", "x") == 1
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "kata-resmgr: there is no sandbox x (not_found)\n")
    assert run("show", "x", "--json") == 1
    captured = capfd.readouterr()
    assert json.loads(captured.out) == PROBLEM
    assert captured.err == "kata-resmgr: there is no sandbox x (not_found)\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "not the daemon"),
        (b"SSH-2.0-x\r\n\r\n", "not the daemon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "not the daemon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}", "ended within the answer"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\nno", "status 500 and no reason"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n[]", "status 500 and no reason"),
    ],
)
def test_a_server_that_is_something_else(
    daemon: Daemon, capfd: pytest.CaptureFixture[str], answer: bytes, words: str
) -> None:
    daemon.answer = answer
    assert run("show", "s1") == 1
    err = capfd.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_no_daemon(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(directory / "api.sock")
    assert run("--socket", path, "show", "s1") == 1
    hint = f"no daemon serves {path}: start it (systemctl start kata-resmgr, or kata-resmgr serve), or say --socket"
    assert capfd.readouterr().err == f"kata-resmgr: {hint}\n"
    assert run("show", "s1", "--json", "--socket", path) == 1
    problem = json.loads(capfd.readouterr().out)
    assert problem == {"code": "daemon_unreachable", "detail": hint, "retryable": True}


def test_a_daemon_that_says_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "api.sock"))
        silent.listen()
        with pytest.raises(client.Unreachable, match=r"no answer from .* within 0\.1 s"):
            client.call(str(directory / "api.sock"), "GET", "/version")


PROGRAM = [sys.executable, "-c", "import sys; from kata_resmgr.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("command", ["show s1", "update s1 c1 --cpus 2", "delete s1 c1"])
def test_hot_commands_import_little(daemon: Daemon, command: str) -> None:
    daemon.say(200, {"container": {}, "sandbox": SANDBOX} if command.startswith("update") else SANDBOX)
    check = (
        "import sys; from kata_resmgr.cli import main; status = main(); "
        "print(sorted({'asyncio', 'httptools', 'msgspec', 'rich', 'structlog', 'typing', 'shutil', 'pathlib'}"
        " & set(sys.modules))); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", check, *command.split()], capture_output=True, timeout=30, check=True)
    assert done.stdout.decode().splitlines()[-1] == "[]"


def test_a_closed_pipe_ends_quietly(daemon: Daemon) -> None:
    daemon.say(200, {"inputs": [], "explain": ["x" * 100] * 10_000})
    process = subprocess.Popen([*PROGRAM, "explain", "s1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) == 0


def test_an_output_that_cannot_be_written(daemon: Daemon) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*PROGRAM, "show", "s1"], stdout=full, stderr=subprocess.PIPE, timeout=30, check=False)
    assert done.returncode == 1
    assert b"kata-resmgr: the output cannot be written: No space left" in done.stderr


def test_ctrl_c_ends_quietly(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "api.sock"))
        silent.listen()
        silent.settimeout(30)
        process = subprocess.Popen(
            [*PROGRAM, "show", "s1"],
            stderr=subprocess.PIPE,
            env=os.environ | {"KATA_RESMGR_SOCKET": str(directory / "api.sock")},
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.read() == b""
            process.stderr.close()
            assert process.wait(30) == 130
