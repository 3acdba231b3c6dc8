"""One TOML file, with the line on which each value stands and each fractional number as its text.

``tomli`` checks the document and gives the values. It does not tell where they stand; :func:`_key_lines` finds that
out in a document which is already known to be valid, and so need not understand values.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

SIZE_LIMIT = 1 << 20


class TomlError(Exception):
    """The file cannot be read; the text is one line that names it."""


class FloatText(str):
    """A TOML float, as it is written: a binary float would not be what the text says."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TomlFile:
    """*path* as it was named, and what is in it."""

    path: Path
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def line(self, *keys: str) -> int:
        """The line of the value, or of the nearest table around it that has a line of its own."""
        return next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), 1)


def read_toml(path: Path) -> TomlFile:
    """Read *path*, of at most 1 MiB. Raises :class:`TomlError`."""
    try:
        data = _read(path)
        if len(data) > SIZE_LIMIT:
            raise TomlError(f"{path}: larger than 1 MiB, which no configuration is")
        text = data.decode("utf-8").replace("\r\n", "\n")
        values = tomli.loads(text, parse_float=FloatText)
    except OSError as error:
        raise TomlError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise TomlError(f"{path}: nested too deeply") from error
    except ValueError as error:  # what tomli says, a number with too many digits, or text that is not UTF-8
        raise TomlError(f"{path}: is not TOML: {str(error).splitlines()[0]}") from error
    return TomlFile(path, values, _key_lines(text))


def _read(path: Path) -> bytes:
    """What is in *path*, to one byte beyond the limit. Never waits for anybody, as opening a pipe does."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):
            raise TomlError(f"{path}: cannot be read: it is no file")
        return file.read(SIZE_LIMIT + 1)


_STRING = r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''
_LONG_STRING = r'"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:\'{0,2})'
_LEXEME = re.compile(rf"(?P<long>{_LONG_STRING})|(?P<string>{_STRING})|(?P<comment>#[^\n]*)", re.DOTALL)
_PART = rf"(?:[A-Za-z0-9_-]+|{_STRING})"
_KEY = rf"({_PART}(?:[ \t]*\.[ \t]*{_PART})*)"
_TABLE = re.compile(rf"[ \t]*\[\[?[ \t]*{_KEY}[ \t]*\]")
_ASSIGNMENT = re.compile(rf"[ \t]*{_KEY}[ \t]*=")


def _key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Where each table and each key starts in a valid document; keys inside inline tables have no line of their own."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    depth = 0  # of brackets: only outside of all of them does a line start with a key
    for number, line in enumerate(_LEXEME.sub(_without_text, text).split("\n"), start=1):
        if depth == 0:
            if header := _TABLE.match(line):
                table = _parts(header[1])
                lines.setdefault(table, number)
                continue
            if key := _ASSIGNMENT.match(line):
                lines[table + _parts(key[1])] = number
        rest = re.sub(_STRING, "", line)
        depth += rest.count("[") + rest.count("{") - rest.count("]") - rest.count("}")
    return lines


def _without_text(match: re.Match[str]) -> str:
    """One-line strings stay, since they may be keys; of the rest only the line ends stay."""
    return match[0] if match["string"] is not None else "\n" * match[0].count("\n")


def _parts(key: str) -> tuple[str, ...]:
    return tuple(part[1:-1] if part[0] in "\"'" else part for part in re.findall(_PART, key))
