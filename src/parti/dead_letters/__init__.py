"""The dead letters of a stream: messages that no handler or endpoint accepted are stored in `<stream>_DLQ`.

Promises: a message counts as done only after its letter is stored; a letter is stored once, however often and by which
process it is sent; it is removed only after its message is stored in the stream again, or by a user.

Flow: the worker, groups, delivery and the Spark pipeline make a `letter` -> `format` (too large for one message:
`parts`) -> `writer` -> the stream; `parti dlq` -> `reader` -> `format` (letters of earlier versions: `old_formats`) and
`parts` -> shown, published again, or removed.
"""

from parti.dead_letters.format import letter_headers, letter_id, read_letter
from parti.dead_letters.letter import (
    DeadLetter,
    LetterExtension,
    LetterKind,
    Unhandled,
    dead_letter_stream,
    dead_letter_subject,
)
from parti.dead_letters.reader import ChosenLetters, DeadLetterReader
from parti.dead_letters.writer import DeadLetterWriter, ensure_stream, largest_message, until_stored

__all__ = [
    "ChosenLetters",
    "DeadLetter",
    "DeadLetterReader",
    "DeadLetterWriter",
    "LetterExtension",
    "LetterKind",
    "Unhandled",
    "dead_letter_stream",
    "dead_letter_subject",
    "ensure_stream",
    "largest_message",
    "letter_headers",
    "letter_id",
    "read_letter",
    "until_stored",
]
