"""The connection for a member's messages and acknowledgements; it is reopened when it breaks."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from parti.errors import PartiError
from parti.groups.freeze_detector import Limits
from parti.groups.names import PRIORITY_GROUP
from parti.wire.columns import Deliveries
from parti.wire.errors import WrongPinId
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions
from parti.wire.pull import LivePull, PullOwner, PullSettings

_BATCH = 500  # as in the reference; the consumer's max_ack_pending decides how many arrive at once
_MOST_HELD = 1_000  # for a consumer without a limit, created by another client
_UNSENT = 4_096  # acknowledgements kept while disconnected


class Puller:
    """Pulls from one consumer at a time. After any error except a lost pin it has stopped itself."""

    def __init__(
        self,
        options: ConnectOptions,
        *,
        on_batch: Callable[[Deliveries, bool], None],
        on_trouble: Callable[[PartiError], None],
        in_hand: Callable[[], int],
    ) -> None:
        self._options = options
        self._on_batch = on_batch
        self._tell = on_trouble
        self._in_hand = in_hand
        self._live: LiveConnection | None = None
        self._pull: LivePull | None = None
        self._expected: tuple[str | None, int] = (None, 0)
        """The pin of current deliveries, and the next consumer sequence."""
        self._last_pin: str | None = None
        self.final_pin: str | None = None
        """The pin at the end of the last withdrawn pull; its last message may have brought it."""
        self._unsent: deque[tuple[str, bytes]] = deque(maxlen=_UNSENT)

    def __repr__(self) -> str:
        return f"<Puller {self._pull!r}>"

    @property
    def pulling(self) -> bool:
        return self._pull is not None

    @property
    def pin(self) -> str | None:
        """The id under which the server pinned this instance, or None."""
        return self._pull.pin if self._pull is not None else None

    def forget_pin(self) -> None:
        """The pin is lost: pull without it from now on."""
        self._last_pin = None
        if self._pull is not None:
            self._pull.pin = None

    async def start(self, stream: str, consumer: str, limits: Limits, *, pin: str | None = None) -> None:
        """Pull from this consumer. A pull is sent at least every half TTL of the pin, independent of handlers.

        That keeps the pin: the reference pulls between two calls of its handler, and loses the pin when a call takes
        longer than `ack_wait` (docs/evidence/groups.md#g10).
        """
        self.stop()
        live = await self._connected()
        while self._unsent:
            live.publish(*self._unsent.popleft())
        expires = min(limits.pin_ttl / 2, limits.max_expires or math.inf)
        batch = min(_BATCH, limits.max_batch or _BATCH)
        self._pull = LivePull(
            live,
            stream,
            consumer,
            PullOwner(self._deliver, self._on_trouble, capacity=lambda: max(1, _MOST_HELD - self._in_hand())),
            PullSettings(batch, batch, expires, heartbeat=expires / 2, group=PRIORITY_GROUP, exclusive=False),
        )
        # Still pinned after a short outage: without the id the server would accept no pull until the pin lapses.
        self._pull.pin = pin or self._last_pin
        self._pull.start()

    def _deliver(self, deliveries: Deliveries) -> None:
        """Hand over the messages, and report whether an earlier one was lost.

        While this instance is pinned it gets every delivery, so the consumer's sequence has no gap
        (docs/evidence/cluster.md#c3). A missing message is redelivered after `ack_wait`, behind later ones of its key.
        """
        first, last = int(deliveries.consumer_seq[0]), int(deliveries.consumer_seq[-1])
        pin, following = self._expected
        self._expected = (self.pin, last + 1)
        lost = last - first != len(deliveries) - 1 or (pin == self.pin and first != following)
        self._on_batch(deliveries, lost)

    def undelivered(self, pin: str, last: int) -> int:
        """How many messages were sent under this pin, up to the consumer's sequence `last`, and never arrived.

        The server takes back what it sends to a pull that has just been withdrawn, and redelivers it.
        """
        known, following = self._expected
        return max(0, last + 1 - following) if pin == known else 0

    async def _connected(self) -> LiveConnection:
        if self._live is None or self._live.lost.done():
            live = await LiveConnection.open(self._options)
            live.lost.add_done_callback(lambda lost: self._on_lost(live, lost))
            self._live = live
        return self._live

    def _on_lost(self, live: LiveConnection, lost: asyncio.Future[PartiError]) -> None:
        if self._live is live and self._pull is not None:
            self._on_trouble(lost.result())

    def _on_trouble(self, error: PartiError) -> None:
        if not isinstance(error, WrongPinId):
            self.stop()  # the server answers a pull from a deleted consumer at once, again and again
        self._tell(error)

    def stop(self) -> None:
        """After this returns nothing more is handed over; messages on their way stay pending at the server."""
        pull, self._pull = self._pull, None
        if pull is not None:
            self._last_pin = pull.pin
            pull.stop()

    async def withdraw(self) -> None:
        """Stop after everything that the server sent was handed over; raises when the connection is lost."""
        pull = self._pull
        if pull is not None:
            try:
                await pull.withdraw()
            finally:
                self.final_pin = pull.pin
                self._pull = self._last_pin = None

    def send(self, reply: bytes, body: bytes, *, late: bool = True) -> None:
        """Answer a message; while disconnected, queue the answer, unless it is useless when `late`."""
        if self._live is None or self._live.lost.done():
            if late:
                self._unsent.append((reply.decode(), body))
        else:
            self._live.publish(reply.decode(), body)
            if self._in_hand() <= 1:
                self._live.send_now()  # strictly in order: the next message is sent when this answer arrives

    async def flush(self) -> None:
        """After this returns the server has received every answer sent so far."""
        if self._live is not None:
            await self._live.ping()

    async def close(self) -> None:
        self.stop()
        live, self._live = self._live, None
        if live is not None:
            await live.close()
