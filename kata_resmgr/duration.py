"""Durations as people write them: ``5s``, ``500ms``, ``1.5m``, ``1h``, or a plain ``0``."""

from __future__ import annotations

import re
from functools import lru_cache

LONGEST = 3600.0
"""Seconds: nothing here waits for longer than an hour."""

ALLOWED = "a number and ms, s, m or h (5s, 500ms), or 0; at most 1h"

FORM = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@lru_cache(256)  # callers say the same few again and again
def parse_duration(text: str) -> float:
    """The seconds that *text* says; :class:`ValueError` with one line where it is not :data:`ALLOWED`."""
    if text == "0":
        return 0.0
    match = FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} must be {ALLOWED}")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > LONGEST:
        raise ValueError(f"{text!r} is longer than 1h")
    return seconds
