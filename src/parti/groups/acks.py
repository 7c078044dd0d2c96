"""Answering messages one by one, as a handler asks for it."""

from __future__ import annotations

from parti.clock import Clock, Deadline
from parti.errors import ConnectionFailed, ConnectionLost, NoResponders, RequestTimeout
from parti.groups.errors import OwnershipLost
from parti.groups.message import GroupMessage
from parti.groups.puller import Puller
from parti.groups.pulse import Limits, Pulse
from parti.groups.work import Work
from parti.wire.connect import Connection

_ANSWER_WITHIN = 1.0


class Acks:
    """What a message needs of the member that holds it (the protocol `Settle`)."""

    def __init__(
        self, connection: Connection, puller: Puller, work: Work, pulse: Pulse, limits: Limits, clock: Clock
    ) -> None:
        self._connection = connection
        self._puller = puller
        self._work = work
        self._pulse = pulse
        self._limits = limits
        self._clock = clock

    def settled(self, message: GroupMessage) -> None:
        """Acknowledge; nothing confirms it."""
        self._puller.send(message._reply, b"+ACK")
        self._work.done(message)

    async def confirmed(self, message: GroupMessage) -> None:
        """Acknowledge, and return when the server has taken it."""
        deadline = Deadline.after(self._clock, seconds=self._limits.ack_wait)
        while True:
            ours = self._work.in_hand.get(message.queue_sequence) is message
            if message.doubtful or not self._pulse.fresh() or not ours:
                raise OwnershipLost(f"message {message.sequence} may be somebody else's by now: undo what was prepared")
            try:
                # A repeated acknowledgement is answered like the first (JETSTREAM.md 4.3), so that a lost answer is no
                # reason to undo what the server has taken.
                reply, wait = message._reply.decode(), min(_ANSWER_WITHIN, self._limits.ack_wait)
                await self._connection.requests.call(reply, b"+ACK", timeout=wait)
                break
            except NoResponders:
                message.doubtful = True
                raise
            except (RequestTimeout, ConnectionLost, ConnectionFailed):
                if deadline.expired:
                    raise
            await self._clock.sleep(0.05)
        self._work.done(message)

    def working(self, message: GroupMessage) -> None:
        """Ask for another `ack_wait`."""
        self._puller.send(message._reply, b"+WPI")
