"""The real daemon as a process of its own, and a caller of its socket, for tests and measurements."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = Path(sys.executable).with_name("kata-resmgr")
DEADLINE = 20.0
"""Seconds for whatever should take far less."""
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"  # noqa: S108 - directories of our own are made there
"""Where measurements keep a daemon's state: in memory, as it lies on a host (``/run``). Short, for sockets."""
IDLE = 5.0
"""Seconds after which a connection is not used again; the daemon closes it at ten."""


class Caller(http.client.HTTPConnection):
    """One kept connection to the daemon's Unix socket."""

    def __init__(self, path: Path, timeout: float = 60.0) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)
        self._used = 0.0

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and decoded body (None where there is none); *body* bytes are sent as they are."""
        if time.monotonic() - self._used > IDLE:
            self.close()  # the daemon has, or will in the middle of this: it is opened anew
        self._used = time.monotonic()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.request(method, path, data, {"Content-Type": "application/json"} if data is not None else {})
        response = self.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None

    def ok(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """The body of an answer that must be a success."""
        status, answer = self.call(method, path, body)
        assert 200 <= status < 300, (method, path, status, answer)
        return answer


class Daemon:
    """``kata-resmgr serve`` in a directory of its own; ready when entered, ended (and waited for) when left."""

    def __init__(
        self,
        directory: Path,
        config: str = "",
        *,
        inherit: socket.socket | None = None,
        program: Sequence[str] = (str(PROGRAM),),
        more: str = "",
    ) -> None:
        """*program* is what is started with the daemon's arguments; *more* are lines for ``[daemon]``."""
        self.directory = directory
        self.socket = directory / "api.sock"
        self.log = directory / "log"
        self._config = config
        self._more = more
        self._inherit = inherit
        self._program = program
        self._callers: list[Caller] = []

    def __enter__(self) -> Self:
        if not self._start(DEADLINE):
            self.__exit__(None, None, None)
            raise AssertionError(f"the daemon did not get ready:\n{self.log.read_text()}")
        return self

    def _start(self, patience: float) -> bool:
        """Whether it got ready in so many seconds."""
        configuration = self.directory / "config.toml"
        configuration.write_text(
            f'{self._config}\n[daemon]\nsocket = "{self.socket}"\nstate = "{self.directory}/state.db"\n'
            f'vm_roots = ["{self.directory}"]\n{self._more}\n'
        )
        notify = self.directory / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self.log.open("wb") as log:
            ready.bind(str(notify))
            environment = {**os.environ, "NOTIFY_SOCKET": str(notify)}
            command = [*self._program, "serve", "--config", str(configuration)]
            if self._inherit is not None:
                command = [sys.executable, "-c", _HAND_OVER, str(self._inherit.fileno()), *command]
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                pass_fds=[] if self._inherit is None else [self._inherit.fileno()],
            )
            end = self.started + patience
            try:
                while (left := end - time.monotonic()) > 0:
                    ready.settimeout(left)
                    if b"READY=1" in ready.recv(4096):
                        return True
            except TimeoutError:
                pass
            finally:
                notify.unlink()
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for caller in self._callers:
            caller.close()
        self.process.terminate()
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def kill(self) -> None:
        """End it with SIGKILL: it does nothing more, and says goodbye to nobody."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """Another one, on what the last one has left; ready when this returns. Its log is added to nothing."""
        self.__enter__()

    def start_and_kill(self, after: float) -> None:
        """Another one, which gets so many seconds before it is ended as by :meth:`kill`, ready or not."""
        end = time.monotonic() + after
        self._start(after)
        time.sleep(max(0.0, end - time.monotonic()))
        self.kill()

    def caller(self) -> Caller:
        """A connection that is closed with the daemon, if not before."""
        self._callers.append(Caller(self.socket))
        return self._callers[-1]


_HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""What systemd does for socket activation: the listening socket as descriptor 3, and the pid that it is meant for."""


def until(true: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Look again and again until *true*; fail, naming *what*, when it is not so in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)
