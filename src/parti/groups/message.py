"""One message of a group for a handler: without the partition token, with its sequence in the source stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from parti.groups.errors import ForeignConsumer
from parti.model import Lease, Partition, PartitionId
from parti.wire.columns import Deliveries
from parti.wire.pull import items_of
from parti.worker.lanes import Lane
from parti.worker.message import Message

_SOURCE = b"\r\nNats-Stream-Source:"


Holding = tuple[str, str | None]
"""The creation time of the message's consumer, and the pin of its delivery."""


class SettleMessage(Protocol):
    """The calls that a message makes to its member in order to be settled."""

    def settled(self, message: GroupMessage) -> None: ...

    async def confirmed(self, message: GroupMessage) -> None: ...

    def working(self, message: GroupMessage) -> None: ...


class GroupMessage(Message):
    """A message of a partition that this member owns; it is a worker's message too, so the same handlers accept both.

    `subject` is the publisher's. `sequence` is the message's sequence in the source stream, in static and elastic
    groups; `queue_sequence` is its sequence in the stream that the member reads. `lease.epoch` is when the server
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
    """The subject with the partition token, as in the stream that the member reads."""
    stored_ns: int
    acknowledged: bool
    started: bool
    doubtful: bool
    """The process was frozen while the handler ran: another instance may have the message by now."""

    holding: Holding
    """The consumer and pin of its last delivery."""
    parked: bool
    """Not started, and must not start before its owner is known."""
    cancelled: bool
    handed_back: bool
    finished: bool
    """Handled; the acknowledgement waits until the message's owner is known."""

    _settle: SettleMessage

    def ack(self) -> None:
        """Acknowledge now, before the handler returns; its outcome is then ignored. The server does not confirm it.

        A handler that runs in a thread may call it from there.
        """
        if not self.acknowledged:
            self.acknowledged = True
            self._settle.settled(self)

    async def double_ack(self) -> None:
        """After this returns the server has confirmed the acknowledgement. An error means: undo what was prepared.

        Raises `OwnershipLost` when another instance may have the message, `NoResponders` when the consumer is gone.
        """
        if not self.acknowledged:
            await self._settle.confirmed(self)
            self.acknowledged = True

    def in_progress(self) -> None:
        """Request another `ack_wait` from the server. The member does this itself while a handler runs."""
        self._settle.working(self)


KeyOf = Callable[[GroupMessage], str]
"""The key for ordering in lanes: messages with the same key are handled one after the other."""

GroupHandler = Callable[[GroupMessage], Awaitable[object] | object]
"""Takes a message; returns None, Ack(), Retry() or Reject()."""


def messages_of(
    deliveries: Deliveries,
    *,
    elastic: bool,
    depth: int,
    settle: SettleMessage,
    lane: Lane,
    member: str,
    received_at: float,
    holding: Holding,
) -> list[GroupMessage]:
    """The messages of a read, in order; each owns its bytes, because the receive buffer is reused.

    `depth` is the number of leading tokens that encode the partition; the last one is its number.
    """
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
    """The sequence in the source stream from the header `Nats-Stream-Source`, or None."""
    start = head.find(_SOURCE)
    if start < 0:
        return None
    end = head.find(b"\r\n", start + len(_SOURCE))
    parts = head[start + len(_SOURCE) : end].split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
