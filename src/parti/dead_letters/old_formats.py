"""Reads letters of earlier versions, which are still stored in users' streams.

Letters of workers, groups and the Spark pipeline had today's format without the extension. Letters of delivery had one
header per field.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

from parti.dead_letters.headers import CONSUMER, EXTENSION, TASK_ID, read_history, steers, whole
from parti.dead_letters.letter import DeadLetter, LetterExtension, LetterKind
from parti.wire.stored import StoredMessage

_WORDS: Final = (
    "Reason Error Outcome Status Response Trigger Host Data-Cut Stream Sequence Attempts First-Seen Subject Origin "
    "History Task-Id"
)
_OF_A_LETTER: Final = frozenset(f"Parti-{word}" for word in _WORDS.split(" "))


def is_old_delivery(headers: Mapping[str, str]) -> bool:
    """Whether these headers are of an old delivery letter: all other old letters named a consumer."""
    return TASK_ID in headers and CONSUMER not in headers and EXTENSION not in headers


def read_old_delivery(stored: StoredMessage) -> DeadLetter:
    def told(word: str) -> str:
        return stored.headers.get(f"Parti-{word}", "")

    stream, _, sequence = told("Origin").rpartition(":")
    return DeadLetter(
        stream=stream,
        subject=told("Subject"),
        original_sequence=whole(sequence),
        reason=told("Reason"),
        error=told("Error"),
        attempts=whole(told("Attempts")),
        data=stored.data,
        headers={k: v for k, v in stored.headers.items() if k not in _OF_A_LETTER and not steers(k)},
        extension=LetterExtension(
            kind=LetterKind.DELIVERY,
            id=told("Task-Id"),
            outcome=told("Outcome"),
            status=whole(told("Status")),
            trigger=told("Trigger"),
            host=told("Host"),
            first_seen=_seconds(told("First-Seen")),
            response=_decoded(told("Response")),
            history=read_history(told("History")),
            cut=whole(told("Data-Cut")),
        ),
        place=stored.subject,
        sequence=stored.seq,
        time=stored.time_ns / 1e9,
    )


def _seconds(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except binascii.Error:
        return b""
