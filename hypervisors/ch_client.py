"""Cloud Hypervisor's HTTP API, for one thread: one exchange of requests over one connection, then nothing is left.

What this module relies on (micro_http as Cloud Hypervisor pins it): the VMM handles one request at a time, whoever
sends it; it takes ten connections and never closes one that idles, so none is kept; ``Connection: close`` is ignored;
whoever shuts down writing loses the answer. Errors are told in five forms (:func:`causes`).

``requests`` bounds the wait for each piece of an answer, not for the whole: :meth:`Exchange.cut` ends the connection
from another thread when the time for all of it is over.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec
import requests
from requests_unixsocket import Session
from requests_unixsocket.adapters import UnixAdapter, UnixHTTPConnection, UnixHTTPConnectionPool
from urllib3.exceptions import HTTPError

from hypervisors import ch_types, vmm_socket
from hypervisors.base import Busy, HypervisorError, Refused, TimedOut, Unreachable
from hypervisors.ch_types import (
    Counters,
    DiskConfig,
    NetConfig,
    PciDeviceInfo,
    VmInfo,
    VmmPing,
    VmRemoveDevice,
    VmResize,
)

T = TypeVar("T")

LONGEST_ANSWER: Final = 4 << 20
"""Bytes. A VM with all PCI slots of one segment in use tells of itself in about 60 KiB."""
_PART: Final = 1 << 16
_LONGEST_TEXT: Final = 200
"""Characters quoted from outside in one error."""
_MOST_CAUSES: Final = 8
_PREFIX: Final = "/api/v1/"
_TOO_MANY_CONNECTIONS: Final = 503

_encode: Final = msgspec.json.Encoder().encode


class ApiError(Refused):
    """The VMM answered with an error.

    What it says depends on its release, and so does *status*: what has become of the request is read back, not
    concluded from here. *causes*: its words, the outermost first.
    """

    def __init__(self, call: str, status: int, said: tuple[str, ...]) -> None:
        self.status = status
        self.causes = said
        super().__init__(f"{call}: {cut_short(': '.join(said)) or 'no reason told'} (HTTP {status})")


class Exchange:
    """Requests to one VMM, which together may take *timeout* seconds from where the ``with`` block begins.

    All methods raise :class:`hypervisors.base.HypervisorError`. :meth:`cut` may be called at any time, by any thread.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.peer: int | None = None
        """The process at the other end (SO_PEERCRED), once connected."""
        self._timeout = timeout
        self._deadline = 0.0
        self._over: HypervisorError | None = None
        self._socket: socket.socket | None = None
        self._guard = threading.Lock()
        self._session: requests.Session = Session()
        self._session.trust_env = False  # neither a proxy nor a .netrc bears on a local socket
        self._session.headers = requests.structures.CaseInsensitiveDict({"Accept": "application/json"})
        self._session.mount("http+unix://", _Adapter(self._connected))
        self._url = f"http+unix://{quote(path, safe='')}{_PREFIX}"

    def __enter__(self) -> Self:
        self._deadline = time.monotonic() + self._timeout
        return self

    def __exit__(self, *_exception: object) -> None:
        self._session.close()
        self._hold(None)

    def cut(self, error: HypervisorError) -> None:
        """End it now; what was under way, and what would come, raises *error*."""
        self._over = error
        with self._guard:
            if self._socket is not None:
                _shut(self._socket)

    # Calls

    def ping(self) -> VmmPing:
        return _read("vmm.ping", self._send("GET", "vmm.ping"), VmmPing)

    def info(self) -> VmInfo:
        return _read("vm.info", self._send("GET", "vm.info"), VmInfo)

    def counters(self) -> Counters:
        return _read("vm.counters", self._send("GET", "vm.counters"), Counters)

    def resize(self, size: VmResize) -> None:
        self._send("PUT", "vm.resize", size)

    def add(self, device: DiskConfig | NetConfig) -> PciDeviceInfo | None:
        """None: the VM is not booted, and the device will be there when it is."""
        call = "vm.add-disk" if isinstance(device, DiskConfig) else "vm.add-net"
        answer = self._send("PUT", call, device)
        return _read(call, answer, PciDeviceInfo) if answer else None

    def remove(self, device_id: str) -> None:
        self._send("PUT", "vm.remove-device", VmRemoveDevice(device_id))

    # The wire

    def _send(self, method: str, call: str, body: msgspec.Struct | None = None) -> bytes:
        left = self._deadline - time.monotonic()
        if self._over is not None or left <= 0:
            raise self._lost(call, "not sent")
        data = None if body is None else _encode(body)
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            with self._session.request(
                method, self._url + call, data=data, headers=headers, timeout=left, allow_redirects=False, stream=True
            ) as response:
                text = _body(response)
        except (requests.RequestException, HTTPError, HTTPException, OSError) as error:
            raise self._lost(call, error) from None
        if response.status_code == _TOO_MANY_CONNECTIONS:
            raise Busy(f"{self.path}: {call}: {cut_short(': '.join(causes(text)))}: others hold all its connections")
        if not 200 <= response.status_code < 300:
            raise ApiError(call, response.status_code, causes(text))
        return text

    def _connected(self, connection: socket.socket) -> None:
        self._hold(connection.dup())
        self.peer, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if self._over is not None:  # cut meanwhile, and without a socket to shut
            _shut(connection)

    def _hold(self, connection: socket.socket | None) -> None:
        """What :meth:`cut` shuts: a descriptor of our own, for the library's may be somebody else's by then."""
        with self._guard:
            if self._socket is not None:
                self._socket.close()
            self._socket = connection

    def _lost(self, call: str, error: object) -> HypervisorError:
        """What ended the exchange, in the words of :mod:`hypervisors.base`."""
        if self._over is not None:
            return type(self._over)(f"{self.path}: {call}: {self._over}")
        cause = _cause(error)
        if isinstance(cause, TimeoutError) or time.monotonic() >= self._deadline:
            return TimedOut(f"{self.path}: {call}: no answer in {self._timeout:g} s")
        if isinstance(cause, BlockingIOError):
            return Busy(f"{self.path}: {call}: others are already waiting for this socket")
        said = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else cut_short(cause)
        return Unreachable(f"{self.path}: {call}: {said}")


