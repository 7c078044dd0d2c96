"""One instance of a member: joins, pulls, heals itself, follows the record, and leaves without a trace.

A supervising task owns every decision and all API calls; callbacks of the connection only put signals into its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic

from parti.backoff import Backoff
from parti.clock import Clock, Deadline, SystemClock
from parti.errors import (
    Category,
    ConnectionFailed,
    ConnectionLost,
    FatalError,
    NoResponders,
    PartiError,
    RequestTimeout,
    TransientError,
)
from parti.groups.common import pinned_id
from parti.groups.distribution import partition_depth, partition_filters, partitions_of
from parti.groups.errors import GroupChanged, GroupError, InvalidGroup, OwnershipLost
from parti.groups.events import EventKind, GroupEvent, GroupEvents, Listener, MemberState
from parti.groups.message import GroupHandler, GroupMessage, messages_of
from parti.groups.names import PRIORITY_GROUP, GroupKind, check_group, check_member, check_stream
from parti.groups.puller import Puller
from parti.groups.store import R, RecordStore, Stored
from parti.groups.template import ConsumerTemplate
from parti.groups.work import HandlerOptions, Work
from parti.observe import group_metrics as m
from parti.observe.health import HealthCheck
from parti.observe.metrics import NO_METRICS, Metrics
from parti.wire.columns import Deliveries
from parti.wire.connect import Connection
from parti.wire.errors import ApiError, ConsumerNotFound, StreamNotFound, WrongPinId
from parti.wire.kv_model import Change, Operation
from parti.wire.stored import parse_time
from parti.worker.dead_letters import DeadLetterOffice

_NANOSECONDS = 1e9
_STOP_WITHIN = 10.0  # a supervisor gives a process about that long between SIGTERM and SIGKILL
_SETTLE_EVERY = 0.03
_RESET_SINCE = (2, 14, 0)
_SERVER_FAILED = 500  # such as a consumer that is made while its predecessor's files are being removed


class Frozen(TransientError):
    """The process stood still for longer than its pin is safe; it must join again before it handles anything."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """What every join has in common, with defaults that fit most."""

    template: ConsumerTemplate = field(default_factory=ConsumerTemplate)
    handlers: HandlerOptions = field(default_factory=HandlerOptions)
    on_event: Listener | None = None
    metrics: Metrics = NO_METRICS
    clock: Clock | None = None


_Signal = Callable[[], Awaitable[None] | None]


class GroupConsumer(Generic[R]):
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
        self.stream, self.group, self.member = check_stream(place[0]), check_group(place[1]), check_member(place[2])
        self.events = GroupEvents(stream=self.stream, group=self.group, member=self.member)
        if options.on_event is not None:
            self.events.listen(options.on_event)
        self.record = stored.record
        self.state = MemberState.STARTING
        self._revision = stored.revision
        self._template = options.template
        self._connection = connection
        self._api = store.kv.api
        self._store = store
        self._clock = options.clock or SystemClock()
        self._metrics = options.metrics
        self._queue_stream, self._consumer = self._consumer_place()
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
            still_fresh=self._fresh,
            dead_letters=DeadLetterOffice(self._api, self.stream, self.group),
            clock=self._clock,
            metrics=options.metrics,
        )
        self._held: tuple[str, ...] = ()
        """The filters of the consumer that we pull from, or pulled from last."""
        self._owned: tuple[int, ...] = ()
        self._pin: str | None = None
        self._pin_since = 0.0
        self._ack_wait, self._pin_ttl = self._template.ack_wait, self._template.pin_ttl
        self._max_pending = self._template.max_ack_pending
        self._signals: asyncio.Queue[_Signal] = asyncio.Queue()
        self._wake_at: float | None = None
        self._waits = self._backoff()
        self._alive_at = self._clock.now()
        self._progress_at = 0.0
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

    def _consumer_place(self) -> tuple[str, str]:
        raise NotImplementedError

    async def _join(self, filters: tuple[str, ...]) -> dict[str, Any] | None:
        """Make or find the consumer and return its info; None when it must be tried again later."""
        raise NotImplementedError

    async def _changed(self, before: R) -> None:
        """The record was replaced by another valid one."""
        raise NotImplementedError

    async def _group_deleted(self) -> None:
        """The record is gone; the member ends after this."""

    async def _leave(self) -> None:
        """Everything in hand is settled and the pin is given back: remove what nobody needs any more."""

    def _beat(self) -> None:
        """Called a few times per `ack_wait`."""

    # -- the public side -------------------------------------------------------------------------------------------

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions of this member, whether or not this instance is the active one."""
        return self._owned

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
        waits = [asyncio.create_task(event.wait()) for event in (drained, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return finished

    async def stop(self, timeout: float = _STOP_WITHIN) -> None:
        """Leave: finish what is in hand (for at most `timeout` seconds), acknowledge it, give the pin back.

        After this returns nothing of this instance runs, and a successor starts at once. Calling it again is fine.
        """
        self._stop_within = timeout
        self._ending = True
        self._signal(_nothing)
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

    def health_check(self) -> HealthCheck:
        """Fails while the member should consume and does not."""

        def probe() -> str | None:
            if self.state in (MemberState.FAILED, MemberState.JOINING):
                last = self.events.recent[-1].detail if self.events.recent else ""
                return f"{self.stream}/{self.group}/{self.member} is {self.state.value}: {last}"
            return None

        return HealthCheck(f"group-{self.group}-{self.member}", probe)

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
        helpers = [asyncio.create_task(self._follow_record()), asyncio.create_task(self._pulse())]
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
            outcome = signal() if signal is not None else None
            if outcome is not None:
                await outcome
            if not self._ending:
                await self._converge()

    async def _next_signal(self) -> _Signal | None:
        wait = None if self._wake_at is None else max(0.0, self._wake_at - self._clock.now())
        try:
            async with asyncio.timeout(wait):
                return await self._signals.get()
        except TimeoutError:
            self._wake_at = None
            return None

    def _signal(self, act: _Signal) -> None:
        self._signals.put_nowait(act)

    def _later(self, seconds: float) -> None:
        self._wake_at = self._clock.now() + seconds

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
        server_failed = isinstance(error, ApiError) and error.code >= _SERVER_FAILED
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
        self._adopt(info)
        await self._puller.start(self._queue_stream, self._consumer, pin_ttl=self._pin_ttl)
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

    def _adopt(self, info: dict[str, Any]) -> None:
        """Follow the consumer as it is, also when another instance made it with other settings."""
        config = info["config"]
        self._ack_wait = int(config["ack_wait"]) / _NANOSECONDS
        self._pin_ttl = int(config.get("priority_timeout") or 0) / _NANOSECONDS or self._template.pin_ttl
        self._max_pending = int(config["max_ack_pending"])

    async def _settle_pin(self) -> None:
        """Pinned by the first message: handle nothing before the server confirms it and earlier deliveries are in."""
        pin = self._puller.pin
        if pin != self._pin:
            self._pin, self._pin_since = pin, self._clock.now()
        info = await self._api.consumer_info(self._queue_stream, self._consumer)
        if pinned_id(info) != pin:
            self._later(_SETTLE_EVERY)
            return
        others = int(info["num_ack_pending"]) - len(self._work.in_hand)
        if self._max_pending != 1 and others > 0:
            # Messages of whoever was pinned before us come again, below those that we hold: they must go first.
            if self._clock.now() - self._pin_since > self._pin_ttl and self._connection.server_version >= _RESET_SINCE:
                self._puller.stop()
                self._work.drop()
                await self._api.consumer_reset(self._queue_stream, self._consumer)
                self._pin_since = self._clock.now()
            else:
                self._later(_SETTLE_EVERY)
            return
        epoch = next(parse_time(g["pinned_ts"]) for g in info["priority_groups"] if g["group"] == PRIORITY_GROUP)
        self._work.release(epoch)
        self._be(MemberState.ACTIVE)
        self._tell(EventKind.PINNED, partitions=self._owned)

    # -- signals ---------------------------------------------------------------------------------------------------

    def _on_batch(self, deliveries: Deliveries) -> None:
        if not self._fresh():
            self._thaw()
            return
        if (again := int((deliveries.delivered > 1).sum())) > 0:
            self._metrics.count(m.REDELIVERED, again)
        try:
            messages = messages_of(
                deliveries,
                elastic=self.kind is not GroupKind.STATIC,
                depth=partition_depth(self.record),
                settle=self,
                lane=self._work.lane,
                member=self.member,
                received_at=self._clock.wall(),
            )
        except GroupError as error:
            foreign = error
            self._signal(lambda: self._fail(foreign))
            return
        if self._work.holding or self._puller.pin != self._pin:
            self._work.hold()
            self._signal(_nothing)
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
            await self._drain(self._ack_wait)
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

    # -- a message's own wishes (the protocol Settle) ---------------------------------------------------------------

    def settled(self, message: GroupMessage) -> None:
        self._puller.send(message._reply, b"+ACK")
        self._work.done(message)

    async def confirmed(self, message: GroupMessage) -> None:
        deadline = Deadline.after(self._clock, seconds=self._ack_wait)
        while True:
            if message.doubtful or not self._fresh() or self._work.in_hand.get(message.queue_sequence) is not message:
                raise OwnershipLost(f"message {message.sequence} may be somebody else's by now: undo what was prepared")
            try:
                # A repeated acknowledgement is answered like the first (JETSTREAM.md 4.3), so that a lost answer is no
                # reason to undo what the server has taken.
                reply = message._reply.decode()
                await self._connection.requests.call(reply, b"+ACK", timeout=min(1.0, self._ack_wait))
                break
            except NoResponders:
                message.doubtful = True
                raise
            except (RequestTimeout, ConnectionLost, ConnectionFailed):
                if deadline.expired:
                    raise
        self._work.done(message)

    def working(self, message: GroupMessage) -> None:
        self._puller.send(message._reply, b"+WPI")

    # -- time ------------------------------------------------------------------------------------------------------

    def _fresh(self) -> bool:
        """Whether this process ran all the time lately: a frozen one reads old deliveries as if they were new."""
        return self._clock.now() - self._alive_at < self._pin_ttl / 2

    def _thaw(self) -> None:
        stood = self._clock.now() - self._alive_at
        self._alive_at = self._clock.now()
        self._puller.stop()
        self._work.drop()
        for message in self._work.in_hand.values():
            message.doubtful = True
        self._signal(lambda: self._troubled(Frozen(f"the process stood still for {stood:.1f} s")))

    async def _pulse(self) -> None:
        """Notice a freeze, and keep the messages in hand ours for as long as their handlers take."""
        while True:
            await self._clock.sleep(min(0.25, self._pin_ttl / 10))
            if not self._fresh():
                self._thaw()
            now = self._alive_at = self._clock.now()
            if now - self._progress_at >= self._ack_wait / 3:
                self._progress_at = now
                for message in list(self._work.in_hand.values()):
                    self.working(message)
                self._beat()

    # -- endings ---------------------------------------------------------------------------------------------------

    async def _drain(self, timeout: float, *, unpin: bool = True) -> bool:
        """Stop pulling, finish what runs, settle it, give the pin back; whether all handlers ended in time."""
        was_pinned = self.state is MemberState.ACTIVE
        self._work.hold()
        try:
            await self._puller.withdraw()
        except PartiError:
            self._puller.stop()
        for message in self._work.drop():
            self._puller.send(message._reply, b"-NAK")
        finished = await self._work.idle(timeout)
        with contextlib.suppress(PartiError, TimeoutError):
            async with asyncio.timeout(2):
                await self._puller.flush()
        self._pin = None
        if was_pinned and unpin:
            with contextlib.suppress(ConsumerNotFound, StreamNotFound, RequestTimeout):
                await self._api.consumer_unpin(self._queue_stream, self._consumer, PRIORITY_GROUP)
        return finished

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

    # -- telling ---------------------------------------------------------------------------------------------------

    def _be(self, state: MemberState) -> None:
        self.state = state
        self._metrics.set(m.PINNED, int(state is MemberState.ACTIVE))

    def _gain(self, partitions: tuple[int, ...]) -> None:
        gained = set(partitions) - set(self._owned)
        self._owned = partitions
        self._metrics.set(m.PARTITIONS, len(partitions))
        if gained:
            self._tell(EventKind.ASSIGNED, partitions=partitions)

    def _lose(self, partitions: tuple[int, ...]) -> None:
        lost = tuple(partition for partition in self._owned if partition in partitions)
        self._owned = tuple(partition for partition in self._owned if partition not in partitions)
        self._metrics.set(m.PARTITIONS, len(self._owned))
        if lost:
            self._tell(EventKind.REVOKED, partitions=lost)

    def _tell(self, kind: EventKind, *, partitions: tuple[int, ...] = (), detail: str = "") -> None:
        self._metrics.count(m.EVENTS, kind=kind.value)
        self.events.tell(GroupEvent(kind, self._clock.wall(), partitions, detail))


async def _nothing() -> None:
    """A signal that only makes the supervisor look again."""
