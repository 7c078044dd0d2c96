"""One dead letter: the message as it was published, why it rests, and what only some consumers can tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from parti.model import Lease
from parti.outcomes import Bury


class LetterKind(StrEnum):
    """Whose letter it is, where that matters for what follows."""

    PLAIN = ""
    """Of a worker or of the Spark pipeline."""
    GROUP = "group"
    DELIVERY = "delivery"


class LetterExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only some letters tell: one JSON object in one header, absent where there is nothing to tell.

    A later version may add fields; one that does not know them passes over them.
    """

    kind: LetterKind = LetterKind.PLAIN
    group: str = ""
    id: str = ""
    """Of a task; it keeps it when it is replayed."""
    outcome: str = ""
    status: int = 0
    trigger: str = ""
    host: str = ""
    first_seen: float = 0.0
    """Unix seconds when the task was published."""
    response: bytes = b""
    """The first bytes of what the endpoint answered."""
    history: tuple[dict[str, Any], ...] = ()
    """What became of the task before, oldest first: one entry for each letter that was replayed."""
    cut: int = 0
    """Bytes of data that the letter had no room for: the stream may hold them still."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter; `data` and `headers` are what the publisher wrote."""

    stream: str
    """Of the message."""
    subject: str
    """Under which the stream takes the message again."""
    original_sequence: int
    reason: str
    error: str
    attempts: int
    data: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False, default_factory=dict)
    consumer: str = ""
    worker: str = ""
    epoch: int = 0
    extension: LetterExtension = field(repr=False, default=LetterExtension())
    place: str = ""
    """Its own subject in the dead-letter stream; empty for the usual one, which is made of the message's."""
    sequence: int = 0
    """Its number in the dead-letter stream; 0 before it is stored."""
    time: float = 0.0
    """Unix seconds when it was buried; 0 before."""

    @property
    def kind(self) -> LetterKind:
        return self.extension.kind

    @property
    def origin(self) -> str:
        """Stream and sequence of the message."""
        return f"{self.stream}:{self.original_sequence}"


class Unhandled(Protocol):
    """A message that no handler could take, as far as its letter tells of it."""

    @property
    def subject(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def attempt(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def timestamp(self) -> float: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def lease(self) -> Lease: ...


def letter_of(
    message: Unhandled, decision: Bury, *, stream: str, consumer: str, extension: LetterExtension | None = None
) -> DeadLetter:
    """The letter of a message, not stored yet."""
    return DeadLetter(
        stream=stream,
        subject=message.subject,
        original_sequence=message.sequence,
        reason=decision.reason.value,
        error=decision.error,
        attempts=message.attempt,
        data=message.data,
        headers=message.headers,
        consumer=consumer,
        worker=message.worker_id,
        epoch=message.lease.epoch,
        extension=extension or LetterExtension(),
    )


def dead_letter_stream(stream: str) -> str:
    return f"{stream}_DLQ"


def dead_letter_subject(stream: str, subject: str) -> str:
    """The usual subject of a letter: the message's own behind the name of the dead-letter stream."""
    return f"{dead_letter_stream(stream)}.{subject}"
