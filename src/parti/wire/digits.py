"""Eight bytes at a time, of thousands of places at once: to compare them, and to read them as digits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

LONGEST_NUMBER = 19  # digits of the largest 64-bit integer, and of some that do not fit

# Eight digits are a load, and three multiplications that make pairs, fours and the whole of them.
_EIGHT_ZEROS = np.uint64(0x3030303030303030)
_BEYOND_NINE = np.uint64(0x7676767676767676)  # added to a byte above 9, it sets the high bit
_HIGH_BITS = np.uint64(0x8080808080808080)
_PAIR, _FOUR, _EIGHT = np.uint64(10 << 8 | 1), np.uint64(100 << 16 | 1), np.uint64(10_000 << 32 | 1)
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)


def word_of(text: bytes) -> np.uint64:
    """What `words` gives where these eight bytes stand."""
    return np.uint64(int.from_bytes(text, "little"))


def words(data: Bytes, at: Ints) -> Words:
    """The eight bytes from each position on as one little-endian number; they must lie within the data."""
    everywhere: Words = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    return everywhere[at]


def rows_before(data: Bytes, ends: Ints, width: int) -> Bytes:
    """The `width` bytes before each position, as rows of one matrix: whatever is read of them then lies together."""
    everywhere = np.ndarray((len(data) - width + 1,), dtype=f"V{width}", buffer=data, strides=(1,))
    return everywhere[ends - width].view(np.uint8).reshape(len(ends), width)


def words_of_rows(rows: Bytes, end: int) -> Words:
    """The eight bytes before column `end` of each row."""
    count, width = rows.shape
    column: Words = np.ndarray((count,), dtype="<u8", buffer=rows, offset=end - 8, strides=(width,))
    return column.copy()


def uints_of_rows(rows: Bytes, end: int, digits: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The numbers of exactly so many digits (1 to 19) before column `end`, and where they are numbers that fit 64 bits.

    Half the cost of `uints`. Eight columns are read at a time, so that there must be some before short numbers.
    """
    value = np.zeros(len(rows), dtype=np.uint64)
    wrong = np.zeros(len(rows), dtype=np.uint64)
    for below in range(0, digits, 8):  # digits to the right of the eight
        word = words_of_rows(rows, end - below)
        word ^= _EIGHT_ZEROS
        if (spare := 8 - (digits - below)) > 0:
            word &= np.uint64((0xFFFFFFFFFFFFFFFF << 8 * spare) & 0xFFFFFFFFFFFFFFFF)
        if (word == word[:1]).all():
            word = word[:1]  # sizes that are all the same, the upper digits of times that are close: once is enough
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
