"""A member's messages as other members see them: the publisher's subject, the group's partition, the first sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from parti.errors import ProtocolError
from parti.spark.source.columns import ColumnBuilder
from parti.spark.source.schema import HEADERS
from parti.spark.tokens import Partitioning

_SOURCE = "Nats-Stream-Source"


@dataclass(frozen=True, slots=True)
class GroupRange:
    """What the tasks of a batch read when the query is a member of a group; sent with each task."""

    stream: str
    created: str
    after: int
    to: int
    subjects: tuple[str, ...]
    depth: int
    """Leading tokens of a subject that hold the partition; the rest is the publisher's subject."""
    elastic: bool
    """The stream is a work queue: the original sequence of a message is in its header."""
    floors: dict[int, int]
    """Partition -> sequence up to which it was done before; a lagging replica may still hold those messages."""

    def needed(self, columns: ColumnBuilder) -> tuple[str, ...]:
        """The columns to request from the range reader."""
        headers = {HEADERS} if self.elastic and "sequence" in columns.schema.names else set()
        return tuple(sorted({*columns.needed, "subject", "sequence", *headers}))

    def build(self, columns: ColumnBuilder, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The messages of a batch that are not done, in the requested columns."""
        partition = Partitioning(held_by=self.depth).column(batch.column("subject"))
        if self.floors:
            numbers = partition.fill_null(-1).to_numpy(zero_copy_only=False)
            done = np.array([self.floors.get(number, 0) for number in range(int(numbers.max(initial=-1)) + 2)])
            left = batch.column("sequence").to_numpy() > done[numbers]  # index -1 is the last entry, which is 0
            if not left.all():
                mask = pa.array(left)
                batch, partition = batch.filter(mask), partition.filter(mask)
        batch = _replaced(batch, "subject", _publishers(batch.column("subject"), self.depth))
        if self.elastic and HEADERS in batch.schema.names:
            batch = _replaced(batch, "sequence", _first_sequences(batch.column(HEADERS)))
        built = columns.build(batch)
        return _replaced(built, "partition", partition) if "partition" in built.schema.names else built


def _replaced(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    columns = [column if field.name == name else batch.column(field.name) for field in batch.schema]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _publishers(subjects: pa.Array, depth: int) -> pa.Array:
    """Subjects without their first `depth` tokens."""
    import pyarrow.compute as pc  # not on the driver, where nothing is computed

    return pc.replace_substring_regex(subjects, r"\A" + r"[^.]*\." * depth, "", max_replacements=1)


def _first_sequences(headers: pa.Array) -> pa.Array:
    """For each message, its sequence in the stream that the work queue is sourced from."""
    import pyarrow.compute as pc

    entries = headers.flatten()
    mask = pc.equal(entries.field("key"), _SOURCE)
    rows = pc.list_parent_indices(headers).filter(mask)
    if len(rows) != len(headers) or rows.to_pylist() != list(range(len(headers))):
        raise ProtocolError(f"a message of the work queue has no single header {_SOURCE}: another publisher stored it")
    words = pc.split_pattern(entries.field("value").filter(mask).cast(pa.string()), " ")
    return pc.list_element(words, 1).cast(pa.int64())
