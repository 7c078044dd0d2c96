"""Why a task is refused: each class names the reason under which the task is stored as a dead letter."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from parti.errors import FatalError, TransientError


class Reason(StrEnum):
    """Why a task is a dead letter: a token of the letter's subject and the label of a metric."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    BAD_URL = "bad_url"
    BAD_HEADER = "bad_header"
    SSRF_BLOCKED = "ssrf_blocked"
    NO_SECRET = "no_secret"
    MISROUTED = "misrouted"
    """The subject belongs to another document: another partition could overtake it (deliver.subjects)."""
    REJECTED = "rejected"
    """The endpoint answered with a status that is not retried."""
    GONE = "gone"
    """The endpoint answered 410: it is disabled from now on."""
    DISABLED = "disabled"
    """The endpoint was disabled before; nothing was sent."""
    EXHAUSTED = "exhausted"
    """Every attempt of the policy failed."""
    EXPIRED = "expired"
    """The task grew older than deliver.max_task_age."""


class TaskRefused(FatalError):
    """The task can never be delivered as it is: it becomes a dead letter, and nothing is sent."""

    reason: ClassVar[Reason] = Reason.MALFORMED


class Malformed(TaskRefused):
    """The message is not a delivery task: correct its publisher."""


def unforeseen(error: Exception, what: str) -> Malformed:
    """A refusal for an unexpected error: the same bytes would raise it again, in every process.

    The caller re-raises errors that the task did not cause: `MemoryError`, and parti's errors that say what to do.
    """
    return Malformed(f"the task cannot be {what} ({type(error).__name__})")


class TooLarge(TaskRefused):
    """The task or its request body is over the limit: send a reference instead of the data."""

    reason: ClassVar[Reason] = Reason.TOO_LARGE


class BadUrl(TaskRefused):
    """A task may not address this url: correct the trigger."""

    reason: ClassVar[Reason] = Reason.BAD_URL


class BadHeader(TaskRefused):
    """A header of the task would change the meaning of the request: correct the trigger."""

    reason: ClassVar[Reason] = Reason.BAD_HEADER


class Misrouted(TaskRefused):
    """The subject is not that of the task's document, so its order cannot be kept: correct the publisher."""

    reason: ClassVar[Reason] = Reason.MISROUTED


class SecretMissing(TaskRefused):
    """The task names a secret that does not exist: nothing is sent unsigned. Add the secret, then replay."""

    reason: ClassVar[Reason] = Reason.NO_SECRET


class AddressBlocked(TaskRefused, OSError):
    """The address is not public and not allowed: no socket was opened. Allow it in deliver.allow_addresses.

    Also an OSError, because the HTTP client expects one from a resolver and from a socket factory.
    """

    reason: ClassVar[Reason] = Reason.SSRF_BLOCKED


class SecretStoreDown(TransientError):
    """The secret cannot be read at the moment: the task is retried, and never sent unsigned."""


class NotTaken(TransientError):
    """A message could not be handed on, for example for lack of memory: it is requested again."""


class LeaseLost(TransientError):
    """The partition may belong to another process by now: drop the work, that process will deliver it."""
