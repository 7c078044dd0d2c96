"""Encodes and decodes the records of a bucket, with typed results for records that cannot be used.

Reading never raises: a foreign, corrupt or newer record is returned as `Unreadable`, to be counted and reported, and
stops neither this worker nor the others. Small records are plain JSON, so that `nats kv get` shows them; a large
assignment is compressed, and split into parts when one message cannot hold it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

import msgspec

from parti.control.election import LeaderRecord
from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lives import Life
from parti.errors import UsageError
from parti.model import (
    SCHEMA_VERSION,
    Ahead,
    Assignment,
    Checkpoint,
    Claim,
    ClaimState,
    Member,
    PartitionId,
    Tried,
    WorkerId,
)

Count = Annotated[int, msgspec.Meta(ge=0)]
DEFAULT_LIMIT: Final = 900_000  # maximum bytes of a record; the server's default max_payload is 1 MiB, headers included
_LARGEST: Final = 64 * 1024 * 1024  # a compressed foreign record must not exhaust memory
_COMPRESS_ABOVE: Final = 8_192


class RecordFault(StrEnum):
    """Why a record cannot be used; the label of `parti_records_unreadable_total`."""

    FOREIGN = "foreign"
    """Not written by parti, or under the wrong key."""
    CORRUPT = "corrupt"
    FUTURE = "future"
    """Written by a newer parti: upgrade this worker."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that was skipped, with the reason as text."""

    fault: RecordFault
    detail: str


class _Header(msgspec.Struct):
    kind: str
    v: int


_Ahead = tuple[Count, tuple[Count, ...]]
"""(upto, left) of `model.Ahead`."""


class _Claim(msgspec.Struct, omit_defaults=True):
    partition: str
    state: ClaimState
    epoch: Count
    owner: tuple[str, str] | None = None
    pending_owner: tuple[str, str] | None = None
    previous: tuple[str, str] | None = None
    cursor: Count = 0
    target: Count | None = None
    accepted: bool = False
    term: Count = 0
    updated: float = 0.0
    lost: bool = False
    stream: str = ""
    """Identity of the stream that the cursor belongs to; empty in records of parti 0.1, which matches any."""
    ahead: _Ahead | None = None
    taken_from: tuple[str, str] | None = None


class _Lease(msgspec.Struct, omit_defaults=True):
    worker: str
    nonce: str
    status: LeaseStatus
    beat: Count
    instance: str = ""
    clean: bool = True
    seen: Count = 0
    capacity: Count = 0
    well: bool = True


class _Leader(msgspec.Struct, omit_defaults=True):
    term: Count
    beat: Count
    leader: tuple[str, str] | None = None


class _Checkpoint(msgspec.Struct, omit_defaults=True):
    worker: str
    nonce: str
    positions: dict[str, tuple[Count, Count]]
    stream: str = ""
    ahead: dict[str, _Ahead] = {}


