"""One message of a group as a handler sees it: without the partition token, and with its first place in the stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from parti.groups.errors import ForeignConsumer
from parti.model import Lease, Partition, PartitionId
from parti.wire.columns import Deliveries
from parti.wire.pull import items_of
from parti.worker.lanes import Lane
from parti.worker.message import Message

_SOURCE = b"\r\nNats-Stream-Source:"


Holding = tuple[str, str | None]
"""When the consumer was made from which a message came, and the pin under which it came."""


class SettleMessage(Protocol):
    """What a message needs of the member that holds it, to be settled."""

    def settled(self, message: GroupMessage) -> None: ...

    async def confirmed(self, message: GroupMessage) -> None: ...

    def working(self, message: GroupMessage) -> None: ...


class GroupMessage(Message):
    """A message of a partition that this member owns; a worker's message, so that the same handlers take both.

    `subject` is the publisher's. `sequence` is the message's place in the source stream, for static and elastic groups
    alike; `queue_sequence` its place in the stream that the member reads. `lease.epoch` is the moment the server
    pinned this instance, in nanoseconds: it grows with every change of owner, so that a sink can refuse an older one.
    """

    __slots__ = (
        "_settle",
        "acknowledged",
        "cancelled",
        "doubtful",
        "finished",
        "handed_back",
        "holding",
        "number",
        "parked",
        "queue_sequence",
        "queue_subject",
        "started",
        "stored_ns",
    )

    number: int
    """The partition."""
    queue_sequence: int
    queue_subject: str
    """The subject with the partition token, as it is in the stream that the member reads."""
    stored_ns: int
    acknowledged: bool
    started: bool
    doubtful: bool
    """The process stood still while the handler ran: somebody else may have the message by now."""

    holding: Holding
    """Under which consumer and pin it came, or came again."""
    parked: bool
    """It was not started, and must not be before somebody knows whose it is."""
    cancelled: bool
    handed_back: bool
    finished: bool
    """Handled, and its acknowledgement waits until it is known whose it is."""

    _settle: SettleMessage

    def ack(self) -> None:
        """Acknowledge now, before the handler returns; its outcome then counts no more. Nothing confirms it.

        A handler that runs in a thread may call it from there.
        """
        if not self.acknowledged:
            self.acknowledged = True
            self._settle.settled(self)

    async def double_ack(self) -> None:
        """After this returns the server has taken the acknowledgement. An error means: undo what was prepared.

        Raises `OwnershipLost` when somebody else may have the message, and `NoResponders` when the consumer is gone.
        """
        if not self.acknowledged:
            await self._settle.confirmed(self)
            self.acknowledged = True

    def in_progress(self) -> None:
        """Ask the server for another `ack_wait`. The member does this by itself while a handler runs."""
        self._settle.working(self)


KeyOf = Callable[[GroupMessage], str]
"""What orders messages in lanes: those with the same key are handled one after the other."""

GroupHandler = Callable[[GroupMessage], Awaitable[object] | object]
"""Takes a message; returns None, Ack(), Retry() or Reject()."""


class QueueShape(NamedTuple):
    """How the subjects that a member reads are made."""

    elastic: bool
    """Whether they come from a queue of the group's own, which names the sequence in the user's stream."""
    depth: int
    """How many leading tokens tell the partition, of which the last is its number."""


def messages_of(
    deliveries: Deliveries,
    shape: QueueShape,
    *,
    settle: SettleMessage,
    lane: Lane,
    member: str,
    received_at: float,
    holding: Holding,
) -> list[GroupMessage]:
    """The messages of a read, in order; each owns its bytes, since the receive buffer is used again."""
    elastic, depth = shape
    made: list[GroupMessage] = []
    for raw_subject, reply, head, data, delivered, sequence, stored_ns in items_of(deliveries):
        subject = raw_subject.decode()
        tokens = subject.split(".", depth)
        token, rest = tokens[-2] if len(tokens) > 1 else "", tokens[-1]
        if not token.isdecimal():
            raise ForeignConsumer(f"the subject {subject!r} carries no partition: the consumer is not of this group")
        message = GroupMessage()
        message.number, message.subject, message.queue_subject = int(token), rest, subject
        message.partition, message.key = _partition(token), rest
        message._head = head
        message.queue_sequence, message.stored_ns = sequence, stored_ns
        message.sequence = (original_sequence(head) if elastic else None) or sequence
        message.delivered, message.attempt, message.data = delivered, 0, data
        message.timestamp, message.received_at = stored_ns / 1e9, received_at
        message.worker_id, message.last_error = member, ""
        message.lease = Lease(PartitionId(token), 0)
        message._headers, message._held_since, message._lane = None, received_at, lane
        message._reply, message._settle = reply, settle
        message.acknowledged = message.started = message.doubtful = False
        message.holding, message.parked = holding, False
        message.cancelled = message.handed_back = message.finished = False
        made.append(message)
    return made


_partitions: dict[str, Partition] = {}


def _partition(token: str) -> Partition:
    found = _partitions.get(token)
    if found is None:
        if len(_partitions) > 10_000:
            _partitions.clear()
        found = _partitions[token] = Partition((token,))
    return found


def original_sequence(head: bytes) -> int | None:
    """The place in the source stream that the header `Nats-Stream-Source` tells; None where there is none."""
    start = head.find(_SOURCE)
    if start < 0:
        return None
    end = head.find(b"\r\n", start + len(_SOURCE))
    parts = head[start + len(_SOURCE) : end].split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
