"""One message as a handler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from parti.model import Lease, Partition
from parti.wire.stored import parse_headers

if TYPE_CHECKING:
    from parti.worker.lanes import Lane


class Message:
    """A message of a partition this worker owns. Treat its fields as read-only; headers are decoded on first use.

    `lease` is the lease under which the handler runs, as of its start: pass its epoch on with every effect, so that a
    sink can refuse the effect of an owner that was fenced in between.
    """

    __slots__ = (
        "_head",
        "_headers",
        "_held_since",
        "_lane",
        "_reply",
        "attempt",
        "data",
        "delivered",
        "key",
        "last_error",
        "lease",
        "partition",
        "received_at",
        "sequence",
        "subject",
        "timestamp",
        "worker_id",
    )

    subject: str
    partition: Partition
    key: str
    """The ordering key: the tokens that the template's wildcards matched, or the partition's id."""
    sequence: int
    """Its stream sequence."""
    delivered: int
    """How often the server delivered it; 0 when it came by a range read."""
    attempt: int
    """How often a handler was started for it, this time and the attempts of earlier owners included."""
    data: bytes
    lease: Lease
    received_at: float
    """Unix seconds when this worker received it."""
    timestamp: float
    """Unix seconds when the stream stored it."""
    worker_id: str
    last_error: str
    """Why the previous attempt failed; empty at the first."""

    _head: bytes
    _headers: Mapping[str, str] | None
    _held_since: float
    _lane: Lane
    _reply: bytes
    """Where its ack is sent; empty when it came by a range read."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The publisher's headers."""
        if self._headers is None:
            self._headers = parse_headers(self._head) if self._head else {}
        return self._headers

    def __repr__(self) -> str:
        return (
            f"<Message {self.subject} seq={self.sequence} attempt={self.attempt} bytes={len(self.data)} "
            f"epoch={self.lease.epoch}>"
        )


def make_message(
    subject: str,
    partition: Partition,
    key: str,
    sequence: int,
    data: bytes,
    *,
    lease: Lease,
    worker_id: str = "",
    delivered: int = 1,
    headers: Mapping[str, str] | None = None,
    timestamp: float = 0.0,
    received_at: float = 0.0,
) -> Message:
    """A message that no server delivered: for tests of a user's own handlers, and for the Spark pipeline."""
    message = Message()
    message.subject, message.partition, message.key = subject, partition, key
    message.sequence, message.delivered, message.data = sequence, delivered, data
    message.lease, message.worker_id = lease, worker_id
    message.timestamp, message.received_at = timestamp, received_at
    message.attempt, message.last_error = 1, ""
    message._head, message._headers, message._reply, message._held_since = b"", headers or {}, b"", received_at
    return message
