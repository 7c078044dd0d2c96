"""Request and reply over one inbox: every call ends with a reply or a typed error, even if the connection breaks.

nats-py's own `request` waits for its whole timeout when the connection breaks during a call, and queues calls made
while disconnected, so that they reach the server long after the caller gave up. Here the first fails at once with
`ConnectionLost` (the outcome is unknown), the second with `ConnectionFailed` (nothing was sent).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors

from parti.errors import (
    AuthFailed,
    ConnectionFailed,
    ConnectionLost,
    NoResponders,
    PartiError,
    RequestTimeout,
    UsageError,
)
from parti.wire.events import ConnectionEvent, ConnectionEventKind

if TYPE_CHECKING:
    from parti.wire.connect import Connection

_REFUSED = re.compile(r'permissions violation for publish to "([^"]*)"')
_NO_RESPONDERS = 503


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply; `status` is 0 for a plain message."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    subject: str = ""
    reply: str = ""
    """The reply subject: for a delivered message its ack subject."""

    @property
    def status(self) -> int:
        text = self.headers.get("Status", "")
        return int(text) if text.isdigit() else 0

    @property
    def description(self) -> str:
        return self.headers.get("Description", "")


def headers_size(headers: Mapping[str, str] | None) -> int:
    """Upper bound of the header block's bytes as nats-py writes it; there is none without headers."""
    if not headers:
        return 0
    return 12 + sum(len(name.encode()) + len(value.encode(errors="replace")) + 4 for name, value in headers.items())


def reply_of(message: Any) -> Reply:
    """A nats-py message as a `Reply`."""
    return Reply(message.data, message.headers or {}, message.subject, message.reply)


Handler = Callable[["Reply | PartiError"], None]


class Requests:
    """The requests in flight of one connection; each gets one reply or fails once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._handlers: dict[str, Handler] = {}
        self._asked: dict[str, str] = {}
        """Token of a request -> its subject."""
        self._prefix = ""
        self._count = 0
        connection.add_listener(self._on_event)

    @property
    def in_flight(self) -> int:
        return len(self._handlers)

    async def call(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout: float
    ) -> Reply:
        """The reply to one request; raises `RequestTimeout`, `NoResponders`, `ConnectionLost`, `ConnectionFailed`.

        `AuthFailed` when the server denies the publish permission: it sends no reply to such a request.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def handle(outcome: Reply | PartiError) -> None:
            if answer.done():
                return
            if isinstance(outcome, PartiError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        token, inbox = await self.expect(handle)
        self._asked[token] = subject
        try:
            await self.send(subject, payload, reply=inbox, headers=headers)
            async with asyncio.timeout(timeout):
                reply = await answer
        except TimeoutError:
            raise RequestTimeout(f"no answer to {subject} within {timeout:g} s") from None
        finally:
            self.forget(token)
        if reply.status == _NO_RESPONDERS and not reply.data:
            raise NoResponders(f"no responder for {subject}: JetStream is off, starting, or has no leader right now")
        return reply

    async def expect(self, handle: Handler) -> tuple[str, str]:
        """A new inbox: each message sent *to it* is passed to `handle`, and so is a loss of the connection.

        It is not for pull consumers: their deliveries arrive under the stream's subjects, so that one inbox cannot
        distinguish them.

        Returns the token for `forget`, which the caller must call at the end, and the inbox's subject.
        """
        if not self._connection.is_connected:
            raise ConnectionFailed("not connected: nothing was sent; try again when the connection is back")
        if not self._prefix:
            self._prefix = f"{self._connection.new_inbox()}."
            try:
                await self._connection.subscribe(f"{self._prefix}*", cb=self._on_message)
            except nats_errors.Error:
                self._prefix = ""
                raise ConnectionFailed("the connection is closed: nothing was sent") from None
        self._count += 1
        token = f"{self._count:x}"
        self._handlers[token] = handle
        return token, self._prefix + token

    def forget(self, token: str) -> None:
        self._handlers.pop(token, None)
        self._asked.pop(token, None)

    async def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Pass one message to the connection; nats-py's errors become typed errors."""
        size = len(payload) + headers_size(headers)
        if size > self._connection.max_payload > 0:
            # nats-py counts only the payload; the server counts both, and closes the connection for all its users.
            raise UsageError(
                f"{size} bytes for {subject}, headers included, exceed the server's max_payload of "
                f"{self._connection.max_payload}: split the message, or raise the limit"
            )
        try:
            await self._connection.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
        except nats_errors.MaxPayloadError:
            raise UsageError(
                f"{len(payload)} bytes for {subject} exceed the server's max_payload of "
                f"{self._connection.max_payload}: split the message, or raise the limit"
            ) from None
        except (nats_errors.BadSubjectError, nats_errors.BadHeaderError) as error:
            raise UsageError(f"{subject!r} is no subject to publish to, or a header is malformed: {error}") from None
        except (nats_errors.ConnectionClosedError, nats_errors.ConnectionDrainingError):
            raise ConnectionFailed(f"the connection is closed: {subject} was not sent") from None
        except nats_errors.OutboundBufferLimitError:
            raise ConnectionFailed(f"the outbound buffer is full while reconnecting: {subject} was not sent") from None

    async def _on_message(self, message: Any) -> None:
        handle = self._handlers.get(message.subject[len(self._prefix) :])
        if handle is not None:
            handle(reply_of(message))

    def _on_event(self, event: ConnectionEvent) -> None:
        if (
            event.kind is ConnectionEventKind.ERROR
            and (refused := _REFUSED.search(str(event.error).lower())) is not None
        ):
            for token, subject in list(self._asked.items()):
                if subject.lower() == refused[1]:  # nats-py reports it in lower case
                    text = f"{event.server} refused a publish to {subject}: grant the user that permission"
                    self._handlers[token](AuthFailed(text))
        if event.kind in (ConnectionEventKind.DISCONNECTED, ConnectionEventKind.CLOSED):
            lost = ConnectionLost(f"the connection to {event.server} broke before the answer came")
            for handle in list(self._handlers.values()):
                handle(lost)
