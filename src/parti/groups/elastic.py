"""Joins an elastic group: a member follows the record, and changes its consumer only when necessary."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from parti.clock import SystemClock
from parti.errors import PartiError
from parti.groups.automatic import AutomaticMembership, Registrar
from parti.groups.common import holder, is_group_consumer
from parti.groups.distribution import partition_filters, partitions_of
from parti.groups.errors import ForeignConsumer, GroupNotFound, WorkQueueMissing
from parti.groups.events import EventKind, MemberState
from parti.groups.member import SERVER_FAILED, GroupConsumer
from parti.groups.message import GroupHandler
from parti.groups.names import GroupKind, check_group, check_member, check_stream, work_queue
from parti.groups.options import MemberOptions
from parti.groups.pinned import OTHERS_FIRST
from parti.groups.records import ElasticRecord
from parti.groups.signals import look_again
from parti.groups.sourcing import SourceWatch
from parti.groups.store import elastic_store
from parti.observe import group_metrics as m
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import (
    ApiError,
    ConsumerAlreadyExists,
    StreamNotFound,
    WorkQueueFilterNotUnique,
)

_BLOCKED_POLL = (0.15, 0.25)  # the server sends an advisory when a consumer is deleted; this covers a lost advisory
LOOK_EVERY = 5.0  # seconds between two looks at the work queue's source


async def elastic_consume(
    connection: Connection,
    stream: str,
    group: str,
    member: str,
    handler: GroupHandler,
    options: MemberOptions | None = None,
    *,
    automatic: AutomaticMembership | None = None,
    compact: bool = False,
) -> ElasticMember:
    """Join the group as an instance of `member`; messages arrive while it is listed and this instance pinned.

    A member that is not listed waits until it is; with `automatic` it is listed while an instance of it is joined,
    without an administrator. `compact` joins a group of the compact layout. Raises `GroupNotFound`, `WorkQueueMissing`,
    `BadTemplate`; waits out later outages. End it with `await consumer.stop()`, or use it in `async with`.
    """
    options = options or MemberOptions()
    options.template.check_kind(GroupKind.ELASTIC)
    check_stream(stream), check_group(group), check_member(member)
    api = JetStreamApi(connection)
    store = elastic_store(api, options.clock, compact=compact)
    stored = await store.get(stream, group)
    try:
        await api.stream_info(work_queue(stream, group))
    except StreamNotFound:
        raise WorkQueueMissing(
            f"group {group!r} on {stream!r} has a record and no work queue {work_queue(stream, group)!r}: create the "
            "group again, which adds it"
        ) from None
    consumer = ElasticMember(connection, store, stored, (stream, group, member), handler, options)
    if automatic is not None:
        consumer.registrar = Registrar(store, (stream, group, member), automatic, clock=options.clock or SystemClock())
    await consumer.start()
    return consumer


class ElasticMember(GroupConsumer[ElasticRecord]):
    """An instance of a member of an elastic group."""

    kind = GroupKind.ELASTIC
    _blocked = False
    """Another member's consumer still has one of this member's partitions: retry as soon as it is deleted."""
    registrar: Registrar | None = None
    """This instance's part in automatic membership."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._source = SourceWatch(self._api, self._own.stream)

    def _consumer_place(self) -> tuple[str, str]:
        return work_queue(self.stream, self.group), self.member

    async def _supervise(self) -> None:
        if self.registrar is not None:
            await self.registrar.start()
        async with self._advised(), self._watching_source():
            await super()._supervise()

    @contextlib.asynccontextmanager
    async def _watching_source(self) -> AsyncIterator[None]:
        """Report in event, log, metric and health that the work queue gets no more messages."""
        task = asyncio.create_task(self._watch_source(), name="parti-group-source")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch_source(self) -> None:
        while True:
            before = self._source.stuck
            with contextlib.suppress(PartiError):  # the member itself reports a server that does not answer
                await self._source.look(self._clock.now())
            self._metrics.set(m.SOURCE_STUCK, int(self._source.stuck is not None))
            if self._source.stuck is not None and before is None:
                self._tell(EventKind.SOURCE_STUCK, detail=self._source.stuck)
            elif before is not None and self._source.stuck is None:
                self._tell(EventKind.SOURCE_RESUMED)
            await self._clock.sleep(LOOK_EVERY * self._random.uniform(0.8, 1.2))

    def _stuck(self) -> str | None:
        return self._source.stuck or super()._stuck()

    @contextlib.asynccontextmanager
    async def _advised(self) -> AsyncIterator[None]:
        """Notice at once when another member's consumer is deleted, so that its partitions can be taken."""

        async def wake(advisory: Any) -> None:
            # Not for the own name: the pinned instance recreates it, and a concurrent create fails (500). Nor does
            # another member's leaving shorten the time left to the pinned instance of this member.
            if self._blocked and advisory.subject.split(".")[-1] != self._own.name:
                self._soon()
                self._signal(look_again)

        subject = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{self._own.stream}.>"
        subscription = await self._connection.subscribe(subject, cb=wake)
        try:
            yield
        finally:
            if not self._connection.is_closed:
                await subscription.unsubscribe()

    async def _join(self, filters: tuple[str, ...]) -> dict[str, Any] | None:
        config = self._template.config(GroupKind.ELASTIC, self._own.name, filters)
        self._blocked = False
        try:
            return await self._make(config)
        except WorkQueueFilterNotUnique:
            self._blocked = True
            self._wait_for("another member's consumer still has one of the partitions")
            return None
        except StreamNotFound:
            self._wait_for(f"the work queue {self._own.stream!r} does not exist")
            return None
        except ConsumerAlreadyExists:
            if (found := await self._own.found()) is None:
                self._later(0)
                return None
            if (followed := await self._existing(found, filters)) is not None:
                differs = "another instance made the consumer otherwise: following it"
                self._tell(EventKind.TEMPLATE_DIFFERS, detail=differs)
            return followed
        except ApiError as error:
            # Two instances that create a consumer while it is deleted can leave one that works but has lost its folder:
            # the server then answers every further create, even one that changes nothing, with 500 (2.15.1).
            if error.code < SERVER_FAILED or (found := await self._own.found()) is None:
                raise
            return await self._existing(found, filters)

    def _wait_for(self, what: str) -> None:
        self._be(MemberState.JOINING)
        self._later(min(next(self._waits), self._random.uniform(*_BLOCKED_POLL)))
        if not self.events.recent or self.events.recent[-1].detail != what:
            self._tell(EventKind.BLOCKED, partitions=partitions_of(self.record, self.member), detail=what)

    async def _existing(self, info: dict[str, Any], filters: tuple[str, ...]) -> dict[str, Any] | None:
        """The member's consumer exists, maybe with another configuration: use it, or have it recreated.

        The reference deletes it at once, which makes two instances with different templates fight forever.
        """
        config = info["config"]
        if not is_group_consumer(config) or config["ack_policy"] != "explicit":
            raise ForeignConsumer(
                f"the consumer {self._own.name!r} of {self._own.stream!r} was not made by a member of the group: "
                "rename the member, or remove that consumer"
            )
        if tuple(config.get("filter_subjects") or ()) == filters:
            return info
        # Created from an older record. Its pinned instance finishes and replaces it; without one, it lapses `ack_wait`
        # after its last message can have been in flight (only the server knows who requested more time).
        unused = holder(info) is None and not info["num_ack_pending"]
        if unused and (info["created"] == self._own.created or await self._is_unused(info["created"])):
            await self._delete_consumer()
            self._later(0)
        else:
            self._wait_for("an older consumer of this member is still in use, or has not lapsed yet")
        return None

    async def _changed(self, before: ElasticRecord) -> None:
        if not before.same_stream(self.record):
            self._refuse_change("the partitions, filters or limits")
            return
        wanted = partition_filters(self.record, self.member)
        if wanted == self._own.filters and self._puller.pulling:
            return  # other members changed; this member's partitions stay, and so does its consumer
        owned = partitions_of(self.record, self.member)
        lost = tuple(partition for partition in self._owned if partition not in owned)
        self._soon()
        if not self._puller.pulling and not self._in_flight.running:
            self._lose(lost)
            return
        # Finish and acknowledge before the consumer is deleted: then none of its messages is delivered twice, or
        # started by the next owner while it runs here.
        await self._drain(self._drain_within, unpin=False)
        self._be(MemberState.JOINING)
        self._lose(lost)
        # With the last pin, even if it was not settled yet: no other instance can release it.
        if not await self._remove_ours(self._drained_pin) and wanted:
            self._leave_to_others(self._random.uniform(*OTHERS_FIRST))

    async def _let_partitions_go(self) -> bool:
        """A consumer of this member's name is left over: no other member removes it."""
        found = await self._own.found()
        if found is None or not is_group_consumer(found["config"]):
            return True
        if await self._is_unused(found["created"]):
            with contextlib.suppress(GroupNotFound):
                stored = await self._store.get(self.stream, self.group)
                if not partition_filters(stored.record, self.member):  # else it is listed again
                    await self._delete_consumer()
        return False

    async def _leave(self) -> None:
        with contextlib.suppress(PartiError):
            await self._remove_unused()
        if self.registrar is not None:
            await self.registrar.stop()
