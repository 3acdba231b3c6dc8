"""Logging to stderr: one line for each record, as JSON unless a person reads it.

What callers and guests say ends up in records, so a line is bounded, cannot be broken by what is in it, and a reader
that has gone away never disturbs the daemon. A fault that goes on for hours is told a few times, and then how often.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
import structlog

from kata_resmgr.repeats import Repeats

LINE_LIMIT = 8192
"""Bytes of a JSON record; characters of a console line."""
_TEXT_LIMIT = 1024
_TRACEBACK_LIMIT = 6144

_PRIORITY = {
    "debug": b"<7>",
    "info": b"<6>",
    "warning": b"<4>",
    "error": b"<3>",
    "exception": b"<3>",
    "critical": b"<2>",
}

Record: TypeAlias = MutableMapping[str, Any]
Writer: TypeAlias = Callable[[object, str, Record], bytes]

_encode = msgspec.json.Encoder(enc_hook=repr).encode


def configure(level: str, form: str, stream: int = 2) -> None:
    """Log records from *level* on to the file descriptor *stream*; *form* is ``json``, ``console`` or ``auto``.

    The records of libraries that use :mod:`logging` come the same way, from warnings on.
    """
    threshold = getattr(logging, level.upper())
    console = form == "console" or (form == "auto" and os.isatty(stream))
    written: Writer = _as_text if console else _as_json
    if _is_journal(stream):
        written = _with_priority(written)
    structlog.configure(
        processors=[_Sifted(written), _complete, _bounded, written],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: _Stream(stream),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_FromLibraries()], level=max(threshold, logging.WARNING), force=True)
    logging.raiseExceptions = False


class _Stream:
    """Writes lines to a descriptor; what cannot be written is lost."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, line: bytes) -> None:
        with suppress(OSError):
            os.write(self._descriptor, line)

    debug = info = warning = error = critical = exception = write


class _FromLibraries(logging.Handler):
    """Passes the records of :mod:`logging` on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )


class _Sifted:
    """Lets a record that repeats itself through only now and then; *written* is how the others are summed up.

    What is done is always told: changes that went well, and all of ``debug``.
    """

    def __init__(self, written: Writer, clock: Callable[[], float] = time.monotonic) -> None:
        self._written = written
        self._clock = clock
        self._repeats: Repeats[tuple[str, ...]] = Repeats()

    def __call__(self, stream: Any, level: str, record: Record) -> Record:  # noqa: ANN401 - structlog says no more
        if level == "debug" or (record.get("event") == "change" and record.get("code") is None):
            return record
        now = self._clock()
        for (kind, event, *told), times, seconds in self._repeats.over(now):
            named = {name: value for name, value in zip(_NAMES, told, strict=True) if value}
            summary: Record = {"event": "repeated", "of": event, **named, "times": times, "seconds": round(seconds)}
            stream.write(self._written(stream, kind, _bounded(stream, kind, _complete(stream, kind, summary))))
        kind = "error" if level == "exception" else level
        if not self._repeats.hears((kind, str(record["event"]), *(str(record.get(n) or "") for n in _NAMES)), now):
            raise structlog.DropEvent
        return record


_NAMES = ("sandbox", "container", "code")
"""Members by which records of one event are told apart."""


def _complete(_: object, level: str, record: Record) -> Record:
    """Time, level and event first; a traceback last, and as text."""
    error = record.pop("exc_info", None)
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    told: Record = {"time": moment, "level": level, "event": record.pop("event"), **record}
    if error:
        kind = error if isinstance(error, tuple) else None
        lines = traceback.format_exception(*kind) if kind else _lines(error)
        told["traceback"] = "".join(lines)[-_TRACEBACK_LIMIT:]
    return told


def _lines(error: object) -> list[str]:
    if isinstance(error, BaseException):
        return traceback.format_exception(error)
    return [traceback.format_exc()]


def _bounded(_: object, __: str, record: Record) -> Record:
    for name, value in record.items():
        if isinstance(value, str) and len(value) > _TEXT_LIMIT and name != "traceback":
            record[name] = value[: _TEXT_LIMIT - 1] + "…"
    return record


def _as_json(_: object, __: str, record: Record) -> bytes:
    line = _encode(record)
    if len(line) >= LINE_LIMIT:
        line = _encode({name: record[name] for name in ("time", "level", "event")} | {"cut": len(line)})
    return line + b"\n"


def _as_text(_: object, __: str, record: Record) -> bytes:
    """``12:34:56.789 info     event  name=value ...``; a traceback follows on lines of its own."""
    moment, level, event = record.pop("time"), record.pop("level"), record.pop("event")
    trace = record.pop("traceback", "")
    told = " ".join(f"{name}={_encode(value).decode()}" for name, value in record.items())
    text = f"{moment[11:23]} {level:<8} {_printable(str(event))}  {told}".rstrip()
    text = text if len(text) < LINE_LIMIT else text[: LINE_LIMIT - 1] + "…"
    return f"{text}\n{trace}".encode("utf-8", "replace")


def _is_journal(stream: int) -> bool:
    """Whether what is written there goes to systemd's journal (systemd.exec(5), ``JOURNAL_STREAM``)."""
    try:
        status = os.fstat(stream)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _with_priority(written: Writer) -> Writer:
    """Each record with its priority before it, by which `journalctl --priority` selects (sd-daemon(3))."""

    def write(logger: object, level: str, record: Record) -> bytes:
        return _PRIORITY.get(level, b"<6>") + written(logger, level, record)

    return write


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
