"""Letters in parts: whatever the size of the message and the limit, every message fits and the join gives it back."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from parti.dead_letters import DeadLetter, LetterExtension, LetterKind, read_letter
from parti.dead_letters.format import is_letter
from parti.dead_letters.parts import fits, joined, letter_messages, part_subjects
from parti.wire.api import Outgoing
from parti.wire.requests import headers_size
from parti.wire.stored import StoredMessage
from unit.dead_letters.test_format import LETTER, NAMES, TEXTS

GROUP = LetterExtension(LetterKind.GROUP, "g")


def stored(message: Outgoing) -> StoredMessage:
    return StoredMessage(message.subject, 9, 1_500_000_000, message.data, message.headers)


def large(size: int, headers: dict[str, str], *, equal: bool = False) -> DeadLetter:
    data = b"0" * size if equal else random.Random(size).randbytes(size)
    return replace(LETTER, data=data, headers=headers, extension=GROUP)


@given(
    room=st.integers(700, 9_000),
    size=st.integers(0, 9_000),
    headers=st.dictionaries(NAMES, TEXTS | st.just("v" * 8_000)),
    equal=st.booleans(),
)
def test_every_message_of_a_letter_fits_and_together_they_are_the_letter(
    room: int, size: int, headers: dict[str, str], equal: bool
) -> None:
    letter = large(size, headers, equal=equal)
    *parts, last = letter_messages(letter, "id", room)
    assert all(fits(message.data, message.headers, room) for message in (*parts, last))
    assert is_letter(stored(last))
    assert not any(is_letter(stored(part)) for part in parts)
    read = read_letter(stored(last))
    assert tuple(part.subject for part in parts) == part_subjects("S_DLQ", read.extension)
    assert len({part.headers["Nats-Msg-Id"] for part in parts}) == len(parts), "none is a duplicate of another"
    whole = joined(read, [part.data for part in parts]) if parts else read
    assert (whole.data, whole.headers, whole.extension.cut) == (letter.data, letter.headers, 0)
    assert (whole.reason, whole.extension.group, whole.subject) == (letter.reason, "g", letter.subject)


@given(size=st.integers(1_000, 5_000), lost=st.integers(0, 10))
def test_a_letter_that_lacks_a_part_is_cut_and_never_taken_for_a_whole_one(size: int, lost: int) -> None:
    *parts, last = letter_messages(large(size, {"Kind": "order"}), "id", 900)
    pieces = [part.data for part in parts]
    pieces.pop(lost % len(pieces))
    found = joined(read_letter(stored(last)), pieces)
    assert (found.data, found.headers) == (b"", {})
    assert found.extension.cut > size


def test_what_somebody_else_stored_as_a_part_makes_no_message() -> None:
    *parts, last = letter_messages(large(3_000, {}), "id", 900)
    letter = read_letter(stored(last))
    assert joined(letter, [b"\xc1" * len(part.data) for part in parts]) == letter


def test_parts_have_the_same_names_at_every_try_and_others_for_another_letter_or_limit() -> None:
    letter = large(3_000, {})
    first, again = ([message.subject for message in letter_messages(letter, "id", 900)[:-1]] for _ in range(2))
    other = [message.subject for message in letter_messages(letter, "another", 900)[:-1]]
    smaller = [message.subject for message in letter_messages(letter, "id", 800)[:-1]]
    assert first == again
    assert not set(first) & (set(other) | set(smaller))


def test_a_letter_that_fits_is_one_message() -> None:
    (only,) = letter_messages(LETTER, "id", 10_000)
    room = len(only.data) + headers_size(only.headers)
    assert letter_messages(LETTER, "id", room) == [only]
    assert len(letter_messages(LETTER, "id", room - 1)) > 1
