"""The fast live path: an asyncio connection that passes on whole reads of frames and combines its writes.

A message through nats-py's `fetch` costs 17 us of client CPU. Here it costs under 2 us: one parse per read, and one
write for all acks of a loop turn (docs/evidence/jetstream.md#j22). API calls, KV and everything that is not bulk use
nats-py; this connection receives deliveries, and sends pulls and acks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections.abc import Callable
from typing import Any, Self, cast
from uuid import uuid4

import numpy as np

from parti.errors import ConnectionFailed, FatalError, PartiError
from parti.waiting import first_of
from parti.wire.address import ServerAddress
from parti.wire.digits import Bytes
from parti.wire.frames import Frames, scan
from parti.wire.handshake import OPEN_FAILURES, all_failed, server_error, tls_failed, upgrade_wanted
from parti.wire.options import ConnectOptions

_BUFFER = 1 << 20
_WRITE_HIGH = 4 << 20  # bytes waiting to be sent before `writable` is cleared

OnFrames = Callable[[Frames], None]


class ReaderBroke(FatalError):
    """The receiver of messages raised: a bug, which a redelivery would hit again. Stop, so that others continue."""

    def __init__(self, bug: Exception) -> None:
        super().__init__(f"a bug in what takes messages: {type(bug).__name__}: {bug}")
        self.bug = bug


class LiveConnection(asyncio.BufferedProtocol):
    """One connection of one event loop. Frames go to the callback of their subscription, a whole read at a time.

    A callback must copy what it needs before it returns: the buffer is reused. When the connection is lost, for any
    reason, `lost` is done with the error, permanently: open a new connection.
    """

    def __init__(self, options: ConnectOptions, address: ServerAddress) -> None:
        self.options = options
        self.address = address
        self.info: dict[str, Any] = {}
        self.lost: asyncio.Future[PartiError] = asyncio.get_running_loop().create_future()
        self.writable = asyncio.Event()
        self.writable.set()
        self.on_error: Callable[[PartiError], None] = lambda error: None  # noqa: ARG005
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer: Bytes = np.empty(_BUFFER, dtype=np.uint8)
        self._have = 0
        self._sid = 0
        self._handlers: dict[int, OnFrames] = {}
        self._greeting: asyncio.Future[None] = self._loop.create_future()
        self._pongs: list[asyncio.Future[None]] = []
        self._out: list[bytes] = []
        self._flush_due = False

    def __repr__(self) -> str:
        return f"<LiveConnection {self.address} {'lost' if self.lost.done() else 'open'}>"

    @classmethod
    async def open(cls, options: ConnectOptions, *, name: str | None = None) -> Self:
        """Connect to one of the servers; typed errors name those that failed, and why."""
        failures: list[PartiError] = []
        for address in random.sample(addresses := options.server_list(), len(addresses)):
            try:
                return await cls._open_one(options, address, name)
            except OPEN_FAILURES as error:
                failures.append(error)
        raise all_failed(failures)

    @classmethod
    async def _open_one(cls, options: ConnectOptions, address: ServerAddress, name: str | None) -> Self:
        connection = cls(options, address)
        try:
            async with asyncio.timeout(options.connect_timeout):
                await connection._handshake(name)
        except ssl.SSLError as error:
            connection.abort()
            raise tls_failed(error, address) from error
        except (OSError, TimeoutError) as error:
            connection.abort()
            text = str(error) or f"no greeting within {options.connect_timeout:g} s"
            raise ConnectionFailed(f"cannot connect to {address}: {text}; is nats-server running there?") from error
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _handshake(self, name: str | None) -> None:
        loop, options, address = self._loop, self.options, self.address
        hostname = options.tls_hostname or address.host
        first = options.ssl_context(required=True) if options.tls_first else None
        await loop.create_connection(
            lambda: self, address.host, address.port, ssl=first, server_hostname=hostname if first else None
        )
        await self._or_lost(self._greeting)
        if upgrade_wanted(options, address, self.info):
            context = options.ssl_context(required=True)
            assert context is not None
            assert self._transport is not None
            transport = await loop.start_tls(self._transport, self, context, server_hostname=hostname)
            self._transport = cast(asyncio.Transport, transport)
        self.write(options.connect_frame(self.info, name=name))
        await self.ping()

    async def _or_lost(self, future: asyncio.Future[None]) -> None:
        await first_of(future, self.lost)
        if self.lost.done():
            raise self.lost.result()

    async def ping(self) -> None:
        """A round trip to the server; when it returns, the server has received everything written before it."""
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self.write(b"PING\r\n")
        await self._or_lost(pong)

    def write(self, data: bytes) -> None:
        """Queue bytes; all bytes queued in one turn of the loop are sent in one write."""
        self._out.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def send_now(self) -> None:
        """Write queued bytes now, not at the end of this turn: the server waits for them."""
        self._flush()

    def publish(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Queue one message, without confirmation."""
        self.write(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(data), data))

    def subscribe(self, subject: str, handler: OnFrames) -> int:
        """Pass the frames of `subject` to `handler` from now on."""
        self._sid += 1
        self._handlers[self._sid] = handler
        self.write(f"SUB {subject} {self._sid}\r\n".encode())
        return self._sid

    def unsubscribe(self, sid: int) -> None:
        """No frame of `sid` reaches its handler after this returns."""
        if self._handlers.pop(sid, None) is not None:
            self.write(f"UNSUB {sid}\r\n".encode())

    def new_inbox(self) -> str:
        return f"{self.options.inbox_prefix}.{uuid4().hex}"

    def abort(self) -> None:
        """Drop the connection at once; queued bytes that were not sent are lost."""
        if self._transport is not None:
            self._transport.abort()
        self._set_lost(ConnectionFailed(f"connection to {self.address} was closed"))

    async def close(self) -> None:
        """Send queued bytes, wait until the server has received them, then drop the connection."""
        if not self.lost.done():
            with contextlib.suppress(PartiError, TimeoutError):
                async with asyncio.timeout(self.options.request_timeout):
                    await self.ping()
        self.abort()

    # -- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH)

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, ssl.SSLError):
            self._set_lost(tls_failed(error, self.address))
        else:
            self._set_lost(ConnectionFailed(f"connection to {self.address} broke: {error or 'closed by the server'}"))

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        if self._have == len(self._buffer):
            larger: Bytes = np.empty(2 * len(self._buffer), dtype=np.uint8)
            larger[: self._have] = self._buffer
            self._buffer = larger
        return memoryview(self._buffer)[self._have :]  # type: ignore[arg-type]  # an ndarray is a buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._have += nbytes
        try:
            frames = scan(self._buffer, self._have)
        except PartiError as error:
            self._fail(error)
            return
        if not frames.consumed:
            return
        for line in frames.controls:
            self._control(line)
        if len(frames):
            try:
                self._dispatch(frames)
            except PartiError as error:
                self._fail(error)
            except Exception as bug:  # else the event loop would only close the connection, repeatedly
                self._fail(ReaderBroke(bug))
        rest = self._have - frames.consumed
        if rest:
            self._buffer[:rest] = self._buffer[frames.consumed : self._have].copy()
        self._have = rest

    def _dispatch(self, frames: Frames) -> None:
        sids = frames.sid
        first = int(sids[0])
        if (sids == first).all():
            if (handler := self._handlers.get(first)) is not None:
                handler(frames)
            return
        for sid in dict.fromkeys(sids.tolist()):
            if (handler := self._handlers.get(sid)) is not None:
                handler(frames.select(sids == sid))

    def _control(self, line: bytes) -> None:
        if line == b"PING":
            self.write(b"PONG\r\n")
        elif line == b"PONG":
            if self._pongs:
                pong = self._pongs.pop(0)
                if not pong.done():
                    pong.set_result(None)
        elif line.startswith(b"INFO"):
            self.info |= json.loads(line[5:])
            if not self._greeting.done():
                self._greeting.set_result(None)
        elif line.startswith(b"-ERR"):
            error = server_error(line, self.address)
            # The server keeps the connection after a permissions violation; after any other error it closes it.
            if b"permissions violation" in line.lower():
                self.on_error(error)
            else:
                self._fail(error)

    def _fail(self, error: PartiError) -> None:
        self._set_lost(error)
        if self._transport is not None:
            self._transport.abort()

    def _set_lost(self, error: PartiError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)
            self.writable.set()
            self._handlers.clear()
