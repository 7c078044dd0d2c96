"""What a leader hears, and what it asks for: the seam between its decisions (`reconcile`) and who performs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parti.control.handoff import Finished, Nudge, StageDone
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
    """How far a gone member got: its checkpoint, and the ack floor by partition (0 where it is unknown).

    Read from the leader of the bucket and of the stream, after the member was gone.
    """

    now: float
    member: Member
    checkpoint: Mapping[PartitionId, int]
    floor: Mapping[PartitionId, int]
    ahead: Mapping[PartitionId, Ahead] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gone:
    """A record that was removed or damaged; see `signals.ClaimLost`."""

    revision: int
    expected: int


@dataclass(frozen=True, slots=True)
class ClaimsLost:
    """Claims that were removed or damaged."""

    now: float
    lost: Mapping[PartitionId, Gone]


@dataclass(frozen=True, slots=True)
class AssignmentLost:
    """The assignment was removed or damaged: it is to be written by CAS on `expected`."""

    now: float
    expected: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The furthest that anybody noted of a partition."""

    epoch: int
    cursor: int
    by: Member
    ahead: Ahead | None = None
    """What is done above the cursor."""


def traces_of(
    checkpoints: Iterable[Checkpoint], partitions: Iterable[PartitionId] | None = None
) -> dict[PartitionId, Trace]:
    """The furthest that any of these positions say, of some partitions or all; what is done stays done."""
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
    """The one of these that goes further: both stay true, whoever goes on."""
    return max((each for each in (one, other) if each is not None), key=lambda ahead: ahead.upto, default=None)


@dataclass(frozen=True, slots=True)
class TracesRead:
    """What the positions of all workers say about partitions whose claims were lost; read when nobody holds them."""

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
    """CAS: create when `expected` is 0. Confirmed or refused, the agent feeds back what the bucket holds."""

    claim: Claim
    expected: int
    reason: str
    fresh: bool = False
    """Nobody ever owned it, as far as anybody knows: it begins where new partitions begin."""


@dataclass(frozen=True, slots=True)
class ReadPositions:
    member: Member
    partitions: tuple[PartitionId, ...]
    floors: bool
    """False on a work queue: what is left there is what is to be done, and no floor is needed."""


@dataclass(frozen=True, slots=True)
class ReadTraces:
    """Read the positions of all workers, and answer with `TracesRead`."""

    partitions: tuple[PartitionId, ...]


Effect = WriteAssignment | WriteClaim | ReadPositions | ReadTraces | Nudge | StageDone | Finished
