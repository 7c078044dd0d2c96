"""Effects as NumPy columns of fixed types: texts as hashes, times as microseconds, missing values filled.

After this step a hash represents a key, a partition or an owner. Two of a million keys collide once in thirty million
audits. The names of partitions and owners are kept with their hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from parti.audit.presence import Ints

COLUMNS: Final = (
    "stream",
    "sequence",
    "order",
    "finished",
    "timestamp",
    "latency",
    "took",
    "partition",
    "key",
    "epoch",
    "owner",
    "outcome",
    "attempts",
)
"""The columns of an effect that the audit reads, if present: the columns of outcome rows, and `order`."""
TEXTS: Final = ("stream", "partition", "key", "owner", "outcome")
NOWHERE: Final = 0
"""The partition of effects that name none: no order is promised among their keys."""
ENDED, BURIED, OPEN = 0, 1, 2
"""Codes of the outcomes: done, dead-lettered, or not done yet (parked, failed, skipped)."""
_OUTCOMES: Final = {"dead-lettered": BURIED, "parked": OPEN, "failed": OPEN, "skipped": OPEN}
_NAMES: Final = 100_000  # partitions and owners whose names are kept


class Names(msgspec.Struct):
    """The names behind the hashes of partitions and owners."""

    partitions: dict[int, str] = msgspec.field(default_factory=dict)
    owners: dict[int, str] = msgspec.field(default_factory=dict)

    def add(self, other: Names) -> None:
        for mine, theirs in ((self.partitions, other.partitions), (self.owners, other.owners)):
            if len(mine) < _NAMES:
                mine |= theirs


@dataclass(slots=True)
class Reading:
    """Turns Arrow batches of effects into columns; keeps only messages of one range of one stream."""

    stream: str
    first: int
    last: int
    names: Names = field(default_factory=Names)

    def columns(self, batch: pa.RecordBatch) -> dict[str, Ints]:
        """sequence, at, finished, partition, key, epoch, owner, outcome, attempts, took, latency; -1: unknown."""
        held = set(batch.schema.names)
        batch = batch.filter(self._ours(batch, held))
        count = batch.num_rows
        finished = micros(batch.column("finished")) if "finished" in held else np.zeros(count, dtype=np.int64)
        partition = self._hashed(batch, held, "partition", NOWHERE, self.names.partitions)
        key = self._hashed(batch, held, "key", NOWHERE, None)
        return {
            "sequence": numbers(batch.column("sequence"), 0),
            "at": numbers(batch.column("order"), 0) if "order" in held else finished,
            "finished": finished,
            "partition": partition,
            "key": np.where(key == NOWHERE, partition, key),
            "epoch": numbers(batch.column("epoch"), 0) if "epoch" in held else np.zeros(count, dtype=np.int64),
            "owner": self._hashed(batch, held, "owner", 0, self.names.owners),
            "outcome": _outcomes(batch) if "outcome" in held else np.zeros(count, dtype=np.int64),
            "attempts": numbers(batch.column("attempts"), 1) if "attempts" in held else np.ones(count, dtype=np.int64),
            "took": _durations(batch, held, "took"),
            "latency": _latency(batch, held, finished),
        }

    def _ours(self, batch: pa.RecordBatch, held: set[str]) -> pa.Array:
        sequence = batch.column("sequence").cast(pa.int64())
        ours = pc.and_(pc.greater_equal(sequence, self.first), pc.less_equal(sequence, self.last))
        if "stream" in held:
            stream = _coded(batch.column("stream"))
            same = pc.equal(stream.dictionary.cast(pa.string()), self.stream).take(stream.indices)
            ours = pc.and_(ours, same.fill_null(True))
        return ours.fill_null(False)

    def _hashed(
        self, batch: pa.RecordBatch, held: set[str], name: str, missing: int, names: dict[int, str] | None
    ) -> Ints:
        if name not in held or not batch.num_rows:
            return np.full(batch.num_rows, missing, dtype=np.int64)
        coded = _coded(batch.column(name))
        words = coded.dictionary.cast(pa.string()).to_pylist()
        hashes = np.array([missing if word is None else hashed(word) for word in [*words, None]], dtype=np.int64)
        if names is not None and len(names) < _NAMES:
            names |= {code: word for code, word in zip(hashes.tolist(), words, strict=False) if word is not None}
        found: Ints = hashes[coded.indices.cast(pa.int64()).fill_null(len(words)).to_numpy(zero_copy_only=False)]
        return found


def hashed(word: str) -> int:
    """The text as a signed 64-bit number."""
    number = xxhash.xxh64_intdigest(word.encode())
    return int(number - (1 << 64) if number >= 1 << 63 else number)


def numbers(array: pa.Array, missing: int) -> Ints:
    """The column as integers, missing values filled."""
    filled = array.cast(pa.int64(), safe=False)
    return _ints((filled.fill_null(missing) if filled.null_count else filled).to_numpy(zero_copy_only=False))


def micros(array: pa.Array) -> Ints:
    """A column of timestamps, or of seconds since 1970, as microseconds; 0 where the value is missing."""
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", tz=array.type.tz), safe=False).cast(pa.int64())
        return numbers(array, 0)
    seconds = array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    return _ints((seconds * 1e6).round())


def _durations(batch: pa.RecordBatch, held: set[str], name: str) -> Ints:
    if name not in held:
        return np.full(batch.num_rows, -1, dtype=np.int64)
    seconds = batch.column(name).cast(pa.float64()).fill_null(-1e-6).to_numpy(zero_copy_only=False)
    return _ints((np.nan_to_num(seconds, nan=-1e-6) * 1e6).round())


def _latency(batch: pa.RecordBatch, held: set[str], finished: Ints) -> Ints:
    measured = _durations(batch, held, "latency")
    if "timestamp" not in held:
        return measured
    stored = micros(batch.column("timestamp"))
    return np.where((measured < 0) & (stored > 0) & (finished > 0), np.maximum(finished - stored, 0), measured)


def _outcomes(batch: pa.RecordBatch) -> Ints:
    coded = _coded(batch.column("outcome"))
    words = coded.dictionary.cast(pa.string()).to_pylist()
    codes = np.array([_OUTCOMES.get(word, ENDED) for word in [*words, None]], dtype=np.int64)
    found: Ints = codes[coded.indices.cast(pa.int64()).fill_null(len(words)).to_numpy(zero_copy_only=False)]
    return found


def _coded(array: pa.Array) -> pa.DictionaryArray:
    return array if pa.types.is_dictionary(array.type) else array.dictionary_encode()


def _ints(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)
