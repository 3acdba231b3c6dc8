"""A QMP session: qemu.qmp's client, with deadlines, bounds, and a short way for what matters.

qemu.qmp knows no deadlines, keeps every event for ever in its default listener, and pretty-prints every message for a
log that is off; :class:`Monitor` makes up for that.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, SupportsIndex, TypeAlias, TypeVar

import msgspec
from qemu.qmp import ExecInterruptedError, ExecuteError, Message, QMPClient, Runstate
from qemu.qmp.message import DeserializationError
from qemu.qmp.models import ErrorResponse
from qemu.qmp.qmp_client import BadReplyError

from hypervisors import vmm_socket
from hypervisors.base import Busy, Refused, Unreachable

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_MESSAGE: Final = 1 << 20
"""Bytes of one line from the monitor. The longest answer, 4096 possible vCPUs, takes about half of it."""
_SLICE: Final = 16 << 10
"""Bytes read from a monitor at a time: about two milliseconds of events."""
_slice: Final = bytearray(_SLICE)
"""Of all sessions: what has come is taken from it before anybody else reads."""
_LONGEST_TEXT: Final = 200
"""Characters quoted from outside in one error or log line."""

Command: TypeAlias = dict[str, object]
Answer: TypeAlias = object
"""What QEMU returned for a command; an :class:`ExecuteError` where it refused."""
OnEvent: TypeAlias = Callable[[object, object], None]
"""Called with an event's name and data, as they came."""


def command(name: str, arguments: dict[str, object] | None = None) -> Command:
    """What :meth:`Monitor.pipeline` sends; it adds the number."""
    return {"execute": name} if arguments is None else {"execute": name, "arguments": arguments}


_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_SILENCE: Final = logging.Logger("qemu.qmp", logging.CRITICAL + 1)


class DeadlinePassed(ExecInterruptedError):
    """No answer by the deadline; the session goes on, and passes over a late one."""


class Lines(asyncio.StreamReader):
    """A reader of lines that *take* is shown as soon as they are there; those it does not take are for the reader."""

    def __init__(self, take: Callable[[bytes], bool], limit: int) -> None:
        super().__init__(limit=limit)
        self._take = take
        self._most = limit
        self._begun = bytearray()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        # What has begun is neither searched nor copied again: a long line may come byte by byte.
        *lines, begun = bytes(data).split(b"\n")
        if lines and self._begun:
            lines[0] = bytes(self._begun) + lines[0]
            self._begun.clear()
        for line in lines:
            if not self._take(line):
                super().feed_data(line + b"\n")
        self._begun += begun
        if len(self._begun) > self._most:  # no line ends in sight: the reader refuses it
            self._hand_on()

    def feed_eof(self) -> None:
        self._hand_on()
        super().feed_eof()

    def _hand_on(self) -> None:
        if self._begun:
            super().feed_data(bytes(self._begun))
            self._begun.clear()


