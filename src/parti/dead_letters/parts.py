"""A letter that is too large for one message: its message is stored in parts, and the letter names them.

A message within a few hundred bytes of the server's limits has no room for the letter's own headers. Its headers and
data are then stored first, as parts under `<stream>_DLQ.parti-part.<name>.<number>`, and the letter last, without them.

The name depends on the letter's id, on what the parts contain and on their size: a retry stores each once, and none is
taken for another when the limit has changed in between. The same letter stored again after the duplicate window has
parts of its own, stored before it: the parts of a letter are the last ones in front of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec
from msgspec import structs

from parti.dead_letters.format import letter_headers, letter_subject
from parti.dead_letters.headers import MSG_ID
from parti.dead_letters.letter import DeadLetter, LetterExtension
from parti.wire.api import Outgoing
from parti.wire.requests import headers_size

PART_TOKEN: Final = "parti-part"
"""Subjects with this token, after the name of the dead-letter stream, hold parts of letters."""
MOST_HEADERS: Final = 65_535  # bytes of headers of a message in a stream; the server refuses more (10097)
_MOST_OF_A_LETTER: Final = 64_000  # bytes of headers of a letter: a fence adds some
_NAME_BYTES: Final = 16
_LONGEST_ID: Final = len(PART_TOKEN) + 2 * _NAME_BYTES + 10
_Body = tuple[dict[str, str], bytes]
"""Headers and data of the message, in MessagePack: what the parts contain."""


def fits(data: bytes, headers: Mapping[str, str], room: int) -> bool:
    """Whether a stream takes a message with these headers, if a message may have `room` bytes."""
    size = headers_size(headers)
    return size <= MOST_HEADERS and len(data) + size <= room


def letter_messages(letter: DeadLetter, identity: str, room: int) -> list[Outgoing]:
    """The messages in which a letter is stored, in this order: only itself, or its parts and then itself.

    `room`: the most bytes that a message may have, with its headers.
    """
    whole = _message(letter, identity)
    if fits(whole.data, whole.headers, room) and headers_size(whole.headers) <= _MOST_OF_A_LETTER:
        return [whole]
    body = msgspec.msgpack.encode((dict(letter.headers), letter.data))
    stream = whole.subject.partition(".")[0]
    size = max(1, room - headers_size({MSG_ID: "-" * _LONGEST_ID}))
    name = hashlib.blake2b(f"{identity}\n{size}\n".encode() + body, digest_size=_NAME_BYTES).hexdigest()
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    extension = structs.replace(letter.extension, cut=len(body), parts=len(pieces), body=name)
    subjects = part_subjects(stream, extension)
    return [
        *(
            Outgoing(subject, piece, {MSG_ID: subject.removeprefix(f"{stream}.")})
            for subject, piece in zip(subjects, pieces, strict=True)
        ),
        _message(replace(letter, data=b"", headers={}, extension=extension), identity),
    ]


def part_subjects(stream: str, extension: LetterExtension) -> tuple[str, ...]:
    """The subjects of a letter's parts, in order; `stream` is the dead-letter stream."""
    return tuple(f"{stream}.{PART_TOKEN}.{extension.body}.{number}" for number in range(extension.parts))


def joined(letter: DeadLetter, parts: Sequence[bytes]) -> DeadLetter:
    """The letter with the message that its parts hold. If one is gone, it stays without: `extension.cut` says so."""
    body = b"".join(parts)
    if len(body) != letter.extension.cut:
        return letter
    try:
        headers, data = msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return letter
    return replace(letter, headers=headers, data=data, extension=structs.replace(letter.extension, cut=0))


def _message(letter: DeadLetter, identity: str) -> Outgoing:
    return Outgoing(letter_subject(letter), letter.data, letter_headers(letter, identity))
