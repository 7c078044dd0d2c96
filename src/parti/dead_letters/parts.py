"""A letter that is too large for one message: its message is stored in parts, and the letter names them.

A message within a few hundred bytes of the server's limit has no room for the letter's own headers. Its headers and
data are then stored first, as parts under `<stream>_DLQ.parti-part.<name>`, and the letter last, without them.

The name of a part depends on the letter's id, and on the part's place and bytes: a retry stores it once, also when the
limit has changed in between. The same letter stored again after the duplicate window has parts of its own, stored
before it: the parts of a letter are the last ones in front of it.
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
from parti.dead_letters.letter import DeadLetter
from parti.wire.api import Outgoing
from parti.wire.requests import headers_size

PART_TOKEN: Final = "parti-part"
"""Subjects with this token, after the name of the dead-letter stream, hold parts of letters."""
_NAME_BYTES: Final = 16
_Body = tuple[dict[str, str], bytes]
"""Headers and data of the message, in MessagePack: what the parts contain."""


def fits(data: bytes, headers: Mapping[str, str], room: int) -> bool:
    """Whether a message with these headers takes at most `room` bytes, as the server counts."""
    return len(data) + headers_size(headers) <= room


def letter_messages(letter: DeadLetter, identity: str, room: int) -> list[Outgoing]:
    """The messages in which a letter is stored, in this order: only itself, or its parts and then itself.

    `room`: the most bytes that a message may have, with its headers.
    """
    whole = _message(letter, identity)
    if fits(whole.data, whole.headers, room):
        return [whole]
    body = msgspec.msgpack.encode((dict(letter.headers), letter.data))
    size = max(1, room - headers_size({MSG_ID: "-" * 2 * _NAME_BYTES}))
    cuts = ((begin, body[begin : begin + size]) for begin in range(0, len(body), size))
    pieces = {_name(identity, begin, piece): piece for begin, piece in cuts}
    extension = structs.replace(letter.extension, cut=len(body), parts=tuple(pieces))
    stream = whole.subject.partition(".")[0]
    return [
        *(Outgoing(part_subject(stream, name), piece, {MSG_ID: name}) for name, piece in pieces.items()),
        _message(replace(letter, data=b"", headers={}, extension=extension), identity),
    ]


def part_subject(stream: str, name: str) -> str:
    """The subject of a part; `stream` is the dead-letter stream."""
    return f"{stream}.{PART_TOKEN}.{name}"


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


def _name(identity: str, begin: int, piece: bytes) -> str:
    return hashlib.blake2b(f"{identity}\n{begin}\n".encode() + piece, digest_size=_NAME_BYTES).hexdigest()
