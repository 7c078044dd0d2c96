"""What a worker refuses, and why; all of these are raised before any call to the server."""

from __future__ import annotations

from typing import ClassVar

from parti.errors import Category, FatalError, TransientError, UsageError


class MaxSubjectsExceeded(FatalError):
    """The assignment has more subjects than one consumer may filter: assign fewer, or raise worker.max_subjects."""

    category: ClassVar[Category] = Category.POLICY


class WorkerIdMutation(FatalError):
    """The worker id changed: it names the durable, and with it the position. Make a new WorkerConsumer for it."""

    category: ClassVar[Category] = Category.POLICY


class WorkerClosed(UsageError):
    """The worker is closed: make a new one."""


class HandlerTimeout(FatalError):
    """The handler ran longer than worker.handler_timeout and was cancelled; its message is retried."""


class HandlerCancelled(FatalError):
    """The handler ended with CancelledError although nobody cancelled it; its message is retried."""


class StreamReplacedUnderWorker(TransientError):
    """The stream was deleted and made anew: who keeps the positions has to begin anew, and then it goes on."""


class WorkerFailed(FatalError):
    """The worker can do no work any more, and has given its partitions to others: start a new process."""
