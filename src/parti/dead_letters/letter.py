"""One dead letter: the message as published, the reason, and optional fields that only some consumers set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from parti.model import Lease
from parti.outcomes import Bury


class LetterKind(StrEnum):
    """Which part of parti wrote the letter, where a replay depends on it."""

    PLAIN = ""
    """Written by a worker or the Spark pipeline."""
    GROUP = "group"
    DELIVERY = "delivery"


class LetterExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Optional fields of a letter: one JSON object in one header, absent when all are empty.

    A later version may add fields; older versions ignore them.
    """

    kind: LetterKind = LetterKind.PLAIN
    group: str = ""
    id: str = ""
    """Id of a delivery task; kept when the task is replayed."""
    outcome: str = ""
    status: int = 0
    trigger: str = ""
    host: str = ""
    first_seen: float = 0.0
    """Unix seconds when the task was published."""
    response: bytes = b""
    """The first bytes of the endpoint's response."""
    history: tuple[dict[str, Any], ...] = ()
    """The task's earlier letters, oldest first: one entry for each letter that was replayed."""
    cut: int = 0
    """Size of what was too large for the letter, and is missing in it: the task stream may still hold it."""
    parts: int = 0
    """Number of parts that hold headers and data of a message too large for one letter (`dead_letters.parts`)."""
    body: str = ""
    """The name that these parts share."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter; `data` and `headers` are the publisher's."""

    stream: str
    """Of the message."""
    subject: str
    """Subject under which the stream accepts the message again."""
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
    """The letter's subject in the dead-letter stream; empty for the default, built from the message's subject."""
    sequence: int = 0
    """Its sequence in the dead-letter stream; 0 before it is stored."""
    time: float = 0.0
    """Unix seconds when the letter was stored; 0 before."""

    @property
    def kind(self) -> LetterKind:
        return self.extension.kind

    @property
    def origin(self) -> str:
        """Stream and sequence of the message."""
        return f"{self.stream}:{self.original_sequence}"


class Unhandled(Protocol):
    """A message that no handler accepted, with the fields that its letter needs."""

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
    """The default subject of a letter: the name of the dead-letter stream, then the message's subject."""
    return f"{dead_letter_stream(stream)}.{subject}"
