"""Why a task is refused: each class names the reason under which the task rests in the dead letters."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from parti.errors import FatalError, TransientError


class Reason(StrEnum):
    """Why a task rests in the dead letters: a token of the letter's subject and the label of a metric."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    BAD_URL = "bad_url"
    BAD_HEADER = "bad_header"
    SSRF_BLOCKED = "ssrf_blocked"
    NO_SECRET = "no_secret"
    MISROUTED = "misrouted"
    """Its subject is not its document's: another partition could overtake it (deliver.subjects)."""
    REJECTED = "rejected"
    """The endpoint answered with a status that is not tried again."""
    GONE = "gone"
    """The endpoint answered 410: it is disabled from now on."""
    DISABLED = "disabled"
    """The endpoint was disabled before; nothing was sent."""
    EXHAUSTED = "exhausted"
    """Every attempt of the policy failed."""
    EXPIRED = "expired"
    """The task grew older than deliver.max_task_age."""


class TaskRefused(FatalError):
    """The task can never be delivered as it is: it goes to the dead letters, and nothing is sent."""

    reason: ClassVar[Reason] = Reason.MALFORMED


class Malformed(TaskRefused):
    """The message is no delivery task: correct its publisher."""


def unforeseen(error: Exception, what: str) -> Malformed:
    """A refusal for what nobody thought of: the same bytes would raise it again, in every process.

    The caller lets through what is not of the task's making: `MemoryError`, and errors of ours that say what to do.
    """
    return Malformed(f"the task cannot be {what} ({type(error).__name__})")


class TooLarge(TaskRefused):
    """The task or its request body is over the limit: send a reference instead of the data."""

    reason: ClassVar[Reason] = Reason.TOO_LARGE


class BadUrl(TaskRefused):
    """The url is none that a task may address: correct the trigger."""

    reason: ClassVar[Reason] = Reason.BAD_URL


class BadHeader(TaskRefused):
    """A header of the task would change the request's meaning: correct the trigger."""

    reason: ClassVar[Reason] = Reason.BAD_HEADER


class Misrouted(TaskRefused):
    """The subject is not that of the task's document, so that its order cannot be kept: correct the publisher."""

    reason: ClassVar[Reason] = Reason.MISROUTED


class SecretMissing(TaskRefused):
    """The task names a secret that is not there: nothing is sent unsigned. Add the secret, then replay."""

    reason: ClassVar[Reason] = Reason.NO_SECRET


class AddressBlocked(TaskRefused, OSError):
    """The address is not public and not allowed: no socket was opened. Allow it in deliver.allow_addresses.

    An OSError as well, because that is what the HTTP client takes from a resolver and from a socket factory.
    """

    reason: ClassVar[Reason] = Reason.SSRF_BLOCKED


class SecretStoreDown(TransientError):
    """The secret could not be read for now: the task is tried again, and never sent unsigned."""


class NotTaken(TransientError):
    """A message could not be handed on, for want of memory perhaps: it is asked for again."""


class LeaseLost(TransientError):
    """The partition may belong to another process by now: drop the work, it will be delivered there."""
