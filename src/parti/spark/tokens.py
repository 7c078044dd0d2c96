"""Keys and partitions of subjects: which tokens they are made of. `subject_text` reads these from whole columns.

It imports NumPy and Arrow, and only where there are columns: the processes that check options cost less without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parti.subjects import validate_subject

if TYPE_CHECKING:
    import pyarrow as pa

_HELD = "token:"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a subject that make up a key, counted from 1; no tokens means the whole subject."""

    positions: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """From `subject` (all of it), `2,3` (positions), or `orders.*.*` (the positions of the wildcards)."""
        if text == "subject":
            return cls()
        if text.replace(",", "").replace(" ", "").isdecimal():
            positions = tuple(int(part) for part in text.split(","))
            if 0 in positions:
                raise ValueError("the tokens of a subject are counted from 1")
            return cls(positions)
        tokens = validate_subject(text, wildcards=True, what="pattern").split(".")
        if ">" in tokens or "*" not in tokens:
            raise ValueError(f"{text!r}: write subject, positions such as 2,3, or a pattern with * for each key token")
        return cls(tuple(position for position, token in enumerate(tokens, start=1) if token == "*"))

    def column(self, subjects: pa.Array) -> pa.Array:
        """The key of each subject, its tokens joined by dots; null where a subject lacks one of them."""
        if not self.positions:
            return subjects
        from parti.spark.subject_text import Text, joined

        text = Text.of(subjects)
        return joined([text.token(position) for position in self.positions])


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The partition of a subject: hashed from its key like nats-server's `partition(n, ...)`, or read from a token."""

    count: int = 1
    tokens: Tokens = Tokens()
    held_by: int | None = None
    """The position of the token that already is the partition, as after the server's own subject transform."""

    @classmethod
    def parse(cls, by: str | None, count: int, key: Tokens) -> Partitioning:
        """`by` is `token:N`, what Tokens.parse reads, or None for the tokens of the key."""
        if by is None:
            return cls(count, key)
        if not by.startswith(_HELD):
            return cls(count, Tokens.parse(by))
        position = by.removeprefix(_HELD).strip()
        if not position.isdecimal() or int(position) < 1:
            raise ValueError(f"{by!r}: write token:N with the position of the token, counted from 1")
        return cls(count, held_by=int(position))

    def keeps_whole(self, key: Tokens) -> bool | None:
        """Whether messages of one key are always in one partition; None when only the writer of the token knows."""
        if not key.positions or (self.held_by is not None and self.held_by in key.positions):
            return True
        if self.held_by is not None:
            return None
        return bool(self.tokens.positions) and set(self.tokens.positions) <= set(key.positions)

    @property
    def needs_subject(self) -> bool:
        """Whether the partition depends on the subject at all."""
        return self.held_by is not None or self.count > 1

    def column(self, subjects: pa.Array) -> pa.Array:
        """The partition of each subject as int32; null where a subject lacks a token, or the token is not a number."""
        from parti.spark.subject_text import Text, as_number, hashed

        text = Text.of(subjects)
        if self.held_by is not None:
            return as_number(text.token(self.held_by))
        return hashed(text, self.tokens.positions, self.count)
