"""Records on a pipe: one bounded line each, whatever is in them and whoever reads."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from kata_resmgr import logs

Reader = Callable[[], list[str]]


@pytest.fixture
def pipe() -> Iterator[tuple[int, Reader]]:
    """A descriptor to log to, and what reads the lines that were logged."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    def lines() -> list[str]:
        try:
            return os.read(read, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return []

    before = logging.getLogger().handlers[:], logging.getLogger().level, logging.raiseExceptions
    try:
        yield write, lines
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers[:], level, logging.raiseExceptions = before
        logging.getLogger().setLevel(level)
        os.close(read)
        os.close(write)


def fresh() -> Any:  # noqa: ANN401
    return structlog.get_logger()


def test_json_is_one_object_a_line(pipe: tuple[int, Reader]) -> None:
    logs.configure("info", "json", pipe[0])
    fresh().info("change", path="/a\nb", uid=0, ms=1.5, none=None)
    (line,) = pipe[1]()
    record = json.loads(line)
    assert list(record) == ["time", "level", "event", "path", "uid", "ms", "none"]
    assert record | {"time": ""} == {
        "time": "", "level": "info", "event": "change", "path": "/a\nb", "uid": 0, "ms": 1.5, "none": None,
    }  # fmt: skip
    assert record["time"].endswith("+00:00")


@pytest.mark.parametrize("form", ["json", "console"])
def test_lines_are_bounded(pipe: tuple[int, Reader], form: str) -> None:
    logs.configure("info", form, pipe[0])
    fresh().info("x" * 5000, **{f"name{n}": "y" * 5000 for n in range(20)}, listed=["z" * 5000])
    (line,) = pipe[1]()
    assert len(line) <= logs.LINE_LIMIT
    assert "xxx" in line
    assert form == "console" or json.loads(line)["cut"] > logs.LINE_LIMIT


@pytest.mark.parametrize(("level", "told"), [("debug", "dive"), ("info", "ive"), ("warning", "ve"), ("error", "e")])
def test_levels(pipe: tuple[int, Reader], level: str, told: str) -> None:
    logs.configure(level, "json", pipe[0])
    log = fresh()
    log.debug("d")
    log.info("i")
    log.warning("v")
    log.error("e")
    assert [json.loads(line)["event"] for line in pipe[1]()] == list(told)


def test_a_traceback_is_told_whole(pipe: tuple[int, Reader]) -> None:
    logs.configure("info", "json", pipe[0])
    try:
        raise ValueError("broken")
    except ValueError as error:
        fresh().exception("defect")
        fresh().error("again", exc_info=error)
    for line in pipe[1]():
        assert json.loads(line)["traceback"].endswith("ValueError: broken\n")


def test_the_records_of_libraries_come_the_same_way(pipe: tuple[int, Reader]) -> None:
    logs.configure("info", "json", pipe[0])
    logging.getLogger("qemu.qmp").error("bad %s", "request")
    logging.getLogger("qemu.qmp").info("not told")
    (line,) = pipe[1]()
    record = json.loads(line)
    assert (record["level"], record["event"], record["logger"]) == ("error", "bad request", "qemu.qmp")


def test_console_lines_read_well_and_control_characters_do_not_reach_the_terminal(pipe: tuple[int, Reader]) -> None:
    logs.configure("info", "console", pipe[0])
    fresh().warning("hot \x1b[31m", path="/a\x1b[31m", n=1)
    (line,) = pipe[1]()
    assert "\x1b" not in line
    assert line[13:].startswith("warning  hot ?[31m")
    assert line.endswith('path="/a\\u001b[31m" n=1')


def test_auto_is_json_where_no_terminal_is(pipe: tuple[int, Reader]) -> None:
    logs.configure("info", "auto", pipe[0])
    fresh().info("x")
    assert pipe[1]()[0].startswith("{")


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_journal_is_told_each_priority(
    pipe: tuple[int, Reader], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    status = os.fstat(pipe[0])
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    logs.configure("debug", form, pipe[0])
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(fresh(), level)("told")
    logging.getLogger("library").error("told")
    assert [line[:3] for line in pipe[1]()] == ["<7>", "<6>", "<4>", "<3>", "<2>", "<3>"]
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    logs.configure("info", form, pipe[0])
    fresh().info("told")
    assert not pipe[1]()[0].startswith("<")


def test_a_reader_that_has_gone_disturbs_nobody() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        logs.configure("info", "json", write)
        fresh().info("x")
    finally:
        structlog.reset_defaults()
        os.close(write)


def test_a_fault_that_repeats_itself_is_summed_up_and_what_is_done_is_not(pipe: tuple[int, Reader]) -> None:
    now = 0.0
    logs.configure("info", "json", pipe[0])
    sifted = logs._Sifted(logs._as_json, lambda: now)
    structlog.configure(processors=[sifted, *structlog.get_config()["processors"][1:]])
    log = fresh().bind(sandbox="s1")
    for _ in range(100):
        log.info("change", container="c1", code="hypervisor_refused")
        log.info("change", container="c1", code=None)
        log.warning("unreachable", reason="gone")
    log.bind(sandbox="s2").warning("unreachable", reason="gone")
    records = [json.loads(line) for line in pipe[1]()]
    assert sum(record.get("code") is None and record["event"] == "change" for record in records) == 100
    assert sum(record.get("code") == "hypervisor_refused" for record in records) == 5
    assert sum(record["event"] == "unreachable" for record in records) == 5 + 1
    now = 61.0
    fresh().info("serving")
    summaries = [{**json.loads(line), "time": ""} for line in pipe[1]()]
    assert summaries == [
        {"time": "", "level": "info", "event": "repeated", "of": "change", "sandbox": "s1", "container": "c1",
         "code": "hypervisor_refused", "times": 95, "seconds": 60},
        {"time": "", "level": "warning", "event": "repeated", "of": "unreachable", "sandbox": "s1", "times": 95,
         "seconds": 60},
        {"time": "", "level": "info", "event": "serving"},
    ]  # fmt: skip
