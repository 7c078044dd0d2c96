"""The worker plane: one durable consumer per worker; a handler gets ordered, fenced, acknowledged messages.

Promises: in order for each key, one at a time; nothing starts without the lease; a message is acknowledged only after
its effect, or its dead letter, is certain.

Flow: `session` pulls -> `inbox` -> `lanes` -> `attempts` -> handler -> ack or dead letter; `ledger` keeps positions.
"""

from parti.config.worker import WorkerConfig
from parti.model import Lease, Partition
from parti.outcomes import Ack, Outcome, Reject, Retry
from parti.worker.consumer import WorkerConsumer
from parti.worker.errors import (
    ForeignDurable,
    HandlerCancelled,
    HandlerTimeout,
    MaxSubjectsExceeded,
    WorkerClosed,
    WorkerFailed,
    WorkerIdMutation,
)
from parti.worker.handler import Handler
from parti.worker.health import WorkerHealth
from parti.worker.info import Fence, PartitionInfo, WorkerInfo
from parti.worker.message import Message, make_message
from parti.worker.stream import MessageStream, Received

__all__ = [
    "Ack",
    "Fence",
    "ForeignDurable",
    "Handler",
    "HandlerCancelled",
    "HandlerTimeout",
    "Lease",
    "MaxSubjectsExceeded",
    "Message",
    "MessageStream",
    "Outcome",
    "Partition",
    "PartitionInfo",
    "Received",
    "Reject",
    "Retry",
    "WorkerClosed",
    "WorkerConfig",
    "WorkerConsumer",
    "WorkerFailed",
    "WorkerHealth",
    "WorkerIdMutation",
    "WorkerInfo",
    "make_message",
]
