"""Threads as the kernel knows them (``/proc/<pid>/task/<tid>/comm``): their name, and when they have gone."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Final

_PR_SET_NAME: Final = 15
_PATIENCE: Final = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def name_this_thread(name: str) -> None:
    """Python 3.11 names its threads for itself only."""
    if _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NAME)")


def join(thread: threading.Thread) -> None:
    """Wait until *thread* has ended and the kernel shows it no more, which is a little later."""
    thread.join()
    until = time.monotonic() + _PATIENCE
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        if time.monotonic() > until:
            raise TimeoutError(f"thread {thread.native_id} is still there")
        time.sleep(0.0002)