class _Slices(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """What has come is taken in slices, between which all others have a turn: one monitor may flood."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._lines = reader

    def get_buffer(self, sizehint: int) -> bytearray:
        return _slice

    def buffer_updated(self, nbytes: int) -> None:
        self._lines.feed_data(_slice[:nbytes])


class _Exchange:
    """Commands that were sent together, and the answers so far."""

    __slots__ = ("answered", "answers", "numbers")

    def __init__(self, numbers: list[str], answered: asyncio.Future[None]) -> None:
        self.numbers = numbers
        self.answers: dict[str, dict[str, Any]] = {}
        self.answered = answered
        """Done when all have come."""

    def takes(self, number: object, answer: dict[str, Any]) -> bool:
        """Whether it is one of these."""
        if number not in self.numbers or not isinstance(number, str):
            return False
        self.answers[number] = answer
        if len(self.answers) == len(self.numbers) and not self.answered.done():
            self.answered.set_result(None)
        return True

    def fail(self, error: ExecInterruptedError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)


class Monitor(QMPClient):
    """qemu.qmp's client, with a short way for what matters.

    The library hands each message from task to task, and a vCPU's coming and going is a dozen of them. Here an answer
    that is awaited, and an event, are taken from the stream as they arrive; whatever else comes, and the beginning and
    the end of a session, are the library's.
    """

    def __init__(self, on_event: OnEvent) -> None:
        super().__init__(readbuflen=LONGEST_MESSAGE)
        # Whatever the library would log arrives here as an exception as well, and is told once, by us.
        self.logger = _SILENCE
        self._on_event = on_event
        self._exchange: _Exchange | None = None
        self.deadline = 0.0
        """The loop time until which the present call may take."""

    async def pipeline(self, commands: Sequence[Command]) -> list[Answer]:
        """Send all *commands* before the first answer is awaited; the answers in the same order.

        They are written in one piece, which wakes QEMU once. Raises :class:`DeadlinePassed` at :attr:`deadline`.
        """
        if self.runstate is not Runstate.RUNNING or self._writer is None:
            raise ExecInterruptedError("Disconnected")
        loop = asyncio.get_running_loop()
        numbers = [self._get_exec_id() for _ in commands]
        text = b"".join([_encode({**command, "id": number}) for command, number in zip(commands, numbers, strict=True)])
        if log.isEnabledFor(logging.DEBUG):
            log.debug("-> %s", one_line(text.decode()))
        exchange = self._exchange = _Exchange(numbers, loop.create_future())
        timer = loop.call_at(self.deadline, exchange.fail, DeadlinePassed())
        try:
            self._writer.write(text)
            await exchange.answered
        finally:
            timer.cancel()
            self._exchange = None
        return [_answer(command, exchange.answers[number]) for command, number in zip(commands, numbers, strict=True)]

    def _take(self, line: bytes) -> bool:
        if self.runstate is not Runstate.RUNNING:
            return False
        try:
            message = _decode(line)
        except _UNDECODABLE:
            return False  # for the library to end the session over
        if not isinstance(message, dict):
            return False
        if log.isEnabledFor(logging.DEBUG):
            log.debug("<- %s", one_line(message))
        event = message.get("event")
        if event is not None:
            self._on_event(event, message.get("data"))
            return True
        return self._exchange is not None and self._exchange.takes(message.get("id"), message)

    # Where the library is asked to do otherwise (its own hooks for subclasses)

    async def _do_connect(self, address: Any, ssl: Any = None) -> None:  # noqa: ANN401 - the library's types
        """On a connected socket, through :class:`Lines`."""
        self._set_state(Runstate.CONNECTING)
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        self._reader = Lines(self._take, self.readbuflen)
        protocol = _Slices(self._reader, loop)
        transport, _ = await loop.create_unix_connection(lambda: protocol, sock=address)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)

    async def _do_recv(self) -> Message:
        """By the rules of :meth:`_take`: the library's own would read what is no JSON (NaN), and 1e999 as infinite."""
        line = await self._readline()
        try:
            message = _decode(line)
        except _UNDECODABLE as error:
            raise DeserializationError("it said what is not JSON", line[:_LONGEST_TEXT]) from error
        if not isinstance(message, dict):
            raise DeserializationError("it said what is no JSON object", line[:_LONGEST_TEXT])
        if isinstance(message.get("id"), dict | list):  # the library would look it up
            raise DeserializationError("it answered what was never asked", line[:_LONGEST_TEXT])
        return Message(message, eager=False)

    def _cb_outbound(self, msg: Message) -> Message:
        return msg  # the library's would turn it into indented text, for a log that is off

    def _cb_inbound(self, msg: Message) -> Message:
        return msg

    async def _on_message(self, msg: Message) -> None:
        if "event" not in msg:
            await super()._on_message(msg)
        else:  # from before the session ran; none for the library's listeners: the default one keeps it for ever
            self._on_event(msg["event"], msg.get("data"))

    async def _bh_disconnect(self) -> None:
        try:
            await super()._bh_disconnect()
        finally:
            if self._exchange is not None:
                self._exchange.fail(ExecInterruptedError("Disconnected"))


def _answer(command: Command, reply: dict[str, Any]) -> Answer:
    if "return" in reply:
        return reply["return"]
    sent, received = Message(command), Message(reply)
    try:
        return ExecuteError(ErrorResponse(reply), sent, received)
    except (KeyError, TypeError) as error:
        raise BadReplyError("neither a result nor an error", received, sent) from error


def connected_socket(path: str) -> socket.socket:
    """A connection to the Unix socket *path*; at once or not at all, as such sockets do."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        vmm_socket.connect(connection, path)
    except BlockingIOError:
        connection.close()
        raise Busy(f"{path}: others are already waiting for this monitor") from None
    except OSError as error:
        connection.close()
        raise Unreachable(f"{path}: {one_line(error)}") from None
    return connection


def peer_pid(connection: socket.socket) -> int:
    """The process that listens at the other end."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def value(answer: Answer, kind: type[T]) -> T:
    """*answer* as *kind*. Raises :class:`Refused` when it is an error, ValidationError when it is something else."""
    if isinstance(answer, ExecuteError):
        raise Refused(f"{answer.sent.get('execute')}: {one_line(answer)}")
    return msgspec.convert(answer, kind)


def one_line(said: object) -> str:
    """What somebody said, as one line that is not too long."""
    line = " ".join(str(said).split())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1] + "…"
