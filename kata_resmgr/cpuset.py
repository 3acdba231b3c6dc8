"""Linux lists of CPU or memory node ids, as cgroup files and OCI write them: ``0-3,7``.

SPEC 4: ASCII digits, leading zeros allowed, ``5-5`` allowed, white space only around the whole text, ids up to 8191.
The kernel's strides (``0-31:2/4``) are not part of it: no container runtime sends them.
"""

from __future__ import annotations

import re

HIGHEST_ID = 8191
"""The kernel's largest NR_CPUS is 8192."""

_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_SPACE = " \t\n\v\f\r"


def parse(text: str) -> frozenset[int]:
    """The ids that *text* names; the empty set for a blank text.

    Raises :class:`ValueError`, quoting the text, for anything else that is not such a list.
    """
    ids = text.strip(_SPACE)
    if not ids:
        return frozenset()
    bits = 0  # a bit mask: a long text of overlapping ranges must not cost its ranges' lengths
    for item in ids.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f'"{_excerpt(text)}" is not a list of ids like 0-3,7: "{_excerpt(item)}"')
        first = _id(match[1], text)
        last = first if match[2] is None else _id(match[2], text)
        if last < first:
            raise ValueError(f'"{_excerpt(text)}" has a range that runs backwards: "{_excerpt(item)}"')
        bits |= ((1 << (last - first + 1)) - 1) << first
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)


def _id(digits: str, text: str) -> int:
    significant = digits.lstrip("0") or "0"
    if len(significant) > 4 or int(significant) > HIGHEST_ID:
        raise ValueError(f'"{_excerpt(text)}" names the id {_excerpt(significant)}; at most {HIGHEST_ID} is allowed')
    return int(significant)


def _excerpt(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
