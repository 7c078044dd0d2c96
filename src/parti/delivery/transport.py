"""Sends one request: aiohttp's pooled connections behind the address guard; no redirects and no proxies.

aiohttp's connector and parser are used without its session. Everything that the session adds (redirects, cookies,
proxies from the environment, decompression) is forbidden here, and it cost more than half of a delivery: 70 of 110 us,
including an asyncio task per body. `Transport` is the extension point: another client, behind its own egress proxy,
needs one class with these three methods.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Protocol

import aiohttp
import msgspec
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.helpers import is_ip_address
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from parti.config.deliver import DeliverSection
from parti.delivery.errors import AddressBlocked
from parti.delivery.guard import LOCAL_ERRORS, AddressGuard, GuardedResolver
from parti.delivery.lookups import Lookup, LookupLate, Lookups, is_definite
from parti.delivery.policy import AttemptOutcome
from parti.delivery.pool import ConnectionPool, affordable
from parti.delivery.response_head import HeadHandler, head_of
from parti.errors import PartiError

KEPT_RESPONSE = 4096  # bytes of a response that go into a dead letter
_HEADER_BYTES = 16 << 10
_KEEP_ALIVE = 30.0
_BODY_WITHIN = 1.0  # seconds for the body after a status that already decides
_RELIEF = 64  # idle connections to close when descriptors or memory run out all the same
_TARGETS = 2_048  # urls whose first request lines are cached
_SWITCHING = 101  # the one 1xx response that no other response follows


class Request(msgspec.Struct, frozen=True):
    """One POST, exactly as it is sent. (A struct, like the others here, because one is created per attempt.)"""

    url: URL
    headers: Mapping[str, str]
    body: bytes
    timeout: float
    may_send: Callable[[], object] | None = None
    """Called right before the bytes are sent; what it raises ends the request."""
    pace: Callable[[], Awaitable[None]] | None = None
    """Returns when the rate allows the request; called with the connection open, outside the request's timeout."""

    def __repr__(self) -> str:
        return f"<Request {len(self.body)} bytes timeout={self.timeout:g}>"  # url and headers may hold a credential


class Response(msgspec.Struct, frozen=True):
    """The endpoint's response, truncated to the useful part."""

    status: int
    retry_after: str | None
    head: bytes

    def __repr__(self) -> str:
        return f"<Response {self.status}>"


class SendFailed(Exception):
    """No response came; `outcome` is the kind of failure. The text contains no url.

    `wait`: a retry is useless before this many seconds.
    """

    def __init__(self, outcome: AttemptOutcome, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.wait = wait


class _Asked(aiohttp.ClientRequest):
    """The request object the pool is asked with, created once per url, together with its key."""

    @cached_property
    def connection_key(self) -> ConnectionKey:
        return super().connection_key


class _Target(msgspec.Struct, frozen=True):
    """What the pool needs to know about a url, and the first lines of every request to it."""

    request: aiohttp.ClientRequest
    key: ConnectionKey
    first_lines: str
    name: str
    """The name to look up; empty for an address."""


class Transport(Protocol):
    """Posts requests. Raises `SendFailed`, `AddressBlocked` or what `may_send` raises, and nothing else."""

    async def open(self) -> None: ...

    async def post(self, request: Request) -> Response: ...

    async def close(self) -> None: ...


class HttpTransport:
    """aiohttp. The lanes limit the requests in flight; the pool limits the connections."""

    def __init__(
        self,
        config: DeliverSection,
        guard: AddressGuard,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        connections: int | None = None,
    ) -> None:
        """`lookup` resolves a name, by default with the system's resolver.

        `connections`: the most open connections, by default as many as the process has descriptors for.
        """
        self.guard = guard
        self._config = config
        self._lookup = lookup
        self._tls = tls
        self._most = connections
        self._pool: ConnectionPool | None = None
        self._lookups: Lookups | None = None
        self._targets: dict[URL, _Target] = {}
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}

    def __repr__(self) -> str:
        return f"<HttpTransport {self._pool or 'closed'} {self.guard!r}>"

    async def open(self) -> None:
        """Create the pool; nothing is connected yet."""
        self._lookups = lookups = Lookups(self._config.dns_timeout, self._lookup)
        self._pool = ConnectionPool(
            self.guard,
            self._most or affordable(),
            keepalive_timeout=_KEEP_ALIVE,
            use_dns_cache=False,  # `Lookups` has a cache that treats each name separately
            resolver=GuardedResolver(self.guard, lookups),
            ssl=self._tls if self._tls is not None else True,
        )

    async def close(self) -> None:
        """After this returns every connection is closed."""
        self._targets.clear()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    async def post(self, request: Request) -> Response:
        pool, lookups = self._pool, self._lookups
        assert pool is not None, "open() comes first"
        assert lookups is not None
        starved = self.guard.starved
        try:
            target = self._target(request.url)
            data = _serialize(target.first_lines, request)
            # Waiting for our own resolver and descriptors does not count against the endpoint's timeout.
            if target.name:
                await lookups.known(target.name)
            if self.guard.alive >= pool.most:
                await pool.room(target.key)
            taken: Connection | None = None
            try:
                async with asyncio.timeout(request.timeout) as limit:
                    limits = self._timeout(request.timeout)
                    connection = taken = await pool.connect(target.request, [], limits)
                    if request.pace is not None:
                        await _apart(limit, request.pace)
                    while not pool.is_clean(connection):
                        connection.close()
                        connection = taken = await pool.connect(target.request, [], limits)
                    status, retry_after, content = await self._exchange(connection, data, request.may_send)
                # Status line and headers have decided the outcome. The body only decides about reusing the connection.
                head = b"" if content is None or content.at_eof() else await self._read(content, connection)
                if _drop_unsent(connection):
                    connection.close()  # it answered before it had received everything
            except BaseException:
                if taken is not None:
                    _drop_unsent(taken)
                    taken.close()  # data still to come would be mistaken for the next response
                raise
            connection.release()
            return Response(status, retry_after, head)
        except PartiError:  # raised by `may_send`, or by the guard
            raise
        except Exception as error:
            if short := self.guard.starved > starved:
                pool.close_idle(_RELIEF)
            raise _failure(error, starved=short) from None
        finally:
            if pool.turns:
                pool.next_turn()

    async def _exchange(
        self, connection: Connection, data: bytes, may_send: Callable[[], object] | None
    ) -> tuple[int, str | None, aiohttp.StreamReader | None]:
        """Status, `Retry-After` and the body; None for a body that was broken from the beginning."""
        protocol: HeadHandler | None = connection.protocol  # type: ignore[assignment]  # as all of the pool
        if protocol is None or (transport := protocol.transport) is None:
            raise aiohttp.ServerDisconnectedError
        protocol.set_response_params(
            read_until_eof=True,
            auto_decompress=False,  # 64 KB of gzip can expand to 64 MB
            read_bufsize=self._config.max_response,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        if may_send is not None:
            may_send()  # opening the connection may have taken longer than the lease had left
        protocol.ask()
        transport.write(data)
        try:
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != _SWITCHING:
                message, content = await protocol.read()
        except HttpProcessingError:
            if (found := head_of(protocol.first)) is None:
                raise
            connection.close()
            return *found, None
        return message.code, message.headers.get("Retry-After"), content

    def _target(self, url: URL) -> _Target:
        target = self._targets.get(url)
        if target is None:
            if len(self._targets) >= _TARGETS:
                self._targets.clear()
            lines = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
            host = url.raw_host or ""
            name = "" if is_ip_address(host) else host
            asked = _Asked("POST", url, loop=asyncio.get_running_loop())
            target = self._targets[url] = _Target(asked, asked.connection_key, lines, name)
        return target

    def _timeout(self, total: float) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(total)
        if timeout is None:
            if len(self._timeouts) > 100:
                self._timeouts.clear()
            connect = min(self._config.connect_timeout, total)
            timeout = aiohttp.ClientTimeout(total=total, sock_connect=connect)
            self._timeouts[total] = timeout
        return timeout

    async def _read(self, content: aiohttp.StreamReader, connection: Connection) -> bytes:
        """The first bytes. A short rest is read as well, so that the connection can be reused; a long one closes it.

        So does a body that is truncated or slow.
        """
        head, seen = b"", 0
        try:
            async with asyncio.timeout(_BODY_WITHIN):
                while chunk := await content.readany():
                    seen += len(chunk)
                    if len(head) < KEPT_RESPONSE:
                        head += chunk[: KEPT_RESPONSE - len(head)]
                    if seen > self._config.max_response:
                        connection.close()
                        break
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError, ValueError):
            connection.close()
        return head


