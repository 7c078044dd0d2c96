"""The records of one namespace in its bucket: typed reads, compare-and-set writes, and a watch over what matters.

One bucket `parti-<namespace>` holds everything, so that no revision is used twice and one watch delivers all changes in
order. Every worker watches the keys under `live.`; positions change many times per second and are not among them.

    live.stream   live.lease.<worker>   live.leader   live.assignment   live.claim.<partition>
    positions.<worker>   part.<n>
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

from parti.control import records
from parti.control.election import LeaderRecord
from parti.control.identity import LeaseRecord
from parti.control.records import StreamRecord, Unreadable
from parti.errors import ConfigError, PartiError
from parti.model import Assignment, Checkpoint, Claim, Member, PartitionId, WorkerId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import NO_METRICS, Metrics
from parti.wire.api import JetStreamApi
from parti.wire.errors import WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyExists, KeyNotFound, Operation, SnapshotDone
from parti.wire.watch import WatchSettings

_NAMESPACE = re.compile(r"[-_a-zA-Z0-9]{1,64}")
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_LEASE, _LEADER, _ASSIGNMENT, _CLAIM = "live.lease.", "live.leader", "live.assignment", "live.claim."
_STREAM = "live.stream"
_ESCAPED: Final = re.compile(rb"=([0-9A-F]{2})")
_HEADERS: Final = 1_024  # bytes of a message besides its value: subject and expectation headers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeaseChange:
    worker: WorkerId
    record: LeaseRecord | None
    revision: int
    expired: bool


@dataclass(frozen=True, slots=True)
class LeaderChange:
    record: LeaderRecord | None
    revision: int


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    assignment: Assignment
    revision: int


@dataclass(frozen=True, slots=True)
class ClaimChange:
    claim: Claim
    revision: int


@dataclass(frozen=True, slots=True)
class Complete:
    """All records that existed at the start have been delivered."""


@dataclass(frozen=True, slots=True)
class ClaimGone:
    """A claim was removed or damaged; it is written again by CAS on `expected`."""

    partition: PartitionId
    revision: int
    expected: int


@dataclass(frozen=True, slots=True)
class AssignmentGone:
    """The assignment was removed or damaged."""

    revision: int
    expected: int


@dataclass(frozen=True, slots=True)
class StreamChange:
    """The stream that the namespace works on; None when the record was removed or damaged."""

    record: StreamRecord | None
    revision: int


@dataclass(frozen=True, slots=True)
class BucketAnew:
    """The bucket was deleted and recreated, or restored: revisions restart, and all known state is invalid."""


Told = (
    BucketAnew
    | StreamChange
    | LeaseChange
    | LeaderChange
    | AssignmentChange
    | AssignmentGone
    | ClaimChange
    | ClaimGone
    | Complete
)


def bucket_of(namespace: str) -> str:
    """The bucket of a namespace; ConfigError when the name is not valid in a bucket name."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(f"control.namespace {namespace!r}: use 1 to 64 letters, digits, '-' and '_'")
    return f"parti-{namespace}"


def key_of(partition: PartitionId) -> str:
    """The claim's key. Bytes of a partition key that a bucket key must not contain are written as =XX."""
    return _CLAIM + "".join(c if c in _PLAIN else "".join(f"={b:02X}" for b in c.encode()) for c in partition)


def partition_at(key: str) -> PartitionId:
    """The inverse of `key_of`."""
    raw = _ESCAPED.sub(lambda found: bytes.fromhex(found.group(1).decode()), key.removeprefix(_CLAIM).encode())
    return PartitionId(raw.decode(errors="replace"))


