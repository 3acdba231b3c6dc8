"""Directories whose paths are short enough for Unix sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory of the test's own, gone after it."""
    with tempfile.TemporaryDirectory(prefix="kr-") as name:
        yield Path(name)
