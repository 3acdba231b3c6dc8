"""The QEMU driver and hostile monitors: each misdeed ends the call in time and with its error, and leaves nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from hypervisors.base import ConnectionLost, GuestReset, HypervisorError, Refused, SizeChanged, TimedOut, Unreachable
from hypervisors.qemu import QemuHypervisor
from hypervisors.qmp import Lines
from tests.drivers.backends import Hints
from tests.drivers.misdeeds import ANSWERS, EVENT, GREETINGS, LONG, MISDEEDS, READ, SHORT, Misdeed
from tests.fakes.qmp_server import GREETING, ID, QmpServer, refusal

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

EVENTS_WHILE_WAITING = 20_000


def make_driver(server: QmpServer, deadline: float) -> QemuHypervisor:
    return QemuHypervisor(server.path, timeout=deadline, greeting_timeout=deadline)


def must_be_one_short_line(error: HypervisorError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) <= 400


@pytest.mark.parametrize("misdeed", MISDEEDS, ids=str)
async def test_met_while_connecting_nothing_is_held(short_tmp: Path, misdeed: Misdeed) -> None:
    async with QmpServer(short_tmp / "m") as server:
        misdeed.commit(server, always=True)
        driver, hints = make_driver(server, misdeed.deadline), Hints()

        async with asyncio.timeout(LONG - 1):
            with pytest.raises(misdeed.error) as failure:
                await driver.connect(hints)

        must_be_one_short_line(failure.value)
        assert [hint for hint in hints.heard if not isinstance(hint, SizeChanged)] == []
        server.behave()
        assert await vcpus_found(server, driver) == 1
        await driver.close()


async def vcpus_found(server: QmpServer, driver: QemuHypervisor) -> int:
    """How many vCPUs the same driver finds; the monitor may still be busy with the end of the session before."""
    async with asyncio.timeout(LONG):
        while True:
            try:
                await driver.connect(Hints())
                return len((await driver.read()).vcpus)
            except HypervisorError:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("misdeed", ANSWERS, ids=str)
async def test_met_in_a_call_the_next_session_is_right(short_tmp: Path, misdeed: Misdeed) -> None:
    async with QmpServer(short_tmp / "m") as server:
        driver, hints = make_driver(server, misdeed.deadline), Hints()
        await driver.connect(hints)
        misdeed.commit(server)

        async with asyncio.timeout(LONG - 1):
            with pytest.raises(misdeed.error) as failure:
                await driver.read()

        must_be_one_short_line(failure.value)
        heard = [hint for hint in hints.heard if not isinstance(hint, SizeChanged)]
        if misdeed.error is Unreachable:  # the session is over, and has been told so once
            assert [type(hint) for hint in heard] == [ConnectionLost]
            with pytest.raises(Unreachable):
                await driver.read()
        else:
            assert heard == []
            await driver.close()
        server.behave()
        assert await vcpus_found(server, driver) == 1
        await driver.close()


@pytest.mark.parametrize(
    "query",
    [
        "query-uuid",
        "query-kvm",
        "query-hotpluggable-cpus",
        "query-memory-size-summary",
        "query-memory-devices",
        READ,
    ],
)
async def test_an_answer_of_another_shape_is_no_machine(short_tmp: Path, query: str) -> None:
    async with QmpServer(short_tmp / "m") as server:
        for value in (b"null", b"true", b"0", b'"x"', b"[[]]", b"[null]", b"[{}]", b'{"x": -1}'):
            server.spoil(query, b'{"return": ' + value + b', "id": ' + ID + b"}\r\n")
            with pytest.raises(Unreachable, match="cannot be understood"):
                await make_driver(server, LONG).connect(Hints())


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("query-memory-size-summary", b'{"base-memory": -1}'),
        ("query-memory-size-summary", b'{"base-memory": 1e30}'),
        ("query-memory-size-summary", b'{"base-memory": 1%s}' % (b"0" * 30)),
        ("query-memory-devices", b'[{"type": "dimm", "data": {"id": "d", "size": -1}}]'),
        ("query-memory-devices", b'[{"type": "virtio-mem", "data": {"id": "v", "block-size": 0}}]'),
        ("query-memdev", b"[[]]"),
        ("query-memdev", b'[{"id": "m", "size": 1%s}]' % (b"0" * 30)),
        ("query-uuid", b'{"UUID": "%s"}' % (b"5" * 1000)),
        ("query-hotpluggable-cpus", b'[{"type": "cpu", "props": {"core-id": "0"}}]'),
    ],
)
async def test_a_value_out_of_range_is_no_machine(short_tmp: Path, query: str, value: bytes) -> None:
    async with QmpServer(short_tmp / "m") as server:
        server.spoil(query, b'{"return": ' + value + b', "id": ' + ID + b"}\r\n")
        with pytest.raises(Unreachable, match="cannot be understood"):
            await make_driver(server, LONG).connect(Hints())


@pytest.mark.parametrize("query", ["query-uuid", "query-memory-size-summary", READ])
async def test_a_query_that_is_refused_is_a_refusal(short_tmp: Path, query: str) -> None:
    async with QmpServer(short_tmp / "m") as server:
        server.spoil(query, refusal("not today"))
        with pytest.raises(Refused, match=f"{query}: not today"):
            await make_driver(server, LONG).connect(Hints())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"nonsense\r\n", "it said what is not JSON: b'nonsense"),
        (b'{"return": NaN}\r\n', 'it said what is not JSON: b\'{"return": NaN'),
        (b"[]\r\n", "it said what is no JSON object: b'[]"),
        (b'{"return": {}, "id": []}\r\n', "it answered what was never asked: b'{"),
        (b"x" * (2 << 20) + b"\r\n", "it said a line of more than 1048576 bytes"),
    ],
    ids=["garbage", "NaN", "no object", "an id that can be none", "a long line"],
)
async def test_the_reason_quotes_what_was_said(short_tmp: Path, said: bytes, words: str) -> None:
    async with QmpServer(short_tmp / "m") as server:
        driver, hints = make_driver(server, LONG), Hints()
        await driver.connect(hints)
        server.send(said)
        assert words in (await hints.next(ConnectionLost)).reason


async def test_every_reply_said_twice_is_heard_once(short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "m") as server:
        driver, hints = make_driver(server, LONG), Hints()
        await driver.connect(hints)
        server.says_each_reply = 2

        assert len((await driver.add_vcpus(1)).vcpus) == 2
        assert len((await driver.add_vcpus(2)).vcpus) == 4

        server.reset()
        await hints.next(GuestReset)
        await driver.close()


async def test_events_between_a_command_and_its_answer_do_not_hold_it_up(short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "m") as server:
        driver, hints = make_driver(server, LONG), Hints()
        await driver.connect(hints)
        cpus = b'[{"cpu-index": 0, "qom-path": "/machine/unattached/device[0]"}]'
        server.spoil(READ, EVENT * EVENTS_WHILE_WAITING + b'{"return": ' + cpus + b', "id": ' + ID + b"}\r\n")

        assert len((await driver.read()).vcpus) == 1

        assert hints.heard == []
        await driver.close()


async def test_a_flood_leaves_everybody_else_a_turn_every_few_hundred_events(short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "m") as server:
        driver, hints = make_driver(server, LONG), Hints()
        await driver.connect(hints)
        reset = b'{"event": "RESET"}\r\n'
        server.send(reset * EVENTS_WHILE_WAITING)

        heard, most = 0, 0
        async with asyncio.timeout(LONG):
            while heard < EVENTS_WHILE_WAITING:
                await asyncio.sleep(0)
                heard, before = len(hints.heard), heard
                most = max(most, heard - before)

        assert most <= (16 << 10) // len(reset) + 1
        await driver.close()


async def test_an_answer_in_single_bytes_is_an_answer(short_tmp: Path) -> None:
    async with QmpServer(short_tmp / "m") as server:
        driver = make_driver(server, LONG)
        await driver.connect(Hints())
        server.spoil(READ, b"")
        server.sent()
        reading = asyncio.create_task(driver.read())
        await server.received(READ)
        cpus = b'[{"cpu-index": 0, "qom-path": "/machine/unattached/device[0]"}]'
        for byte in b'{"return": ' + cpus + b', "id": "' + server.commands[-1]["id"].encode() + b'"}\r\n':
            server.send(bytes([byte]))
            await asyncio.sleep(0)

        assert len((await reading).vcpus) == 1
        await driver.close()


async def test_the_time_that_a_long_line_takes_does_not_grow_with_the_pieces_it_comes_in() -> None:
    """A megabyte in 16-byte pieces held up the daemon for 43 s when each piece was joined to all before."""
    taken: list[bytes] = []

    def take(line: bytes) -> bool:
        taken.append(line)
        return True

    lines = Lines(take, 1 << 20)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(60_000):
        lines.feed_data(b"x" * 16)
    lines.feed_data(b"\n")

    assert taken == [b"x" * 960_000]
    assert loop.time() - began < 2


@pytest.mark.parametrize("before", [b"", b'{"return": {}, "id": '], ids=["while negotiating", "in the middle"])
async def test_a_connection_that_is_reset(short_tmp: Path, before: bytes) -> None:
    """A peer that closes with something unread is a reset (ECONNRESET), and no end of file."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(short_tmp / "m"))
        listener.listen()
        connecting = asyncio.create_task(QemuHypervisor(short_tmp / "m").connect(Hints()))
        connection, _ = await loop.sock_accept(listener)
        with connection:
            await loop.sock_sendall(connection, GREETING)
            await loop.sock_recv(connection, 1)
            await loop.sock_sendall(connection, before)

        with pytest.raises(Unreachable):
            await connecting


async def test_what_a_stopped_monitor_has_not_read_does_not_pile_up(short_tmp: Path) -> None:
    """Two calls in a row without answer end the session; there is no third that would be written."""
    async with QmpServer(short_tmp / "m") as server:
        driver, hints = make_driver(server, SHORT), Hints()
        await driver.connect(hints)
        server.spoil(READ, b"", always=True)
        for _ in range(2):
            with pytest.raises(TimedOut):
                await driver.add_vcpus(1)
        await hints.next(ConnectionLost)
        sent = len(server.commands)
        with pytest.raises(Unreachable, match="2 calls in a row"):
            await driver.add_vcpus(1)
        assert len(server.commands) == sent


def test_the_table_has_a_row_for_each_kind() -> None:
    assert len({misdeed.name for misdeed in MISDEEDS}) == len(GREETINGS) + len(ANSWERS)
