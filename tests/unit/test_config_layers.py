"""Files laid over each other: Kata's, its drop-ins, the own one, its drop-ins."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kata_resmgr import config
from kata_resmgr.config import ConfigError, SandboxConfig
from kata_resmgr.host import Host

DATA = Path(__file__).parents[1] / "data" / "kata"
HOST = Host(cpus=8, memory=16384)


def write(directory: Path, **files: str) -> None:
    """``own``, ``kata``, and ``own_10`` for a drop-in of the first."""
    for name, text in files.items():
        home, _, drop_in = name.partition("_")
        path = directory / home / (f"config.d/{drop_in}.toml" if drop_in else f"{home}.toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def load(directory: Path) -> SandboxConfig:
    return config.load(directory / "own/own.toml", HOST).for_sandbox()


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        config.load(directory / "own/own.toml", HOST)
    message = str(refused.value)
    assert "\n" not in message
    return message


NAMES_KATA = '[kata]\nconfig_path = "../kata/kata.toml"\n'


def test_the_own_file_lies_over_katas_key_by_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        kata="[hypervisor.qemu]\ndefault_vcpus = 2\ndefault_memory = 512\nenable_annotations = ['a', 'b']\n"
        "[runtime]\nstatic_sandbox_resource_mgmt = true\n",
        own=NAMES_KATA + "[hypervisor.qemu]\ndefault_vcpus = 3\nenable_annotations = ['c']\n"
        "[resmgr]\nstatic_sandbox_resource_mgmt = false\n",
    )
    found = load(tmp_path)
    assert found.default_vcpus == 3
    assert found.origins["default_vcpus"] == "own.toml:4"
    assert (found.default_memory, found.origins["default_memory"]) == (512, "kata.toml:3")
    assert found.enable_annotations == ("c",)
    assert (found.static, found.origins["static"]) == (False, "own.toml:7")


def test_each_file_has_its_drop_ins(tmp_path: Path) -> None:
    write(
        tmp_path,
        kata="[hypervisor.qemu]\ndefault_vcpus = 1\ndefault_memory = 100\nmemory_slots = 1\noverhead_memory = 1\n",
        kata_10="[hypervisor.qemu]\ndefault_vcpus = 2\ndefault_memory = 200\nmemory_slots = 2\n",
        own=NAMES_KATA + "[hypervisor.qemu]\ndefault_vcpus = 3\ndefault_memory = 300\n",
        own_10="[hypervisor.qemu]\ndefault_vcpus = 4\n",
    )
    found = load(tmp_path)
    assert found.default_vcpus == 4
    assert found.origins["default_vcpus"] == "config.d/10.toml:2"
    assert (found.default_memory, found.origins["default_memory"]) == (300, "own.toml:5")
    assert (found.memory_slots, found.origins["memory_slots"]) == (2, "config.d/10.toml:4")
    assert (found.overhead_memory, found.origins["overhead_memory"]) == (1, "kata.toml:5")


def test_the_files_that_were_read_are_told(tmp_path: Path) -> None:
    write(tmp_path, kata="", kata_10="", own=NAMES_KATA, own_10="")
    files = config.load(tmp_path / "own/own.toml", HOST).layers.files
    assert [str(file.resolve().relative_to(tmp_path.resolve())) for file in files] == [
        "kata/kata.toml",
        "kata/config.d/10.toml",
        "own/own.toml",
        "own/config.d/10.toml",
    ]


def test_drop_ins_count_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    ordered = ["10", "9", "B", "a", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{FULLWIDTH LATIN SMALL LETTER A}"]
    write(tmp_path, own="", **{f"own_{name}": f"[daemon]\nsocket_group = '{name}'\n" for name in ordered})
    while ordered:
        last = ordered.pop()
        assert config.load(tmp_path / "own/own.toml", HOST).daemon.socket_group == last
        (tmp_path / f"own/config.d/{last}.toml").unlink()


def test_other_names_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, own="")
    drop_ins = tmp_path / "own/config.d"
    (drop_ins / "more.toml.d").mkdir(parents=True)
    for name in ("10-base", "10.conf", "10.toml~", "10.TOML", ".10.toml", ".toml", "README"):
        (drop_ins / name).write_text("this is not TOML")
    (drop_ins / ".#10.toml").symlink_to("nowhere")
    assert load(tmp_path).default_vcpus == 1


def test_symlinks_are_followed(tmp_path: Path) -> None:
    write(tmp_path, own="")
    (tmp_path / "elsewhere").write_text("[hypervisor.qemu]\ndefault_vcpus = 5\n")
    (tmp_path / "own/config.d").mkdir()
    (tmp_path / "own/config.d/10.toml").symlink_to(tmp_path / "elsewhere")
    found = load(tmp_path)
    assert found.default_vcpus == 5
    assert found.origins["default_vcpus"] == "config.d/10.toml:2"


def test_a_files_directory_is_that_of_the_file_not_of_a_link_to_it(tmp_path: Path) -> None:
    write(tmp_path, kata="", kata_10="[hypervisor.qemu]\ndefault_vcpus = 5\n", own=NAMES_KATA)
    (tmp_path / "links").mkdir()
    (tmp_path / "links/config.toml").symlink_to(tmp_path / "own/own.toml")
    assert config.load(tmp_path / "links/config.toml", HOST).for_sandbox().default_vcpus == 5


@pytest.mark.parametrize("absolute", [False, True])
def test_a_drop_in_can_name_katas_file(tmp_path: Path, absolute: bool) -> None:
    """A relative path counts from the file that names it."""
    path = tmp_path / "kata/kata.toml" if absolute else "../../kata/kata.toml"
    write(tmp_path, own="", own_10=f'[kata]\nconfig_path = "{path}"\n', kata="[hypervisor.qemu]\ndefault_vcpus = 5\n")
    assert load(tmp_path).default_vcpus == 5


def test_both_names_of_cloud_hypervisor_mean_one_table(tmp_path: Path) -> None:
    write(
        tmp_path,
        kata="[hypervisor.clh]\ndefault_vcpus = 2\nmemory_slots = 2\n",
        own=NAMES_KATA + "[hypervisor.cloud-hypervisor]\ndefault_vcpus = 3\n",
    )
    found = load(tmp_path)
    assert found.default_vcpus == 3
    assert (found.hypervisor, found.memory_slots) == ("clh", 2)


def test_a_layer_may_change_a_type(tmp_path: Path) -> None:
    write(tmp_path, kata="resmgr = 1\n[hypervisor.qemu]\ndefault_vcpus = 'x'\n", own=NAMES_KATA, own_10="")
    assert "resmgr = 1: must be a table" in refusal(tmp_path)
    write(tmp_path, own_10="[resmgr]\nbase = 'max'\n[hypervisor.qemu]\ndefault_vcpus = 2\n")
    assert load(tmp_path).default_vcpus == 2


@pytest.mark.parametrize(
    ("files", "place", "words"),
    [
        ({"own": NAMES_KATA}, "own/own.toml:2: [kata] config_path", "kata/kata.toml: cannot be read: No such file"),
        ({"own": NAMES_KATA, "kata": "["}, "own/own.toml:2: [kata] config_path", "kata/kata.toml: is not TOML"),
        ({"own": NAMES_KATA, "kata": NAMES_KATA}, "kata/kata.toml:1: [kata]", "take it out"),
        ({"own": NAMES_KATA, "kata": "", "kata_10": NAMES_KATA}, "config.d/10.toml:1: [kata]", "take it out"),
        ({"own": '[kata]\nconfig_path = "own.toml"'}, "own/own.toml:1: [kata]", "take it out"),
        ({"own": "", "own_10": "["}, "own/config.d/10.toml", "is not TOML"),
        ({"own": "", "own_10": "[resmgr]\nbas = 1"}, "own/config.d/10.toml:2", "the nearest is base"),
        ({"own": "", "own_10": "[resmg]"}, "own/config.d/10.toml:1", "the nearest is resmgr"),
        ({"own": NAMES_KATA, "kata": "[resmg]"}, "kata/kata.toml:1", "the nearest is resmgr"),
        ({"own": NAMES_KATA, "kata": "[hypervisor.qemu]\ndefault_memory = 63"}, "kata/kata.toml:2", "at least 64 MiB"),
        ({"own": "", "own_10": "[hypervisor.clh]\n[hypervisor.cloud-hypervisor]"}, "config.d/10.toml:2", "the same"),
    ],
)
def test_refused(tmp_path: Path, files: dict[str, str], place: str, words: str) -> None:
    write(tmp_path, **files)
    message = refusal(tmp_path)
    assert place in message.partition(": must")[0]
    assert words in message


def test_drop_ins_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, own="")
    drop_ins = tmp_path / "own/config.d"
    (drop_ins / "10.toml").mkdir(parents=True)
    assert "own/config.d/10.toml: cannot be read: " in refusal(tmp_path)
    (drop_ins / "10.toml").rmdir()
    (drop_ins / "10.toml").symlink_to("nowhere")
    assert "own/config.d/10.toml: cannot be read: No such file" in refusal(tmp_path)
    (drop_ins / "10.toml").unlink()
    drop_ins.rmdir()
    drop_ins.write_text("")
    assert "own/config.d: cannot be read: Not a directory" in refusal(tmp_path)


@pytest.mark.parametrize("through_config_path", [False, True])
@pytest.mark.parametrize(
    ("name", "hypervisor", "static", "overhead"),
    [
        ("configuration-qemu.toml", "qemu", False, 0),
        ("configuration-qemu-runtime-rs.toml", "qemu", True, 32),
        ("configuration-clh.toml", "clh", False, 0),
        ("configuration-clh-runtime-rs.toml", "clh", True, 32),
    ],
)
def test_katas_files_as_they_are_shipped(
    tmp_path: Path, name: str, hypervisor: str, static: bool, overhead: int, through_config_path: bool
) -> None:
    file = DATA / name
    if through_config_path:
        write(tmp_path, own=f'[kata]\nconfig_path = "{file}"\n')
        file = tmp_path / "own/own.toml"
    found = config.load(file, HOST).for_sandbox()
    assert (found.hypervisor, found.static, found.sandbox_cgroup_only) == (hypervisor, static, static)
    assert found.default_vcpus == 1
    assert found.default_maxvcpus == 8
    assert (found.default_memory, found.default_maxmemory, found.memory_slots) == (2048, 16384, 10)
    assert found.overhead_vcpus == (Fraction(1, 5) if overhead else 0)
    assert found.overhead_memory == overhead
    assert ("default_vcpus" in found.enable_annotations) == static
    assert found.origins["default_vcpus"].startswith(f"{name}:")
    assert not any((found.enable_virtio_mem, found.reclaim_guest_freed_memory, found.enable_vcpus_pinning))
    assert set(found.rate_limits.values()) == {0}
