"""The bucket of records: reads from the leader, and writes that never undo another writer's change."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from parti.backoff import FAST
from parti.clock import Clock, SystemClock
from parti.errors import UnknownOutcome
from parti.groups.errors import GroupNotFound, WriteContended
from parti.groups.names import GroupKind, record_key, split_key
from parti.groups.records import (
    ElasticRecord,
    GroupMembership,
    MemberMapping,
    StaticRecord,
    decode_compact,
    decode_elastic,
    decode_static,
    edit_membership,
)
from parti.groups.rules import check_elastic_record, check_membership
from parti.wire.api import JetStreamApi
from parti.wire.errors import StreamNameExists, StreamNotFound, WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyExists, KeyNotFound, SnapshotDone

R = TypeVar("R", bound=GroupMembership)

# Ten tries take about a second; ten administrators writing at once all succeed with fewer.
_WRITES = replace(FAST, max_tries=10)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record with its exact bytes and the revision for the next CAS."""

    record: R
    raw: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class NewMembership:
    """A record's new membership."""

    members: tuple[str, ...] = ()
    mappings: tuple[MemberMapping, ...] = ()


class RecordStore(Generic[R]):
    """The records of one kind. Every write is a CAS, repeated on a fresh read when another writer was faster."""

    def __init__(self, api: JetStreamApi, kind: GroupKind, decode: Callable[[bytes], R], *, clock: Clock) -> None:
        self.kv = KeyValue(api, kind.bucket)
        self.kind = kind
        self._decode = decode
        self._clock = clock

    def __repr__(self) -> str:
        return f"<RecordStore {self.kv.bucket}>"

    async def ensure_bucket(self, replicas: int) -> None:
        """Create the bucket as the reference does, with the replicas of the first group's stream."""
        # Not `KeyValue.ensure`: its buckets allow TTLs, which the reference's does not, and a later create by the
        # reference must find the stream as it would have created it.
        with contextlib.suppress(StreamNameExists):
            await self.kv.api.stream_create(bucket_config(self.kv.bucket, replicas))

    async def get(self, stream: str, group: str) -> Stored[R]:
        """The valid record; raises `GroupNotFound`, `RecordUnreadable` or the error of the broken rule."""
        missing = f"there is no {self.kind} group {group!r} on stream {stream!r}: create it, or correct the name"
        try:
            entry = await self.kv.get(record_key(stream, group))
        except (KeyNotFound, StreamNotFound):
            raise GroupNotFound(missing) from None
        return Stored(self.decode(entry.value), entry.value, entry.revision)

    def decode(self, raw: bytes) -> R:
        """The record of these bytes, if it is valid."""
        record = self._decode(raw)
        check_record(record)
        return record

    async def create(self, stream: str, group: str, raw: bytes) -> Stored[R]:
        """Write the record if the key has none; raises `KeyExists` when another one exists."""
        key = record_key(stream, group)
        try:
            revision = await self.kv.create(key, raw)
        except UnknownOutcome:
            entry = await self.kv.get(key)
            if entry.value != raw:
                raise KeyExists(f"the key {key!r} exists", key=key, revision=entry.revision) from None
            revision = entry.revision
        return Stored(self.decode(raw), raw, revision)

    async def edit(self, stream: str, group: str, change: Callable[[R], NewMembership]) -> Stored[R]:
        """Replace the membership by the result of `change`; returns the record. Writes nothing if nothing changes."""
        waits = _WRITES.delays()
        while True:
            found = await self.get(stream, group)
            wanted = change(found.record)
            if wanted == NewMembership(found.record.members, found.record.mappings):
                return found
            raw = edit_membership(found.raw, members=wanted.members, mappings=wanted.mappings)
            record = self.decode(raw)
            try:
                revision = await self.kv.update(record_key(stream, group), raw, found.revision)
                return Stored(record, raw, revision)
            except (WrongLastSequence, UnknownOutcome) as error:
                # Without an answer the write may have happened: then the next round finds nothing to change.
                wait = next(waits, None)
                if wait is None:
                    raise WriteContended(
                        f"the record of {group!r} on {stream!r} could not be written: {error}; try again"
                    ) from error
            await self._clock.sleep(wait)

    async def delete(self, stream: str, group: str, *, revision: int | None = None) -> None:
        await self.kv.delete(record_key(stream, group), revision=revision)

    async def names(self, stream: str | None = None) -> list[tuple[str, str]]:
        """(stream, group) of every group, or of those on one stream, sorted."""
        try:
            keys = await self.kv.keys(f"{stream}.>" if stream else ">")
        except StreamNotFound:
            return []
        return [split_key(key) for key in keys]

    def watch(self, stream: str, group: str) -> AsyncGenerator[Change | SnapshotDone, None]:
        """Every later state of the record, also across outages; close the iterator to end it."""
        changes: Any = self.kv.watch(record_key(stream, group))
        found: AsyncGenerator[Change | SnapshotDone, None] = changes
        return found


def bucket_config(bucket: str, replicas: int) -> dict[str, Any]:
    """The bucket's stream configuration as the reference sends it."""
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": -1,
        "discard": "new",
        "max_age": 0,
        "max_msgs_per_subject": 1,
        "max_msg_size": -1,
        "storage": "file",
        "num_replicas": replicas,
        "duplicate_window": 120_000_000_000,
        "deny_delete": True,
        "allow_rollup_hdrs": True,
        "compression": "none",
        "allow_direct": True,
        "mirror_direct": False,
        "consumer_limits": {},
    }


def check_record(record: GroupMembership) -> None:
    """The rules that the reference checks on every read."""
    if isinstance(record, ElasticRecord):
        check_elastic_record(record)
    else:
        check_membership(record)


def static_store(api: JetStreamApi, clock: Clock | None = None) -> RecordStore[StaticRecord]:
    return RecordStore(api, GroupKind.STATIC, decode_static, clock=clock or SystemClock())


def elastic_store(
    api: JetStreamApi, clock: Clock | None = None, *, compact: bool = False
) -> RecordStore[ElasticRecord]:
    if compact:
        return RecordStore(api, GroupKind.COMPACT, decode_compact, clock=clock or SystemClock())
    return RecordStore(api, GroupKind.ELASTIC, decode_elastic, clock=clock or SystemClock())
