"""One process's network to the simulated server: requests, live connections with the NATS protocol, range reads.

The shipped JetStreamApi, LiveConnection and LivePull run on it unchanged. This module decides what is lost, reordered
or late: requests and their answers, deliveries, pulls and acks. A process that is cut off loses its connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from parti.errors import ConnectionFailed, RequestTimeout
from parti.testing.sim.server import SimServer
from parti.testing.sim.stream import partitions_of
from parti.testing.sim.world import SimMachine
from parti.wire.options import ConnectOptions
from parti.wire.requests import Reply

if TYPE_CHECKING:
    from parti.testing.sim.process import Process

_ROWS: Final = 3  # messages per part of a range read: many events can happen between two parts
_INFO: Final = b"INFO " + json.dumps({"server_id": "SIM", "version": "2.15.1", "headers": True}).encode() + b"\r\n"
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Network:
    """A process's view of the network; replaces `parti.wire.connect.Connection`."""

    server_version = (2, 15, 1)
    is_connected = True
    max_payload = 1 << 20
    connect_options = ConnectOptions(request_timeout=0.25, connect_timeout=0.25)

    def __init__(self, process: Process, server: SimServer) -> None:
        self.requests = self
        self._process = process
        self._world = process.world
        self._server = server

    def add_listener(self, listener: Callable[..., None]) -> Callable[[], None]:
        del listener
        return lambda: None

    # -- requests -----------------------------------------------------------------------------------------------------

    async def call(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout: float = 0.0
    ) -> Reply:
        """As `Requests.call`. Consumer changes travel in order; a late reset could do harm, so it must not happen."""
        del timeout
        if ".CONSUMER.RESET." in subject:
            self._process.reached("reset")
        late = ".CONSUMER.CREATE." not in subject and ".CONSUMER.DELETE." not in subject
        return Reply(await self.ask(lambda: self._server.request(subject, payload, headers), late=late))

    async def ask(self, serve: Callable[[], Any], *, late: bool = True) -> Any:
        """Run this on the server and return the answer; `RequestTimeout` when the answer does not arrive."""
        if self._process.loop.ending:
            raise ConnectionFailed("this process has no network")
        future: asyncio.Future[Any] = self._process.loop.create_future()

        def answered(result: Any) -> None:
            if not future.done():
                future.set_result(result)

        def failed() -> None:
            if not future.done():
                future.set_exception(RequestTimeout("no answer"))

        self._world.call(self._process, serve, answered, failed, late=late)
        return await future

    # -- live connections ---------------------------------------------------------------------------------------------

    async def connect(self, made: Callable[[], Any]) -> tuple[asyncio.Transport, Any]:
        """Replaces `loop.create_connection`."""
        try:
            await self.ask(lambda: True)
        except RequestTimeout as error:
            raise ConnectionRefusedError("no server") from error
        protocol = made()
        transport = SimTransport(self._process, self._server, protocol)
        protocol.connection_made(transport)
        transport.send(_INFO, steady=True)
        return transport, protocol


class SimTransport(asyncio.Transport):
    """The bytes of one connection, in order both ways, unless network faults are on."""

    def __init__(self, process: Process, server: SimServer, protocol: Any) -> None:
        super().__init__()
        self.host: SimMachine = process
        self._world = process.world
        self._server = server
        self._protocol = protocol
        self._subscriptions: dict[str, int] = {}
        self._closed = False
        self._sent_until = self._received_until = 0.0

    # -- the process's side -------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closed:
            return
        world = self._world
        if self.host.cut_until > world.now:
            self._break()
            return
        lost = world.lost(self.host)
        self._sent_until = max(self._sent_until, world.now + world.delay())
        world.at(self._sent_until, None, self._arrived, bytes(data), lost)

    def abort(self) -> None:
        self._closed = True
        self._subscriptions.clear()

    close = abort

    def is_closing(self) -> bool:
        return self._closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Buffers are never full here."""

    def _break(self) -> None:
        if not self._closed:
            self.abort()
            self._world.after(0.01, self.host, self._protocol.connection_lost, ConnectionResetError("cut off"))

    # -- the server's side --------------------------------------------------------------------------------------------

    def _arrived(self, data: bytes, lost: bool) -> None:
        """Written bytes arrive; a lost write loses its pulls and acks."""
        for verb, words, payload in _commands(data):
            if verb == b"PING":
                self.send(b"PONG\r\n", steady=True)
            elif verb == b"SUB":
                self._subscriptions[words[0].decode()] = int(words[1])
            elif verb == b"UNSUB":
                gone = int(words[0])
                self._subscriptions = {k: sid for k, sid in self._subscriptions.items() if sid != gone}
            elif verb == b"PUB" and not lost:
                reply = words[1].decode() if len(words) == 3 else ""
                self._server.published(self, words[0].decode(), reply, payload)

    def wants(self, subject: str) -> int | None:
        if self._closed or self.host.dead:
            return None
        found = self._subscriptions.get(subject)
        return found if found is not None else self._subscriptions.get(f"{subject.rpartition('.')[0]}.*")

    def send(self, frames: bytes, *, steady: bool = False) -> None:
        world = self._world
        if self.host.cut_until > world.now:
            self._break()
            return
        if not steady and world.lost(self.host):
            return
        arrives = world.now + world.delay()
        if steady or not (world.network.reorder and world.rng.random() < world.network.reorder):
            arrives = self._received_until = max(arrives, self._received_until)
        world.at(arrives, self.host, self._received, frames)

    def _received(self, frames: bytes) -> None:
        if not self._closed:
            self._protocol.get_buffer(len(frames))[: len(frames)] = frames
            self._protocol.buffer_updated(len(frames))


def _commands(data: bytes) -> Iterator[tuple[bytes, list[bytes], bytes]]:
    while data:
        line, _, data = data.partition(b"\r\n")
        verb, *words = line.split()
        payload = b""
        if verb == b"PUB":
            size = int(words[-1])
            payload, data = data[:size], data[size + 2 :]
        yield verb, words, payload


class SimReader:
    """Replaces `AsyncRangeReader`, with its guarantee: complete and in order, or an error."""

    def __init__(self, network: Network, server: SimServer) -> None:
        self._network = network
        self._server = server

    async def read(
        self, stream: str, after: int, to: int, *, subjects: tuple[str, ...] = (), **options: Any
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        del stream, options
        partitions = partitions_of(list(subjects))
        while after < to:
            found, upto = await self._part(after, to, partitions)
            if found:
                yield self._batch(found)
            after = upto

    async def _part(self, after: int, to: int, partitions: frozenset[str]) -> tuple[list[int], int]:
        answer: tuple[list[int], int] = await self._network.ask(
            lambda: self._server.stream.read(after, to, partitions, _ROWS)
        )
        return answer

    def _batch(self, found: list[int]) -> pa.RecordBatch:
        subjects = [self._server.stream.subjects[seq] for seq in found]
        return pa.RecordBatch.from_arrays(
            [
                pa.array(subjects),
                pa.array(found, pa.uint64()),
                pa.array(found, pa.timestamp("ns")),
                pa.nulls(len(found), _HEADERS),
                pa.array([b""] * len(found), pa.binary()),
            ],
            ["subject", "sequence", "timestamp", "headers", "data"],
        )

    async def close(self) -> None:
        """Nothing stays open between two parts."""
