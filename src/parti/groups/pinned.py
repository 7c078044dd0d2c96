"""The pinned instance: nothing starts before the server confirms the pin and all earlier messages have arrived.

Each message in flight remembers the consumer and the pin of its delivery. After a freeze or a lost connection it is
kept, not started. Under the same pin it still belongs to this instance and continues at once; under another pin it is
dropped without a NAK, which would make the server redeliver what another instance holds (NAKs count by sequence).
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
    """The consumer of this name is not the one that this instance pulled from: join again."""


OTHERS_FIRST = (0.6, 0.7)
"""Seconds that an unpinned instance leaves to the pinned one. An instance of the reference takes 0.4 to 0.5, counted
from when it notices a change, which may be a little later than here."""
_SETTLE_EVERY = (0.02, 0.04)


class Pinned(Core[R], Generic[R]):
    """The part of an instance that receives messages, and releases them when it loses the pin."""

    _pin_since = 0.0
    _told_waiting = False
    _unpinned_at: float | None = None
    """When the pin was lost while handlers ran; they have `drain_timeout` to end."""

    async def _settle_pin(self) -> None:
        """Pinned by the first message: start nothing until the server confirms it and earlier messages have come."""
        pin = self._puller.pin
        if pin != self._own.pin:
            self._own.pin, self._pin_since, self._told_waiting = pin, self._clock.now(), False
        holding = self._own.holding
        # Messages that came or went while the answer was on its way must not be compared with it: a message that
        # another instance still holds would be counted as this instance's.
        before = self._in_flight.held_under(holding)
        info = await self._api.consumer_info(self._own.stream, self._own.name)
        if self._own.holding != holding or not self._puller.pulling:
            self._signal(look_again)
            return
        if info["created"] != self._own.created:
            self._puller.stop()
            self._signal(lambda: self._troubled(ConsumerReplaced("another client recreated the consumer")))
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
        self._own.uncertain, self._unpinned_at = False, None
        self._in_flight.release(pinned_at(info), holding)
        if self.state is not MemberState.ACTIVE:
            self._be(MemberState.ACTIVE)
            self._tell(EventKind.PINNED, partitions=self._owned)

    async def _clear_stray(self, info: dict[str, Any]) -> None:
        """Remove a pin that no instance holds; the next waiting pull gets it."""
        if (pin := stray_pin(info)) is not None:
            log.info("group.stray_pin", member=self.member, consumer=self._own.name, pin=pin)
            await self._api.consumer_unpin(self._own.stream, self._own.name, PRIORITY_GROUP)

    def _await_others(self, count: int) -> None:
        """The previously pinned instance's messages are redelivered and must be handled before those held here.

        They arrive `ack_wait` after that instance's last sign of life; a live instance finishes them within its
        `drain_timeout`. So this wait ends by itself, and is reported when it takes long.
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
                holding=self._own.holding,
            )
        except GroupError as error:
            foreign = error
            self._signal(lambda: self._fail(foreign))
            return
        if self._own.pin is not None and self._puller.pin != self._own.pin:
            self._unpinned("the pin went, and came back at once")
        if self._in_flight.holding or self._puller.pin != self._own.pin or (lost and self._limits.max_pending != 1):
            self._in_flight.hold()
            self._signal(look_again)
        self._in_flight.accept(messages)

    def _thaw(self, frozen: Frozen) -> None:
        """Messages not started wait until their owner is known; running ones may belong to another instance by now."""
        self._puller.stop()
        self._suspect()
        self._in_flight.doubt()
        self._signal(lambda: self._troubled(frozen))

    def _suspect(self) -> None:
        """Nothing starts until the pin is settled again."""
        self._own.uncertain = True
        self._in_flight.suspend()

    async def _troubled(self, error: PartiError) -> None:
        if isinstance(error, WrongPinId):
            if self._puller.pin is None:  # otherwise pinned again since
                self._unpinned(str(error))
            return
        if isinstance(error, ReaderBroke):
            self._fail(error)
            return
        if self._puller.pulling:
            return  # recovered meanwhile
        self._suspect()
        self._metrics.set(m.PINNED, 0)
        if self.state is MemberState.STANDBY and isinstance(error, ConsumerDeleted | NoResponder):
            # The pinned instance recreates it; two concurrent creates fail for one of the two (500, 10012).
            self._leave_to_others(self._random.uniform(*OTHERS_FIRST))
        if self.state in (MemberState.ACTIVE, MemberState.STANDBY):
            self._be(MemberState.JOINING)
        kind = EventKind.FROZEN if isinstance(error, Frozen) else EventKind.CONSUMER_LOST
        self._tell(kind, detail=str(error))

    def _unpinned(self, why: str) -> None:
        """Another instance is pinned: it handles the messages not started here, which a NAK sends to it at once."""
        self._own.pin = None
        if self._own.uncertain:
            self._in_flight.doubt()
        self._hand_back(self._in_flight.drop())
        if self._unpinned_at is None and self._in_flight.running:
            self._unpinned_at = self._clock.now()
        if self.state is MemberState.ACTIVE:
            self._be(MemberState.STANDBY)
            self._tell(EventKind.UNPINNED, detail=why)

    def _hand_back(self, messages: Sequence[GroupMessage]) -> None:
        """NAK in stream order, the order of redelivery; not if the messages may belong to another instance."""
        if self._own.uncertain:
            return
        for message in sorted(messages, key=lambda each: each.queue_sequence):
            self._puller.send(message._reply, NAK)

    def _beat(self) -> None:
        """Extend `ack_wait` of messages in flight while their handlers run; without the pin only for a limited time.

        While their owner is uncertain nothing is sent: the instance that may be pinned by now waits for the server to
        redeliver them, and each request would delay that by another `ack_wait`.
        """
        for message in () if self._own.uncertain else self._in_flight.ours():
            self._acks.working(message)
        if self._unpinned_at is None:
            return
        if not self._in_flight.running:
            self._unpinned_at = None
        elif self._clock.now() - self._unpinned_at > self._drain_within:
            self._in_flight.cancel("the pin went, and the next instance waits for its message", keep=False)
