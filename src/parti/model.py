"""The values every part of parti speaks in: partitions, members, claims, leases, assignments.

All of them are frozen and comparable; none of them knows about NATS, asyncio or time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import total_ordering
from types import MappingProxyType
from typing import Final, NamedTuple, NewType

from parti.errors import ConfigError
from parti.subjects import validate_token

WorkerId = NewType("WorkerId", str)
"""A stable name such as `worker-7`; outlives the process that carries it."""

PartitionId = NewType("PartitionId", str)
"""The keys of a partition joined by dots: unique, because a key is one token and holds no dot."""

SCHEMA_VERSION: Final = 1
"""Written into every record; a reader reports a higher one instead of guessing."""

# docs/evidence/jetstream.md#j8: up to ten filters a consumer stays clear of the cliff
MAX_SUBJECTS_PER_PARTITION: Final = 10


class Layout(StrEnum):
    """Where a partition's position lives on the server."""

    PER_WORKER = "per-worker"
    """One durable per worker; the position is in the claim, the checkpoint and the ack floor (protocol L)."""
    PER_PARTITION = "per-partition"
    """One durable per partition; the position is the durable's own, moves go by CONSUMER.RESET (protocol C)."""


class Retention(StrEnum):
    """The stream's retention, which decides how a partition may change hands."""

    LIMITS = "limits"
    INTEREST = "interest"
    WORKQUEUE = "workqueue"

    @property
    def overlap(self) -> bool:
        """Whether two consumers may filter the same subject; a work queue refuses it (10100)."""
        return self is not Retention.WORKQUEUE


@total_ordering
@dataclass(frozen=True, slots=True)
class Partition:
    """A unit of work with one owner at a time: one or more keys, each a literal subject token.

    Keys are checked here, because a key with `*`, `>` or a blank would widen the owner's filter. A weight of 0 means
    that nothing is known about the load; the partition then counts as 1.
    """

    keys: tuple[str, ...]
    weight: int = 1

    def __post_init__(self) -> None:
        if not self.keys:
            raise ConfigError("a partition without keys has no subject: give at least one key")
        for key in self.keys:
            validate_token(key, what="partition key")
        if self.weight < 0:
            raise ConfigError(f"partition {self.id}: weight {self.weight} is negative; use 0 when it is not known")

    @property
    def id(self) -> PartitionId:
        return PartitionId(".".join(self.keys))

    @property
    def load(self) -> int:
        """The weight that balancing counts with."""
        return self.weight or 1

    def __lt__(self, other: Partition) -> bool:
        return self.keys < other.keys

    def __repr__(self) -> str:
        return f"<Partition {self.id} weight={self.weight}>"


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One process holding a worker id: the nonce tells it from the process that held the id before."""

    worker: WorkerId
    nonce: str

    def __str__(self) -> str:
        return f"{self.worker}#{self.nonce}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to act on a partition within one epoch. Every effect takes one: unfenced work does not type-check."""

    partition: PartitionId
    epoch: int


class ClaimState(StrEnum):
    """Where a claim stands. Only the owner acts: in STABLE, in PREPARE until it stops, and in an accepted COMMIT."""

    UNASSIGNED = "unassigned"
    STABLE = "stable"
    PREPARE = "prepare"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Ahead:
    """Of a partition's messages up to `upto` all are done but `left`. What is done stays done, whoever did it."""

    upto: int
    left: frozenset[int] = frozenset()

    def covers(self, sequence: int) -> bool:
        return sequence <= self.upto and sequence not in self.left


