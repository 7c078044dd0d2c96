"""An HTTP endpoint on loopback that fails on demand, for testing webhook delivery.

    async with FaultHttpServer() as server:
        server.on("/orders", Answer(503), Answer(429, {"Retry-After": "2"}), Hang(), Answer(200))
        ...
        assert [request.path for request in server.received] == ["/orders"] * 4

Each request to a path takes the path's next reply; the last one repeats. A path without a script answers 200.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, cast

from parti.testing.eventually import PATIENCE

_MOST_RECEIVED = 100_000  # requests kept; older ones are dropped, so that a long run does not fill the memory
_LARGEST_REQUEST = 8 << 20
_HUGE_CHUNK = b"x" * 65_536


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as received; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    number: int
    """The request's number within its path, from 1."""

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, sent after `delay` seconds and not before `gate` is set."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay: float = 0.0
    gate: asyncio.Event | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """No answer at all; the connection stays open until the client or the server gives up."""


@dataclass(frozen=True, slots=True)
class ResetConnection:
    """The connection is aborted (RST) instead of an answer."""


@dataclass(frozen=True, slots=True)
class Drip:
    """An answer of `size` bytes, one byte every `interval` seconds."""

    size: int = 1_000
    interval: float = 0.1
    status: int = 200


@dataclass(frozen=True, slots=True)
class Huge:
    """A body of `size` bytes, sent as fast as the client reads it."""

    size: int = 64 << 20
    status: int = 200


@dataclass(frozen=True, slots=True)
class Garbage:
    """Bytes that are not HTTP: for an https client, a broken TLS handshake."""

    data: bytes = b"\x00\x01garbage\r\n\r\n"


def redirect(location: str, status: int = 302) -> Answer:
    """An answer that redirects the client."""
    return Answer(status, {"Location": location})


Reply = Answer | Hang | ResetConnection | Drip | Huge | Garbage
Script = Callable[[ReceivedRequest], Reply]
"""Chooses the reply to each request of a path."""


class FaultHttpServer:
    """Listens on loopback while the context is open; afterwards all its connections are closed."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 takes any free port."""
        self.received: deque[ReceivedRequest] = deque(maxlen=_MOST_RECEIVED)
        self.connections = 0
        """Connections accepted so far."""
        self.port = port
        self._host = host
        self._scripts: dict[str, Script] = {}
        self._counts: dict[str, int] = {}
        self._default: Script = lambda _request: Answer()
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FaultHttpServer {self._host}:{self.port} received={len(self.received)} open={len(self._open)}>"

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def allowed(self) -> str:
        """This server as an entry of deliver.allow_addresses."""
        return f"{self._host}/32@{self.port}"

    def on(self, path: str, *replies: Reply | Script) -> None:
        """Script a path: replies in order, the last one repeated, or one function that chooses each reply."""
        if len(replies) == 1 and callable(replies[0]):
            self._scripts[path] = replies[0]
            return
        rest = deque(cast("tuple[Reply, ...]", replies))
        self._scripts[path] = lambda _request: rest.popleft() if len(rest) > 1 else rest[0]

    def otherwise(self, reply: Reply | Script) -> None:
        """The reply for paths without a script."""
        self._default = reply if callable(reply) else lambda _request: reply

    def bodies(self, path: str) -> list[Any]:
        """The JSON bodies received for a path, in order."""
        return [request.json() for request in self.received if request.path == path]

    async def wait_for(
        self, count: int, *, path: str | None = None, timeout: float = PATIENCE
    ) -> list[ReceivedRequest]:
        """Return when `count` requests have arrived (for the path); `TimeoutError` if they do not."""
        async with asyncio.timeout(timeout):
            while True:
                found = [r for r in self.received if path is None or r.path == path]
                if len(found) >= count:
                    return found
                self._arrived.clear()
                await self._arrived.wait()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """After this returns, the port is free and every connection is closed. A new start uses the same port."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        ends = [connection.abort() for connection in list(self._open)]
        await asyncio.gather(*ends)
        await server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def decide(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Record a request and choose its reply."""
        number = self._counts[path] = self._counts.get(path, 0) + 1
        request = ReceivedRequest(method, path, headers, body, number)
        self.received.append(request)
        self._arrived.set()
        return self._scripts.get(path, self._default)(request)


class _Connection(asyncio.Protocol):
    """One client: requests in sequence, each answered by the server's script."""

    def __init__(self, server: FaultHttpServer) -> None:
        self._server = server
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections += 1
        self._server._open.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._server._open.discard(self)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()
        await self._closed
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._task is None or self._task.done():
            self._next()

    def _next(self) -> None:
        assert self._transport is not None
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            # A TLS client, or one that sends garbage, would never complete a request.
            if self._data[:1] == b"\x16" or len(self._data) > _LARGEST_REQUEST:
                self._transport.write(Garbage().data)
                self._transport.close()
            return
        first, *lines = self._data[:end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if len(self._data) < end + 4 + length:
            return
        body = bytes(self._data[end + 4 : end + 4 + length])
        del self._data[: end + 4 + length]
        method, path, _ = first.split(" ", 2)
        reply = self._server.decide(method, path, headers, body)
        if isinstance(reply, Answer) and not reply.delay and reply.gate is None:
            self._transport.write(_encode(reply))
        else:
            self._task = asyncio.get_running_loop().create_task(self._reply(reply))

    async def _reply(self, reply: Reply) -> None:
        transport = self._transport
        assert transport is not None
        match reply:
            case Answer():
                await asyncio.sleep(reply.delay)
                if reply.gate is not None:
                    await reply.gate.wait()
                transport.write(_encode(reply))
            case Hang():
                await self._closed
            case ResetConnection():
                transport.abort()
            case Garbage():
                transport.write(reply.data)
                transport.close()
            case Drip():
                transport.write(_head(reply.status, {"Content-Length": str(reply.size)}))
                for _ in range(reply.size):
                    await asyncio.sleep(reply.interval)
                    transport.write(b".")
            case Huge():
                transport.write(_head(reply.status, {"Content-Length": str(reply.size)}))
                for sent in range(0, reply.size, len(_HUGE_CHUNK)):
                    await self._writable.wait()
                    transport.write(_HUGE_CHUNK[: reply.size - sent])


def _encode(answer: Answer) -> bytes:
    return _head(answer.status, {"Content-Length": str(len(answer.body)), **answer.headers}) + answer.body


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    known = {member.value for member in HTTPStatus}
    phrase = HTTPStatus(status).phrase if status in known else "Whatever"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
