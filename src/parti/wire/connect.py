"""The async connection: nats-py with typed errors, a first connect that fails fast, and safe callbacks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from nats import errors as nats_errors
from nats.aio.client import Client, RawCredentials

from parti.errors import AuthFailed, ConnectionFailed, PartiError, TlsFailed
from parti.observe.logs import get_logger
from parti.wire.events import ConnectionEvent, ConnectionEventKind, Events, Listener
from parti.wire.options import ConnectOptions
from parti.wire.requests import Requests

log = get_logger("wire")

# How often each server is tried before the first connect gives up. A server that refuses us sends the reason and
# disconnects; the reset can arrive before the reason, so a disconnect is retried more often to get it.
_FIRST_ROUNDS = 2
_HANG_UP_ROUNDS = 4
_HANG_UPS = (nats_errors.UnexpectedEOF, ConnectionResetError, BrokenPipeError)
_NAME_MISMATCH = (62, 64)  # OpenSSL: host name, IP address
_AUTH_WORDS = ("authorization violation", "authentication expired", "authentication revoked", "authorization timeout")


class _NoTls(nats_errors.Error):  # type: ignore[misc]  # one of nats-py's own, so that a reconnect goes on trying
    """The server offered no TLS although TLS was requested."""


class Connection(Client):  # type: ignore[misc]  # nats-py is only partly typed
    """A nats-py client with listeners for connection events; the whole nats-py API works on it.

    Two guarantees beyond nats-py: a listener's exception cannot stop the read loop, and when TLS was requested, no
    credential is sent to a server that does not offer it.
    """

    _transport: Any

    def __init__(self, options: ConnectOptions) -> None:
        super().__init__()
        self.connect_options = options
        self.events = Events()
        self.requests = Requests(self)
        self._opening = True
        self._abandoned = False
        self._ended = False
        self._failures = 0

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "closed" if self.is_closed else "disconnected"
        return f"<Connection {self.connect_options.name} {state} {self.server_address or '-'}>"

    @property
    def server_address(self) -> str:
        """host:port of the connected server, empty while disconnected."""
        url = self.connected_url
        return f"{url.hostname}:{url.port}" if url is not None else ""

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The version of the connected server; (0, 0, 0) while disconnected."""
        if not self.is_connected:
            return (0, 0, 0)
        version = self.connected_server_version
        return (version.major, version.minor, version.patch)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` for every event from now on; the returned function removes it."""
        return self.events.add_listener(listener)

    async def open(self, name: str) -> None:
        """Connect to the first server that accepts us, or raise after `_FIRST_ROUNDS` rounds over all of them."""
        options = self.connect_options
        await self.connect(
            servers=list(options.servers),
            name=name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            lame_duck_mode_cb=self._on_lame_duck,
            connect_timeout=options.connect_timeout,
            max_reconnect_attempts=options.max_reconnects,
            reconnect_time_wait=options.reconnect_wait,
            ping_interval=options.ping_interval,
            max_outstanding_pings=options.max_outstanding_pings,
            tls=options.ssl_context(),
            tls_hostname=options.tls_hostname,
            tls_handshake_first=options.tls_first,
            inbox_prefix=options.inbox_prefix,
            **_auth(options),
        )
        # nats-py returns normally, but unconnected, when the server disconnects right after CONNECT, as it does when it
        # refuses a client certificate.
        if not self.is_connected:
            raise self._typed(nats_errors.UnexpectedEOF())
        self._opening = False

    async def abandon(self) -> None:
        """Free the socket and the tasks of a connection that was never established, without events."""
        self._opening, self._abandoned = False, True
        # nats-py waits for its transport to close, and after a failed TLS upgrade that never happens: the upgrade has
        # taken the socket from the stream that nats-py waits for.
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        await self.close()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py encrypts only if the server sends `tls_required`; otherwise it would send the password in clear text
        # to any server at a tls:// address. This runs after INFO and before CONNECT.
        options = self.connect_options
        if initial_connection and options.wants_tls and not options.tls_first and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise _NoTls
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def close(self) -> None:
        """After this returns, the connection is permanently closed.

        nats-py's own close fails during a reconnect, which swallows its cancellation, marks the client as connected
        again and then keeps reconnecting forever.
        """
        self._ended = True
        await super().close()
        task = self._reconnection_task
        if task is not None and task is not asyncio.current_task():
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=self.connect_options.reconnect_wait)
        if not self.is_closed:
            await super().close()

    async def _connect_to_server(self, server: Any) -> None:
        if self._ended:
            raise asyncio.CancelledError
        await super()._connect_to_server(server)

    async def _on_error(self, error: Exception) -> None:
        if not self._opening:
            self._tell(ConnectionEventKind.ERROR, error)
            return
        # During the first connect an exception raised here ends `Client.connect`, which otherwise retries forever.
        typed = self._typed(error)
        self._failures += 1
        hung_up = isinstance(error, _HANG_UPS)
        rounds = _HANG_UP_ROUNDS if hung_up else _FIRST_ROUNDS
        if not (typed.retriable or hung_up) or self._failures >= rounds * len(self.connect_options.servers):
            raise typed from error

    async def _on_disconnected(self) -> None:
        self._tell(ConnectionEventKind.DISCONNECTED, self.last_error)

    async def _on_reconnected(self) -> None:
        self._tell(ConnectionEventKind.RECONNECTED)

    async def _on_closed(self) -> None:
        self._tell(ConnectionEventKind.CLOSED, self.last_error)

    async def _on_lame_duck(self) -> None:
        self._tell(ConnectionEventKind.LAME_DUCK)

    def _tell(self, kind: ConnectionEventKind, error: Exception | None = None) -> None:
        if self._abandoned:
            return
        event = ConnectionEvent(kind, self._address(), error)
        tell = log.debug if self._ended else log.info  # an expected event is not news
        tell(f"connection.{kind.value}", server=event.server, error=str(error) if error else None)
        self.events.tell(event)

    def _address(self) -> str:
        server = self._current_server
        return f"{server.uri.hostname}:{server.uri.port}" if server is not None else ",".join(self._hosts())

    def _hosts(self) -> list[str]:
        return [str(address) for address in self.connect_options.server_list()]

    def _typed(self, error: Exception) -> PartiError:
        """The error for a failed first connect: which server, what happened, what to do."""
        if isinstance(error, PartiError):
            return error
        text, where = str(error), self._address()
        if isinstance(error, _NoTls):
            return TlsFailed(f"{where} offers no TLS, though it is asked for: enable it there, or use nats:// here")
        if any(words in text.lower() for words in _AUTH_WORDS):
            return AuthFailed(f"{where} refused the credentials ({_kind_of_auth(self.connect_options)}): correct them")
        if isinstance(error, ssl.SSLError):
            return TlsFailed(f"the TLS handshake with {where} failed: {_tls_reason(error)}")
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            return ConnectionFailed(
                f"{where} did not answer within {self.connect_options.connect_timeout:g} s: check the address, or "
                "set tls_first if the server expects the TLS handshake first"
            )
        if isinstance(error, ConnectionRefusedError):
            return ConnectionFailed(f"nothing listens on {where}: start nats-server there, or correct the address")
        if isinstance(error, _HANG_UPS) and self._server_info.get("tls_verify"):
            return TlsFailed(f"{where} hung up: it wants a client certificate that it trusts (tls_cert, tls_key)")
        if "empty response" in text or isinstance(error, _HANG_UPS):
            return ConnectionFailed(
                f"{where} hung up during the handshake: it may want the TLS handshake first (tls_first), or be out of "
                "connections"
            )
        return ConnectionFailed(f"cannot connect to {where}: {text or type(error).__name__}")


async def connect(options: ConnectOptions, *, name: str | None = None, on_event: Listener | None = None) -> Connection:
    """A live connection, or a typed error within seconds: `AuthFailed`, `TlsFailed`, `ConnectionFailed`.

    It reconnects by itself after later disconnects; `on_event` and `Connection.add_listener` report them. Close it with
    `await connection.close()` or `async with`.
    """
    connection = Connection(options)
    if on_event is not None:
        connection.add_listener(on_event)
    try:
        await connection.open(name or options.name)
    except BaseException:
        await connection.abandon()
        raise
    return connection


def _auth(options: ConnectOptions) -> dict[str, Any]:
    """nats-py's arguments for the configured way to authenticate."""
    if options.user is not None:
        return {"user": options.user, "password": options.password or ""}
    if options.token is not None:
        return {"token": options.token}
    identity = options.identity()
    if identity is None:
        return {}
    if identity.jwt is None:
        return {"nkeys_seed_str": identity.seed}
    # Rewritten from its two parts, because nats-py reads these lines by position.
    text = (
        f"-----BEGIN NATS USER JWT-----\n{identity.jwt}\n------END NATS USER JWT------\n"
        f"-----BEGIN USER NKEY SEED-----\n{identity.seed}\n------END USER NKEY SEED------\n"
    )
    return {"user_credentials": RawCredentials(text)}


def _kind_of_auth(options: ConnectOptions) -> str:
    for label in ("creds_file", "creds", "nkey_file", "nkey_seed", "token"):
        if getattr(options, label):
            return label
    if options.user is not None:
        return f"user {options.user!r} with a password"
    return "none were given; set user and password, token, nkey or creds"


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = (
            "tls_hostname to the name in the certificate"
            if error.verify_code in _NAME_MISMATCH
            else "tls_ca to the authority"
        )
        return f"{error.verify_message.rstrip('.')}; set {hint}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate required" in reason or "bad certificate" in reason or "unknown ca" in reason:
        return f"{reason}; the server wants a client certificate that it trusts (tls_cert, tls_key)"
    if "wrong version number" in reason:
        return f"{reason}; the server does not speak TLS here, or not first (tls_first)"
    return reason
