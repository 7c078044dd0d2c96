"""Keys and partitions of whole subject columns: selects tokens, and computes the server's FNV-1a with NumPy.

No Python runs per message: 0.02 to 0.2 us per row (docs/evidence/pipeline.md#p1), where a loop takes 1 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from parti.subjects import validate_subject
from parti.wire.frames import binary_array

_DOT = 46
_FNV_OFFSET = np.uint32(0x811C9DC5)
_FNV_PRIME = np.uint32(0x01000193)
_HELD = "token:"

Ints = npt.NDArray[np.int64]


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
        import pyarrow.compute as pc  # not on the driver, where nothing is computed

        text = _Text.of(subjects)
        parts = [text.token(position) for position in self.positions]
        return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, ".")


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
        text = _Text.of(subjects)
        if self.held_by is not None:
            import pyarrow.compute as pc

            held = text.token(self.held_by)
            number = pc.match_substring_regex(held, r"\A[0-9]{1,9}\z")
            return pc.if_else(number, held, pa.scalar(None, pa.string())).cast(pa.int32())
        present = np.ones(len(subjects), dtype=bool)
        value = np.full(len(subjects), _FNV_OFFSET, dtype=np.uint32)
        if not self.tokens.positions:
            value = _fnv1a(value, text.data, text.starts, text.ends)
        for position in self.tokens.positions:
            starts, ends, found = text.span(position)
            value = _fnv1a(value, text.data, starts, ends)
            present &= found
        return pa.array((value % np.uint32(self.count)).astype(np.int32), mask=None if present.all() else ~present)


@dataclass(frozen=True, slots=True)
class _Text:
    """The bytes of a string column, and the positions of its values and of the dots in them."""

    data: npt.NDArray[np.uint8]
    starts: Ints
    ends: Ints
    dots: Ints
    first_dot: Ints  # of each value: index into dots
    dot_count: Ints

    @classmethod
    def of(cls, column: pa.Array) -> _Text:
        _, offsets, values = column.buffers()
        cut = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
        data = np.frombuffer(values or b"", dtype=np.uint8)
        dots = np.flatnonzero(data == _DOT)
        at = np.searchsorted(dots, cut)
        return cls(data, cut[:-1], cut[1:], dots, at[:-1], np.diff(at))

    def span(self, position: int) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Where the token at `position` (from 1) starts and ends in each value, and whether it exists."""
        found: npt.NDArray[np.bool_] = self.dot_count >= position - 1
        starts = self.starts if position == 1 else np.where(found, self._dot(position - 2) + 1, self.ends)
        ends = np.where(self.dot_count >= position, self._dot(position - 1), self.ends)
        return starts, ends, found

    def token(self, position: int) -> pa.Array:
        """The token at `position` of each value; null where there is none."""
        starts, ends, found = self.span(position)
        tokens = binary_array(self.data, starts, ends).cast(pa.string())
        if found.all():
            return tokens
        import pyarrow.compute as pc

        return pc.if_else(pa.array(found), tokens, pa.scalar(None, pa.string()))

    def _dot(self, index: int) -> Ints:
        if not len(self.dots):
            return self.ends
        return np.asarray(self.dots[np.minimum(self.first_dot + index, len(self.dots) - 1)])


def _fnv1a(
    value: npt.NDArray[np.uint32], data: npt.NDArray[np.uint8], starts: Ints, ends: Ints
) -> npt.NDArray[np.uint32]:
    """`value` hashed further with the slices [starts, ends): one pass per byte position, over rows still that long."""
    length = ends - starts
    value = value.copy()
    shortest = int(length.min(initial=1 << 30))
    for offset in range(int(length.max(initial=0))):
        if offset < shortest:
            value = (value ^ data[starts + offset]) * _FNV_PRIME
        else:
            rows = np.flatnonzero(length > offset)
            value[rows] = (value[rows] ^ data[starts[rows] + offset]) * _FNV_PRIME
    return value
