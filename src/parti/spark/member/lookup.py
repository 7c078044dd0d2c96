"""Finds and checks the group that a query is a member of, before anything is read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from parti.errors import ConfigError
from parti.groups.distribution import partition_depth, partition_filters, partition_subject, partitions_of
from parti.groups.errors import GroupNotFound, NotListed, WorkQueueMissing
from parti.groups.names import GroupKind, check_group, check_member, check_stream, work_queue
from parti.groups.records import GroupMembership, StaticRecord
from parti.groups.store import RecordStore, Stored, elastic_store, static_store
from parti.spark.source.options import GroupSetting
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.errors import StreamNotFound
from parti.wire.options import ConnectOptions


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A group as it is now."""

    kind: GroupKind
    source: str
    """The stream of the group."""
    stream: str
    """The stream that its members read: the same, or the work queue of an elastic group."""
    store: RecordStore[Any]
    stored: Stored[Any]

    @property
    def depth(self) -> int:
        """Leading tokens of a subject that hold the partition; in an elastic group publishers did not write them."""
        return partition_depth(self.stored.record)


async def find_group(connection: Connection, stream: str, setting: GroupSetting) -> FoundGroup:
    """The group of this name; raises `GroupNotFound`, `WorkQueueMissing`, `NotListed`, or ConfigError for two."""
    check_stream(stream), check_group(setting.group), check_member(setting.member)
    api = JetStreamApi(connection)
    stores: dict[GroupKind, RecordStore[Any]] = {
        GroupKind.STATIC: static_store(api),
        GroupKind.ELASTIC: elastic_store(api),
        GroupKind.COMPACT: elastic_store(api, compact=True),
    }
    found: dict[GroupKind, Stored[Any]] = {}
    for kind, store in stores.items():
        if setting.kind in ("auto", kind.value):
            try:
                found[kind] = await store.get(stream, setting.group)
            except GroupNotFound:
                continue
    if not found:
        what = "group" if setting.kind == "auto" else f"{setting.kind} group"
        raise GroupNotFound(
            f"there is no {what} {setting.group!r} on stream {stream!r}: create it, or correct the name or its kind"
        )
    if len(found) > 1:
        kinds = ", ".join(kind.value for kind in found)
        raise ConfigError(f"group {setting.group!r} on {stream!r} exists as {kinds}: say which one with groupKind")
    (kind, stored), *_ = found.items()
    queue = stream if kind is GroupKind.STATIC else work_queue(stream, setting.group)
    try:
        await api.stream_info(queue)
    except StreamNotFound:
        if kind is GroupKind.STATIC:
            raise
        raise WorkQueueMissing(
            f"group {setting.group!r} on {stream!r} has a record and no work queue {queue!r}: create the group again"
        ) from None
    record = stored.record
    if kind is GroupKind.STATIC and setting.member not in record.member_names:
        raise NotListed(
            f"member {setting.member!r} is not in static group {setting.group!r}: it has "
            f"{', '.join(record.member_names) or 'no members'}"
        )
    return FoundGroup(kind, stream, queue, stores[kind], stored)


def look_up(options: ConnectOptions, stream: str, setting: GroupSetting) -> FoundGroup:
    """`find_group` for blocking code; use only its values afterwards, the connection is closed."""

    async def look() -> FoundGroup:
        connection = await connect(options, name="parti-spark-group")
        try:
            return await find_group(connection, stream, setting)
        finally:
            await connection.close()

    return asyncio.run(look())


def read_filters(record: GroupMembership, member: str, partitions: tuple[int, ...]) -> tuple[str, ...]:
    """The subjects of these partitions in the stream that members read.

    A work queue holds only what the group's filters select; the stream of a static group holds more.
    """
    if isinstance(record, StaticRecord):
        return partition_filters(record, member)
    return tuple(partition_subject(record, partition) for partition in partitions)


def owned(record: GroupMembership, member: str) -> tuple[int, ...]:
    """The member's partitions in ascending order."""
    return tuple(sorted(partitions_of(record, member)))
