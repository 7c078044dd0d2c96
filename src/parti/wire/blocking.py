"""A NATS connection on a plain blocking socket, for bulk reads and requests from one thread (Spark tasks, catch-up).

It exists because reading a range through an asyncio client costs 30 us per message and through this 0.6 us
(docs/evidence/spark.md#s7). It shares addresses, credentials and TLS settings with every other connection
(`ConnectOptions`).
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np

from parti.errors import ConnectionFailed, NoResponders, PartiError, RequestTimeout
from parti.wire.address import ServerAddress
from parti.wire.digits import Bytes
from parti.wire.errors import api_error
from parti.wire.frames import Frames, bytes_of_first, scan
from parti.wire.handshake import OPEN_FAILURES, all_failed, server_error, tls_failed, upgrade_wanted
from parti.wire.options import ConnectOptions

_BUFFER = 2 << 20  # measured at 128 B and 1 KiB: half costs more CPU, double makes the server wait
_STREAMING = 64 << 10  # this many bytes in one read mean that more will follow
_QUIET = 0.002  # ... and justify this wait: a scan costs 0.2 ms even for a few bytes
_PAUSE = 0.02  # ... and this one if much more is due: a server on a shared CPU sends in bursts
_STATUS_END = b"\r\n\r\n\r\n"  # a status frame ends a reply: nothing follows it


@dataclass(frozen=True, slots=True)
class BlockingReply:
    """The reply to a request: status (0 when there is none), header block and body."""

    status: int
    description: str
    header: bytes
    data: bytes


class ClosedOnExit:
    """A context that calls `close` at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingConnection(ClosedOnExit):
    """One connection, used by one thread at a time; every call returns within its timeout or raises.

    After any ConnectionFailed the connection is closed permanently: open a new one. Only `close` may be called from
    another thread; it ends the running call.
    """

    def __init__(
        self, options: ConnectOptions, address: ServerAddress, sock: socket.socket, info: dict[str, Any], rest: bytes
    ) -> None:
        self.options = options
        self.address = address
        self.info = info
        self.closed = False
        self.inbox = f"{options.inbox_prefix}.{uuid4().hex}"
        self._sock = sock
        self._in_use = threading.Lock()  # after a close during a call, another socket could get the same number
        self._tls = isinstance(sock, ssl.SSLSocket)  # then a receive returns one record, often a single message
        self._room = _BUFFER  # the same size follows, never written and so without memory: see `binary_array`
        self._buffer: Bytes = np.empty(2 * _BUFFER, dtype=np.uint8)
        self._buffer[: len(rest)] = np.frombuffer(rest, dtype=np.uint8)
        self._have = len(rest)  # bytes in the buffer
        self._used = 0  # bytes consumed by the last scan
        self._unscanned = bool(rest)  # the server may send more right after its reply to our CONNECT
        self._sid = 1
        self._requests = 0
        self._pongs_due = 0
        self._sock.sendall(f"SUB {self.inbox}.* 1\r\n".encode())

    def __repr__(self) -> str:
        return f"<BlockingConnection {self.address} {'closed' if self.closed else 'open'}>"

    @classmethod
    def open(cls, options: ConnectOptions, *, name: str | None = None) -> Self:
        """Connect to one of the servers, in random order so that many tasks spread over a cluster."""
        addresses = options.server_list()
        random.shuffle(addresses)
        failures: list[PartiError] = []
        for address in addresses:
            try:
                return cls._open_one(options, address, name)
            except OPEN_FAILURES as error:
                failures.append(error)
        raise all_failed(failures)

    @classmethod
    def _open_one(cls, options: ConnectOptions, address: ServerAddress, name: str | None) -> Self:
        try:
            sock: socket.socket = socket.create_connection((address.host, address.port), options.connect_timeout)
        except OSError as error:
            raise ConnectionFailed(f"cannot connect to {address}: {error}; is nats-server running there?") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if options.tls_first:
                sock = _encrypt(options, sock, address)
            rest = bytearray()
            info = json.loads(_line(sock, rest, b"INFO ", address))
            if upgrade_wanted(options, address, info):
                sock = _encrypt(options, sock, address)
            sock.sendall(options.connect_frame(info, name=name) + b"PING\r\n")
            _line(sock, rest, b"PONG", address)
            return cls(options, address, sock, info, bytes(rest))
        except ssl.SSLError as error:  # with TLS 1.3 a refused client certificate appears at the first read
            sock.close()
            raise tls_failed(error, address) from error
        except OSError as error:
            sock.close()
            raise ConnectionFailed(f"handshake with {address} failed: {error}") from error
        except BaseException:
            sock.close()
            raise

    @property
    def max_payload(self) -> int:
        return int(self.info.get("max_payload", 1 << 20))

    def send(self, data: bytes) -> None:
        """Pass bytes to the kernel; a broken connection raises ConnectionFailed."""
        try:
            with self._in_use:
                self._sock.settimeout(self.options.request_timeout)
                self._sock.sendall(data)
        except OSError as error:
            raise self._broken(error) from error

    def publish(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Send one message, without confirmation."""
        self.send(f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + b"\r\n")

    def subscribe(self, subject: str) -> int:
        """Subscribe to a subject; returns the number that marks its messages in `Frames.sid`."""
        self._sid += 1
        self.send(f"SUB {subject} {self._sid}\r\n".encode())
        return self._sid

    def unsubscribe(self, sid: int) -> None:
        """After this returns, no message of `sid` arrives: the server confirmed it, and leftovers were dropped."""
        self.send(f"UNSUB {sid}\r\n".encode())
        self.ping()

    def ping(self, timeout: float | None = None) -> None:
        """A round trip to the server; when it returns, every message sent before it was received and dropped."""
        timeout = timeout or self.options.request_timeout
        deadline = time.monotonic() + timeout
        self.probe()
        while self._pongs_due:
            try:
                self.frames(deadline - time.monotonic())
            except RequestTimeout:
                raise self._broken(f"no PONG within {timeout:g} s") from None

    def probe(self) -> None:
        """Send a PING without waiting: `frames` returns when the PONG arrives, or earlier with messages."""
        self._pongs_due += 1
        self.send(b"PING\r\n")

    def request(self, subject: str, data: bytes = b"", timeout: float | None = None) -> BlockingReply:
        """Return the first reply. Messages of subscriptions that arrive meanwhile are dropped: unsubscribe before."""
        timeout = timeout or self.options.request_timeout
        self._requests += 1
        reply = f"{self.inbox}.{self._requests}"
        self.publish(subject, data, reply)
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RequestTimeout(f"no answer on {subject} from {self.address} within {timeout:g} s")
            try:
                frames = self.frames(remaining)
            except RequestTimeout:
                continue
            frames = frames.select(frames.sid == 1)  # our replies; there may be many leftovers of a subscription
            for index in range(len(frames)):
                if frames.subject(index) == reply.encode():
                    answer = _reply(frames, index)
                    if answer.status == 503:
                        raise NoResponders(f"no responder for {subject}: JetStream is off, or has no leader now")
                    return answer

    def api(self, suffix: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """One JetStream API call; an error reply raises the typed error of its code."""
        subject = f"{self.options.js_prefix}.{suffix}"
        answer = self.request(subject, json.dumps(body).encode() if body is not None else b"", timeout)
        response: dict[str, Any] = json.loads(answer.data)
        if (error := response.get("error")) is not None:
            raise api_error(error, request=suffix)
        return response

    def frames(self, timeout: float, due: int = 0) -> Frames:
        """The next frames, at least one; raises RequestTimeout when none comes. Valid until the next call.

        `due` is the number of bytes expected: then it waits a little to scan many at once, as few cost nearly the same.
        PINGs are answered here. An error line of the server raises: nothing after it can be trusted.
        """
        self._compact()
        needed = 0
        while True:
            if not self._unscanned:
                self._receive(
                    max(timeout, 0.001), due
                )  # set again each time: a large frame on a slow line may take long
            self._unscanned = False
            if self._have < needed:
                continue
            try:
                frames = scan(self._buffer, self._have)
            except PartiError:
                self.close()
                raise
            if frames.consumed:
                self._used = frames.consumed
                for line in frames.controls:
                    self._control(line)
                return frames
            needed = bytes_of_first(self._buffer, self._have)  # scanning an incomplete frame again is wasted

    @property
    def socket(self) -> socket.socket:
        """The raw socket, for benchmarks of its throughput; bypasses the parser."""
        return self._sock

    def close(self) -> None:
        """Drop the connection. Safe to call at any time, from any thread, more than once."""
        self.closed = True
        # Not the shutdown of SSLSocket: that lets a running receive continue with encrypted bytes.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._in_use:
            self._sock.close()

    def _compact(self) -> None:
        """Move the bytes of an incomplete frame to the front; the frames of the last scan become invalid."""
        rest = self._have - self._used
        if self._used and rest:
            self._buffer[:rest] = self._buffer[self._used : self._have].copy()
        self._have, self._used = rest, 0

    def _receive(self, timeout: float, due: int) -> None:
        """Receive the available bytes, at least one, or raise."""
        if self._have == self._room:
            self._grow()
        view = memoryview(self._buffer)[: self._room]  # type: ignore[arg-type]  # ndarray is a buffer; its stubs do not say so
        before = self._have
        try:
            with self._in_use:
                self._sock.settimeout(timeout)
                more = self._take(view)
                if self._tls:
                    self._sock.settimeout(0)
                    with contextlib.suppress(ssl.SSLWantReadError):
                        while more and self._have < self._room:
                            more = self._take(view)
                due = min(due, self._room // 2)
                while more and self._have < due - _STREAMING:
                    self._sock.settimeout(_PAUSE)
                    more = self._take(view)
                if self._have >= _STREAMING:
                    self._sock.settimeout(_QUIET)
                    while more and self._have < self._room and not self._ends_in_status():
                        more = self._take(view)
        except TimeoutError:
            if self._have == before:
                raise RequestTimeout(f"nothing came from {self.address} within {timeout:g} s") from None
        except OSError as error:
            if self._have == before:  # else what arrived is valid, and the next call raises the error again
                raise self._broken(error) from error
        if self._have == before:
            raise self._broken("the server closed the connection")

    def _take(self, view: memoryview) -> bool:
        got = self._sock.recv_into(view[self._have :])
        self._have += got
        return got > 0

    def _ends_in_status(self) -> bool:
        return self._buffer[max(self._have - len(_STATUS_END), 0) : self._have].tobytes() == _STATUS_END

    def _grow(self) -> None:
        limit = max(_BUFFER, 2 * self.max_payload + (1 << 20))
        if self._room >= limit:
            self.close()
            raise ConnectionFailed(f"a frame of {self.address} is larger than its max_payload {self.max_payload}")
        self._room = min(limit, 2 * self._room)
        larger: Bytes = np.empty(self._room, dtype=np.uint8)
        larger[: self._have] = self._buffer[: self._have]
        self._buffer = larger

    def _control(self, line: bytes) -> None:
        if line == b"PING":
            self.send(b"PONG\r\n")
        elif line == b"PONG":
            self._pongs_due = max(self._pongs_due - 1, 0)
        elif line.startswith(b"-ERR"):
            self.close()
            raise server_error(line, self.address)
        elif line.startswith(b"INFO"):
            self.info |= json.loads(line[5:])

    def _broken(self, cause: object) -> ConnectionFailed:
        self.close()
        return ConnectionFailed(f"connection to {self.address} broke: {cause}")


def _reply(frames: Frames, index: int) -> BlockingReply:
    header = frames.header(index)
    return BlockingReply(*status_of(header), header, frames.payload(index))


def status_of(header: bytes) -> tuple[int, str]:
    """Status and description of a header block such as `NATS/1.0 404 No Messages`; (0, "") when it has none."""
    if header[8:9] != b" ":
        return 0, ""
    status, _, description = header[9 : header.find(b"\r\n")].decode(errors="replace").partition(" ")
    return (int(status), description) if status.isdigit() else (0, "")


def _line(sock: socket.socket, rest: bytearray, verb: bytes, address: ServerAddress) -> bytes:
    """The text after `verb` on the next line that starts with it; bytes received after that line stay in `rest`."""
    while True:
        while b"\r\n" not in rest:
            received = sock.recv(4096)
            if not received:
                raise ConnectionFailed(f"{address} closed the connection during the handshake")
            rest += received
        line, _, behind = bytes(rest).partition(b"\r\n")
        rest[:] = behind
        if line.startswith(verb):
            return line[len(verb) :]
        if line.startswith(b"-ERR"):
            raise server_error(line, address)


def _encrypt(options: ConnectOptions, sock: socket.socket, address: ServerAddress) -> ssl.SSLSocket:
    context = options.ssl_context(required=True)
    assert context is not None
    try:
        return context.wrap_socket(sock, server_hostname=options.tls_hostname or address.host)
    except ssl.SSLError as error:
        raise tls_failed(error, address) from error
