"""Every error that parti raises, and what the caller should do about it.

All are subclasses of `PartiError`. The message says what happened, with which value, and what to do. `retriable` is a
class attribute: a loop may retry a retriable error with a backoff; any other error ends the attempt. The retriable
errors are exactly the `TransientError`s, so code may check either.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Category(StrEnum):
    """The error categories of docs/requirements.md#r-101; metrics and logs use these words."""

    NOT_FOUND = "not_found"
    POLICY = "policy"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"


class PartiError(Exception):
    """Base of every error parti raises."""

    retriable: ClassVar[bool] = False
    category: ClassVar[Category] = Category.UNKNOWN


class TransientError(PartiError):
    """The same call may succeed later: back off and try again."""

    retriable: ClassVar[bool] = True
    category: ClassVar[Category] = Category.TRANSIENT


class FatalError(PartiError):
    """Trying again cannot help: change the input, the configuration or the server first."""


class ConfigError(FatalError):
    """A setting is unknown, malformed or out of range: correct the value that the message names."""


class OverlappingPartitions(ConfigError):
    """Two partitions share subjects: change the subject template or the partition keys. Nothing was changed."""

    def __init__(self, first: str, first_subject: str, second: str, second_subject: str) -> None:
        super().__init__(
            f"partitions {first} and {second} share subjects ({first_subject}, {second_subject}): change the subject "
            "template or the partition keys"
        )
        self.partitions = (first, second)
        self.subjects = (first_subject, second_subject)


class UsageError(FatalError):
    """The caller broke a precondition of the API: correct the code."""


class ConnectionFailed(TransientError):
    """No server could be reached, or the connection broke: check the address, then try again."""


class AuthFailed(FatalError):
    """The server refused the credentials: correct them; trying again cannot help."""

    category: ClassVar[Category] = Category.POLICY


class TlsFailed(FatalError):
    """The TLS handshake failed: check the certificate authority, the client certificate and the host name."""

    category: ClassVar[Category] = Category.POLICY


class ConnectionLost(TransientError):
    """The connection broke after the request was sent. Whether the server acted on it is unknown."""


class RequestTimeout(TransientError):
    """No answer came in time. Whether the server acted on the request is unknown."""


class NoResponders(TransientError):
    """Nobody listens on the request's subject: JetStream is off, starting, or has no leader right now (503)."""


class UnknownOutcome(PartiError):
    """A write was sent and no answer came: it may or may not have taken effect. Read the state before you decide.

    Never retriable automatically: a blind second try can undo another client's write in between.
    """

    category: ClassVar[Category] = Category.TRANSIENT


class ServerTooOld(FatalError):
    """The server lacks what the call needs: upgrade it to the version that the message names."""

    category: ClassVar[Category] = Category.POLICY


class DataLoss(FatalError):
    """Messages of the requested range are gone from the stream; `first_available` is the first sequence still stored.

    `count` is the number of missing sequences, if known; some sequences after `first_missing` may still be stored.
    """

    def __init__(
        self, message: str, *, stream: str, first_missing: int, first_available: int, count: int | None = None
    ) -> None:
        super().__init__(message)
        self.stream = stream
        self.first_missing = first_missing
        self.first_available = first_available
        self.count = count


class ProtocolError(FatalError):
    """The server sent bytes that are no valid NATS frame: the connection is unusable and must be dropped."""
