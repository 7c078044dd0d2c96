"""Elastic groups: create, change the membership, inspect, delete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from parti.errors import PartiError
from parti.groups.changes import adding, dropping, mapping_to, unmapping
from parti.groups.common import DeletePlan, GroupCalls, is_group_consumer
from parti.groups.distribution import transforms
from parti.groups.errors import GroupExists, GroupNotFound, NameCollision
from parti.groups.names import GroupKind, can_exist, check_group, check_stream, work_queue
from parti.groups.records import CompactRecord, ElasticRecord, MemberMapping, PartitioningFilter, encode
from parti.groups.rules import check_elastic
from parti.groups.store import Stored, elastic_store
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import StreamNameExists, StreamNotFound, WrongLastSequence
from parti.wire.kv_model import KeyExists


class ElasticGroups(GroupCalls[ElasticRecord]):
    """Groups on any stream; each has its own work queue, and its membership may change at any time."""

    kind = GroupKind.ELASTIC

    def __init__(self, connection: Connection, *, compact: bool = False) -> None:
        """`compact`: groups in the compact layout, which only parti's members can read; see `compact.py`."""
        super().__init__(connection, elastic_store(JetStreamApi(connection), compact=compact))
        if compact:
            self.kind = GroupKind.COMPACT

    def consumer_place(self, stream: str, group: str, member: str) -> tuple[str, str]:
        return work_queue(stream, group), member

    async def create(
        self,
        stream: str,
        group: str,
        *,
        max_members: int,
        filters: Sequence[PartitioningFilter] | None = None,
        max_buffered_msgs: int = 0,
        max_buffered_bytes: int = 0,
        start_sequence: int | None = None,
        start_time: datetime | None = None,
    ) -> Stored[ElasticRecord]:
        """The group with its work queue; missing parts are created, members are kept.

        Settings that differ from an existing group raise `GroupExists`. If the work queue cannot be created, no record
        is left behind. `start_sequence` or `start_time` skip older messages of the stream; without them the whole
        stream is replayed. (With a start the reference can join the group, but not create it again: 10058.)
        """
        check_stream(stream)
        check_group(group)
        record = (CompactRecord if self.kind is GroupKind.COMPACT else ElasticRecord)(
            max_members=max_members,
            partitioning_filters=tuple(filters) if filters else None,
            max_buffered_msgs=max_buffered_msgs,
            max_buffered_bytes=max_buffered_bytes,
        )
        check_elastic(record)
        if not all(each.wildcards for each in filters or [PartitioningFilter(">")]):
            self.api.require((2, 12, 0), "partitioning by the whole subject")
        info = await self.api.stream_info(stream)
        await self.store.ensure_bucket(int(info["config"]["num_replicas"]))
        stored, new = await self._put_record(stream, group, record)
        config = work_queue_config(stream, group, stored.record, info["config"], start_sequence, start_time)
        try:
            await self._create_queue(config)
        except PartiError as error:
            if new and await self._queue_is_missing(config["name"], error):
                await self._take_back(stream, group, stored.revision, error)
            raise
        return stored

    async def _put_record(self, stream: str, group: str, record: ElasticRecord) -> tuple[Stored[ElasticRecord], bool]:
        try:
            return self._same(await self.store.get(stream, group), record), False
        except GroupNotFound:
            pass
        queue = work_queue(stream, group)
        for other_stream, other in await self.store.names():
            if (other_stream, other) != (stream, group) and work_queue(other_stream, other) == queue:
                raise NameCollision(
                    f"group {other!r} on stream {other_stream!r} already uses the work queue {queue!r}: choose another "
                    "group name"
                )
        try:
            return await self.store.create(stream, group, encode(record)), True
        except KeyExists:
            return self._same(await self.store.get(stream, group), record), False

    @staticmethod
    def _same(stored: Stored[ElasticRecord], wanted: ElasticRecord) -> Stored[ElasticRecord]:
        if not stored.record.same_stream(wanted):
            raise GroupExists("the group exists with other partitions, filters or limits: use those, or delete it")
        return stored

    async def _create_queue(self, config: dict[str, Any]) -> None:
        try:
            await self.api.stream_create(config)
        except StreamNameExists:
            found = (await self.api.stream_info(config["name"]))["config"]
            if not _serves(found, config):
                raise NameCollision(
                    f"the stream {config['name']!r}, which the group needs as its work queue, exists and is something "
                    "else: choose another group name"
                ) from None

    async def _queue_is_missing(self, name: str, error: PartiError) -> bool:
        if isinstance(error, NameCollision):
            return True
        try:
            await self.api.stream_info(name)
        except StreamNotFound:
            return True
        except PartiError:
            error.add_note("whether the work queue was made is unknown; create the group again to repair it")
        return False

    async def _take_back(self, stream: str, group: str, revision: int, error: PartiError) -> None:
        try:
            await self.store.delete(stream, group, revision=revision)
        except WrongLastSequence:
            error.add_note("another client changed the record meanwhile; it is kept")
        except PartiError as second:
            error.add_note(f"the record could not be taken back: {second}")

    async def add_members(self, stream: str, group: str, members: Iterable[str]) -> tuple[str, ...]:
        """Add members and return all members of the group; blank names are ignored, existing members change nothing."""
        change = adding(members)
        return (await self.store.edit(check_stream(stream), group, change)).record.members

    async def drop_members(self, stream: str, group: str, members: Iterable[str]) -> tuple[str, ...]:
        """Drop members and return the remaining ones; unknown names are ignored."""
        change = dropping(members)
        return (await self.store.edit(check_stream(stream), group, change)).record.members

    async def set_mappings(self, stream: str, group: str, mappings: Sequence[MemberMapping]) -> Stored[ElasticRecord]:
        """Use explicit mappings from now on; the list of members is removed."""
        return await self.store.edit(check_stream(stream), group, mapping_to(mappings))

    async def delete_mappings(self, stream: str, group: str) -> Stored[ElasticRecord]:
        """Remove the mappings; the group then has no members, unless it had no mappings."""
        return await self.store.edit(check_stream(stream), group, unmapping())

    async def plan_delete(self, stream: str, group: str) -> DeletePlan:
        """What `delete` would remove: the record, and the work queue with its remaining messages."""
        stored = await self.get(stream, group)
        name = work_queue(stream, group)
        try:
            if not can_exist(name):
                raise StreamNotFound(f"no stream can be named {name!r}")
            info = await self.api.stream_info(name)
        except StreamNotFound:
            return DeletePlan(self.kind, stream, group, stored.revision, (), (), 0)
        if not _is_queue_of(info["config"], stream):
            return DeletePlan(self.kind, stream, group, stored.revision, (), (), 0)
        consumers = [each["name"] for each in await self.api.consumer_list(name) if is_group_consumer(each["config"])]
        return DeletePlan(
            self.kind, stream, group, stored.revision, tuple(sorted(consumers)), (name,), int(info["state"]["messages"])
        )

    async def delete(self, stream: str, group: str) -> DeletePlan:
        """After this returns the group and its work queue are deleted; a missing work queue is not an error."""
        plan = await self.plan_delete(stream, group)
        await self.store.delete(stream, group, revision=plan.revision)
        for name in plan.streams:
            try:
                await self.api.stream_delete(name)
            except StreamNotFound:
                continue
        return plan


