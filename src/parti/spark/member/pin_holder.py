"""A group member that processes no messages itself: it holds the member's consumer and pin, while Spark reads ranges.

The pin is the lease. To get it, the member takes one message and keeps it: it is acknowledged only when a batch with it
is done, and given back when the member leaves (docs/evidence/pipeline.md#p10). Everything else (joining, recovering,
following the record beside Go and Python members) works as in `parti.groups`. A change of the record waits until the
running batch has ended: only then is the consumer released, so that no other member gets a partition while its messages
are being handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from parti.errors import PartiError, TransientError, UsageError
from parti.groups.common import is_group_consumer
from parti.groups.elastic import ElasticMember
from parti.groups.errors import ForeignConsumer, GroupNotFound
from parti.groups.events import MemberState
from parti.groups.in_flight import HandlerOptions
from parti.groups.member import GroupConsumer
from parti.groups.message import GroupMessage
from parti.groups.names import GroupKind
from parti.groups.options import MemberOptions
from parti.groups.static import StaticMember
from parti.groups.template import ConsumerTemplate
from parti.outcomes import Retry, RetryPolicy
from parti.spark.member.lookup import FoundGroup, find_group, owned
from parti.spark.source.options import GroupSetting
from parti.waiting import first_of
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

T = TypeVar("T")

_ANSWER = 15.0  # seconds for the member's own thread to answer; its calls to the server have shorter limits
_NEVER_BURY = RetryPolicy(max_deliver=1 << 62, delays=(0.0,))  # a message that is given back was not tried


@dataclass(frozen=True, slots=True)
class PinStatus:
    """The right to read, at this moment."""

    lease: int
    """Identifies the period for which this instance has been pinned without interruption."""
    partitions: tuple[int, ...]
    filters: tuple[str, ...]


class PinHolder(GroupConsumer[Any]):
    """Keeps the messages that come; common to both kinds of group."""

    lease: int | None = None
    _lent = False
    """A batch is running: the partitions must stay."""
    _before: Any = None
    """The record of the held consumer, while a newer record waits for the batch to end."""

    def prepare(self) -> None:
        """Must be called before `start`."""
        self._done = 0
        self._leaving = False
        self._moved = asyncio.Condition()

    async def hold(self, message: GroupMessage) -> Retry | None:
        """The handler: ends when the message is done, or when it must be given back."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._leaving or message.queue_sequence <= self._done)
        return None if message.queue_sequence <= self._done else Retry(after=0.0, error="given back")

    def _be(self, state: MemberState) -> None:
        super()._be(state)
        if state is not MemberState.ACTIVE:
            self.lease = None
        elif self.lease is None:
            self.lease, self._done = time.time_ns(), 0

    async def _changed(self, before: Any) -> None:
        if self._lent:
            self._before = self._before or before
        else:
            await self._apply(before)

    @abstractmethod
    async def _apply(self, before: Any) -> None:
        """Follow the record, as the kind of group requires."""

    async def _drain(self, timeout: float, *, unpin: bool = True) -> bool:
        await self._let_go(True)
        try:
            return await super()._drain(timeout, unpin=unpin)
        finally:
            await self._let_go(False)

    async def _let_go(self, leaving: bool) -> None:
        async with self._moved:
            self._leaving = leaving
            self._moved.notify_all()

    async def lend(self, lease: int = 0) -> PinStatus | None:
        """The right to run a batch, if this instance has it: until `take_back` the partitions stay.

        While a change of the record waits, no new right is given; the running batch, planned under `lease`, keeps its.
        """
        under_way = self._lent and lease == self.lease
        if self.lease is None or (self._before is not None and not under_way) or not await self.pinned():
            return None
        self._lent = True
        return PinStatus(self.lease, owned(self.record, self.member), self._own.filters)

    async def pinned(self) -> bool:
        """Whether this instance has the pin now."""
        return self.lease is not None and self._freeze_detector.look()

    async def take_back(self, lease: int, done: int) -> None:
        """The batch has ended, and is committed up to `done`; now a change of the record takes effect."""
        self._lent = False
        if lease == self.lease:
            async with self._moved:
                self._done = max(self._done, done)
                self._moved.notify_all()
        if self._before is not None:
            followed = asyncio.Event()
            self._signal(lambda: self._follow(followed))
            await first_of(followed.wait(), self._ended.wait())

    async def _follow(self, followed: asyncio.Event) -> None:
        before, self._before = self._before, None
        try:
            if before is not None:
                await self._apply(before)
        finally:
            followed.set()


