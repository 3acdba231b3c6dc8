"""Annotations that change the configuration for one sandbox: what is let in, what it may say, and what is told."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kata_resmgr import config
from kata_resmgr.config import Settings
from kata_resmgr.config_annotations import NOTES_LIMIT
from kata_resmgr.host import Host
from kata_resmgr.note import Note
from kata_resmgr.problem import Code, Problem

HYPERVISOR = "io.katacontainers.config.hypervisor."
RUNTIME = "io.katacontainers.config.runtime."
OPEN = "[hypervisor.qemu]\nenable_annotations = ['.*']\ndefault_maxmemory = 4096\n"


def load(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return config.load(file, Host(cpus=8, memory=16384))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("default_vcpus", "2", 2),
        ("default_vcpus", " 2.5\n", Fraction(5, 2)),
        ("default_vcpus", "0.1", Fraction(1, 10)),
        ("default_vcpus", "25e-1", Fraction(5, 2)),
        ("default_vcpus", ".5E+1", 5),
        ("default_vcpus", "+8.", 8),
        ("default_vcpus", "0", 1),  # as 0 in a file
        ("default_vcpus", "-0.0", 1),
        ("default_memory", "2048", 2048),
        ("default_memory", "\t64\r", 64),
        ("default_memory", "0", 2048),
        ("default_memory", "2 GiB", 2048),
        ("default_memory", "2g", 2048),
        ("default_memory", "1GB", 1024),
        ("default_memory", "100m", 100),
        ("default_memory", "100MIb", 100),
        ("default_memory", "65537K", 65),  # rounded up
        ("default_memory", "65535k", 64),
        ("default_memory", "0T", 2048),
        ("memory_slots", "0", 10),
        ("memory_slots", "0256", 256),
        ("enable_virtio_mem", "T", True),
        ("enable_virtio_mem", "FALSE", False),
        ("reclaim_guest_freed_memory", " true ", True),
        ("machine_type", " microvm ", "microvm"),
    ],
)
def test_a_value_counts_as_it_would_in_a_file(tmp_path: Path, name: str, value: str, expected: object) -> None:
    found = load(tmp_path, OPEN).for_sandbox(None, {HYPERVISOR + name: value})
    assert getattr(found, name) == expected
    assert found.notes == ()


@pytest.mark.parametrize(
    ("text", "annotations", "expected"),
    [
        (OPEN, {HYPERVISOR + "default_max_vcpus": "4"}, {"default_maxvcpus": 4}),
        (OPEN, {HYPERVISOR + "default_max_vcpus": "0"}, {"default_maxvcpus": 8}),
        (OPEN + "default_vcpus = 6", {HYPERVISOR + "default_max_vcpus": "4"}, {"default_vcpus": 4}),
        (OPEN, {HYPERVISOR + "default_max_vcpus": "2", HYPERVISOR + "default_vcpus": "3"}, {"default_vcpus": 2}),
        ("[resmgr]\nhost_cpus = 500\n" + OPEN, {HYPERVISOR + "default_max_vcpus": "500"}, {"default_maxvcpus": 240}),
        ("[runtime]\nstatic_sandbox_resource_mgmt = true\n" + OPEN, {HYPERVISOR + "default_memory": "0"},
         {"default_memory": 0}),
        (OPEN, {RUNTIME + "sandbox_cgroup_only": "1"}, {"sandbox_cgroup_only": True}),
        (OPEN, {RUNTIME + "enable_vcpus_pinning": "t"}, {"enable_vcpus_pinning": True}),
        (OPEN, {HYPERVISOR + "kernel": "/nowhere", HYPERVISOR + "enable_iothreads": "perhaps"}, {"notes": ()}),
        (OPEN, {HYPERVISOR + "virtio_fs_whatever": "", RUNTIME + "vfio_mode": "x"}, {"notes": ()}),
        ("", {"io.katacontainers.config.agent.kernel_modules": "x", "io.kubernetes.cri.sandbox-id": "x"},
         {"notes": ()}),
    ],
)  # fmt: skip
def test_effects(tmp_path: Path, text: str, annotations: dict[str, str], expected: dict[str, Any]) -> None:
    found = load(tmp_path, text).for_sandbox(None, annotations)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (HYPERVISOR + "default_vcpus", "9", "a decimal number from 0 to 8"),
        (HYPERVISOR + "default_vcpus", "8.0001", "a decimal number from 0 to 8"),
        (HYPERVISOR + "default_vcpus", "-1", "a decimal number from 0 to 8"),
        (HYPERVISOR + "default_vcpus", "nan", "a decimal number from 0 to 8"),
        (HYPERVISOR + "default_vcpus", "1e999999999", "a decimal number from 0 to 8"),
        (HYPERVISOR + "default_vcpus", "1e-999999999", "more than 1000 decimal places"),
        (HYPERVISOR + "default_vcpus", "1_0", "a decimal number"),
        (HYPERVISOR + "default_vcpus", "0x1", "a decimal number"),
        (HYPERVISOR + "default_vcpus", "\u0661", "a decimal number"),
        (HYPERVISOR + "default_vcpus", "1" * 5000, "a decimal number"),
        (HYPERVISOR + "default_vcpus", "\u00a01", "a decimal number"),
        (HYPERVISOR + "default_vcpus", " ", "a decimal number"),
        (HYPERVISOR + "default_max_vcpus", "9", "a whole number from 0 to 8"),
        (HYPERVISOR + "default_max_vcpus", "-1", "a whole number from 0 to 8"),
        (HYPERVISOR + "default_max_vcpus", "2.0", "a whole number from 0 to 8"),
        (HYPERVISOR + "default_max_vcpus", "9" * 5000, "a whole number from 0 to 8"),
        (HYPERVISOR + "default_memory", "63", "0, or a size from 64 MiB to default_maxmemory, which is 4096 MiB"),
        (HYPERVISOR + "default_memory", "1K", "0, or a size from 64 MiB"),
        (HYPERVISOR + "default_memory", "4097", "default_maxmemory, which is 4096 MiB"),
        (HYPERVISOR + "default_memory", "4194305K", "default_maxmemory, which is 4096 MiB"),
        (HYPERVISOR + "default_memory", "2048r", "in digits"),
        (HYPERVISOR + "default_memory", "100B", "in digits"),
        (HYPERVISOR + "default_memory", "1.5G", "in digits"),
        (HYPERVISOR + "default_memory", "1P", "in digits"),
        (HYPERVISOR + "default_memory", "100000\u212a", "in digits"),
        (HYPERVISOR + "default_memory", "9" * 5000, "in digits"),
        (HYPERVISOR + "default_memory", "-64", "in digits"),
        (HYPERVISOR + "default_memory", "", "in digits"),
        (HYPERVISOR + "memory_slots", "257", "a whole number from 0 to 256"),
        (HYPERVISOR + "memory_slots", "+1", "a whole number from 0 to 256"),
        (HYPERVISOR + "enable_virtio_mem", "yes", "true or false"),
        (HYPERVISOR + "enable_virtio_mem", "tRUE", "true or false"),
        (HYPERVISOR + "reclaim_guest_freed_memory", "", "true or false"),
        (HYPERVISOR + "machine_type", " ", "not blank"),
        (RUNTIME + "sandbox_cgroup_only", "2", "true or false"),
        (RUNTIME + "hypervisor_name", "firecracker", '"qemu" or "clh" or "cloud-hypervisor"'),
    ],
)
def test_what_is_let_in_must_be_right(tmp_path: Path, key: str, value: str, words: str) -> None:
    with pytest.raises(Problem) as refused:
        load(tmp_path, OPEN).for_sandbox(None, {key: value})
    assert refused.value.code is Code.INVALID_ANNOTATION
    assert refused.value.detail.startswith(f'annotation "{key}" = "')
    assert words in refused.value.detail


@pytest.mark.parametrize(
    "key",
    [
        HYPERVISOR + "default_maxmemory",
        HYPERVISOR + "overhead_vcpus",
        HYPERVISOR + "disk_rate_limiter_bw_max_rate",
        HYPERVISOR + "enable_vcpus_pinning",
        HYPERVISOR,
        RUNTIME + "static_sandbox_resource_mgmt",
        RUNTIME + "default_vcpus",
    ],
)
def test_what_is_let_in_must_be_known(tmp_path: Path, key: str) -> None:
    with pytest.raises(Problem) as refused:
        load(tmp_path, OPEN).for_sandbox(None, {key: "1"})
    assert refused.value.code is Code.INVALID_ANNOTATION
    assert refused.value.detail == f'annotation "{key}" is allowed by enable_annotations, but not known: take it out'


@pytest.mark.parametrize(
    ("pattern", "name", "opens"),
    [
        ("default_vcpus", "default_vcpus", True),
        ("default_.*", "default_vcpus", True),
        ("vcpus", "default_vcpus", False),  # Kata would let it in
        ("default_vcpu", "default_vcpus", False),
        ("^default_vcpus$", "default_vcpus", True),
        ("a|default_vcpus", "default_vcpus", True),
        ("", "default_vcpus", False),
    ],
)
def test_a_pattern_matches_the_whole_name(tmp_path: Path, pattern: str, name: str, opens: bool) -> None:
    text = f"[hypervisor.qemu]\nenable_annotations = ['x', '{pattern}']\n"
    found = load(tmp_path, text).for_sandbox(None, {HYPERVISOR + name: "4"})
    assert found.default_vcpus == (4 if opens else 1)
    assert found.notes == (() if opens else (Note("AnnotationIgnored", name, "not allowed by enable_annotations"),))


def test_what_is_not_let_in_is_not_looked_at(tmp_path: Path) -> None:
    plain = load(tmp_path, "").for_sandbox()
    annotations = {HYPERVISOR + "default_vcpus": "many", HYPERVISOR + "no_such": "", RUNTIME + "name": "x"}
    found = load(tmp_path, "").for_sandbox(None, annotations)
    assert [note.reason for note in found.notes] == ["default_vcpus", "no_such", "name"]
    assert dataclasses.replace(found, notes=()) == plain


def test_any_number_of_ignored_ones_is_told_in_few_notes(tmp_path: Path) -> None:
    annotations = {f"{HYPERVISOR}x{number}": "" for number in range(1000)}
    notes = load(tmp_path, "").for_sandbox(None, annotations).notes
    assert len(notes) == NOTES_LIMIT + 1
    assert notes[-1] == Note("AnnotationIgnored", "more", "968 more are not allowed by enable_annotations")


def test_the_origins_tell_of_the_annotation(tmp_path: Path) -> None:
    annotations = {HYPERVISOR + "default_vcpus": "6", HYPERVISOR + "default_max_vcpus": "4"}
    found = load(tmp_path, OPEN).for_sandbox(None, annotations).origins
    assert found["default_maxvcpus"] == HYPERVISOR + "default_max_vcpus"
    assert found["default_vcpus"] == f"cut to default_maxvcpus ({HYPERVISOR}default_vcpus)"
    assert found["default_maxmemory"] == "config.toml:3"


def test_one_sandbox_does_not_change_the_next(tmp_path: Path) -> None:
    settings = load(tmp_path, OPEN)
    assert settings.for_sandbox(None, {HYPERVISOR + "default_vcpus": "4"}).default_vcpus == 4
    assert settings.for_sandbox().default_vcpus == 1


BOTH = """
[hypervisor.qemu]
enable_annotations = ["hypervisor_name"]
[hypervisor.clh]
enable_annotations = ["default_vcpus"]
"""


def test_an_annotation_chooses_the_hypervisor_and_the_chosen_one_lets_in_the_rest(tmp_path: Path) -> None:
    annotations = {RUNTIME + "hypervisor_name": "cloud-hypervisor", HYPERVISOR + "default_vcpus": "4"}
    found = load(tmp_path, BOTH).for_sandbox(None, annotations)
    assert found.default_vcpus == 4
    assert (found.hypervisor, found.origins["hypervisor"]) == ("clh", RUNTIME + "hypervisor_name")
    assert found.notes == ()


def test_the_sandbox_chooses_before_its_annotations(tmp_path: Path) -> None:
    annotations = {RUNTIME + "hypervisor_name": "clh", HYPERVISOR + "default_vcpus": "4"}
    found = load(tmp_path, BOTH).for_sandbox("qemu", annotations)
    assert found.default_vcpus == 1
    assert (found.hypervisor, found.origins["hypervisor"]) == ("qemu", "sandbox")
    assert [note.reason for note in found.notes] == ["default_vcpus"]


def test_a_choice_that_is_not_let_in_is_ignored(tmp_path: Path) -> None:
    found = load(tmp_path, "").for_sandbox(None, {RUNTIME + "hypervisor_name": "clh"})
    assert found.hypervisor == "qemu"
    assert [note.reason for note in found.notes] == ["hypervisor_name"]
