"""An event loop whose clock jumps: a minute of pauses takes no time, and nothing depends on the machine's speed.

For tests in which nothing comes from outside the process: when no callback is ready, the clock jumps to the next timer.
A loop in which nothing would ever happen again raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

P = ParamSpec("P")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.on_turn: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.on_turn is not None:
            self.on_turn()
        events = super().select(0)
        if not events and timeout != 0:
            if timeout is None:
                raise RuntimeError("the test waits for something that cannot happen any more")
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's text."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def at_each_turn(self, action: Callable[[], None] | None) -> None:
        """From now on *action* is called between what is ready and what gets ready then."""
        self._jumping.on_turn = action


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on such a loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    run.__signature__ = signature(test)  # type: ignore[attr-defined]  # for pytest: the fixtures it asks for
    del run.__wrapped__  # pytest-asyncio looks through it and would run the coroutine
    return run
