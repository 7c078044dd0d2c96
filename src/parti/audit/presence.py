"""Which messages exist: sets of sequences as bitmaps, so that a message costs one bit and no row is collected.

Tasks turn sequences into blocks of bits. All blocks of the same range meet in one task, which compares what was
published with what is done. The counts are exact for any order and any number of repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

PUBLISHED, DONE, WAITING = "published", "done", "waiting"
BITMAPS: Final = frozenset((PUBLISHED, DONE, WAITING))
EXAMPLES: Final = 10  # of each kind: enough to investigate, few enough to print
BLOCK: Final = 1 << 20  # sequences of a block: 128 KiB of bits


class Weight(msgspec.Struct):
    """The counts of one block, or a sum of several."""

    published: int = 0
    done: int = 0
    lost: int = 0
    unknown: int = 0
    waiting: int = 0
    only_here: int = 0
    """Published, and done by this consumer alone."""
    examples: dict[str, list[int]] = msgspec.field(default_factory=dict)

    def add(self, other: Weight) -> None:
        for name in ("published", "done", "lost", "unknown", "waiting", "only_here"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, found in other.examples.items():
            self.examples[kind] = sorted(self.examples.get(kind, []) + found)[:EXAMPLES]


class SeenSequences:
    """A set of sequences that tells which of the given ones are new, and adds them."""

    def __init__(self) -> None:
        self.blocks: dict[int, Bits] = {}

    def add(self, sequences: Ints) -> None:
        for block, positions in _by_block(sequences):
            bits = self._unpacked(block)
            bits[positions] = 1
            self.blocks[block] = np.packbits(bits)

    def add_first(self, sequences: Ints) -> npt.NDArray[np.bool_]:
        """Add them in this order; True for each that was not in the set before."""
        first = np.zeros(len(sequences), dtype=bool)
        values, at = np.unique(sequences, return_index=True)
        for block, positions, where in _by_block_with(values, at):
            bits = self._unpacked(block)
            first[where] = bits[positions] == 0
            bits[positions] = 1
            self.blocks[block] = np.packbits(bits)
        return first

    def _unpacked(self, block: int) -> Bits:
        known = self.blocks.get(block)
        return np.zeros(BLOCK, dtype=np.uint8) if known is None else np.unpackbits(known)


def _by_block(sequences: Ints) -> Iterator[tuple[int, Ints]]:
    if not len(sequences):
        return
    number = sequences // BLOCK
    for block in range(int(number.min()), int(number.max()) + 1):
        part = sequences[number == block]
        if len(part):
            yield block, part - block * BLOCK


def _by_block_with(values: Ints, at: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Sorted values and their original positions, split at block boundaries."""
    cuts = np.flatnonzero(np.diff(values // BLOCK)) + 1
    for part, where in zip(np.split(values, cuts), np.split(at, cuts), strict=True):
        if len(part):
            block = int(part[0]) // BLOCK
            yield block, part - block * BLOCK, where


def weights(block: int, found: dict[tuple[str, int], Bits]) -> list[Weight]:
    """The counts of one block for both consumers; the second is meaningless when there is no second consumer."""
    none = np.zeros(BLOCK // 8, dtype=np.uint8)
    published = found.get((PUBLISHED, 0), none)
    done = [found.get((DONE, side), none) for side in (0, 1)]
    waiting = [found.get((WAITING, side), none) for side in (0, 1)]
    return [_weight(block, published, done[side], waiting[side], done[1 - side]) for side in (0, 1)]


def _weight(block: int, published: Bits, done: Bits, waiting: Bits, other: Bits) -> Weight:
    sets = {
        "published": published,
        "done": done,
        "lost": published & ~done & ~waiting,
        "unknown": (done | waiting) & ~published,
        "waiting": published & waiting & ~done,
        "only_here": published & done & ~other,
    }
    counts: dict[str, Any] = {name: int(np.bitwise_count(bits).sum()) for name, bits in sets.items()}
    examples = {
        name: (np.flatnonzero(np.unpackbits(bits))[:EXAMPLES] + block * BLOCK).tolist()
        for name, bits in sets.items()
        if name not in ("published", "done") and counts[name]
    }
    return Weight(**counts, examples=examples)