def work_queue_config(
    stream: str,
    group: str,
    record: ElasticRecord,
    source: dict[str, Any],
    start_sequence: int | None = None,
    start_time: datetime | None = None,
) -> dict[str, Any]:
    """The work queue's configuration as the reference sends it; storage and replicas are the source stream's."""
    start: dict[str, Any] = {}
    if start_sequence is not None:
        start["opt_start_seq"] = start_sequence
    elif start_time is not None:
        start["opt_start_time"] = start_time.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": work_queue(stream, group),
        "retention": "workqueue",
        "max_consumers": 0,
        "max_msgs": record.max_buffered_msgs,
        "max_bytes": record.max_buffered_bytes,
        "discard": "new",
        "max_age": 0,
        "max_msgs_per_subject": 0,
        "storage": source["storage"],
        "num_replicas": source["num_replicas"],
        "sources": [{"name": stream, **start, "subject_transforms": transforms(record)}],
        "compression": "none",
        "allow_direct": True,
        "mirror_direct": False,
        "consumer_limits": {},
    }


def _is_queue_of(config: dict[str, Any], stream: str) -> bool:
    sources = config.get("sources") or []
    return config.get("retention") == "workqueue" and [source.get("name") for source in sources] == [stream]


def _serves(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether an existing stream is this group's work queue, with any start, storage or replicas."""
    source = wanted["sources"][0]
    if not _is_queue_of(found, source["name"]):
        return False
    return bool((found["sources"][0].get("subject_transforms") or []) == source["subject_transforms"])
