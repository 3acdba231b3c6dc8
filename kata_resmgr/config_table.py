"""Typed access to one table of a configuration: each getter checks its value and knows where it stands."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kata_resmgr.duration import ALLOWED as ALLOWED_DURATION
from kata_resmgr.duration import parse_duration
from kata_resmgr.exact import exact
from kata_resmgr.toml_file import FloatText

DROP_INS = "config.d"
"""The directory beside a file whose ``*.toml`` are laid over it."""


class ConfigError(Exception):
    """The configuration cannot be used: one line with file, key, value, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, and where it stands; a table's value is a dict of settings."""

    value: Any
    file: Path
    line: int

    @property
    def origin(self) -> str:
        """In short, as an explanation names it: ``config.toml:16``, ``config.d/10-more.toml:3``."""
        drop_in = self.file.parent.name == DROP_INS
        return f"{DROP_INS if drop_in else ''}{'/' if drop_in else ''}{plain(self.file.name)}:{self.line}"

    @property
    def where(self) -> str:
        """In full, as an error names it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Override:
    """One value that is put in the place of a file's; it is checked already."""

    value: Any
    where: str
    """The key of the sandbox's annotation that says so, or ``request``."""

    @property
    def origin(self) -> str:
        return self.where


_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Table:
    """The settings of one table. A getter gives None where the key is absent and refuses what is not allowed."""

    name: str
    settings: Mapping[str, Setting | Override]

    def under(self, overrides: Mapping[str, Override]) -> Table:
        """This table with *overrides* laid over it."""
        return Table(self.name, {**self.settings, **overrides})

    def origin(self, key: str) -> str:
        setting = self.settings.get(key)
        return "default" if setting is None else setting.origin

    def refuse(self, key: str, allowed: str) -> NoReturn:
        setting = self.settings[key]
        raise ConfigError(f"{setting.where}: [{self.name}] {key} = {shown(setting.value)}: must be {allowed}")

    def flag(self, key: str) -> bool | None:
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str) -> Fraction | None:
        value = self._value(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            return Fraction(value)
        if not isinstance(value, FloatText):
            self.refuse(key, "a number")
        try:
            return exact(value)
        except ValueError as error:
            self.refuse(key, f"a number; {error}")

    def text(self, key: str) -> str | None:
        value = self._value(key)
        if value is None:
            return None
        if not _is_text(value):
            self.refuse(key, "a string")
        return str(value)

    def choice(self, key: str, kind: type[_Choice]) -> _Choice | None:
        value = self.text(key)
        if value is None:
            return None
        try:
            return kind(value)
        except ValueError:
            self.refuse(key, either(kind))

    def duration(self, key: str) -> float | None:
        value = self._value(key)
        if value is None:
            return None
        if value == 0 and not isinstance(value, bool):
            return 0.0
        try:
            return parse_duration(value if isinstance(value, str) else "")
        except ValueError:
            self.refuse(key, f"a duration: {ALLOWED_DURATION}")

    def path(self, key: str) -> Path | None:
        value = self.text(key)
        if value is not None and not _is_path(value):
            self.refuse(key, "an absolute path")
        return None if value is None else Path(value)

    def paths(self, key: str) -> tuple[Path, ...] | None:
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) and _is_path(item) for item in value):
            self.refuse(key, "an array of absolute paths")
        return tuple(Path(item) for item in value)

    def patterns(self, key: str) -> tuple[str, ...] | None:
        """Regular expressions, each of which compiles."""
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_is_text(item) for item in value):
            self.refuse(key, "an array of regular expressions")
        for pattern in value:
            if (fault := _fault(pattern)) is not None:
                self.refuse(key, f"an array of regular expressions; {shown(pattern)} is none: {fault}")
        return tuple(value)

    def _value(self, key: str) -> Any:  # noqa: ANN401 - what TOML can hold
        setting = self.settings.get(key)
        return None if setting is None else setting.value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not isinstance(value, FloatText)


def _fault(pattern: str) -> str | None:
    """Why *pattern* is no regular expression; None where it is one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a later Python may read otherwise is for a later Python to say
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return plain(str(error) or "too deep")
    return None


def _is_path(text: str) -> bool:
    return text.startswith("/") and "\0" not in text


def either(values: Iterable[str]) -> str:
    """``"a" or "b"``."""
    return " or ".join(f'"{value}"' for value in values)


def shown(value: object) -> str:
    """*value* as TOML writes it, on one line of at most 80 characters."""
    match value:
        case FloatText():
            text = str(value)
        case str():
            text = f'"{value}"'
        case bool():
            text = "true" if value else "false"
        case list():
            text = "[" + ", ".join(shown(item) for item in value[:4]) + (", …]" if len(value) > 4 else "]")
        case dict():
            text = "{…}"
        case _:
            text = str(value)
    return plain(text)


def plain(text: str) -> str:
    """*text* without control characters, and cut to 80."""
    text = "".join(c if c.isprintable() else "?" for c in text[:81])
    return text if len(text) <= 80 else text[:79] + "…"
