"""Being the one that gets the messages: nothing starts before the server confirms the pin and all earlier ones are in.

What is in hand is known by the consumer and the pin under which it came. After a freeze or a cut it is kept, and not
started: under the same pin it is still ours and goes on at once; under another it is somebody else's, and is dropped
without a word, since a NAK would make the server deliver again what that one has in hand (NAKs count by sequence).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from parti.errors import PartiError, TransientError
from parti.groups.common import pinned_at, pinned_id, stray_pin
from parti.groups.core import Core
from parti.groups.distribution import partition_depth
from parti.groups.errors import GroupError
from parti.groups.events import EventKind, MemberState
from parti.groups.freeze_detector import Frozen
from parti.groups.message import GroupMessage, QueueShape, messages_of
from parti.groups.names import PRIORITY_GROUP, GroupKind
from parti.groups.signals import look_again
from parti.groups.store import R
from parti.observe import group_metrics as m
from parti.observe.logs import get_logger
from parti.wire.acks import NAK
from parti.wire.columns import Deliveries
from parti.wire.errors import ConsumerDeleted, NoResponder, WrongPinId
from parti.wire.live import ReaderBroke

log = get_logger("groups")


class ConsumerReplaced(TransientError):
    """The consumer under our name is not the one that we pulled from: join again."""


OTHERS_FIRST = (0.6, 0.7)
"""Seconds that an instance which is not pinned leaves to the pinned one; one of the reference takes 0.4 to 0.5, counted
from when it learns of a change, which may be a little later than when we do."""
_SETTLE_EVERY = (0.02, 0.04)


class Pinned(Core[R], Generic[R]):
    """The part of an instance that takes messages, and lets them go when the pin goes."""

    _pin_since = 0.0
    _told_waiting = False
    _unpinned_at: float | None = None
    """When the pin went while handlers ran; they have `drain_timeout` to end."""

    async def _settle_pin(self) -> None:
        """Pinned by the first message: handle nothing before the server confirms it and earlier deliveries are in."""
        pin = self._puller.pin
        if pin != self._pin:
            self._pin, self._pin_since, self._told_waiting = pin, self._clock.now(), False
        holding = self._holding_now()
        # What came or went while the answer was on its way must not be weighed against it: a message that another
        # instance still holds would be taken for ours.
        before = self._in_flight.held_under(holding)
        info = await self._api.consumer_info(self._queue_stream, self._consumer)
        if self._holding_now() != holding or not self._puller.pulling:
            self._signal(look_again)
            return
        if info["created"] != self._created:
            self._puller.stop()
            self._signal(lambda: self._troubled(ConsumerReplaced("somebody made the consumer anew")))
            return
        if pinned_id(info) != pin:
            self._puller.forget_pin()
            self._unpinned("the pin lapsed")
            return
        several = self._limits.max_pending != 1
        if several and before != self._in_flight.held_under(holding):
            self._later(self._random.uniform(*_SETTLE_EVERY))
            return
        if several and int(info["num_ack_pending"]) > len(before):
            self._await_others(int(info["num_ack_pending"]) - len(before))
            return
        self._uncertain, self._unpinned_at = False, None
        self._in_flight.release(pinned_at(info), holding)
        if self.state is not MemberState.ACTIVE:
            self._be(MemberState.ACTIVE)
            self._tell(EventKind.PINNED, partitions=self._owned)

    async def _clear_stray(self, info: dict[str, Any]) -> None:
        """Take away a pin that nobody has; the next pull that waits gets it."""
        if (pin := stray_pin(info)) is not None:
            log.info("group.stray_pin", member=self.member, consumer=self._consumer, pin=pin)
            await self._api.consumer_unpin(self._queue_stream, self._consumer, PRIORITY_GROUP)

    def _await_others(self, count: int) -> None:
        """Messages of whoever was pinned before us come again, below those that we hold: they must go first.

        They come `ack_wait` after that one's last sign of life; one that lives and works on them ends within its
        `drain_timeout`. So this ends by itself, and is told when it takes long.
        """
        self._later(self._random.uniform(*_SETTLE_EVERY))
        if not self._told_waiting and self._clock.now() - self._pin_since > 2 * self._limits.pin_ttl:
            self._told_waiting = True
            why = f"{count} messages are in the hands of the instance that was pinned before"
            self._tell(EventKind.BLOCKED, partitions=self._owned, detail=why)

    def _on_batch(self, deliveries: Deliveries, lost: bool) -> None:
        if not self._freeze_detector.look():
            return
        self._metrics.set(m.PENDING, int(deliveries.pending[-1]))
        if (again := int((deliveries.delivered > 1).sum())) > 0:
            self._metrics.count(m.REDELIVERED, again)
        try:
            messages = messages_of(
                deliveries,
                QueueShape(elastic=self.kind is not GroupKind.STATIC, depth=partition_depth(self.record)),
                settle=self._acks,
                lane=self._in_flight.lane,
                member=self.member,
                received_at=self._clock.wall(),
                holding=self._holding_now(),
            )
        except GroupError as error:
            foreign = error
            self._signal(lambda: self._fail(foreign))
            return
        if self._pin is not None and self._puller.pin != self._pin:
            self._unpinned("the pin went, and came back at once")
        if self._in_flight.holding or self._puller.pin != self._pin or (lost and self._limits.max_pending != 1):
            self._in_flight.hold()
            self._signal(look_again)
        self._in_flight.accept(messages)

    def _thaw(self, frozen: Frozen) -> None:
        """Whatever was not started waits until we know whose it is, and what runs may be somebody else's by now."""
        self._puller.stop()
        self._suspect()
        self._in_flight.doubt()
        self._signal(lambda: self._troubled(frozen))

    def _suspect(self) -> None:
        """Nothing starts until the pin is settled anew."""
        self._uncertain = True
        self._in_flight.suspend()

    async def _troubled(self, error: PartiError) -> None:
        if isinstance(error, WrongPinId):
            if self._puller.pin is None:  # otherwise we are pinned again since
                self._unpinned(str(error))
            return
        if isinstance(error, ReaderBroke):
            self._fail(error)
            return
        if self._puller.pulling:
            return  # it was healed meanwhile
        self._suspect()
        self._metrics.set(m.PINNED, 0)
        if self.state is MemberState.STANDBY and isinstance(error, ConsumerDeleted | NoResponder):
            # Whoever is pinned makes it anew; a create at the same moment fails for one of the two (500, 10012).
            self._leave_to_others(self._random.uniform(*OTHERS_FIRST))
        if self.state in (MemberState.ACTIVE, MemberState.STANDBY):
            self._be(MemberState.JOINING)
        kind = EventKind.FROZEN if isinstance(error, Frozen) else EventKind.CONSUMER_LOST
        self._tell(kind, detail=str(error))

    def _unpinned(self, why: str) -> None:
        """Another instance is pinned: what was not started is its work now, and comes to it at once by a NAK."""
        self._pin = None
        if self._uncertain:
            self._in_flight.doubt()
        self._hand_back(self._in_flight.drop())
        if self._unpinned_at is None and self._in_flight.running:
            self._unpinned_at = self._clock.now()
        if self.state is MemberState.ACTIVE:
            self._be(MemberState.STANDBY)
            self._tell(EventKind.UNPINNED, detail=why)

    def _hand_back(self, messages: Sequence[GroupMessage]) -> None:
        """In the order of the stream, in which the server then delivers them; not what may be somebody else's."""
        if self._uncertain:
            return
        for message in sorted(messages, key=lambda each: each.queue_sequence):
            self._puller.send(message._reply, NAK)

    def _beat(self) -> None:
        """Keep the messages in hand ours for as long as their handlers take; without the pin that has a limit.

        While it is uncertain whose they are nothing is asked for: the instance that may be pinned by now waits for them
        to come from the server, and each request would make it wait for another `ack_wait`.
        """
        for message in () if self._uncertain else self._in_flight.ours():
            self._acks.working(message)
        if self._unpinned_at is None:
            return
        if not self._in_flight.running:
            self._unpinned_at = None
        elif self._clock.now() - self._unpinned_at > self._drain_within:
            self._in_flight.cancel("the pin went, and the next instance waits for its message", keep=False)
