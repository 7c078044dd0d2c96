"""Compares and parses eight bytes at a time, at thousands of positions at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

LONGEST_NUMBER = 19  # digits of the largest 64-bit integer; some numbers of 19 digits do not fit

# Eight digits need one load and three multiplications, for pairs, groups of four, and all eight.
_EIGHT_ZEROS = np.uint64(0x3030303030303030)
_BEYOND_NINE = np.uint64(0x7676767676767676)  # added to a byte above 9, it sets the high bit
_HIGH_BITS = np.uint64(0x8080808080808080)
_PAIR, _FOUR, _EIGHT = np.uint64(10 << 8 | 1), np.uint64(100 << 16 | 1), np.uint64(10_000 << 32 | 1)
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)


def word_of(text: bytes) -> np.uint64:
    """The value of `words` at a position with these eight bytes."""
    return np.uint64(int.from_bytes(text, "little"))


def words(data: Bytes, at: Ints) -> Words:
    """The eight bytes from each position on as one little-endian number; they must be within the data."""
    everywhere: Words = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    return everywhere[at]


def rows_before(data: Bytes, ends: Ints, width: int) -> Bytes:
    """The `width` bytes before each position, as rows of one matrix, so that later reads are contiguous."""
    everywhere = np.ndarray((len(data) - width + 1,), dtype=f"V{width}", buffer=data, strides=(1,))
    return everywhere[ends - width].view(np.uint8).reshape(len(ends), width)


def words_of_rows(rows: Bytes, end: int) -> Words:
    """The eight bytes before column `end` of each row."""
    count, width = rows.shape
    column: Words = np.ndarray((count,), dtype="<u8", buffer=rows, offset=end - 8, strides=(width,))
    return column.copy()


def uints_of_rows(rows: Bytes, end: int, digits: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The numbers of exactly `digits` digits (1 to 19) before column `end`, and a mask of those valid in 64 bits.

    Half the cost of `uints`. Eight columns are read at a time, so short numbers need columns before them.
    """
    value = np.zeros(len(rows), dtype=np.uint64)
    wrong = np.zeros(len(rows), dtype=np.uint64)
    for below in range(0, digits, 8):  # digits to the right of the eight
        word = words_of_rows(rows, end - below)
        word ^= _EIGHT_ZEROS
        if (spare := 8 - (digits - below)) > 0:
            word &= np.uint64((0xFFFFFFFFFFFFFFFF << 8 * spare) & 0xFFFFFFFFFFFFFFFF)
        if (word == word[:1]).all():
            word = word[:1]  # equal sizes, or the upper digits of close times: parsing once is enough
        wrong |= word
        wrong |= word + _BEYOND_NINE
        word *= _PAIR
        word >>= np.uint64(8)
        word &= _PAIRS
        word *= _FOUR
        word >>= np.uint64(16)
        word &= _FOURS
        word *= _EIGHT
        word >>= np.uint64(32)
        if below:
            word *= np.uint64(10**below)
        value += word
    found = value.view(np.int64)
    right: npt.NDArray[np.bool_] = wrong & _HIGH_BITS == 0
    if digits == LONGEST_NUMBER:
        right &= found >= 0
    return found, right
