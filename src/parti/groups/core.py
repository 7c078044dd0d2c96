"""The parts of a joined instance, what it knows about its consumer, and the time limit of its handlers."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Generic

from parti.backoff import FOREVER
from parti.clock import SystemClock
from parti.dead_letters import DeadLetterWriter, LetterExtension, LetterKind
from parti.errors import PartiError
from parti.groups.acks import Acks
from parti.groups.freeze_detector import FreezeDetector, Frozen, Limits
from parti.groups.in_flight import InFlight, InFlightOwner
from parti.groups.member_consumer import MemberConsumer
from parti.groups.member_status import MemberStatus
from parti.groups.message import GroupHandler
from parti.groups.names import GroupKind, check_group, check_member, check_stream
from parti.groups.options import MemberOptions
from parti.groups.puller import Puller
from parti.groups.signals import Signals
from parti.groups.store import R, RecordStore, Stored
from parti.wire.columns import Deliveries
from parti.wire.connect import Connection

STOP_WITHIN = 10.0  # supervisors allow a process about this long between SIGTERM and SIGKILL


class Core(MemberStatus, Signals, ABC, Generic[R]):
    """The parts of an instance; `Pinned`, `Leaving` and `GroupConsumer` use them."""

    kind: GroupKind

    def __init__(
        self,
        connection: Connection,
        store: RecordStore[R],
        stored: Stored[R],
        place: tuple[str, str, str],
        handler: GroupHandler,
        options: MemberOptions,
    ) -> None:
        clock = options.clock or SystemClock()
        super().__init__(
            (check_stream(place[0]), check_group(place[1]), check_member(place[2])),
            clock=clock,
            metrics=options.metrics,
            on_event=options.on_event,
        )
        Signals.__init__(self)
        self._random = random.Random()
        self.record = stored.record
        self._revision = stored.revision
        self._template = template = options.template
        self._connection = connection
        self._api = store.kv.api
        self._store = store
        self._drain_within = options.drain_timeout
        self._limits = Limits(template.ack_wait, template.pin_ttl, template.max_ack_pending)
        self._freeze_detector = FreezeDetector(clock, self._limits, on_freeze=self._thaw, on_beat=self._beat)
        self._puller = Puller(
            connection.connect_options,
            on_batch=self._on_batch,
            on_trouble=lambda error: self._signal(lambda: self._troubled(error)),
            in_hand=lambda: len(self._in_flight.in_hand),
        )
        self._own = MemberConsumer(self._api, self._consumer_place(), self._puller)
        self._in_flight = InFlight(
            handler,
            options.handlers,
            InFlightOwner(
                settle=lambda message, body: self._puller.send(message._reply, body),
                still_fresh=self._freeze_detector.fresh,
                certain=lambda: not self._own.uncertain,
            ),
            DeadLetterWriter(
                self._api,
                self.stream,
                self.group,
                extension=LetterExtension(LetterKind.GROUP, self.group),
                # The stream of a static group takes only subjects that begin with the partition.
                subject_of=(lambda message: message.queue_subject) if self.kind is GroupKind.STATIC else None,
            ),
            clock,
            self._metrics,
        )
        self._acks = Acks(
            connection, self._puller, self._own, self._in_flight, self._freeze_detector, self._limits, clock
        )
        self._waits = self._backoff()
        self._ending = False
        self._stopping = asyncio.Event()
        """A stop was requested: no wait may take longer than `_stop_within`."""
        self._stop_within = STOP_WITHIN
        self._tried = asyncio.Event()
        """The first attempt to join is over, successful or not."""
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: PartiError | None = None

    def _backoff(self) -> Any:
        return replace(FOREVER, cap=max(0.2, min(FOREVER.cap, self._template.ack_wait / 2))).delays()

    def _stuck(self) -> str | None:
        return self._in_flight.stuck()

    def _fail(self, error: PartiError) -> None:
        self._failure = self._failure or error
        self._ending = True

    @abstractmethod
    def _consumer_place(self) -> tuple[str, str]:
        """Stream and name of the member's consumer."""

    @abstractmethod
    def _beat(self) -> None:
        """Called three times per `ack_wait`."""

    @abstractmethod
    def _thaw(self, frozen: Frozen) -> None:
        """The process was frozen until now."""

    @abstractmethod
    def _on_batch(self, deliveries: Deliveries, lost: bool) -> None:
        """Messages arrived; `lost` if an earlier one is missing."""

    @abstractmethod
    async def _troubled(self, error: PartiError) -> None:
        """The pull reported an error; except for a lost pin, it has stopped."""
