"""``kata-resmgr weight``: what it tells, what it refuses, and that it starts fast."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kata_resmgr import cli


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("1024", {"shares": 1024, "milliCpu": None, "cpuWeight": 100, "formula": "quadratic"}),
        ("102 --from shares", {"shares": 102, "milliCpu": None, "cpuWeight": 17, "formula": "quadratic"}),
        ("1024 --formula linear", {"shares": 1024, "milliCpu": None, "cpuWeight": 39, "formula": "linear"}),
        ("0", {"shares": 0, "milliCpu": None, "cpuWeight": None, "formula": "quadratic"}),
        ("100 --from millicpu", {"shares": 102, "milliCpu": 100, "cpuWeight": 17, "formula": "quadratic"}),
        ("0 --from millicpu", {"shares": 2, "milliCpu": 0, "cpuWeight": 1, "formula": "quadratic"}),
        (
            "17 --from weight",
            {
                "cpuWeight": 17,
                "shares": {"min": 95, "max": 102},
                "milliCpu": {"min": 93, "max": 100},
                "formula": "quadratic",
            },
        ),
        (
            "10000 --from weight --formula linear",
            {
                "cpuWeight": 10000,
                "shares": {"min": 262144, "max": None},
                "milliCpu": {"min": 256000, "max": None},
                "formula": "linear",
            },
        ),
    ],
)
def test_json(capfd: pytest.CaptureFixture[str], command: str, answer: dict[str, Any]) -> None:
    assert cli.main(["weight", "--json", *command.split()]) == 0
    assert json.loads(capfd.readouterr().out) == answer


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("1024", "1024 shares: weight 100 (quadratic)"),
        ("0", "0 shares: no weight: 0 is unset (quadratic)"),
        ("1500 --from millicpu --formula linear", "1500m CPU, 1536 shares: weight 59 (linear)"),
        ("17 --from weight", "weight 17: 95..102 shares, 93m..100m CPU (quadratic)"),
        ("10000 --from weight", "weight 10000: 262115 and more shares, 255972m and more CPU (quadratic)"),
    ],
)
def test_in_words(capfd: pytest.CaptureFixture[str], command: str, line: str) -> None:
    assert cli.main(["weight", *command.split()]) == 0
    assert capfd.readouterr().out == line + "\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("-5", "'-5': CPU shares must be a whole number from 0 to 18446744073709551615"),
        ("1.5", "'1.5': CPU shares must be a whole number"),
        ("18446744073709551616", "'18446744073709551616': CPU shares must be"),
        ("-1 --from millicpu", "'-1': milliCPU must be a whole number from 0 to 9223372036854775807"),
        ("0 --from weight", "'0': a CPU weight must be a whole number from 1 to 10000"),
        ("10001 --from weight", "'10001': a CPU weight must be a whole number from 1 to 10000"),
        ("5 --from cpus", "invalid choice: 'cpus'"),
        ("5 --formula cubic", "invalid choice: 'cubic'"),
        ("", "required: VALUE"),
    ],
)
def test_wrong_usage(capfd: pytest.CaptureFixture[str], command: str, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["weight", "--json", *command.split()])
    assert ended.value.code == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert words in captured.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["1024", "17 --from weight --json"])
def test_it_imports_little(command: str) -> None:
    check = (
        "import sys; from kata_resmgr.cli import main; status = main(); "
        "print(sorted({'asyncio', 'httptools', 'msgspec', 'rich', 'typing', 'dataclasses', 'socket', 'pathlib'}"
        " & set(sys.modules))); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, "weight", *command.split()], capture_output=True, timeout=30, check=True
    )
    assert done.stdout.decode().splitlines()[-1] == "[]"
