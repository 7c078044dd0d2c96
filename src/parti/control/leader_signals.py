"""Events and effects of a leader: the interface between its decisions (`reconcile`) and the code that performs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parti.control.handoff import Finished, Nudge, Slow, StageDone
from parti.control.membership import Change, Membership
from parti.model import Ahead, Assignment, Checkpoint, Claim, Member, Partition, PartitionId


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class MembersChanged:
    now: float
    membership: Membership
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionsChanged:
    now: float
    partitions: tuple[Partition, ...]
    refresh: bool = False


@dataclass(frozen=True, slots=True)
class ClaimsSeen:
    """Newer revisions of claims, batched: the watch delivers thousands at a time."""

    now: float
    claims: tuple[tuple[Claim, int], ...]


@dataclass(frozen=True, slots=True)
class AssignmentSeen:
    now: float
    assignment: Assignment
    revision: int


@dataclass(frozen=True, slots=True)
class PositionsRead:
    """The progress of a member that is gone, read from the bucket's leader afterwards; 0 where it is unknown."""

    now: float
    member: Member
    checkpoint: Mapping[PartitionId, int]
    ahead: Mapping[PartitionId, Ahead] = field(default_factory=dict)

    @classmethod
    def of(cls, now: float, member: Member, claims: Iterable[Claim], checkpoint: Checkpoint | None) -> PositionsRead:
        """From its stored positions. Only these count: its ack floor also passes messages that it gave up unread."""
        if checkpoint is None:
            return cls(now, member, {claim.partition: 0 for claim in claims})
        done = {claim.partition: checkpoint.position(claim.partition, claim.epoch) for claim in claims}
        ahead = {claim.partition: checkpoint.ahead_of(claim.partition, claim.epoch) for claim in claims}
        return cls(now, member, done, {partition: known for partition, known in ahead.items() if known is not None})


@dataclass(frozen=True, slots=True)
class Gone:
    """A record that was deleted or damaged; see `signals.ClaimLost`."""

    revision: int
    expected: int


@dataclass(frozen=True, slots=True)
class ClaimsLost:
    """Claims that were deleted or damaged."""

    now: float
    lost: Mapping[PartitionId, Gone]


@dataclass(frozen=True, slots=True)
class AssignmentLost:
    """The assignment was deleted or damaged: write it by CAS on `expected`."""

    now: float
    expected: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The highest recorded progress of a partition, from any worker."""

    epoch: int
    cursor: int
    by: Member
    ahead: Ahead | None = None
    """What is done above the cursor."""


def traces_of(
    checkpoints: Iterable[Checkpoint], partitions: Iterable[PartitionId] | None = None
) -> dict[PartitionId, Trace]:
    """The highest progress in these positions, for some partitions or all; what is done stays done."""
    found: dict[PartitionId, Trace] = {}
    wanted = None if partitions is None else set(partitions)
    for checkpoint in checkpoints:
        for partition, (epoch, cursor) in checkpoint.positions.items():
            if wanted is None or partition in wanted:
                best = found.get(partition, Trace(0, 0, checkpoint.member))
                latest = checkpoint.member if epoch >= best.epoch else best.by
                ahead = further(best.ahead, checkpoint.ahead.get(partition))
                found[partition] = Trace(max(epoch, best.epoch), max(cursor, best.cursor), latest, ahead)
    return found


def further(one: Ahead | None, other: Ahead | None) -> Ahead | None:
    """The one that reaches further: both stay true, whichever member continues."""
    return max((each for each in (one, other) if each is not None), key=lambda ahead: ahead.upto, default=None)


@dataclass(frozen=True, slots=True)
class TracesRead:
    """What all workers' positions say about partitions whose claims were lost; read when no member holds them."""

    now: float
    partitions: tuple[PartitionId, ...]
    traces: Mapping[PartitionId, Trace]


Event = (
    Tick
    | MembersChanged
    | PartitionsChanged
    | ClaimsSeen
    | ClaimsLost
    | AssignmentSeen
    | AssignmentLost
    | PositionsRead
    | TracesRead
)


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    assignment: Assignment
    expected: int


@dataclass(frozen=True, slots=True)
class WriteClaim:
    """CAS: create when `expected` is 0. Confirmed or refused, the agent feeds back the bucket's content."""

    claim: Claim
    expected: int
    reason: str
    fresh: bool = False
    """As far as is known it never had an owner: it starts where new partitions start."""


@dataclass(frozen=True, slots=True)
class ReadPositions:
    member: Member
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True)
class ReadTraces:
    """Read the positions of all workers, and answer with `TracesRead`."""

    partitions: tuple[PartitionId, ...]


Effect = WriteAssignment | WriteClaim | ReadPositions | ReadTraces | Nudge | Slow | StageDone | Finished
