"""Status lines of the server (`NATS/1.0 409 Consumer Deleted`): each as a typed error, by code and by text.

Two statuses are no errors and are not here: 100 (idle heartbeat, flow control) and 204 (end of a batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from parti.errors import Category, PartiError, TransientError


class StatusError(PartiError):
    """The server ended the request with a status of no known kind: look it up and decide by hand."""

    def __init__(self, message: str, *, status: int, description: str) -> None:
        super().__init__(message)
        self.status = status
        self.description = description


class _Transient(StatusError, TransientError):
    category: ClassVar[Category] = Category.TRANSIENT


class _Policy(StatusError):
    category: ClassVar[Category] = Category.POLICY


class RequestRefused(_Policy):
    """The request is malformed, or lacks the priority group that the consumer demands: correct it."""


class AccessDenied(_Policy):
    """The user may not do this: correct the permissions."""


class NoMessages(_Transient):
    """There was nothing to deliver at the moment: ask again, or wait."""


class PullExpired(_Transient):
    """The pull ran out before it was filled: send the next one."""


class ConsumerDeleted(StatusError):
    """The consumer was deleted while we pulled from it: create it again from the stored position."""

    category: ClassVar[Category] = Category.NOT_FOUND


class LeadershipChanged(_Transient):
    """The consumer has a new leader; deliveries may be missing: resync, then pull again."""


class ServerShutdown(_Transient):
    """The server is going down: reconnect, resync, pull again."""


class ConsumerIsPush(_Policy):
    """The consumer pushes, so that it cannot be pulled from: use another name."""


class PullTooLarge(_Policy):
    """The pull asks for more than the consumer's max_batch, max_bytes or max_expires allow: ask for less."""


class TooManyPulls(_Transient):
    """The consumer has max_waiting pulls already: wait for one to end."""


class MaxAckPendingReached(_Transient):
    """Too many messages are unacknowledged: acknowledge some, then pull again."""


class MessageExceedsMaxBytes(_Policy):
    """The next message is larger than the pull's max_bytes: raise it."""


class BatchCompleted(_Transient):
    """The pull ended early because its byte limit was reached: send the next one."""


class ReplicaBehind(_Transient):
    """The asked replica has not reached the wanted sequence: ask again, or ask the leader."""


class TooManyResults(_Policy):
    """The request matches more subjects than the server answers at once: narrow it."""


class WrongPinId(_Transient):
    """Another client is pinned now: drop the pin id and pull without one."""


class Throttled(_Transient):
    """The server sheds load: back off and try again."""


class NoResponder(_Transient):
    """Nobody listens: JetStream is off, starting, without a leader, or the consumer is gone; check, then try again."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One row of the table: the first row whose status and text match decides."""

    status: int
    text: str
    """A part of the description, compared without case; empty matches every description."""
    error: type[StatusError]


STATUS_ERRORS: Sequence[StatusRow] = (
    StatusRow(400, "", RequestRefused),
    StatusRow(401, "", AccessDenied),
    StatusRow(403, "", AccessDenied),
    StatusRow(404, "", NoMessages),
    StatusRow(408, "", PullExpired),
    StatusRow(409, "Consumer Deleted", ConsumerDeleted),
    StatusRow(409, "Leadership Change", LeadershipChanged),
    StatusRow(409, "Server Shutdown", ServerShutdown),
    StatusRow(409, "Consumer is push based", ConsumerIsPush),
    StatusRow(409, "Exceeded MaxRequest", PullTooLarge),
    StatusRow(409, "Exceeded MaxWaiting", TooManyPulls),
    StatusRow(409, "Exceeded MaxAckPending", MaxAckPendingReached),
    StatusRow(409, "Message Size Exceeds MaxBytes", MessageExceedsMaxBytes),
    StatusRow(409, "Batch Completed", BatchCompleted),
    StatusRow(412, "", ReplicaBehind),
    StatusRow(413, "", TooManyResults),
    StatusRow(423, "", WrongPinId),
    StatusRow(429, "", Throttled),
    StatusRow(503, "", NoResponder),
)


def status_error(status: int, description: str, *, request: str) -> StatusError:
    """The typed error for a status line; `request` names what was asked."""
    lowered = description.lower()
    kind = next(
        (row.error for row in STATUS_ERRORS if row.status == status and row.text.lower() in lowered), StatusError
    )
    shown = f"{status} {description}".strip()
    return kind(f"{request}: {shown}", status=status, description=description)
