"""Durations by value."""

from __future__ import annotations

import pytest

from kata_resmgr.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("0s", 0.0), ("5s", 5.0), ("500ms", 0.5), ("1.5m", 90.0), ("1h", 3600.0), ("3600s", 3600.0)],
)
def test_what_is_taken(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "-1s",
        "+1s",
        "1 s",
        " 1s",
        "1s ",
        "1s\n",
        ".5s",
        "1.s",
        "1e3s",
        "1S",
        "1d",
        "s",
        "00",
        "1h1m",
        "\u0663s",
        "3601s",
        "2h",
        "1" * 400 + "s",
        "inf",
        "nans",
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"at most 1h|longer than 1h"):
        parse_duration(text)
