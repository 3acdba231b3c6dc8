"""``check-config`` as people and scripts see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kata_resmgr import cli, config

KATA = Path(__file__).parents[1] / "data" / "kata"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["check-config", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Something of everything."""
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d/10.toml").write_text("[hypervisor.qemu]\noverhead_vcpus = 0.25\n")
    file = tmp_path / "config.toml"
    file.write_text(
        "[hypervisor.qemu]\ndefault_vcpus = 4\ndefault_maxvcpus = 2\nmemory_slot = 3\n"
        "enable_annotations = ['default_.*', 'back\\slash\U0001f600']\n[resmgr]\nhost_cpus = 8\nhost_memory = 16384\n"
    )
    return file


@pytest.mark.parametrize("sample", sorted(KATA.iterdir()), ids=lambda file: file.stem)
def test_katas_own_files(capsys: pytest.CaptureFixture[str], sample: Path) -> None:
    status, out, err = run(capsys, sample)
    assert (status, err) == (0, "")
    assert f"\ndefault_memory = 2048                           # {sample.name}:" in out


def test_what_people_see(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    status, out, err = run(capsys, file)
    assert status == 0
    for line in (
        f"# {file}",
        f"# {file.parent}/config.d/10.toml",
        "[hypervisor.qemu]",
        "default_vcpus = 2                               # cut to default_maxvcpus (config.toml:2)",
        "overhead_vcpus = 0.25                           # config.d/10.toml:2",
        "default_maxmemory = 16384                       # host",
        "# compat is unset                               # default",
        'vm_roots = ["/run/vc", "/run/kata", "/run/kata-resmgr"]  # default',
    ):
        assert line in out.split("\n")
    patterns = "matches the whole of no annotation that Kata has"
    assert err.split("\n") == [
        f"kata-resmgr: warning: {file}:4: [hypervisor.qemu] memory_slot: there is no such key; "
        "did you mean memory_slots?",
        f'kata-resmgr: warning: {file}:5: [hypervisor.qemu] enable_annotations: "back\\slash\U0001f600" {patterns}',
        f"kata-resmgr: warning: {file}:2: [hypervisor.qemu] default_vcpus = 4: above default_maxvcpus, which is 2 "
        "(config.toml:3), and cut to it",
        "",
    ]


def test_what_is_told_is_a_configuration_that_comes_to_the_same(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    _, out, _ = run(capsys, file)
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.toml").write_text(out)
    status, retold, err = run(capsys, again / "config.toml")
    assert status == 0
    assert "cut to" not in err
    assert [line.split("  #")[0] for line in retold.split("\n") if not line.startswith(f"# {tmp_path}")] == [
        line.split("  #")[0] for line in out.split("\n") if not line.startswith(f"# {tmp_path}")
    ]


def test_json(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    status, out, err = run(capsys, file, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["files"] == [str(file), str(file.parent / "config.d/10.toml")]
    assert told["hypervisor"] == "qemu"
    table = told["tables"]["hypervisor.qemu"]
    assert table["default_vcpus"] == {
        "value": 2,
        "origin": "cut to default_maxvcpus (config.toml:2)",
        "file": str(file),
        "line": 2,
    }
    assert table["overhead_vcpus"]["value"] == 0.25
    assert table["overhead_vcpus"]["file"] == str(file.parent / "config.d/10.toml")
    assert table["enable_annotations"]["value"] == ["default_.*", "back\\slash\U0001f600"]
    assert table["default_memory"] == {"value": 2048, "origin": "default"}
    assert told["tables"]["resmgr"]["compat"] == {"value": None, "origin": "default"}
    assert len(told["warnings"]) == 3


def test_without_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "config.toml")
    status, out, _ = run(capsys)
    assert status == 0
    assert out.startswith("# no file: the defaults hold\n")
    (tmp_path / "config.toml").write_text("[resmgr]\nbase = 'max'\n")
    assert f"# {tmp_path}/config.toml\n" in run(capsys)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hypervisor.qemu]\ndefault_memory = -1", "config.toml:2: [hypervisor.qemu] default_memory = -1: must be a"),
        ("[hypervisor.qemu]\ndefault_vcpus = nan", "config.toml:2: [hypervisor.qemu] default_vcpus = nan: must be a"),
        (
            "[hypervisor.qemu]\nenable_annotations = ['(']",
            'config.toml:2: [hypervisor.qemu] enable_annotations = ["("]',
        ),
        (None, "config.toml: cannot be read: "),
    ],
)
def test_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "config.toml"
    file.mkdir() if text is None else file.write_text(text)
    status, out, err = run(capsys, file)
    assert (status, out) == (1, "")
    assert err.startswith(f"kata-resmgr: {tmp_path}/{words}")
    assert err.count("\n") == 1
    status, out, again = run(capsys, file, "--json")
    assert (status, again) == (1, err)
    assert json.loads(out) == {
        "code": "invalid_config",
        "detail": err.removeprefix("kata-resmgr: ").rstrip("\n"),
        "retryable": False,
    }


def test_it_asks_no_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--socket", "/nowhere")
    assert ended.value.code == 2
    assert "unrecognized arguments: --socket" in capsys.readouterr().err
