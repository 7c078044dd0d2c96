"""Whole subject columns: the tokens of each subject, and the server's FNV-1a of them, with NumPy.

No Python runs per message: 0.02 to 0.2 us per row (docs/evidence/pipeline.md#p1), where a loop takes 1 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from parti.wire.frames import binary_array

_DOT = 46
_FNV_OFFSET = np.uint32(0x811C9DC5)
_FNV_PRIME = np.uint32(0x01000193)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes of a string column, and the positions of its values and of the dots in them."""

    data: npt.NDArray[np.uint8]
    starts: Ints
    ends: Ints
    dots: Ints
    first_dot: Ints  # of each value: index into dots
    dot_count: Ints

    @classmethod
    def of(cls, column: pa.Array) -> Text:
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
        return pc.if_else(pa.array(found), tokens, pa.scalar(None, pa.string()))

    def _dot(self, index: int) -> Ints:
        if not len(self.dots):
            return self.ends
        return np.asarray(self.dots[np.minimum(self.first_dot + index, len(self.dots) - 1)])


def joined(parts: list[pa.Array]) -> pa.Array:
    """The parts of each row joined by dots; null where one is."""
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, ".")


def as_number(tokens: pa.Array) -> pa.Array:
    """The tokens as int32; null where one is not a number."""
    number = pc.match_substring_regex(tokens, r"\A[0-9]{1,9}\z")
    return pc.if_else(number, tokens, pa.scalar(None, pa.string())).cast(pa.int32())


def hashed(text: Text, positions: tuple[int, ...], count: int) -> pa.Array:
    """The hash modulo `count`, as int32, of these tokens or else of the whole text; null where a token is missing."""
    present = np.ones(len(text.starts), dtype=bool)
    value = np.full(len(text.starts), _FNV_OFFSET, dtype=np.uint32)
    if not positions:
        value = _fnv1a(value, text.data, text.starts, text.ends)
    for position in positions:
        starts, ends, found = text.span(position)
        value = _fnv1a(value, text.data, starts, ends)
        present &= found
    return pa.array((value % np.uint32(count)).astype(np.int32), mask=None if present.all() else ~present)


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
