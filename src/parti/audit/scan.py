"""The tasks of an audit: one kind reads messages and effects, the other judges what belongs together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from parti.audit.effects import BURIED, OPEN, Reading, micros, numbers
from parti.audit.measures import Spread, Tempo
from parti.audit.order import Judge
from parti.audit.packing import TOGETHER, Merge, packets, unpack
from parti.audit.presence import BITMAPS, DONE, PUBLISHED, WAITING, Bits, Ints, SeenSequences, weights

ROWS: Final = "kind string, side int, place int, low bigint, data binary"
"""A row that every task returns: its kind, its consumer, its place, its rank there, and packed content."""
_SCHEMA: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("side", pa.int32()),
        ("place", pa.int32()),
        ("low", pa.int64()),
        ("data", pa.binary()),
    ]
)
PACKET, TEMPO, FACTS, NAMES, WEIGHT, JUDGED, FOUND = "packet", "tempo", "facts", "names", "weight", "judged", "found"
_FOUND: Final = 1_000  # maximum rows per batch: these are examples, not evidence


class ScanFacts(msgspec.Struct):
    """Facts about a consumer's effects that do not depend on their order."""

    effects: int = 0
    buried: int = 0
    deliveries: int = 0
    """Attempts of all handlers, if the effects report them."""
    took: Spread = msgspec.field(default_factory=Spread)

    def add(self, other: ScanFacts) -> None:
        self.effects += other.effects
        self.buried += other.buried
        self.deliveries += other.deliveries
        self.took.add(other.took)

    def feed(self, columns: dict[str, Ints]) -> None:
        self.effects += len(columns["sequence"])
        self.buried += int((columns["outcome"] == BURIED).sum())
        self.deliveries += int(columns["attempts"].sum())
        self.took.feed(columns["took"])


@dataclass(frozen=True, slots=True)
class ReadPublished:
    """For an executor, over column `sequence` and optionally `timestamp`: which messages exist, and since when."""

    first: int
    last: int
    places: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seen, tempo = SeenSequences(), Tempo()
        for batch in gathered(batches):
            sequence = numbers(batch.column("sequence"), 0)
            inside = (sequence >= self.first) & (sequence <= self.last)
            seen.add(sequence[inside])
            if "timestamp" in batch.schema.names:
                stored = micros(batch.column("timestamp"))[inside]
                tempo.feed(stored[stored > 0])
        yield from _bitmaps(PUBLISHED, 0, seen, self.places)
        yield _row(TEMPO, 0, 0, 0, msgspec.msgpack.encode(tempo))


@dataclass(frozen=True, slots=True)
class ReadEffects:
    """For an executor, over the columns of effects: counts, which messages, and packets for the judging tasks."""

    stream: str
    first: int
    last: int
    places: int
    side: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reading = Reading(self.stream, self.first, self.last)
        done, waiting, facts = SeenSequences(), SeenSequences(), ScanFacts()
        for batch in gathered(batches):
            columns = reading.columns(batch)
            ended = columns["outcome"] != OPEN
            if not ended.all():
                waiting.add(columns["sequence"][~ended])
                columns = {name: column[ended] for name, column in columns.items()}
            if len(columns["sequence"]):
                done.add(columns["sequence"])
                facts.feed(columns)
                for place, low, data in packets(columns, self.places):
                    yield _row(PACKET, self.side, place, low, data)
        yield from _bitmaps(DONE, self.side, done, self.places)
        yield from _bitmaps(WAITING, self.side, waiting, self.places)
        yield _row(FACTS, self.side, 0, 0, msgspec.msgpack.encode(facts))
        yield _row(NAMES, self.side, 0, 0, msgspec.msgpack.encode(reading.names))


@dataclass(frozen=True, slots=True)
class Find:
    """For an executor: the rows of some messages, each as a mapping of its columns to text."""

    sequences: tuple[int, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = pa.array(self.sequences, pa.int64())
        for batch in batches:
            found = batch.filter(pc.is_in(batch.column("sequence").cast(pa.int64()), wanted))
            for row in found.to_pylist()[:_FOUND]:
                said = {name: None if value is None else str(value) for name, value in row.items()}
                yield _row(FOUND, 0, 0, row["sequence"], msgspec.msgpack.encode(said))


def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on an executor, over all rows of its places, sorted by rank: counts and verdicts; passes other rows on."""
    blocks: dict[int, dict[tuple[str, int], Bits]] = {}
    sides = ((Merge(), Judge()), (Merge(), Judge()))
    for batch in batches:
        for kind, side, _, low, data in zip(*(batch.column(name) for name in _SCHEMA.names), strict=True):
            word, number, rank = kind.as_py(), side.as_py(), low.as_py()
            if word == PACKET:
                merge, judging = sides[number]
                for columns in merge.add(rank, unpack(data.as_buffer())):
                    judging.feed(columns)
            elif word in BITMAPS:
                bits = np.frombuffer(data.as_buffer(), dtype=np.uint8)
                known = blocks.setdefault(rank, {})
                name = (word, number)
                known[name] = known[name] | bits if name in known else bits.copy()
            else:
                yield _row(word, number, 0, rank, data.as_py())
    for block, found in blocks.items():
        yield _row(WEIGHT, 0, 0, block, msgspec.msgpack.encode(weights(block, found)))
    for number, (merge, judging) in enumerate(sides):
        for columns in merge.finish():
            judging.feed(columns)
        yield _row(JUDGED, number, 0, 0, msgspec.msgpack.encode(judging.finish()))


def gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merges small Arrow batches and splits large ones into about the number of rows that are processed at once."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        for start in range(0, batch.num_rows, TOGETHER):
            held.append(batch.slice(start, TOGETHER))
            count += held[-1].num_rows
            if count >= TOGETHER:
                yield _joined(held)
                held, count = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _bitmaps(kind: str, side: int, seen: SeenSequences, places: int) -> Iterator[pa.RecordBatch]:
    for block, bits in seen.blocks.items():
        yield _row(kind, side, block % places, block, bits.tobytes())


def _row(kind: str, side: int, place: int, low: int, data: bytes) -> pa.RecordBatch:
    columns = [[kind], [side], [place], [low], [data]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
