"""How hard the laws are tried: enough to find what is wrong, quick enough to be run each time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("laws", max_examples=100, deadline=None)
settings.load_profile("laws")
