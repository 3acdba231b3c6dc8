"""What a hostile monitor may do: the table that the driver, a sandbox and the daemon are held against.

Each row is the bytes in place of one answer, and what the call that meets them must fail with: at once where something
that cannot be understood was said, else at its deadline. The first rows are those of facts seen with qemu.qmp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypervisors.base import Busy, HypervisorError, TimedOut, Unreachable
from tests.fakes.qmp_server import CONNECTING, GREETING, ID, QmpServer, refusal

MIB: Final = 1 << 20
SHORT: Final = 0.1
"""Seconds: a deadline that a test waits for to pass."""
LONG: Final = 5.0
"""Seconds: one that must not pass. What is told at once is told long before."""
READ: Final = "query-cpus-fast"
"""The read-back, which every call ends with."""
EVENT: Final = b'{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RTC_CHANGE", "data": {"offset": 1}}\r\n'
SIZE_EVENT: Final = b'{"event": "MEMORY_DEVICE_SIZE_CHANGE", "data": {"id": "vm0", "size": 1}}\r\n'
DEEP: Final = b'{"return": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\r\n"


@dataclass(frozen=True)
class Misdeed:
    """*said* in place of the answer to *command*, and then what follows; *error* is what the call fails with."""

    name: str
    command: str
    said: bytes
    error: type[HypervisorError]
    hang_up: bool = False
    repeat: bool = False

    @property
    def deadline(self) -> float:
        """Seconds for the driver's calls: only what is silence may be waited out, so that has little."""
        return LONG if self.error is Unreachable else SHORT

    def commit(self, server: QmpServer, *, always: bool = False) -> None:
        """Make *server* do it, once or until it is told to behave."""
        server.spoil(self.command, self.said, hang_up=self.hang_up, repeat=self.repeat, always=always)

    def __str__(self) -> str:
        return self.name


def _connecting(
    name: str,
    said: bytes,
    error: type[HypervisorError] = Unreachable,
    *,
    hang_up: bool = False,
    repeat: bool = False,
) -> Misdeed:
    return Misdeed(f"greeting: {name}", CONNECTING, said, error, hang_up, repeat)


def _reading(
    name: str,
    said: bytes,
    error: type[HypervisorError] = Unreachable,
    *,
    hang_up: bool = False,
    repeat: bool = False,
) -> Misdeed:
    return Misdeed(f"answer: {name}", READ, said, error, hang_up, repeat)


def _returning(name: str, value: bytes) -> Misdeed:
    return _reading(name, b'{"return": ' + value + b', "id": ' + ID + b"}\r\n")


GREETINGS: Final = (
    _connecting("none", b"", Busy),
    _connecting("half, and silence", GREETING[:20], Busy),
    _connecting("half, and the end", GREETING[:20], hang_up=True),
    _connecting("the end at once", b"", hang_up=True),
    _connecting("another protocol", b"SSH-2.0-OpenSSH_9.2\r\n"),
    _connecting("not UTF-8", b"\xff\xfe\r\n"),
    _connecting("no object", b"[]\r\n"),
    _connecting("deep", DEEP),
    _connecting("of another form", b'{"QMP": {"version": 7, "capabilities": "oob"}}\r\n'),
    _connecting("events for ever", EVENT * 100, repeat=True),
    _connecting("a line of 10 MiB", b'{"QMP": "' + b"x" * 10 * MIB + b'"}\r\n'),
    _connecting("a line without end", b"x" * 65536, repeat=True),
    Misdeed("negotiation: silence", "qmp_capabilities", b"", TimedOut),
    Misdeed("negotiation: refused", "qmp_capabilities", refusal("no"), Unreachable),
    Misdeed("negotiation: events for ever", "qmp_capabilities", EVENT * 100, Unreachable, repeat=True),
    Misdeed("negotiation: the end", "qmp_capabilities", b"", Unreachable, hang_up=True),
)
"""Met on connecting."""

ANSWERS: Final = (
    _reading("silence", b"", TimedOut),
    _reading("half, and silence", b'{"return": [{"cpu-in', TimedOut),
    _reading("to another id", b'{"return": [], "id": "somebody else\'s"}\r\n', TimedOut),
    _reading("to no id", b'{"return": []}\r\n', TimedOut),
    _reading("to an id that can be none", b'{"return": [], "id": {"a": [1]}}\r\n'),
    _reading("replies to nothing for ever", b'{"return": {}, "id": 7}\r\n' * 100, TimedOut, repeat=True),
    _reading("events for ever", EVENT * 100, TimedOut, repeat=True),
    _reading("hints for ever", SIZE_EVENT * 100, TimedOut, repeat=True),
    _reading("white space for ever", b"\r\n" * 100, repeat=True),
    _reading("the end", b"", hang_up=True),
    _reading("half, and the end", b'{"return": [{"cpu-in', hang_up=True),
    _reading("garbage", b"\x00\x01\x02 nonsense\r\n"),
    _reading("no object", b"[]\r\n"),
    _reading("not UTF-8", b'{"return": "\xff"}\r\n'),
    _reading("a lone surrogate", b'{"return": "\\ud800"}\r\n'),
    _reading("a line of 10 MiB", b'{"return": "' + b"x" * 10 * MIB + b'"}\r\n'),
    _reading("a line without end", b"x" * 65536, repeat=True),
    _reading("deep", DEEP),
    _reading("an error without id", b'{"error": {"class": "GenericError", "desc": "what?"}}\r\n'),
    _reading("neither result nor error", b'{"id": ' + ID + b"}\r\n"),
    _reading("an error of no form", b'{"error": "no", "id": ' + ID + b"}\r\n"),
    _returning("NaN", b"NaN"),
    _returning("infinite", b"1e999"),
    _returning("a number of a million digits", b"9" * 1_000_000),
    _returning("no list", b'{"cpus": 4}'),
    _returning("no vCPU at all", b"[]"),
    _returning("a vCPU in no slot", b'[{"cpu-index": "0", "qom-path": "/"}]'),
    _returning("a vCPU in slot -1", b'[{"cpu-index": -1, "qom-path": "/"}]'),
    _returning("a vCPU in slot 10^30", b'[{"cpu-index": 1%s, "qom-path": "/"}]' % (b"0" * 30)),
    _returning("a vCPU in slot 0.5", b'[{"cpu-index": 0.5, "qom-path": "/"}]'),
    _returning("a vCPU of no name", b'[{"cpu-index": 0, "qom-path": null}]'),
)
"""Met by a read."""

MISDEEDS: Final = GREETINGS + ANSWERS
