"""Events and effects of a worker's partition: the interface between pure decisions and the agent that performs them.

Both layouts share it. A ticket ties an answer to its request: an answer to an older request is outdated (a T that was
read before the last gap would lose what the gap lost), and the step ignores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parti.model import Claim, Lease, PartitionId


class DeliveryVerdict(StrEnum):
    """What to do with a message that a partition's own durable delivered."""

    PROCESS = "process"
    ACK = "ack"
    """Already done: only the ack is missing."""
    ACK_WHEN_DONE = "ack_when_done"
    """It arrives, or arrived, by another path: drop it, and ack once the cursor has reached it."""
    IGNORE = "ignore"
    """Neither process nor ack: it belongs to another owner, or will be read again."""


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    """A revision of the claim, from the watch, a read, or our own confirmed write."""

    claim: Claim
    revision: int


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """The record was deleted or damaged: write a claim by CAS on `expected` (0: create it)."""

    revision: int
    """Revision of the record there now, or the last known one of a record that vanished."""
    expected: int
    epoch: int = 0
    """Epoch of the mislaid claim there now."""


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Our CAS was refused or its outcome is unknown. The agent reads the claim next."""


@dataclass(frozen=True, slots=True)
class FilterAdded:
    """The consumer filters the partition; `last` is the stream's last sequence, read from its leader *afterwards*."""

    last: int
    ticket: int


@dataclass(frozen=True, slots=True)
class FilterDropped:
    pass


@dataclass(frozen=True, slots=True)
class LastRead:
    """The stream's last sequence, read from its leader after the gap."""

    last: int
    ticket: int


@dataclass(frozen=True, slots=True)
class ReadUpTo:
    """Everything up to `seq` is processed; the stream's leader confirmed that nothing is missing."""

    seq: int
    ticket: int


@dataclass(frozen=True, slots=True)
class MessageDone:
    """The lane finished this message: its effect was accepted, or it is stored in the dead-letter stream."""

    seq: int


@dataclass(frozen=True, slots=True)
class LaneStopped:
    """No further message of the partition starts; messages that had not started were dropped."""

    last_started: int
    """The last message that was started, finished or not; 0 when none was."""
    dropped_from: int | None
    """The first message that was dropped; None when the lane had started all its messages."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A delivery may be missing: consumer sequence not +1, reconnect, missed heartbeat, leadership change."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The worker's lease is over: its results no longer count."""


@dataclass(frozen=True, slots=True)
class ResetDone:
    """CONSUMER.RESET was answered; pull only now."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The double ack was answered, or given up: the claim carries the position either way."""

    ticket: int


@dataclass(frozen=True, slots=True)
class AddFilter:
    """Add the partition to the consumer (on a work queue, remove gone owners' filters of it first), then read T."""

    partition: PartitionId
    ticket: int


@dataclass(frozen=True, slots=True)
class DropFilter:
    partition: PartitionId


@dataclass(frozen=True, slots=True)
class ReadLast:
    """Ask the stream's leader for its last sequence."""

    partition: PartitionId
    ticket: int


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Continue after `after`: a range read brings everything up to `upto`. Replaces a catch-up in progress."""

    partition: PartitionId
    after: int
    upto: int
    ticket: int


@dataclass(frozen=True, slots=True)
class StopLane:
    """Start nothing more of the partition, and answer `LaneStopped`."""

    partition: PartitionId


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop queued and held messages without an ack: they are not ours."""

    partition: PartitionId


@dataclass(frozen=True, slots=True)
class WriteClaim:
    claim: Claim
    expected: int
    exact: bool = False
    """The agent may raise its cursor to the partition's position at the time of the write."""


@dataclass(frozen=True, slots=True)
class Granted:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Revoked:
    """No effect may start under this lease any more."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class ResetConsumer:
    """Close the inbox, open a new one, and reset the partition's durable to `seq`; retry until it is answered."""

    partition: PartitionId
    seq: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Stop pulling and ack the last message with a reply, so that everything acked before it is settled too."""

    partition: PartitionId
    ticket: int