class _Connection(UnixHTTPConnection):  # type: ignore[misc]  # the library has no types
    """Tells of its socket when it has one; the library's own leaves a socket behind that could not be connected."""

    told: Any

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            vmm_socket.connect(connection, unquote(urlsplit(self.unix_socket_url).netloc))
            self.told(connection)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


class _Pool(UnixHTTPConnectionPool):  # type: ignore[misc]
    def __init__(self, url: str, timeout: float, told: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(url, timeout)
        self._told = told

    def _new_conn(self) -> _Connection:
        connection = _Connection(self.socket_path, self.timeout)
        connection.told = self._told
        return connection


class _Adapter(UnixAdapter):  # type: ignore[misc]
    """One connection for all requests; the library's own has one for each URL, and keeps it."""

    def __init__(self, told: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__()
        self._told = told

    def get_connection(self, url: str, proxies: Mapping[str, str] | None = None) -> _Pool:
        endpoint = "http+unix://" + urlsplit(url).netloc
        with self.pools.lock:
            pool = self.pools.get(endpoint)
            if pool is None:
                pool = self.pools[endpoint] = _Pool(endpoint, self.timeout, self._told)
        assert isinstance(pool, _Pool)  # noqa: S101 - for mypy: nothing else is put there
        return pool


def causes(body: bytes) -> tuple[str, ...]:
    """What an error's body says, the outermost first.

    From v47 on it is an array of strings, before that plain text; the HTTP parser sends an object that is no valid
    JSON (a line feed inside a string) under the name ``error``; a wrong method gets nothing.
    """
    text = body.decode(errors="replace").strip()
    try:
        said = msgspec.json.decode(text.replace("\n", " ").replace("\r", " "))
    except (msgspec.DecodeError, RecursionError):
        said = text
    if isinstance(said, dict):
        said = said.get("error", text)
    parts = said[:_MOST_CAUSES] if isinstance(said, list) else [said]
    return tuple(cut_short(part) for part in parts if part not in ("", None))


def cut_short(said: object) -> str:
    """What somebody said, as one line that is not too long."""
    line = " ".join(str(said).split())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1] + "…"


def _body(response: requests.Response) -> bytes:
    """All of it; the library tells that its end is missing only to who reads on. OSError where it is too long."""
    text = b""
    while part := response.raw.read(_PART, decode_content=False):
        text += part
        if len(text) > LONGEST_ANSWER:
            raise OSError(f"an answer of more than {LONGEST_ANSWER} bytes")
    return text


def _read(call: str, text: bytes, kind: type[T]) -> T:
    try:
        return ch_types.read(text, kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Unreachable(f"{call}: an answer that cannot be understood: {cut_short(error)}") from None


def _cause(error: object) -> object:
    """The innermost of what the libraries have wrapped around it."""
    seen = 0
    while isinstance(error, BaseException) and seen < 8:
        inner = (
            error.__cause__
            or error.__context__
            or next((part for part in error.args if isinstance(part, BaseException)), None)
        )
        if inner is None:
            return error
        error, seen = inner, seen + 1
    return error


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it may have ended by itself
        connection.shutdown(socket.SHUT_RDWR)
