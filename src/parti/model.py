"""The value types shared by every part of parti: partitions, members, claims, leases, assignments.

All are frozen and comparable. None depends on NATS, asyncio or time.
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
"""A stable name such as `worker-7`; it outlives the process that holds it."""

PartitionId = NewType("PartitionId", str)
"""The keys of a partition joined by dots: unique, because a key is one token and holds no dot."""

SCHEMA_VERSION: Final = 1
"""Schema version in every record; a reader reports a higher version instead of guessing."""

# docs/evidence/jetstream.md#j8: a consumer with up to ten filters keeps its throughput
MAX_SUBJECTS_PER_PARTITION: Final = 10


class Layout(StrEnum):
    """Where the server stores a partition's position."""

    PER_WORKER = "per-worker"
    """One durable per worker; the position is in the claim, the checkpoint and the ack floor (protocol L)."""
    PER_PARTITION = "per-partition"
    """One durable per partition; the position is the durable's own, moves go by CONSUMER.RESET (protocol C)."""


class Retention(StrEnum):
    """The stream's retention policy; it decides how a partition may move to another owner."""

    LIMITS = "limits"
    INTEREST = "interest"
    WORKQUEUE = "workqueue"

    @property
    def overlap(self) -> bool:
        """Whether two consumers may filter the same subject; a work queue refuses overlapping filters (10100)."""
        return self is not Retention.WORKQUEUE


@total_ordering
@dataclass(frozen=True, slots=True)
class Partition:
    """A unit of work with one owner at a time: one or more keys, each a literal subject token.

    Keys are checked here, because a key with `*`, `>` or a blank would widen the owner's filter. Weight 0 means that
    the load is unknown; the partition then counts as 1.
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
        """The weight used for balancing."""
        return self.weight or 1

    def __lt__(self, other: Partition) -> bool:
        return self.keys < other.keys

    def __repr__(self) -> str:
        return f"<Partition {self.id} weight={self.weight}>"


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One process that holds a worker id; the nonce distinguishes it from the id's previous holder."""

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
    """State of a claim. Only the owner acts: in STABLE, in PREPARE until it stops, and in an accepted COMMIT."""

    UNASSIGNED = "unassigned"
    STABLE = "stable"
    PREPARE = "prepare"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Ahead:
    """All messages of a partition up to `upto` are done except `left`. Done is final, whichever owner did it."""

    upto: int
    left: frozenset[int] = frozenset()

    def covers(self, sequence: int) -> bool:
        return sequence <= self.upto and sequence not in self.left


class Tried(NamedTuple):
    """Attempts at a message that is not done."""

    sequence: int
    attempts: int
    timed_out: bool = False
    """The last attempt ran longer than `handler_timeout`."""
    ended: bool = False
    """An attempt was in flight when its process ended or lost its lease."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who may act on a partition, in which epoch, and from which position. Changed only by CAS on its revision.

    The partition is done up to the stream sequence `cursor`. `target` is T: messages above T reach the owner through
    its own consumer, messages up to T by catch-up. `cursor >= target` means that the catch-up is finished.
    """

    partition: PartitionId
    state: ClaimState = ClaimState.UNASSIGNED
    epoch: int = 0
    owner: Member | None = None
    pending: Member | None = None
    """The member that the partition is moving to; set in PREPARE only."""
    previous: Member | None = None
    """The last owner that had finished its catch-up. On a rollback it gets the partition back; on an interest stream
    its filter keeps the messages stored until the next owner has processed up to T."""
    cursor: int = 0
    target: int | None = None
    """None until the next owner knows its T."""
    accepted: bool = False
    """True once the owner of a COMMIT accepted it by its own CAS: it may act, and no other member may undo it."""
    term: int = 0
    """Term of the leader that wrote this decision."""
    updated: float = 0.0
    """Unix seconds, informational; never used in a decision."""
    ahead: Ahead | None = None
    """Messages done above the cursor, when one message waits (for a retry, for example) and other keys continued."""
    lost: bool = False
    """The record was removed or damaged, and this UNASSIGNED record replaces it. The member that holds the partition
    rewrites it; no other member gets the partition before every possible holder has answered."""
    taken_from: Member | None = None
    """The owner that was gone when the leader reassigned the partition; None when the owner itself handed it over."""

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
    """Only weights other than 1."""

    def of(self, worker: WorkerId) -> tuple[PartitionId, ...]:
        return tuple(sorted(p for p, owner in self.owners.items() if owner == worker))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A member's positions: one record per member, written every 100-200 ms, so that a crash repeats only that much."""

    member: Member
    positions: Mapping[PartitionId, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Partition -> (epoch, cursor). The epoch keeps a late write of an earlier ownership out of a takeover."""
    ahead: Mapping[PartitionId, Ahead] = field(default_factory=lambda: MappingProxyType({}))
    """Messages done above those cursors; written by a member that stopped."""

    def position(self, partition: PartitionId, epoch: int) -> int:
        """The cursor written in this epoch or an older one: done is final, whichever owner did it."""
        written, cursor = self.positions.get(partition, (0, 0))
        return cursor if 0 < written <= epoch else 0

    def ahead_of(self, partition: PartitionId, epoch: int) -> Ahead | None:
        """Messages done above that cursor."""
        return self.ahead.get(partition) if 0 < self.positions.get(partition, (0, 0))[0] <= epoch else None
