"""That the fake Cloud Hypervisor answers as the real one was seen to: observed bytes, and answers by its source."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.ch_rig import MIB, RELEASES, config
from tests.fakes.ch_config import Json, VmmError
from tests.fakes.ch_vmm import Vmm
from tests.fakes.cloud_hypervisor import CloudHypervisorServer
from tests.fakes.micro_http import MicroHttp, Raw, Request, Response

KNOWN: list[Json] = json.loads((Path(__file__).parents[1] / "data" / "cloud_hypervisor.json").read_text())["vectors"]


def known(area: str) -> list[Json]:
    return [vector for vector in KNOWN if vector["area"] == area]


# The wire


def stub(request: Request) -> Response | Raw | None:
    """The handler behind the server when its bytes were observed."""
    match request.path:
        case "/204":
            return Response(204)
        case "/200empty":
            return Response(200)
        case "/400empty":
            return Response(400)
        case "/500":
            return Response(500, b'["Error from API"]')
        case "/echo":
            length = -1 if request.body is None else len(request.body)
            return Response(200, f'{{"method":"{request.method}","body_len":{length},"files":0}}'.encode())
    return Response(404, b'["Not Found"]')


@pytest.fixture
def stub_server(short_tmp: Path) -> Iterator[Path]:
    server = MicroHttp(short_tmp / "s", stub, methods=Vmm(54).methods)
    yield short_tmp / "s"
    server.close()


def dial(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect(str(path))
    return connection


@pytest.mark.parametrize(
    "vector",
    [v for v in known("http.wire") if "request" in v["input"] and v["expected"] != "<EOF>"],
    ids=lambda vector: vector["input"]["case"],
)
def test_bytes_are_those_of_the_real_server(stub_server: Path, vector: Json) -> None:
    expected = vector["expected"].encode()
    with dial(stub_server) as connection:
        connection.sendall(vector["input"]["request"].encode())
        received = b""
        while len(received) < len(expected):
            received += connection.recv(65536)
    assert received == expected


def test_the_eleventh_connection_is_turned_away(stub_server: Path) -> None:
    (expected,) = [v["expected"] for v in known("http.wire") if v["input"]["case"].startswith("11th")]
    held = []
    for _ in range(10):
        held.append(dial(stub_server))
        held[-1].sendall(b"PUT /204 HTTP/1.1\r\n\r\n")
        assert held[-1].recv(1024)
    with dial(stub_server) as eleventh:
        received = b""
        while part := eleventh.recv(1024):
            received += part
    for connection in held:
        connection.close()

    assert received.decode() == expected.removesuffix("<EOF>")


# Answers


def vmm_in(state: str, *, resizes_a_disk: bool = False) -> Vmm:
    """A VMM in the state that a vector describes in words."""
    vmm = Vmm(54)
    if "nothing" in state and "created" not in state.split(",")[0].replace("nothing created", ""):
        return vmm
    vm = config(hotplug=1024 * MIB)
    if "max_vcpus 4" in state:
        vm = config(max_vcpus=4)
    if "VirtioMem" in state:
        vm = config(method="VirtioMem", hotplug=0 if "no hotplug_size" in state else 1024 * MIB)
    if "beyond the hotplug area" in state:
        vm = config(hotplug=128 * MIB)
    if "zones" in state:
        vm["memory"] |= {"size": 0, "zones": [{"id": "z", "size": 1024 * MIB}]}
    if "with 4" in state:
        vm = config(vcpus=4)
    if "vsock present" in state:
        vm["vsock"] = {"id": "v", "cid": 3, "socket": "/s"}
    if "id d in config" in state or "d removed" in state or resizes_a_disk:
        vm["disks"] = [{"id": "d", "path": "/x.raw"}]
    if state.startswith("created"):
        _ask(vmm, "PUT vm.create", json.dumps(vm))
        return vmm
    vmm.boot(vm)
    if "removal to 2 pending" in state:
        _ask(vmm, "PUT vm.resize", '{"desired_vcpus":2}')
    if "d removed" in state:
        _ask(vmm, "PUT vm.remove-device", '{"id":"d"}')
    if "after 8" in state:
        for step in range(1, 9):
            _ask(vmm, "PUT vm.resize", json.dumps({"desired_ram": (1024 + 128 * step) * MIB}))
    return vmm


def _ask(vmm: Vmm, call: str, body: str | None) -> Response:
    method, name = call.split()
    answer = vmm.handle(Request(method, f"/api/v1/{name}", None if body is None else body.encode()))
    assert isinstance(answer, Response)
    return answer


def _body(vector: Json) -> str | None:
    """Some vectors say in words what the body is."""
    body: str | None = vector["input"]["body"]
    if body == "<valid>":
        return json.dumps(config())
    if body is None or "..." not in body:
        return None if body is None else body.replace(" >= boot size", str(1152 * MIB))
    state = vector["input"]["state"]
    sizes = {"not a multiple": 1025, "after 8": 2176, "beyond": 1280, "below the current": 512}
    return json.dumps({"desired_ram": next(size for words, size in sizes.items() if words in state) * MIB})


@pytest.mark.parametrize(
    "vector", known("api.semantics"), ids=lambda v: f"{v['input']['call']}, {v['input']['state']}"[:70]
)
def test_answers_are_those_of_the_source(vector: Json) -> None:
    vmm = vmm_in(vector["input"]["state"], resizes_a_disk="513" in (vector["input"]["body"] or ""))
    try:
        answer = _ask(vmm, vector["input"]["call"], _body(vector))
    finally:
        vmm.close()

    expected = vector["expected"]
    assert answer.status == expected["http"]
    if isinstance(expected["body"], list):
        assert json.loads(answer.body) == expected["body"]
    elif expected["body"] and "bdf" in expected["body"]:
        assert json.loads(answer.body)["id"] == "test0"
    else:
        assert answer.body.decode() == (expected["body"] or "")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("vector", known("api.cold_add"), ids=lambda v: f"{v['input']['call']}, {v['input']['state']}")
def test_adding_before_the_boot(vector: Json, release: int) -> None:
    call = vector["input"]["call"]
    if call == "vm.add-generic-vhost-user" and release < 52:
        return  # which does not know it
    vmm = Vmm(release)
    if vector["input"]["state"].startswith("created"):
        _ask(vmm, "PUT vm.create", json.dumps(config()))

    answer = _ask(vmm, f"PUT {call}", '{"id": "x", "path": "/x"}')

    expected = vector["expected"]["http"]
    if isinstance(expected, dict):
        expected = expected[">=v53.0" if release >= 53 else "<=v52.0"]
    assert answer.status == expected


@pytest.mark.parametrize("vector", known("http.status_mapping"), ids=lambda v: v["input"]["vm_error"])
def test_statuses_depend_on_the_release(vector: Json) -> None:
    kind = vector["input"]["vm_error"]
    inner = kind.removesuffix("))").split("(")
    name = inner[1] if len(inner) > 2 or inner[0] == "DeviceManager" else inner[0]
    name = name if name in ("IdentifierNotUnique", "DuplicateDevicePath", "UnknownDeviceId") else inner[0]
    by_release = {release: Vmm(release)._status(name) for release in RELEASES}

    assert by_release[54] == vector["expected"]
    assert by_release[53] == (404 if name == "VmNotCreated" else 500)
    assert {by_release[release] for release in (46, 47, 52)} == {500}


_MODELLED = {"cpus", "disks", "net", "rate_limit_groups", "balloon", "console"}


def _is_modelled(vector: Json) -> bool:
    merge = vector["input"]["merge"]
    if not set(merge) <= _MODELLED | {"memory"} or "topology" in merge.get("cpus", {}):
        return False
    if "memory" in merge and not (set(merge) & {"disks", "net"}):
        return False
    devices = [*merge.get("disks", ()), *merge.get("net", ())]
    return not any(device.get("pci_device_id") == 0 or "fds" in device for device in devices)


@pytest.mark.parametrize(
    "vector",
    [v for v in known("config.validation") if _is_modelled(v)],
    ids=lambda v: json.dumps(v["input"]["merge"])[:70],
)
def test_configurations_are_judged_as_by_the_real_one(vector: Json) -> None:
    vmm = Vmm(54)
    vm = copy.deepcopy(config(vcpus=1, max_vcpus=1, hotplug=0)) | copy.deepcopy(vector["input"]["merge"])
    vm["memory"] = config(hotplug=0)["memory"] | vm["memory"]
    assert _ask(vmm, "PUT vm.create", json.dumps(vm)).status == 204
    answer = _ask(vmm, "PUT vm.boot", None)
    vmm.close()

    if vector["expected"] == "ok":
        assert answer.status == 204, answer.body
    else:
        assert json.loads(answer.body)[-1] == vector["expected"]["message"]


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_not_set_is_null_before_v53(release: int) -> None:
    vmm = Vmm(release)
    limiter = {"ops": {"size": 10, "refill_time": 1000}}
    vmm.boot(config(disks=[{"id": "d", "path": "/x", "rate_limiter_config": limiter}]))
    info = json.loads(_ask(vmm, "GET vm.info", None).body)
    vmm.close()

    disk = info["config"]["disks"][0]
    assert ("serial" in disk) == (release < 53)
    assert disk["rate_limiter_config"] == {
        "bandwidth": None,
        "ops": {"size": 10, "one_time_burst": None, "refill_time": 1000},
    }


def test_a_reboot_below_a_queue_count_ends_the_vmm() -> None:
    vmm = Vmm(54)
    vmm.boot(config(vcpus=4, disks=[{"id": "d", "path": "/x", "num_queues": 4}]))
    assert _ask(vmm, "PUT vm.resize", '{"desired_vcpus": 2}').status == 204
    with pytest.raises(RuntimeError, match=r"Queue count \(4\) must not exceed boot vCPUs \(2\)"):
        vmm.reboot()
    vmm.close()


def test_errors_before_v47_are_plain_text() -> None:
    assert _ask(Vmm(46), "GET vm.info", None).body == b"Error from API: The VM info is not available: VM is not created"
    assert VmmError("x", "a", "b").texts == ("a", "b")


def test_processes_of_their_own(short_tmp: Path) -> None:
    paths = [short_tmp / "a", short_tmp / "b"]
    command = [sys.executable, "-m", "tests.fakes.cloud_hypervisor", *map(str, paths), "--config", json.dumps(config())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        names = [sorted(task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/comm")) for pid in pids]
        process.stdin.close()
        process.wait()

    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert all(each[-2:] == ["vcpu0\n", "vcpu1\n"] for each in names)


def test_a_server_leaves_nothing(short_tmp: Path) -> None:
    def held() -> tuple[int, int]:
        """Descriptors and threads of this process."""
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    before = held()
    with CloudHypervisorServer(short_tmp / "s", config()):
        assert held()[1] == before[1] + 3
    assert held() == before