class Tried(NamedTuple):
    """Attempts at a message that is not done."""

    sequence: int
    attempts: int
    timed_out: bool = False
    """The last of them ran longer than `handler_timeout`."""
    ended: bool = False
    """One of them was under way when its process ended or lost its lease."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who may act on a partition, in which epoch, and from which position. Changed only by CAS on its revision.

    `cursor` is the stream sequence up to which the partition is known to be done. `target` is T: everything above it
    reaches the owner through its own consumer, everything up to it comes by catch-up. `cursor >= target` says that
    the catch-up is finished, which is the only case in which an ack floor may be trusted (docs/evidence/handoff.md#h3).
    """

    partition: PartitionId
    state: ClaimState = ClaimState.UNASSIGNED
    epoch: int = 0
    owner: Member | None = None
    pending: Member | None = None
    """The member the partition is moving to; set in PREPARE only."""
    previous: Member | None = None
    """The last owner that had finished its catch-up: it gets the partition back on a rollback, and on an interest
    stream its filter keeps the messages alive until the next owner has processed up to T."""
    cursor: int = 0
    target: int | None = None
    """None until the member that is taking over knows its T."""
    accepted: bool = False
    """True once the owner of a COMMIT took it by its own CAS: from then on it may act, and nobody may undo it."""
    term: int = 0
    """Term of the leader that decided this."""
    updated: float = 0.0
    """Unix seconds, for people; never used in a decision."""
    ahead: Ahead | None = None
    """What is done above the cursor, where one message waits (for a retry, say) while those of other keys went on."""
    lost: bool = False
    """The record was removed or damaged, and this UNASSIGNED one stands in its place: whoever holds the partition
    writes it anew, and nobody else gets it before all who might hold it have spoken."""
    taken_from: Member | None = None
    """The owner that was gone when the leader gave the partition on; None when it moved by its owner's own word."""

    @property
    def caught_up(self) -> bool:
        return self.target is not None and self.cursor >= self.target

    @property
    def moving(self) -> bool:
        return self.state in (ClaimState.PREPARE, ClaimState.COMMIT)

    def lease(self) -> Lease:
        return Lease(self.partition, self.epoch)

    def __str__(self) -> str:
        arrow = f"{self.owner}->{self.pending}" if self.pending else str(self.owner)
        flag = "+" if self.accepted else "?" if self.lost else ""
        return f"{self.partition} {self.state}{flag} {arrow} epoch={self.epoch} cursor={self.cursor} T={self.target}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which worker should own which partition: one record per namespace, written by CAS with term and version."""

    term: int = 0
    version: int = 0
    reason: str = ""
    """Why it was written: cold_start, planned_scale, emergency, leave, restart, refresh or adopt."""
    owners: Mapping[PartitionId, WorkerId] = field(default_factory=lambda: MappingProxyType({}))
    weights: Mapping[PartitionId, int] = field(default_factory=lambda: MappingProxyType({}))
    """Only the weights other than 1."""

    def newer_than(self, other: Assignment) -> bool:
        """Judged by term first: after a bucket was recreated the version may start again.

        See docs/evidence/go-library.md#w7.
        """
        return (self.term, self.version) > (other.term, other.version)

    def of(self, worker: WorkerId) -> tuple[PartitionId, ...]:
        return tuple(sorted(p for p, owner in self.owners.items() if owner == worker))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a member got: one record per member, written every 100-200 ms, so that a crash repeats only that much."""

    member: Member
    positions: Mapping[PartitionId, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Partition -> (epoch, cursor). The epoch keeps a late write of an older ownership out of a takeover."""
    ahead: Mapping[PartitionId, Ahead] = field(default_factory=lambda: MappingProxyType({}))
    """What is done above those cursors; said by a member that stopped."""

    def position(self, partition: PartitionId, epoch: int) -> int:
        """The cursor of this epoch or an older one; what is done stays done, whoever did it."""
        written, cursor = self.positions.get(partition, (0, 0))
        return cursor if 0 < written <= epoch else 0

    def ahead_of(self, partition: PartitionId, epoch: int) -> Ahead | None:
        """What is done above that cursor."""
        return self.ahead.get(partition) if 0 < self.positions.get(partition, (0, 0))[0] <= epoch else None
