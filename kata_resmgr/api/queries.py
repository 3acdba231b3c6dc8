"""The query of a request: known parameters, each once."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_plus

from kata_resmgr.duration import parse_duration
from kata_resmgr.problem import Code, Problem
from kata_resmgr.sandbox import Patience

PATIENCE = frozenset({"wait", "deadline"})


def read_query(text: str, known: frozenset[str]) -> dict[str, str]:
    """The parameters of *text*. Raises :class:`Problem` (``invalid_query``) for unknown and repeated ones."""
    query: dict[str, str] = {}
    for part in text.split("&") if text else ():
        name, _, value = part.partition("=")
        if name not in known:
            there = f"there are {', '.join(sorted(known))}" if known else "this call takes none"
            raise Problem(Code.INVALID_QUERY, f"there is no parameter {name[:40]!r}; {there}")
        if name in query:
            raise Problem(Code.INVALID_QUERY, f"{name} is given more than once")
        query[name] = unquote_plus(value, errors="replace")
    return query


def seconds(query: Mapping[str, str], name: str) -> float | None:
    """The duration of that name, where given. Raises :class:`Problem` (``invalid_query``)."""
    if name not in query:
        return None
    try:
        return parse_duration(query[name])
    except ValueError as error:
        raise Problem(Code.INVALID_QUERY, f"{name}: {error}") from error


def patience(query: Mapping[str, str]) -> Patience:
    """``wait`` and ``deadline``; a wait is never longer than the deadline."""
    deadline, wait = seconds(query, "deadline"), seconds(query, "wait")
    if deadline is not None and wait is not None:
        wait = min(wait, deadline)
    return Patience(deadline=deadline, wait=wait)


def number(query: Mapping[str, str], name: str) -> int | None:
    """The number of that name, where given: 0 to 2^63-1. Raises :class:`Problem` (``invalid_query``)."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) < 1 << 63):
        raise Problem(Code.INVALID_QUERY, f"{name}={text[:40]!r}: must be a number from 0 to {(1 << 63) - 1}")
    return int(text)


def choice(query: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    """The value of that name, one of *values*, where given. Raises :class:`Problem` (``invalid_query``)."""
    value = query.get(name)
    if value is not None and value not in values:
        raise Problem(Code.INVALID_QUERY, f"{name}={value[:40]!r}: must be {' or '.join(values)}")
    return value
