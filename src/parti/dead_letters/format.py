"""A letter as a NATS message: the original data and headers, plus parti's headers with the reason.

Fields that every letter has are one header each; optional fields are JSON in `Parti-Extension`. Original headers that
would affect the letter's own publish, or that have one of parti's names, are kept with a prefix.
"""

from __future__ import annotations

from typing import Final

import msgspec

from parti.dead_letters import headers as h
from parti.dead_letters.headers import steers, whole
from parti.dead_letters.letter import DeadLetter, LetterExtension, dead_letter_subject
from parti.dead_letters.old_formats import is_old_delivery, read_old_delivery
from parti.wire.stored import StoredMessage

_OURS: Final = frozenset(
    {h.REASON, h.ERROR, h.ATTEMPTS, h.STREAM, h.SUBJECT, h.SEQUENCE, h.CONSUMER, h.WORKER, h.EPOCH, h.EXTENSION}
)
_KEPT: Final = "Parti-Original-"
_MARKER: Final = "fence"
"""The reason in an epoch marker, with which a Spark driver fences earlier drivers: a marker is not a letter."""


def letter_headers(letter: DeadLetter, identity: str) -> dict[str, str]:
    """The headers under which a letter is published."""
    headers = {_kept_name(name): value for name, value in letter.headers.items()} | {
        h.REASON: letter.reason,
        h.ERROR: letter.error,
        h.ATTEMPTS: str(letter.attempts),
        h.STREAM: letter.stream,
        h.SUBJECT: letter.subject,
        h.SEQUENCE: str(letter.original_sequence),
        h.MSG_ID: identity,
    }
    if letter.consumer:
        headers |= {h.CONSUMER: letter.consumer, h.WORKER: letter.worker, h.EPOCH: str(letter.epoch)}
    if letter.extension != LetterExtension():
        headers[h.EXTENSION] = msgspec.json.encode(letter.extension).decode()
    return headers


def letter_subject(letter: DeadLetter) -> str:
    """The subject under which a letter is published."""
    return letter.place or dead_letter_subject(letter.stream, letter.subject)


def letter_id(letter: DeadLetter, *, created: str, scope: str, timestamp: float) -> str:
    """The `Nats-Msg-Id` of a letter: the same for every process that may bury the message, and unique to it.

    It contains the stream and its creation time, its readers (`scope`), and the message's sequence and time: a stream
    that was deleted and recreated counts from 1 again, and needs other ids for its letters.
    """
    return f"{letter.stream}:{created}:{scope}:{letter.original_sequence}:{timestamp:.6f}"


def is_letter(stored: StoredMessage) -> bool:
    """Whether a message of a dead-letter stream is a letter: the stream also holds epoch markers."""
    told = h.STREAM in stored.headers or is_old_delivery(stored.headers)
    return told and stored.headers.get(h.REASON) != _MARKER


def read_letter(stored: StoredMessage) -> DeadLetter:
    """A letter of this version or of an earlier one."""
    headers = stored.headers
    if is_old_delivery(headers):
        return read_old_delivery(stored)
    return DeadLetter(
        stream=headers.get(h.STREAM, ""),
        subject=headers.get(h.SUBJECT, stored.subject),
        original_sequence=whole(headers.get(h.SEQUENCE)),
        reason=headers.get(h.REASON, ""),
        error=headers.get(h.ERROR, ""),
        attempts=whole(headers.get(h.ATTEMPTS)),
        data=stored.data,
        headers={k.removeprefix(_KEPT): v for k, v in headers.items() if k not in _OURS and not steers(k)},
        consumer=headers.get(h.CONSUMER, ""),
        worker=headers.get(h.WORKER, ""),
        epoch=whole(headers.get(h.EPOCH)),
        extension=_extension(headers.get(h.EXTENSION)),
        place=stored.subject,
        sequence=stored.seq,
        time=stored.time_ns / 1e9,
    )


def _kept_name(name: str) -> str:
    return f"{_KEPT}{name}" if steers(name) or name in _OURS else name


def _extension(text: str | None) -> LetterExtension:
    """Other programs may write to the stream: an unreadable extension counts as empty."""
    try:
        return msgspec.json.decode(text or "{}", type=LetterExtension)
    except (msgspec.DecodeError, RecursionError):
        return LetterExtension()
