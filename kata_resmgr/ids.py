"""Ids of sandboxes, containers and devices, as callers give them."""

from __future__ import annotations

import re

from kata_resmgr.problem import Code, Problem

ID_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"

_ID = re.compile(ID_PATTERN, re.ASCII)


def check_id(text: str, what: str) -> str:
    """*text* itself where it is an id; *what* names it in the :class:`Problem` (``invalid_id``) where it is not."""
    if _ID.fullmatch(text) is None:
        raise Problem(
            Code.INVALID_ID,
            f"{what} id {text[:40]!r} must be 1 to 128 of A-Z a-z 0-9 . _ - and must not start with . or -",
        )
    return text