def _drop_unsent(connection: Connection) -> bool:
    """Abort the connection if data is still unsent; True if so. A plain close would wait for the peer to read it."""
    protocol = connection.protocol
    transport = protocol.transport if protocol is not None else None
    if transport is None or not transport.get_write_buffer_size():
        return False
    transport.abort()
    return True


async def _apart(limit: asyncio.Timeout, wait: Callable[[], Awaitable[None]]) -> None:
    """Wait without counting the time against the limit."""
    ends, loop = limit.when(), asyncio.get_running_loop()
    began = loop.time()
    limit.reschedule(None)
    await wait()
    limit.reschedule(ends + loop.time() - began if ends is not None else None)


def _serialize(first_lines: str, request: Request) -> bytes:
    """The whole request; `ValueError` for a header that contains a line break, wherever it slipped through."""
    headers = request.headers
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError("a header holds a line break")
    return f"{first_lines}{text}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body


def _failure(error: BaseException, *, starved: bool = False) -> Exception:
    """A client failure as one of ours; the text never contains the url, whose path may be a secret.

    `starved`: a socket could not be created; when several addresses fail, the client does not say which one.
    """
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, AddressBlocked):
        return inner
    name = type(inner).__name__
    if isinstance(inner, LookupLate):
        return SendFailed(AttemptOutcome.LOCAL, str(inner), inner.wait)
    if isinstance(inner, MemoryError):
        return SendFailed(AttemptOutcome.LOCAL, "out of memory")
    late = isinstance(error, TimeoutError)
    if isinstance(inner, OSError) and (inner.errno in LOCAL_ERRORS or (starved and not late)):
        return SendFailed(AttemptOutcome.LOCAL, f"this process is at its limits: {inner.strerror or name}")
    if isinstance(inner, socket.gaierror) and not is_definite(inner):
        return SendFailed(AttemptOutcome.LOCAL, f"the host's name cannot be resolved for now ({name})")
    if late:
        return SendFailed(AttemptOutcome.TIMEOUT, f"no answer in time ({type(error).__name__})")
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return SendFailed(AttemptOutcome.DNS, f"the host's name cannot be resolved ({name})")
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return SendFailed(AttemptOutcome.TLS, f"TLS failed ({type(error).__name__})")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return SendFailed(AttemptOutcome.NETWORK, "the endpoint closed the connection without an answer")
    detail = inner.strerror if isinstance(inner, OSError) and inner.strerror else name
    return SendFailed(AttemptOutcome.NETWORK, f"the request failed: {detail}")
