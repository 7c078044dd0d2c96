"""Acknowledges single messages at the handler's request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from parti.backoff import FAST
from parti.clock import Clock, Deadline
from parti.errors import ConnectionFailed, ConnectionLost, NoResponders, RequestTimeout
from parti.groups.errors import OwnershipLost
from parti.groups.freeze_detector import FreezeDetector, Limits
from parti.groups.in_flight import InFlight
from parti.groups.member_consumer import MemberConsumer
from parti.groups.message import GroupMessage
from parti.groups.puller import Puller
from parti.wire.acks import ACK, IN_PROGRESS
from parti.wire.connect import Connection

_ANSWER_WITHIN = 1.0


class Acks:
    """The member's side of a message's acknowledgements (the protocol `Settle`)."""

    def __init__(
        self,
        connection: Connection,
        puller: Puller,
        consumer: MemberConsumer,
        in_flight: InFlight,
        freeze_detector: FreezeDetector,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._puller = puller
        self._consumer = consumer
        self._in_flight = in_flight
        self._freeze_detector = freeze_detector
        self._limits = limits
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def settled(self, message: GroupMessage) -> None:
        """Acknowledge without confirmation. From another thread, the ack is sent before the outcome counts."""
        self._in_loop(self._settled, message)

    def _settled(self, message: GroupMessage) -> None:
        self._in_flight.finish(message)

    async def confirmed(self, message: GroupMessage) -> None:
        """Acknowledge, and return when the server has confirmed it."""
        deadline = Deadline.after(self._clock, seconds=self._limits.ack_wait)
        waits = FAST.delays()
        look_at = self._clock.now() + _ANSWER_WITHIN
        seen: str | None = None
        while True:
            ours = self._in_flight.in_hand.get(message.queue_sequence) is message
            if message.doubtful or not self._freeze_detector.fresh() or not ours:
                raise OwnershipLost(
                    f"message {message.sequence} may belong to another instance by now: undo what was prepared"
                )
            consumer = self._consumer.created
            if message.holding[0] == consumer:
                if await self._asked(message, deadline):
                    break
            elif deadline.expired or self._cannot_come(consumer):
                # Messages waiting behind this handler use up the new consumer's max_ack_pending: the message is
                # redelivered only after the handler has ended.
                raise self._replaced(message)
            elif self._clock.now() >= look_at:
                # It comes again only from the consumer that this member follows. While the member drains, it follows
                # none that another instance has created meanwhile.
                look_at, before, seen = look_at + _ANSWER_WITHIN, seen, await self._consumer.created_now()
                if seen == before and seen != self._consumer.created:
                    raise self._replaced(message)
            await self._clock.sleep(next(waits))
        self._in_flight.done(message)

    async def _asked(self, message: GroupMessage, deadline: Deadline) -> bool:
        try:
            # The server answers a repeated acknowledgement like the first one (docs/evidence/jetstream.md#j11), so a
            # lost answer is no reason to undo what the server has accepted.
            reply, wait = message._reply.decode(), min(_ANSWER_WITHIN, self._limits.ack_wait)
            await self._connection.requests.call(reply, ACK, timeout=wait)
            return True
        except NoResponders:
            message.doubtful = True
            raise
        except RequestTimeout:
            # The server ignores acks for a deleted consumer's deliveries; a new one of the same name does not answer.
            if await self._consumer.created_now() != message.holding[0]:
                raise self._replaced(message) from None
            if deadline.expired:
                raise
        except (ConnectionLost, ConnectionFailed):
            if deadline.expired:
                raise
        return False

    @staticmethod
    def _replaced(message: GroupMessage) -> OwnershipLost:
        message.doubtful = True
        return OwnershipLost(
            f"the consumer of message {message.sequence} was replaced, and the message comes again: undo what was "
            "prepared"
        )

    def _cannot_come(self, consumer: str) -> bool:
        """Whether the messages held from this consumer leave no room for another delivery."""
        return 0 < self._limits.max_pending <= self._in_flight.count_under(consumer)

    def working(self, message: GroupMessage) -> None:
        """Request another `ack_wait` (in progress)."""
        self._in_loop(self._working, message)

    def _working(self, message: GroupMessage) -> None:
        self._puller.send(message._reply, IN_PROGRESS, late=False)

    def _in_loop(self, act: Callable[[GroupMessage], None], message: GroupMessage) -> None:
        """The connection belongs to one thread; a synchronous handler runs in another."""
        if threading.get_ident() == self._thread:
            act(message)
        else:
            self._loop.call_soon_threadsafe(act, message)
