"""Delivery of tasks to HTTP endpoints, in order per document, without ever losing one.

Promises: a task is delivered, or rests as a dead letter; tasks of a document arrive in order; no request to an address
that is not allowed.

Flow: `feed` -> `lanes` -> `gate` -> `courier` -> `policy` -> acknowledgement, park or dead letter.
"""

from parti.config.deliver import DeliverSection
from parti.tasks.consumer import TaskConsumer
from parti.tasks.dead_letters import DeadLetters, Letter
from parti.tasks.guard import AddressGuard
from parti.tasks.task import DeliveryTask, decode_task
from parti.tasks.transport import HttpTransport, Request, Response, Transport

__all__ = [
    "AddressGuard",
    "DeadLetters",
    "DeliverSection",
    "DeliveryTask",
    "HttpTransport",
    "Letter",
    "Request",
    "Response",
    "TaskConsumer",
    "Transport",
    "decode_task",
]