class ElasticPinHolder(PinHolder, ElasticMember):
    """Holds the consumer of an elastic member."""

    async def _apply(self, before: Any) -> None:
        await ElasticMember._changed(self, before)

    async def _existing(self, info: dict[str, Any], filters: tuple[str, ...]) -> dict[str, Any] | None:
        found = await super()._existing(info, filters)
        if found is not None:
            _refuse_several(found["config"], self.member)
        return found


class StaticPinHolder(PinHolder, StaticMember):
    """Holds the durable of a static member."""

    async def _apply(self, before: Any) -> None:
        await StaticMember._changed(self, before)

    async def _existing(self, filters: tuple[str, ...]) -> dict[str, Any]:
        info = await super()._existing(filters)
        _refuse_several(info["config"], self.member)
        return info


def _refuse_several(config: dict[str, Any], member: str) -> None:
    if is_group_consumer(config) and config["max_ack_pending"] != 1:
        raise ForeignConsumer(
            f"the consumer of member {member!r} was made with max_ack_pending {config['max_ack_pending']}; a query "
            "holds one message and needs 1: give the query a member of its own, or let that instance use 1"
        )


class MemberThread:
    """The member in a thread with its own event loop, for the driver's reader, which is blocking code."""

    def __init__(self, options: ConnectOptions, stream: str, setting: GroupSetting) -> None:
        self._options = options
        self._stream = stream
        self._setting = setting
        self._ready = threading.Event()
        self._failure: PartiError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._member: PinHolder | None = None
        self._stop: asyncio.Event | None = None
        self._found: FoundGroup | None = None
        self._thread = threading.Thread(target=self._run, name=f"parti-member-{setting.member}", daemon=True)

    def __repr__(self) -> str:
        return f"<MemberThread {self._setting.group}/{self._setting.member} {self._member or 'starting'}>"

    def start(self) -> FoundGroup:
        """Join; returns the group after the first attempt, and raises errors that make joining impossible."""
        self._thread.start()
        self._ready.wait()
        self.check()
        assert self._found is not None
        return self._found

    @property
    def record(self) -> Any:
        """The group's record as the member sees it."""
        assert self._member is not None
        return self._member.record

    def check(self) -> None:
        """Raise the error that ended the member."""
        if self._failure is not None:
            raise self._failure

    def lend(self, lease: int = 0) -> PinStatus | None:
        """See `PinHolder.lend`."""
        return self._ask(lambda member: member.lend(lease))

    def pinned(self) -> bool:
        """See `PinHolder.pinned`."""
        return self._ask(lambda member: member.pinned())

    def take_back(self, lease: int, done: int) -> None:
        """See `PinHolder.take_back`."""
        self._ask(lambda member: member.take_back(lease, done))

    def _ask(self, question: Callable[[PinHolder], Coroutine[Any, Any, T]]) -> T:
        self.check()
        assert self._loop is not None
        assert self._member is not None
        try:
            return asyncio.run_coroutine_threadsafe(question(self._member), self._loop).result(_ANSWER)
        except (RuntimeError, TimeoutError) as error:
            self.check()
            raise TransientError(f"the member {self._setting.member!r} did not answer: {error!r}") from error

    def close(self) -> None:
        """Leave the group; after this returns nothing of the member runs."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_ANSWER)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except PartiError as error:
            self._failure = error
        except Exception as error:
            self._failure = UsageError(f"the member ended by a bug: {error!r}")
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with await connect(self._options, name="parti-spark-member") as connection:
            found = self._found = await find_group(connection, self._stream, self._setting)
            kind = StaticPinHolder if found.kind is GroupKind.STATIC else ElasticPinHolder
            template = ConsumerTemplate(ack_wait=self._setting.ack_wait)
            options = MemberOptions(template=template, handlers=HandlerOptions(retry=_NEVER_BURY))
            place = (found.source, self._setting.group, self._setting.member)
            member: PinHolder

            async def hold(message: GroupMessage) -> Retry | None:
                return await member.hold(message)

            member = kind(connection, found.store, found.stored, place, hold, options)
            member.prepare()
            await member.start()
            self._member = member
            self._ready.set()
            try:
                await first_of(self._stop.wait(), member.wait())
            finally:
                await member.stop()
            await member.wait()
            if not self._stop.is_set():
                raise GroupNotFound(f"group {self._setting.group!r} on {self._stream!r} was deleted while it was read")