class Store:
    """Everything that the control plane reads and writes. Writes return the new revision, or None when uncertain.

    None means refused by compare-and-set or unknown (no answer): read the record and decide again, never guess.
    """

    def __init__(self, kv: KeyValue, *, metrics: Metrics = NO_METRICS) -> None:
        self.kv = kv
        self.stream = ""
        """Identity of the current stream: a position written under another identity counts as nothing done yet."""
        self.stream_created = ""
        self._metrics = metrics
        self._written: dict[str, int] = {}
        """Own writes that the watch has not yielded yet, with their revisions."""
        self._log = get_logger("control", bucket=kv.bucket)
        self._limit = kv.api.connection.max_payload - _HEADERS

    def __repr__(self) -> str:
        return f"<Store {self.kv.bucket}>"

    @classmethod
    async def open(
        cls,
        js: JetStreamApi,
        namespace: str,
        *,
        replicas: int = 1,
        storage: str = "file",
        metrics: Metrics = NO_METRICS,
    ) -> Store:
        """The namespace's bucket, created if it does not exist."""
        kv = await KeyValue.ensure(
            js,
            bucket_of(namespace),
            replicas=replicas,
            storage=storage,
            description=f"parti: leases, leader, assignment, claims and positions of {namespace}",
        )
        return cls(kv, metrics=metrics)

    @property
    def namespace(self) -> str:
        return self.kv.bucket.removeprefix("parti-")

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def stream_record(self) -> tuple[StreamRecord | None, int]:
        return await self._get(_STREAM, records.decode_stream)

    async def write_stream_record(self, record: StreamRecord, expected: int) -> int | None:
        return await self._cas(_STREAM, records.encode_stream(record), expected)

    # -- leases -------------------------------------------------------------------------------------------------------

    async def leases(self) -> dict[WorkerId, tuple[LeaseRecord | None, int]]:
        """All leases as the bucket's leader has them: a lagging replica would return outdated leases.

        The value is None for a lease that cannot be read.
        """
        workers = [WorkerId(key.removeprefix(_LEASE)) for key in await self.kv.keys(f"{_LEASE}>")]
        read = await asyncio.gather(*(self.lease(worker) for worker in workers))
        return dict(zip(workers, read, strict=True))

    async def lease(self, worker: WorkerId) -> tuple[LeaseRecord | None, int]:
        """(None, revision) when it was removed or damaged; revision 0 when the key never existed."""
        found, revision = await self._look(_LEASE + worker, records.decode_lease)
        if isinstance(found, Unreadable) and found.fault is records.RecordFault.FUTURE:
            return LeaseRecord(Member(worker, "of a newer parti")), revision  # held by a newer parti, unreadable here
        return (None if isinstance(found, Unreadable) else found), revision

    async def write_lease(self, record: LeaseRecord, expected: int) -> int | None:
        return await self._cas(_LEASE + record.member.worker, records.encode_lease(record), expected)

    # -- leader -------------------------------------------------------------------------------------------------------

    async def leader(self) -> tuple[LeaderRecord | None, int]:
        return await self._get(_LEADER, records.decode_leader)

    async def write_leader(self, record: LeaderRecord, expected: int) -> int | None:
        return await self._cas(_LEADER, records.encode_leader(record), expected)

    # -- assignment ---------------------------------------------------------------------------------------------------

    async def assignment(self) -> tuple[Assignment | None, int]:
        """The stored assignment; (None, revision) also for one that cannot be read: the leader writes a new one."""
        try:
            entry = await self.kv.get(_ASSIGNMENT)
        except KeyNotFound as gone:
            return None, gone.revision
        return await self._assembled(entry.value), entry.revision

    async def _assembled(self, head: bytes) -> Assignment | None:
        count = records.parts_of(head)
        if isinstance(count, Unreadable):
            self._report(_ASSIGNMENT, count)
            return None
        parts: list[bytes] = []
        for number in range(count):
            try:
                parts.append((await self.kv.get(f"part.{number}")).value)
            except KeyNotFound:
                break
        return self._read(_ASSIGNMENT, head, lambda data: records.decode_assignment(data, parts))

    async def write_assignment(self, assignment: Assignment, expected: int) -> int | None:
        """Writes the parts, then the head by CAS: a half-written assignment does not match its head's digest."""
        head, parts = records.encode_assignment(assignment, self._limit)
        try:
            for number, part in enumerate(parts):
                await self.kv.put(f"part.{number}", part)
        except PartiError as error:
            self._log.warning("assignment.part_failed", error=str(error))
            return None
        return await self._cas(_ASSIGNMENT, head, expected)

    # -- claims -------------------------------------------------------------------------------------------------------

    async def claims(self) -> dict[PartitionId, tuple[Claim, int]]:
        return (await self.claims_and_gone())[0]

    async def claims_and_gone(self) -> tuple[dict[PartitionId, tuple[Claim, int]], dict[PartitionId, ClaimGone]]:
        """All claims, and the keys that hold only a delete marker or unreadable data."""
        found: dict[PartitionId, tuple[Claim, int]] = {}
        gone: dict[PartitionId, ClaimGone] = {}
        for change in await self.kv.states(f"{_CLAIM}>"):
            found_change = self._claim_told(change)
            if isinstance(found_change, ClaimChange):
                found[found_change.claim.partition] = (found_change.claim, found_change.revision)
            elif found_change is not None:
                gone[found_change.partition] = found_change
        return found, gone

    async def claim(self, partition: PartitionId) -> tuple[Claim | ClaimGone | None, int]:
        """The claim; None for one that must not be changed (written by a newer parti)."""
        found, revision = await self._look(key_of(partition), self._decode_claim)
        if isinstance(found, Unreadable) and found.fault is records.RecordFault.FUTURE:
            return None, revision
        if isinstance(found, Claim) and found.partition == partition:
            return found, revision
        return ClaimGone(partition, revision, revision), revision

    async def write_claim(self, claim: Claim, expected: int) -> int | None:
        return await self._cas(key_of(claim.partition), records.encode_claim(claim, self.stream), expected, count=True)

    def _decode_claim(self, data: bytes) -> Claim | Unreadable:
        return records.decode_claim(data, self.stream)

    # -- positions ----------------------------------------------------------------------------------------------------

    async def checkpoint(self, worker: WorkerId) -> tuple[Checkpoint | None, int]:
        return await self._get(f"positions.{worker}", lambda data: records.decode_checkpoint(data, self.stream))

    async def checkpoints(self) -> list[Checkpoint]:
        """The positions of all workers, as the bucket's leader has them, without records that cannot be read."""
        workers = [WorkerId(key.removeprefix("positions.")) for key in await self.kv.keys("positions.>")]
        read = await asyncio.gather(*(self.checkpoint(worker) for worker in workers))
        return [found for found, _ in read if found is not None]

    async def write_checkpoint(self, checkpoint: Checkpoint, expected: int) -> int | None:
        data = records.encode_checkpoint(checkpoint, self.stream)
        return await self._cas(f"positions.{checkpoint.member.worker}", data, expected)

    # -- the watch ----------------------------------------------------------------------------------------------------

    async def changes(self) -> AsyncGenerator[Told, None]:
        """Yields current records, `Complete`, then changes; an unreadable record is reported and yielded as gone."""
        anew: list[BucketAnew] = []

        def recreated() -> None:
            self._written.clear()
            anew.append(BucketAnew())

        settings = WatchSettings(written=lambda: self._written, recreated=recreated)
        async with aclosing(self.kv.watch("live.>", settings)) as changes:
            async for change in changes:
                if isinstance(change, Change) and self._written.get(change.key, change.revision + 1) <= change.revision:
                    del self._written[change.key]
                while anew:
                    yield anew.pop()
                if isinstance(change, SnapshotDone):
                    yield Complete()
                    continue
                found_change = await self._decoded(change)
                if found_change is not None:
                    yield found_change

    async def _decoded(self, change: Change) -> Told | None:
        key, value = change.key, change.value
        if key.startswith(_LEASE):
            worker = WorkerId(key.removeprefix(_LEASE))
            if value is None:
                return LeaseChange(worker, None, change.revision, change.operation is Operation.EXPIRED)
            record = self._read(key, value, records.decode_lease)
            matches = record is not None and record.member.worker == worker
            return LeaseChange(worker, record if matches else None, change.revision, expired=False)
        if key == _STREAM:
            found = self._read(key, value, records.decode_stream) if value is not None else None
            return StreamChange(found, change.revision)
        if key == _LEADER:
            leader = self._read(key, value, records.decode_leader) if value is not None else None
            return LeaderChange(leader, change.expected)
        if key == _ASSIGNMENT:
            assignment = await self._assembled(value) if value is not None else None
            if assignment is None:
                return AssignmentGone(change.revision, change.expected)
            return AssignmentChange(assignment, change.revision)
        return self._claim_told(change) if key.startswith(_CLAIM) else None

    def _claim_told(self, change: Change) -> ClaimChange | ClaimGone | None:
        partition = partition_at(change.key)
        if change.value is not None:
            read = self._decode_claim(change.value)
            if isinstance(read, Claim) and read.partition == partition:
                return ClaimChange(read, change.revision)
            if isinstance(read, Claim):
                read = Unreadable(records.RecordFault.FOREIGN, f"the claim of {read.partition!r} lies here")
            self._report(change.key, read)
            if read.fault is records.RecordFault.FUTURE:
                return None  # written by a newer parti: do not overwrite it
        return ClaimGone(partition, change.revision, change.expected)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _get(self, key: str, decode: Callable[[bytes], T | Unreadable]) -> tuple[T | None, int]:
        found, revision = await self._look(key, decode)
        return (None if isinstance(found, Unreadable) else found), revision

    async def _look(self, key: str, decode: Callable[[bytes], T | Unreadable]) -> tuple[T | Unreadable | None, int]:
        """The record and its revision; without a record None and the revision of the delete marker, or 0."""
        try:
            entry = await self.kv.get(key)
        except KeyNotFound as gone:
            return None, gone.revision
        read = decode(entry.value)
        if isinstance(read, Unreadable):
            self._report(key, read)
        return read, entry.revision

    async def _cas(self, key: str, value: bytes, expected: int, *, count: bool = False) -> int | None:
        result, revision = "success", None
        try:
            if expected:
                revision = await self.kv.update(key, value, expected)
            else:
                revision = await self.kv.create(key, value)
        except (WrongLastSequence, KeyExists):
            result = "conflict"
        except PartiError as error:
            result = "unknown"
            self._log.info("store.write_failed", key=key, error=str(error))
        if revision is not None and key.startswith((_CLAIM, _ASSIGNMENT)):
            self._written[key] = revision
        if count:
            self._metrics.count(m.CLAIM_WRITES, result=result)
            if result == "conflict":
                self._metrics.count(m.CAS_CONFLICTS)
        return revision

    def _read(self, key: str, value: bytes, decode: Callable[[bytes], T | Unreadable]) -> T | None:
        read = decode(value)
        if isinstance(read, Unreadable):
            self._report(key, read)
            return None
        return read

    def _report(self, key: str, unreadable: Unreadable) -> None:
        self._metrics.count(m.UNREADABLE, fault=unreadable.fault.value)
        self._log.warning("record.unreadable", key=key, fault=unreadable.fault.value, detail=unreadable.detail)
