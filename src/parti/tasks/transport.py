"""Sending one request: aiohttp with pooled connections behind the address guard; no redirects and no proxies.

`Transport` is the seam: another client, behind an egress proxy of its own, needs one class with these three methods.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from parti.config.deliver import DeliverSection
from parti.tasks.errors import AddressBlocked
from parti.tasks.guard import AddressGuard, GuardedResolver, Lookup
from parti.tasks.policy import Outcome

KEPT_RESPONSE = 4096  # bytes of a response that go into a dead letter
_HEADER_BYTES = 16 << 10
_KEEP_ALIVE = 30.0
_DNS_CACHE = 10  # seconds; short, as endpoints move, and each use is checked at the socket anyway


class Request(msgspec.Struct, frozen=True):
    """One POST, exactly as it is to be sent. (A struct, as are the others here: one is made for every attempt.)"""

    url: URL
    headers: Mapping[str, str]
    body: bytes
    timeout: float
    may_send: Callable[[], object] | None = None
    """Asked at the last moment before the bytes leave; what it raises ends the request."""

    def __repr__(self) -> str:
        return f"<Request {len(self.body)} bytes timeout={self.timeout:g}>"  # url and headers may hold a credential


class Response(msgspec.Struct, frozen=True):
    """What the endpoint answered, cut to what is of use."""

    status: int
    retry_after: str | None
    head: bytes

    def __repr__(self) -> str:
        return f"<Response {self.status}>"


class SendFailed(Exception):
    """No answer came; `outcome` says which kind of failure it was. The text holds no url."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class FencedBody(aiohttp.BytesPayload):
    """A body that asks before it is written: opening the connection may have taken longer than the lease had left."""

    def __init__(self, body: bytes, may_send: Callable[[], object]) -> None:
        super().__init__(body)
        self._may_send = may_send

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._may_send()
        await super().write(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._may_send()
        await super().write_with_length(writer, content_length)


class Transport(Protocol):
    """Posts requests. Raises `SendFailed` or `AddressBlocked`, and nothing else but a cancellation."""

    async def open(self) -> None: ...

    async def post(self, request: Request) -> Response: ...

    async def close(self) -> None: ...


class HttpTransport:
    """aiohttp. The pool has no limit of its own: the lanes decide how many requests are under way."""

    def __init__(
        self,
        config: DeliverSection,
        guard: AddressGuard,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.guard = guard
        self._config = config
        self._lookup = lookup
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}

    def __repr__(self) -> str:
        return f"<HttpTransport {'open' if self._session else 'closed'} {self.guard!r}>"

    async def open(self) -> None:
        """Make the pool; nothing is connected yet."""
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=0,
            keepalive_timeout=_KEEP_ALIVE,
            ttl_dns_cache=_DNS_CACHE,
            resolver=GuardedResolver(self.guard, self._lookup),
            socket_factory=self.guard.socket,
            ssl=self._tls if self._tls is not None else True,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,  # a proxy of the environment would be asked to go where the guard forbids
            auto_decompress=False,  # 64 KB of gzip can be 64 MB
            cookie_jar=aiohttp.DummyCookieJar(),
            raise_for_status=False,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
            read_bufsize=self._config.max_response,
        )

    async def close(self) -> None:
        """After this returns every connection is closed."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def post(self, request: Request) -> Response:
        assert self._session is not None, "open() comes first"
        try:
            async with self._session.post(
                request.url,
                data=request.body if request.may_send is None else FencedBody(request.body, request.may_send),
                headers=request.headers,
                allow_redirects=False,
                timeout=self._timeout(request.timeout),
            ) as response:
                head = await self._read(response)
                return Response(response.status, response.headers.get("Retry-After"), head)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _failure(error) from None

    def _timeout(self, total: float) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(total)
        if timeout is None:
            if len(self._timeouts) > 100:
                self._timeouts.clear()
            connect = min(self._config.connect_timeout, total)
            timeout = aiohttp.ClientTimeout(total=total, sock_connect=connect)
            self._timeouts[total] = timeout
        return timeout

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The first bytes. A short rest is read too, so that the connection can be used again; a long one ends it."""
        if response.content.at_eof():
            return b""
        head, seen = b"", 0
        while chunk := await response.content.readany():
            seen += len(chunk)
            if len(head) < KEPT_RESPONSE:
                head += chunk[: KEPT_RESPONSE - len(head)]
            if seen > self._config.max_response:
                response.close()
                break
        return head


def _failure(error: BaseException) -> Exception:
    """A failure of the client as ours; the text never holds the url, whose path may be a secret."""
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, AddressBlocked):
        return inner
    name = type(inner).__name__
    if isinstance(error, asyncio.TimeoutError):
        return SendFailed(Outcome.TIMEOUT, f"no answer in time ({type(error).__name__})")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return SendFailed(Outcome.DNS, f"the host's name cannot be resolved ({name})")
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return SendFailed(Outcome.TLS, f"TLS failed ({type(error).__name__})")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return SendFailed(Outcome.NETWORK, "the endpoint closed the connection without an answer")
    detail = inner.strerror if isinstance(inner, OSError) and inner.strerror else name
    return SendFailed(Outcome.NETWORK, f"the request failed: {detail}")
