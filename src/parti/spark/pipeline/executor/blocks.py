"""Messages in a shuffle: whole blocks of them, each one binary value, instead of one row per message.

One row per message cost the JVM's tasks 2.0 us of processor time (out of Arrow, into the shuffle, through the sort, and
back into Arrow), as much as the Python side of it; in blocks it is 0.9 us, most of that for the bytes.

Order needs no sort of rows either. A reading task yields its range in order, and the ranges of a batch do not overlap:
so the blocks of a task, sorted by the sequence of their first message, are its messages in stream order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from parti.spark.tokens import Partitioning
from parti.wire.columns import HEADER_TYPE

TASK: Final = "task"
FIRST: Final = "first"
BLOCK: Final = "block"
DDL: Final = f"{TASK} int, {FIRST} bigint, {BLOCK} binary"
_SCHEMA: Final = pa.schema([(TASK, pa.int32()), (FIRST, pa.int64()), (BLOCK, pa.binary())])
PARKED: Final = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.binary()),
        ("subject", pa.string()),
        ("partition", pa.int32()),
        ("sequence", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("headers", HEADER_TYPE),
        ("parked_until", pa.float64()),
        ("parked_times", pa.int32()),
        ("parked_alone", pa.bool_()),
    ]
)
"""The columns of all messages of a pipeline that parks, whether they come from the stream or were parked."""
_ROWS: Final = 4096  # average messages per block: the fixed cost of a block, some 0.1 ms, is small beside theirs
BLOCK_BYTES: Final = 8 << 20  # ... or payload bytes in the blocks of all tasks together, whatever their number


@dataclass(frozen=True, slots=True)
class Packing:
    """Cuts messages into blocks, one per handling task; immutable and picklable."""

    tasks: int
    parking: bool = False
    """Whether parked messages are included, with additional columns."""
    by_key: bool = False
    """Whether the key chooses the task, not the partition, because a key may be in several partitions."""

    def pack(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same messages as rows of `DDL`, in their original order within each task.

        Block ends depend on the messages alone, not on how they arrived: a task that runs again makes the same rows.
        Spark checks this by a checksum, and otherwise reruns the stages after it.
        """
        waiting: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            whole = completed(batch) if self.parking else batch
            sizes = np.asarray(pc.fill_null(pc.binary_length(whole.column("value")), 0), dtype=np.int64)
            start = 0
            while start < len(sizes):
                count = self._until(sizes[start:], rows, size)
                waiting.append(whole.slice(start, count))
                rows, size = rows + count, size + int(sizes[start : start + count].sum())
                start += count
                if rows >= _ROWS * self.tasks or size >= BLOCK_BYTES:
                    yield self._blocks(waiting)
                    waiting, rows, size = [], 0, 0
        if waiting:
            yield self._blocks(waiting)

    def _until(self, sizes: npt.NDArray[np.int64], rows: int, size: int) -> int:
        """How many of these messages belong to blocks that already hold `rows` rows and `size` bytes."""
        full = int(np.searchsorted(np.cumsum(sizes), BLOCK_BYTES - size)) + 1
        return min(full, _ROWS * self.tasks - rows, len(sizes))

    def _blocks(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        task = self._tasks_of(whole)
        ordered = whole.take(pa.array(np.argsort(task, kind="stable")))
        counts = np.bincount(task, minlength=self.tasks)
        filled = np.flatnonzero(counts)
        starts = (np.cumsum(counts) - counts)[filled]
        first = ordered.column("sequence").take(pa.array(starts))
        blocks = packed([ordered.slice(*span) for span in zip(starts, counts[filled], strict=True)])
        return pa.RecordBatch.from_arrays([pa.array(filled, pa.int32()), first, blocks], schema=_SCHEMA)

    def _tasks_of(self, whole: pa.RecordBatch) -> npt.NDArray[np.int32]:
        if self.by_key:
            return np.asarray(Partitioning(self.tasks).column(pc.fill_null(whole.column("key"), "")))
        # A subject without the tokens of its partition has no partition: all such messages go to one task.
        return np.asarray(pc.fill_null(whole.column("partition"), 0)) % self.tasks


def completed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with all columns of `PARKED`, in exactly its types: Spark has its own names for time zones."""
    columns = []
    for field in PARKED:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name).cast(field.type))
        elif field.name == "headers":
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(pa.repeat(pa.scalar(0, pa.int8()).cast(field.type), batch.num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=PARKED)


def unpacked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The messages of rows with one block each, block by block."""
    for batch in batches:
        for block in batch.column(BLOCK):
            with pa.ipc.open_stream(block.as_buffer()) as stream:
                yield stream.read_next_batch()


def packed(parts: list[pa.RecordBatch]) -> pa.Array:
    """Each part as a separate Arrow stream, all in one column."""
    target = pa.BufferOutputStream()
    ends = [0]
    for part in parts:
        with pa.ipc.new_stream(target, part.schema) as stream:
            stream.write_batch(part)
        ends.append(target.tell())
    offsets = pa.py_buffer(np.array(ends, dtype=np.int32))
    return pa.BinaryArray.from_buffers(pa.binary(), len(parts), [None, offsets, target.getvalue()])
