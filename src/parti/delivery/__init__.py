"""Delivery of tasks to HTTP endpoints, in order per document, without ever losing one.

Promises: a task is delivered or stored as a dead letter; tasks of a document arrive in order; no request goes to an
address that is not allowed.

Flow: `feed` -> `documents` -> `gate` -> `courier` -> `policy` -> acknowledgement, park or dead letter.
"""

from parti.config.deliver import DeliverSection
from parti.delivery.consumer import TaskConsumer
from parti.delivery.guard import AddressGuard
from parti.delivery.task import DeliveryTask, decode_task
from parti.delivery.transport import HttpTransport, Request, Response, Transport

__all__ = [
    "AddressGuard",
    "DeliverSection",
    "DeliveryTask",
    "HttpTransport",
    "Request",
    "Response",
    "TaskConsumer",
    "Transport",
    "decode_task",
]