class _Stream(msgspec.Struct, omit_defaults=True):
    name: str
    created: str
    template: str = ""
    layout: str = ""
    rewinds: Count = 0


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What a namespace works on. Another template or layout is not another stream, but all members must agree on it."""

    name: str
    created: str = ""
    template: str = ""
    layout: str = ""
    rewinds: int = 0
    """How often the stream went back to an older state while its creation time stayed the same."""

    @property
    def identity(self) -> str:
        return f"{self.name}@{self.created}" + (f"#{self.rewinds}" if self.rewinds else "")

    @property
    def shape(self) -> tuple[str, str]:
        return self.template, self.layout

    def __str__(self) -> str:
        return f"stream {self.name!r} with template {self.template!r} and layout {self.layout!r}"


class _Assignment(msgspec.Struct, omit_defaults=True):
    term: Count
    version: Count
    reason: str
    workers: list[str] = []
    owners: dict[str, Count] = {}
    """Partition -> index into `workers`."""
    weights: dict[str, Count] = {}
    parts: Count = 0
    digest: str = ""
    """Over all parts: a half-written assignment is recognised, never half-applied."""


def encode_stream(record: StreamRecord) -> bytes:
    return _encode("stream", _Stream(record.name, record.created, record.template, record.layout, record.rewinds))


def decode_stream(data: bytes) -> StreamRecord | Unreadable:
    read = _decode("stream", data, _Stream)
    if isinstance(read, Unreadable):
        return read
    return StreamRecord(read.name, read.created, read.template, read.layout, read.rewinds)


def encode_claim(claim: Claim, stream: str = "") -> bytes:
    """Bytes of one claim, about 250; `stream`: identity of the stream that its cursor belongs to."""
    return _encode(
        "claim",
        _Claim(
            claim.partition,
            claim.state,
            claim.epoch,
            _pair(claim.owner),
            _pair(claim.pending),
            _pair(claim.previous),
            claim.cursor,
            claim.target,
            claim.accepted,
            claim.term,
            claim.updated,
            claim.lost,
            stream,
            _written(claim.ahead) if claim.ahead is not None else None,
            _pair(claim.taken_from),
        ),
    )


def decode_claim(data: bytes, stream: str = "") -> Claim | Unreadable:
    """A claim that satisfies the invariants of its state, or the reason why not.

    A claim of another stream than `stream` is returned without owner and with nothing done; its epoch is kept.
    """
    read = _decode("claim", data, _Claim)
    if isinstance(read, Unreadable):
        return read
    if stream and read.stream and read.stream != stream:
        return Claim(PartitionId(read.partition), epoch=read.epoch, term=read.term, updated=read.updated)
    owned = read.owner is not None
    if owned == (read.state is ClaimState.UNASSIGNED):
        return Unreadable(RecordFault.CORRUPT, f"claim {read.partition!r}: state {read.state} with owner {read.owner}")
    if read.pending_owner is not None and read.state is not ClaimState.PREPARE:
        return Unreadable(RecordFault.CORRUPT, f"claim {read.partition!r}: pending owner in state {read.state}")
    return Claim(
        PartitionId(read.partition),
        read.state,
        read.epoch,
        _member(read.owner),
        _member(read.pending_owner),
        _member(read.previous),
        read.cursor,
        read.target,
        read.accepted,
        read.term,
        read.updated,
        _read(read.ahead) if read.ahead is not None else None,
        read.lost and not owned,
        _member(read.taken_from),
    )


def _written(ahead: Ahead) -> _Ahead:
    return ahead.upto, tuple(sorted(ahead.left))


def _read(written: _Ahead) -> Ahead:
    return Ahead(written[0], frozenset(written[1]))


def encode_lease(record: LeaseRecord) -> bytes:
    member = record.member
    body = _Lease(
        member.worker,
        member.nonce,
        record.status,
        record.beat,
        record.instance,
        record.clean,
        record.seen,
        record.capacity,
        record.well,
    )
    return _encode("lease", body)


def decode_lease(data: bytes) -> LeaseRecord | Unreadable:
    read = _decode("lease", data, _Lease)
    if isinstance(read, Unreadable):
        return read
    return LeaseRecord(
        Member(WorkerId(read.worker), read.nonce),
        read.status,
        read.beat,
        read.instance,
        read.clean,
        read.seen,
        read.capacity,
        read.well,
    )


def encode_leader(record: LeaderRecord) -> bytes:
    return _encode("leader", _Leader(record.term, record.beat, _pair(record.leader)))


def decode_leader(data: bytes) -> LeaderRecord | Unreadable:
    read = _decode("leader", data, _Leader)
    return read if isinstance(read, Unreadable) else LeaderRecord(read.term, _member(read.leader), read.beat)


def encode_checkpoint(checkpoint: Checkpoint, stream: str = "") -> bytes:
    member = checkpoint.member
    ahead = {str(p): _written(known) for p, known in checkpoint.ahead.items()}
    body = _Checkpoint(member.worker, member.nonce, dict(checkpoint.positions), stream, ahead)  # type: ignore[arg-type]
    return _encode("checkpoint", body)


def decode_checkpoint(data: bytes, stream: str = "") -> Checkpoint | Unreadable:
    """Positions of another stream than `stream` are ignored."""
    read = _decode("checkpoint", data, _Checkpoint)
    if isinstance(read, Unreadable):
        return read
    if stream and read.stream and read.stream != stream:
        return Checkpoint(Member(WorkerId(read.worker), read.nonce))
    positions = {PartitionId(p): position for p, position in read.positions.items()}
    ahead = {PartitionId(p): _read(known) for p, known in read.ahead.items()}
    return Checkpoint(Member(WorkerId(read.worker), read.nonce), MappingProxyType(positions), MappingProxyType(ahead))


def encode_assignment(assignment: Assignment, limit: int = DEFAULT_LIMIT) -> tuple[bytes, tuple[bytes, ...]]:
    """The head record and its parts, each at most `limit` bytes. Write the parts first, then the head by CAS.

    No parts when the head holds everything: about 5 bytes per partition compressed, so 50,000 fit in one record.
    """
    workers = sorted(set(assignment.owners.values()))
    index = {worker: i for i, worker in enumerate(workers)}
    body = _Assignment(
        assignment.term,
        assignment.version,
        assignment.reason,
        [str(w) for w in workers],
        {p: index[assignment.owners[p]] for p in sorted(assignment.owners)},
        {p: assignment.weights[p] for p in sorted(assignment.weights)},
    )
    whole = _encode("assignment", body)
    if len(whole) <= limit:
        return whole, ()
    cuts = [*range(0, len(whole), limit), len(whole)]
    parts = tuple(whole[a:b] for a, b in pairwise(cuts))
    digest = hashlib.blake2b(whole, digest_size=16).hexdigest()
    head = _Assignment(body.term, body.version, body.reason, parts=len(parts), digest=digest)
    encoded = _encode("assignment", head)
    if len(encoded) > limit:
        raise UsageError(f"a record limit of {limit} bytes cannot hold even the head of an assignment: raise it")
    return encoded, parts


def parts_of(head: bytes) -> int | Unreadable:
    """The number of parts the head refers to; 0 when it holds everything itself."""
    read = _decode("assignment", head, _Assignment)
    return read if isinstance(read, Unreadable) else read.parts


def decode_assignment(head: bytes, parts: Sequence[bytes] = ()) -> Assignment | Unreadable:
    """The assignment, or why it cannot be read; the digest detects parts of another version."""
    read = _decode("assignment", head, _Assignment)
    if isinstance(read, Unreadable):
        return read
    if read.parts:
        whole = b"".join(parts)
        if len(parts) != read.parts or hashlib.blake2b(whole, digest_size=16).hexdigest() != read.digest:
            return Unreadable(
                RecordFault.CORRUPT, f"assignment {read.version}: its {read.parts} parts are not all there"
            )
        read = _decode("assignment", whole, _Assignment)
        if isinstance(read, Unreadable):
            return read
    workers = [WorkerId(w) for w in read.workers]
    if any(i >= len(workers) for i in read.owners.values()):
        return Unreadable(RecordFault.CORRUPT, f"assignment {read.version}: it names a worker that it does not list")
    return Assignment(
        read.term,
        read.version,
        read.reason,
        MappingProxyType({PartitionId(p): workers[i] for p, i in read.owners.items()}),
        MappingProxyType({PartitionId(p): w for p, w in read.weights.items()}),
    )


_Body = TypeVar("_Body", bound=msgspec.Struct)


def _encode(kind: str, body: msgspec.Struct) -> bytes:
    data = msgspec.json.encode({"kind": f"parti.{kind}", "v": SCHEMA_VERSION, **msgspec.to_builtins(body)})
    return zlib.compress(data, 6) if len(data) > _COMPRESS_ABOVE else data


def _decode(kind: str, data: bytes, shape: type[_Body]) -> _Body | Unreadable:
    if data[:1] == b"\x78":  # the first byte of every zlib stream; JSON objects start with a brace
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(data, _LARGEST)
        except zlib.error as error:
            return Unreadable(RecordFault.CORRUPT, f"{kind}: {error}")
        if not unpacker.eof:
            return Unreadable(RecordFault.CORRUPT, f"{kind}: cut off, or larger than {_LARGEST} bytes")
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unreadable(RecordFault.FOREIGN, f"not a {kind} of parti: {error}")
    if header.kind != f"parti.{kind}":
        return Unreadable(RecordFault.FOREIGN, f"a {header.kind!r} stands where a {kind} belongs")
    if header.v > SCHEMA_VERSION:
        return Unreadable(RecordFault.FUTURE, f"{kind} of schema {header.v}; this parti reads up to {SCHEMA_VERSION}")
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unreadable(RecordFault.CORRUPT, f"{kind}: {error}")


def _pair(member: Member | None) -> tuple[str, str] | None:
    return None if member is None else (member.worker, member.nonce)


def _member(pair: tuple[str, str] | None) -> Member | None:
    return None if pair is None else Member(WorkerId(pair[0]), pair[1])


class _Life(msgspec.Struct, omit_defaults=True):
    nonce: str
    ended: bool = False
    counts: dict[str, tuple[Count, Count]] = {}
    trials: tuple[tuple[str, Count], ...] = ()
    suspects: dict[str, tuple[Count, ...]] = {}
    buried: dict[str, tuple[Count, ...]] = {}
    stream: str = ""
    tried: dict[str, tuple[tuple[Count, Count, bool, bool], ...]] = {}


class _Lives(msgspec.Struct):
    worker: str
    lives: list[_Life]


def encode_lives(worker: WorkerId, lives: Sequence[Life]) -> bytes:
    """The lives of one worker id, newest first."""
    stored = [
        _Life(
            life.member.nonce,
            life.ended,
            {str(p): held for p, held in life.counts.items()},
            life.trials,
            {str(p): known for p, known in life.suspects.items() if known},
            {str(p): known for p, known in life.buried.items() if known},
            life.stream,
            {str(p): known for p, known in life.tried.items() if known},
        )
        for life in lives
    ]
    return _encode("lives", _Lives(worker, stored))


def decode_lives(data: bytes) -> tuple[Life, ...] | Unreadable:
    read = _decode("lives", data, _Lives)
    if isinstance(read, Unreadable):
        return read
    return tuple(
        Life(
            Member(WorkerId(read.worker), life.nonce),
            life.ended,
            MappingProxyType({PartitionId(p): held for p, held in life.counts.items()}),
            tuple((PartitionId(p), sequence) for p, sequence in life.trials),
            MappingProxyType({PartitionId(p): known for p, known in life.suspects.items()}),
            MappingProxyType({PartitionId(p): known for p, known in life.buried.items()}),
            life.stream,
            MappingProxyType({PartitionId(p): tuple(Tried(*each) for each in t) for p, t in life.tried.items()}),
        )
        for life in read.lives
    )
