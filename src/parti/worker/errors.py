"""Errors of a worker, and their reasons; invalid input is refused before any call to the server."""

from __future__ import annotations

from typing import ClassVar

from parti.errors import Category, FatalError, TransientError, UsageError


class MaxSubjectsExceeded(FatalError):
    """The assignment has more subjects than one consumer may filter: assign fewer, or raise worker.max_subjects."""

    category: ClassVar[Category] = Category.POLICY


class WorkerIdMutation(FatalError):
    """The worker id changed: it names the durable, and with it the position. Create a new WorkerConsumer for it."""

    category: ClassVar[Category] = Category.POLICY


class ForeignDurable(FatalError):
    """A consumer with our name has another owner and is left alone: choose another worker.consumer_prefix or
    control.namespace, or delete it. The worker stays unhealthy and retries."""

    category: ClassVar[Category] = Category.POLICY

    def __init__(self, consumer: str, stream: str, why: str) -> None:
        super().__init__(
            f"consumer {consumer!r} of stream {stream!r} is not ours ({why}) and is left alone: set "
            "worker.consumer_prefix or control.namespace to something else, or delete it if it is not needed"
        )
        self.consumer = consumer


class WorkerClosed(UsageError):
    """The worker is closed: create a new one."""


class HandlerTimeout(FatalError):
    """The handler ran longer than worker.handler_timeout and was cancelled; its message is retried."""


class HandlerCancelled(FatalError):
    """The handler ended with CancelledError although nobody cancelled it; its message is retried."""


class LeaseOver(FatalError):
    """The lease ended while the message waited for its handler: the next owner handles it, nothing starts here."""


class StreamReplacedUnderWorker(TransientError):
    """The stream was deleted and recreated: the keeper of the positions must start over, then the worker continues."""


class WorkerFailed(FatalError):
    """The worker cannot work any more and has given its partitions to others: start a new process."""
