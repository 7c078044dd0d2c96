"""Joining an elastic group: a member that follows the record, and touches its consumer only when it must."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

from parti.clock import Randomness, SystemClock
from parti.errors import PartiError
from parti.groups.automatic import AutomaticMembership, Registrar
from parti.groups.common import is_group_consumer, pinned_id
from parti.groups.distribution import partition_filters, partitions_of
from parti.groups.errors import ForeignConsumer, WorkQueueMissing
from parti.groups.events import EventKind, MemberState
from parti.groups.member import SERVER_FAILED, GroupConsumer
from parti.groups.message import GroupHandler
from parti.groups.names import GroupKind, check_group, check_member, check_stream, work_queue
from parti.groups.options import MemberOptions
from parti.groups.records import ElasticRecord
from parti.groups.store import elastic_store
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import (
    ApiError,
    ConsumerAlreadyExists,
    ConsumerNotFound,
    StreamNotFound,
    WorkQueueFilterNotUnique,
)

_OTHERS_FIRST = (0.4, 0.5)  # seconds that an instance which is not pinned leaves to the pinned one (the reference's)
_BLOCKED_POLL = 0.25  # the server tells when a consumer goes; this is for when that message got lost
_DRAIN_SHARE = 0.8  # of ack_wait: an elastic consumer goes after ack_wait without a pull


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
    """Join the group as an instance of `member`; messages come while the member is listed and this instance pinned.

    A member that is not listed waits until it is; with `automatic` it is listed while an instance of it is joined, and
    no administrator is needed. `compact` joins a group of the compact layout. Raises `GroupNotFound`,
    `WorkQueueMissing`, `BadTemplate`; later outages are waited out. End it with `await consumer.stop()`, or use it in
    `async with`.
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
    _random: Randomness = random.Random()
    _stale_since: float | None = None
    registrar: Registrar | None = None
    """This instance's part in automatic membership."""

    def _consumer_place(self) -> tuple[str, str]:
        return work_queue(self.stream, self.group), self.member

    async def _supervise(self) -> None:
        if self.registrar is not None:
            await self.registrar.start()
        async with self._advised():
            await super()._supervise()

    @contextlib.asynccontextmanager
    async def _advised(self) -> AsyncIterator[None]:
        """Learn at once that another member's consumer is gone, so that its partitions can be taken."""

        async def wake(advisory: Any) -> None:
            # Our own name: the pinned instance makes it anew, and a create at the same moment fails (500).
            if self.state is MemberState.JOINING and advisory.subject.split(".")[-1] != self._consumer:
                self._wake_at = None
                self._signal(lambda: None)

        subject = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{self._queue_stream}.>"
        subscription = await self._connection.subscribe(subject, cb=wake)
        try:
            yield
        finally:
            if not self._connection.is_closed:
                await subscription.unsubscribe()

    async def _join(self, filters: tuple[str, ...]) -> dict[str, Any] | None:
        config = self._template.config(GroupKind.ELASTIC, self._consumer, filters)
        try:
            info = await self._api.consumer_create(self._queue_stream, config, action="create")
        except WorkQueueFilterNotUnique:
            self._wait_for("another member's consumer still has one of the partitions")
            return None
        except StreamNotFound:
            self._wait_for(f"the work queue {self._queue_stream!r} does not exist")
            return None
        except ConsumerAlreadyExists:
            if (found := await self._found()) is None:
                self._later(0)
                return None
            if (followed := await self._existing(found, filters)) is not None:
                differs = "another instance made the consumer otherwise: following it"
                self._tell(EventKind.TEMPLATE_DIFFERS, detail=differs)
            return followed
        except ApiError as error:
            # Two instances that make a consumer while it is deleted can leave one that works, and whose folder is gone:
            # the server then answers every further create, also one that changes nothing, with 500 (2.15.1).
            if error.code < SERVER_FAILED or (found := await self._found()) is None:
                raise
            return await self._existing(found, filters)
        self._stale_since = None
        return info

    async def _found(self) -> dict[str, Any] | None:
        try:
            return await self._api.consumer_info(self._queue_stream, self._consumer)
        except ConsumerNotFound:
            return None

    def _wait_for(self, what: str) -> None:
        self._be(MemberState.JOINING)
        self._later(min(next(self._waits), _BLOCKED_POLL))
        if not self.events.recent or self.events.recent[-1].detail != what:
            self._tell(EventKind.BLOCKED, partitions=partitions_of(self.record, self.member), detail=what)

    async def _existing(self, info: dict[str, Any], filters: tuple[str, ...]) -> dict[str, Any] | None:
        """The member's consumer exists, maybe with another configuration: follow it, or have it made anew.

        The reference deletes it at once, which makes two instances with different templates fight for ever.
        """
        config = info["config"]
        if not is_group_consumer(config) or config["ack_policy"] != "explicit":
            raise ForeignConsumer(
                f"the consumer {self._consumer!r} of {self._queue_stream!r} was not made by a member of the group: "
                "rename the member, or remove that consumer"
            )
        if tuple(config.get("filter_subjects") or ()) == filters:
            self._stale_since = None
            return info
        # Made from an older record. Its pinned instance finishes and replaces it; one that is gone never will.
        now = self._clock.now()
        self._stale_since = self._stale_since or now
        if pinned_id(info) is None or now - self._stale_since > self._limits.ack_wait:
            await self._delete_consumer()
            self._later(0)
        else:
            self._wait_for("an older consumer of this member is still in use")
        return None

    async def _changed(self, before: ElasticRecord) -> None:
        if not before.same_stream(self.record):
            self._refuse_change("the partitions, filters or limits")
            return
        wanted = partition_filters(self.record, self.member)
        if wanted == self._held and self._puller.pulling:
            return  # others come and go; this member's partitions stay, and so does its consumer
        owned = partitions_of(self.record, self.member)
        lost = tuple(partition for partition in self._owned if partition not in owned)
        self._wake_at = None
        if not self._puller.pulling:
            self._lose(lost)
            return
        was_pinned = self.state is MemberState.ACTIVE
        # Finish and acknowledge before the consumer goes: then nothing of it is delivered twice.
        await self._drain(_DRAIN_SHARE * self._limits.ack_wait, unpin=False)
        self._be(MemberState.JOINING)
        self._lose(lost)
        if was_pinned:
            await self._delete_consumer()
        else:
            self._later(self._random.uniform(*_OTHERS_FIRST))

    async def _delete_consumer(self) -> None:
        await self._shortly(self._api.consumer_delete(self._queue_stream, self._consumer))

    async def _leave(self) -> None:
        """Nobody else pulls: the consumer would only keep its partitions from others until it lapses."""
        with contextlib.suppress(PartiError):
            info = await self._api.consumer_info(self._queue_stream, self._consumer)
            if not info.get("num_waiting"):
                await self._delete_consumer()
        if self.registrar is not None:
            await self.registrar.stop()
