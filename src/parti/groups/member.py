"""One instance of a member: joins, pulls, heals itself, follows the record, and leaves without a trace.

A supervising task owns every decision and all API calls; callbacks of the connection only put signals into its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, Generic

from parti.backoff import Backoff
from parti.clock import SystemClock
from parti.errors import Category, FatalError, PartiError
from parti.groups.acks import Acks
from parti.groups.common import pinned_id
from parti.groups.distribution import partition_depth, partition_filters, partitions_of
from parti.groups.errors import GroupChanged, GroupError, InvalidGroup
from parti.groups.events import EventKind, MemberState
from parti.groups.message import GroupHandler, messages_of
from parti.groups.names import PRIORITY_GROUP, GroupKind, check_group, check_member, check_stream
from parti.groups.options import MemberOptions
from parti.groups.puller import Puller
from parti.groups.pulse import Frozen, Limits, Pulse
from parti.groups.signals import Signals, look_again
from parti.groups.standing import Standing
from parti.groups.store import R, RecordStore, Stored
from parti.groups.work import Work
from parti.observe import group_metrics as m
from parti.wire.columns import Deliveries
from parti.wire.connect import Connection
from parti.wire.errors import ApiError, WrongPinId
from parti.wire.kv_model import Change, Operation
from parti.wire.stored import parse_time
from parti.worker.dead_letters import DeadLetterOffice

_STOP_WITHIN = 10.0  # a supervisor gives a process about that long between SIGTERM and SIGKILL
_PATIENCE = 2.0  # for each call to the server while leaving
_SETTLE_EVERY = 0.03
SERVER_FAILED = 500  # such as a consumer that is made while its predecessor's files are being removed


class GroupConsumer(Standing, Signals, ABC, Generic[R]):
    """A joined instance. `state` says where it stands, `events` what happened, `wait()` when and how it ended."""

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
        self.record = stored.record
        self._revision = stored.revision
        self._template = template = options.template
        self._connection = connection
        self._api = store.kv.api
        self._store = store
        self._queue_stream, self._consumer = self._consumer_place()
        self._limits = Limits(template.ack_wait, template.pin_ttl, template.max_ack_pending)
        self._pulse = Pulse(clock, self._limits, on_freeze=self._thaw, on_beat=self._beat)
        self._puller = Puller(
            connection.connect_options,
            on_batch=self._on_batch,
            on_trouble=lambda error: self._signal(lambda: self._troubled(error)),
            in_hand=lambda: len(self._work.in_hand),
        )
        self._work = Work(
            handler,
            options.handlers,
            settle=lambda message, body: self._puller.send(message._reply, body),
            still_fresh=self._pulse.fresh,
            dead_letters=DeadLetterOffice(self._api, self.stream, self.group),
            clock=clock,
            metrics=options.metrics,
        )
        self._acks = Acks(connection, self._puller, self._work, self._pulse, self._limits, clock)
        self._held: tuple[str, ...] = ()
        """The filters of the consumer that we pull from, or pulled from last."""
        self._pin: str | None = None
        self._pin_since = 0.0
        self._waits = self._backoff()
        self._ending = False
        self._failure: PartiError | None = None
        self._stop_within = _STOP_WITHIN
        self._tried = asyncio.Event()
        """The first attempt to join is over, whatever came of it."""
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.stream}/{self.group}/{self.member} {self.state.value} "
            f"partitions={list(self._owned)} in_hand={len(self._work.in_hand)}>"
        )

    # -- what the kinds differ in ---------------------------------------------------------------------------------

    @abstractmethod
    def _consumer_place(self) -> tuple[str, str]:
        """Stream and name of the member's consumer."""

    @abstractmethod
    async def _join(self, filters: tuple[str, ...]) -> dict[str, Any] | None:
        """Make or find the consumer and return its info; None when it must be tried again later."""

    @abstractmethod
    async def _changed(self, before: R) -> None:
        """The record was replaced by another valid one."""

    async def _group_deleted(self) -> None:
        """The record is gone; the member ends after this."""

    async def _leave(self) -> None:
        """Everything in hand is settled and the pin is given back: remove what nobody needs any more."""

    def _beat(self) -> None:
        """Keep the messages in hand ours for as long as their handlers take."""
        for message in list(self._work.in_hand.values()):
            self._acks.working(message)

    def _thaw(self, frozen: Frozen) -> None:
        """Whatever was not started is somebody else's by now, and so may be what runs."""
        self._puller.stop()
        self._work.drop()
        for message in self._work.in_hand.values():
            message.doubtful = True
        self._signal(lambda: self._troubled(frozen))

    # -- the public side -------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._work.in_hand)

    async def drain(self, timeout: float = _STOP_WITHIN) -> bool:
        """Take nothing more, finish what is in hand, give the pin back; the instance stays joined until `stop()`.

        False when a handler still ran after `timeout` seconds.
        """
        drained = asyncio.Event()
        finished = True

        async def draining() -> None:
            nonlocal finished
            finished = await self._drain(timeout)
            self._be(MemberState.DRAINING)
            drained.set()

        self._signal(draining)
        await self._set_or_ended(drained)
        return finished

    async def _set_or_ended(self, event: asyncio.Event) -> None:
        """Return when the event is set, or the member has ended and nobody will set it."""
        waits = [asyncio.create_task(each.wait()) for each in (event, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self, timeout: float = _STOP_WITHIN) -> None:
        """Leave: finish what is in hand (for at most `timeout` seconds), acknowledge it, give the pin back.

        After this returns nothing of this instance runs, and a successor starts at once. Calling it again is fine.
        """
        self._stop_within = timeout
        self._ending = True
        self._signal(look_again)
        await self._ended.wait()

    async def wait(self) -> None:
        """Return when the member has ended: stopped, or its group deleted. Raises what made it fail."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> GroupConsumer[R]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- the supervising task --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin, and return after the first attempt to join; raises what makes joining impossible."""
        if self.record.old_names:
            self._tell(EventKind.OLD_NAMES, detail=f"the record uses the old names {', '.join(self.record.old_names)}")
        self._task = asyncio.create_task(self._run(), name=f"parti-group-{self.member}")
        await self._tried.wait()
        if self._failure is not None:
            await self.wait()

    async def _run(self) -> None:
        helpers = [asyncio.create_task(self._follow_record()), asyncio.create_task(self._pulse.run())]
        try:
            await self._supervise()
        except PartiError as error:
            self._fail(error)
        except Exception as error:
            self._fail(FatalError(f"a bug ended the member: {type(error).__name__}: {error}"))
            raise
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._finish()
            self._tried.set()

    async def _supervise(self) -> None:
        await self._converge()
        self._tried.set()
        while not self._ending:
            signal = await self._next_signal()
            try:
                outcome = signal() if signal is not None else None
                if outcome is not None:
                    await outcome
            except PartiError as error:
                if not self._may_pass(error):
                    raise
                self._retry(error)
            if not self._ending:
                await self._converge()

    async def _converge(self) -> None:
        """Make what is fit what should be; what may pass by itself is waited out, anything else ends the member."""
        if self.state is MemberState.DRAINING:
            return
        try:
            if not self._puller.pulling:
                await self._begin(partition_filters(self.record, self.member))
            elif self._work.holding and self._puller.pin is not None:
                await self._settle_pin()
        except PartiError as error:
            if not self._may_pass(error):
                raise
            self._retry(error)

    def _may_pass(self, error: PartiError) -> bool:
        """Whether trying again can help. A member that was joined once gives up only when its group has changed."""
        if isinstance(error, GroupError):
            return False
        server_failed = isinstance(error, ApiError) and error.code >= SERVER_FAILED
        return error.retriable or error.category is Category.TRANSIENT or server_failed or bool(self._held)

    async def _begin(self, wanted: tuple[str, ...]) -> None:
        """Have the right consumer, and pull from it."""
        if not wanted:
            if self.state is not MemberState.WAITING:
                self._be(MemberState.WAITING)
                self._tell(EventKind.WAITING, detail="the record gives this member no partition")
            return
        if self._wake_at is not None:
            return
        if self.state is not MemberState.STARTING:
            self._be(MemberState.JOINING)
        info = await self._join(wanted)
        if info is None:
            return
        self._limits.follow(info["config"])
        await self._puller.start(self._queue_stream, self._consumer, pin_ttl=self._limits.pin_ttl)
        self._held, self._waits = wanted, self._backoff()
        self._gain(partitions_of(self.record, self.member))
        self._be(MemberState.STANDBY)
        self._tell(EventKind.JOINED, partitions=self._owned)

    def _retry(self, why: PartiError) -> None:
        self._later(next(self._waits))
        if self._puller.pulling:
            return
        self._be(MemberState.JOINING)
        if not self.events.recent or self.events.recent[-1].kind is not EventKind.CONSUMER_LOST:
            self._tell(EventKind.CONSUMER_LOST, detail=f"cannot join: {why}")

    def _backoff(self) -> Any:
        return Backoff(base=0.05, cap=max(0.2, min(2.0, self._template.ack_wait / 2)), max_tries=None).delays()

    async def _settle_pin(self) -> None:
        """Pinned by the first message: handle nothing before the server confirms it and earlier deliveries are in."""
        pin = self._puller.pin
        if pin != self._pin:
            self._pin, self._pin_since = pin, self._clock.now()
        # What came or went while the answer was on its way must not be weighed against it: a message that another
        # instance still holds would be taken for ours.
        before = set(self._work.in_hand)
        info = await self._api.consumer_info(self._queue_stream, self._consumer)
        if pinned_id(info) != pin or (self._limits.max_pending != 1 and before != set(self._work.in_hand)):
            self._later(_SETTLE_EVERY)
            return
        others = int(info["num_ack_pending"]) - len(before)
        if self._limits.max_pending != 1 and others > 0:
            await self._await_others()
            return
        epoch = next(parse_time(g["pinned_ts"]) for g in info["priority_groups"] if g["group"] == PRIORITY_GROUP)
        self._work.release(epoch)
        if self.state is not MemberState.ACTIVE:
            self._be(MemberState.ACTIVE)
            self._tell(EventKind.PINNED, partitions=self._owned)

    async def _await_others(self) -> None:
        """Messages of whoever was pinned before us come again, below those that we hold: they must go first."""
        waited = self._clock.now() - self._pin_since
        if waited <= self._limits.pin_ttl or not self._api.can_reset:
            self._later(_SETTLE_EVERY)
            return
        self._puller.stop()
        self._work.drop()
        await self._api.consumer_reset(self._queue_stream, self._consumer)
        self._pin_since = self._clock.now()
        self._signal(look_again)

    # -- signals ---------------------------------------------------------------------------------------------------

    def _on_batch(self, deliveries: Deliveries, lost: bool) -> None:
        if not self._pulse.look():
            return
        self._metrics.set(m.PENDING, int(deliveries.pending[-1]))
        if (again := int((deliveries.delivered > 1).sum())) > 0:
            self._metrics.count(m.REDELIVERED, again)
        try:
            messages = messages_of(
                deliveries,
                elastic=self.kind is not GroupKind.STATIC,
                depth=partition_depth(self.record),
                settle=self._acks,
                lane=self._work.lane,
                member=self.member,
                received_at=self._clock.wall(),
            )
        except GroupError as error:
            foreign = error
            self._signal(lambda: self._fail(foreign))
            return
        if self._work.holding or self._puller.pin != self._pin or (lost and self._limits.max_pending != 1):
            self._work.hold()
            self._signal(look_again)
        self._work.accept(messages)

    async def _troubled(self, error: PartiError) -> None:
        if isinstance(error, WrongPinId):
            self._unpinned(str(error))
            return
        if self._puller.pulling:
            return  # it was healed meanwhile
        self._pin = None
        self._metrics.set(m.PINNED, 0)
        self._work.drop()
        if self.state in (MemberState.ACTIVE, MemberState.STANDBY):
            self._be(MemberState.JOINING)
        kind = EventKind.FROZEN if isinstance(error, Frozen) else EventKind.CONSUMER_LOST
        self._tell(kind, detail=str(error))

    def _unpinned(self, why: str) -> None:
        """Another instance is pinned: what was not started is its work now, and comes to it at once by a NAK."""
        self._pin = None
        for message in self._work.drop():
            self._puller.send(message._reply, b"-NAK")
        if self.state is MemberState.ACTIVE:
            self._be(MemberState.STANDBY)
            self._tell(EventKind.UNPINNED, detail=why)

    async def _follow_record(self) -> None:
        try:
            async with contextlib.aclosing(self._store.watch(self.stream, self.group)) as changes:
                async for change in changes:
                    if isinstance(change, Change) and change.revision != self._revision:
                        self._signal(lambda told=change: self._recorded(told))  # type: ignore[misc]
        except PartiError as error:
            self._signal(lambda failed=error: self._fail(failed))  # type: ignore[misc]

    async def _recorded(self, change: Change) -> None:
        self._revision = change.revision
        if change.operation is not Operation.PUT or change.value is None:
            self._tell(EventKind.GROUP_DELETED)
            await self._drain(self._limits.ack_wait)
            await self._group_deleted()
            self._ending = True
            return
        try:
            record = self._store.decode(change.value)
        except (GroupError, InvalidGroup) as error:
            self._tell(EventKind.RECORD_INVALID, detail=str(error))
            return
        before, self.record = self.record, record
        await self._changed(before)

    # -- endings ---------------------------------------------------------------------------------------------------

    async def _drain(self, timeout: float, *, unpin: bool = True) -> bool:
        """Stop pulling, finish what runs, settle it, give the pin back; whether all handlers ended in time."""
        was_pinned = self.state is MemberState.ACTIVE
        self._work.hold()
        await self._shortly(self._puller.withdraw())
        self._puller.stop()
        for message in self._work.drop():
            self._puller.send(message._reply, b"-NAK")
        finished = await self._work.idle(timeout)
        await self._shortly(self._puller.flush())
        self._pin = None
        if was_pinned and unpin:
            await self._shortly(self._api.consumer_unpin(self._queue_stream, self._consumer, PRIORITY_GROUP))
        return finished

    @staticmethod
    async def _shortly(act: Awaitable[None]) -> None:
        """Try it; leaving must not hang on a server that is gone, and what is left behind lapses by itself."""
        with contextlib.suppress(PartiError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await act

    async def _finish(self) -> None:
        failed = self._failure is not None
        with contextlib.suppress(PartiError):
            await self._drain(self._stop_within)
            await self._leave()
        await self._work.close()
        await self._puller.close()
        self._lose(self._owned)
        self._be(MemberState.FAILED if failed else MemberState.STOPPED)
        self._tell(EventKind.FAILED if failed else EventKind.STOPPED, detail=str(self._failure or ""))
        self.events.close()
        self._ended.set()

    def _fail(self, error: PartiError) -> None:
        self._failure = self._failure or error
        self._ending = True

    def _refuse_change(self, what: str) -> None:
        self._fail(
            GroupChanged(f"{what} of group {self.group!r} on {self.stream!r} changed while it was in use: join again")
        )
