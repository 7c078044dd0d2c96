"""A Spark task: one range of sequences, read over a connection that the worker process keeps between tasks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from parti.errors import DataLoss, TransientError
from parti.observe.logs import get_logger
from parti.spark.columns import ColumnBuilder
from parti.spark.group_columns import GroupRange
from parti.spark.plain_errors import plainly
from parti.spark.source_options import SourceOptions
from parti.spark.worker_process import settle
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader

log = get_logger("spark.source")

# Idle connections of this worker process. Spark forks workers from a daemon, and a socket must not be shared by two of
# them, so that the process id is part of the key. A worker serves one query at a time: few are enough.
_IDLE: dict[tuple[int, ConnectOptions], RangeReader] = {}
_MOST_IDLE = 4


class RangePartition(InputPartition):
    """The messages with `after` < sequence <= `to` of one incarnation of the stream."""

    def __init__(self, created: str, after: int, to: int, group: GroupRange | None = None) -> None:
        super().__init__((after, to))
        self.created = created
        self.after = after
        self.to = to
        self.group = group

    def __repr__(self) -> str:
        return f"RangePartition({self.after}, {self.to}]"


def split(
    created: str, after: int, to: int, options: SourceOptions, group: GroupRange | None = None
) -> list[RangePartition]:
    """The range as tasks of nearly the same size: none smaller than the minimum, unless the maximum asks for it.

    Every task costs about 25 ms (SPARK.md 3.2), reading 20,000 messages about 30 ms: smaller tasks are mostly cost.
    """
    count = to - after
    if count <= 0:
        return []
    tasks = min(options.min_partitions or os.cpu_count() or 1, max(count // options.min_records, 1))
    if options.max_records is not None:
        tasks = max(tasks, -(-count // options.max_records))
    cuts = [after + count * index // tasks for index in range(tasks + 1)]
    return [RangePartition(created, low, high, group) for low, high in pairwise(cuts)]


@dataclass(frozen=True, slots=True)
class RangeTask:
    """What all tasks of a query have in common; travels to the executors inside the reader."""

    connect: ConnectOptions
    stream: str
    subjects: tuple[str, ...]
    columns: ColumnBuilder
    fail_on_data_loss: bool
    patience: float

    @classmethod
    def of(cls, options: SourceOptions, columns: ColumnBuilder) -> RangeTask:
        return cls(
            options.connect,
            options.stream,
            options.subjects,
            columns,
            options.fail_on_data_loss,
            options.retry_budget,
        )

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        """All messages of the range that the stream holds, in order, or an error; with the same columns every time."""
        if partition.after >= partition.to:
            return
        with plainly(), _borrowed(self.connect, self.patience) as reader:
            if self.fail_on_data_loss:
                yield from self._read_all(reader, partition)
            else:
                yield from self._read_what_is_left(reader, partition)

    def _read_all(self, reader: RangeReader, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        for batch in self._batches(reader, partition, partition.after, self._needed(partition)):
            yield self._built(partition, batch)

    def _read_what_is_left(self, reader: RangeReader, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        """As `_read_all`, but what the stream lost meanwhile is logged and passed over."""
        wanted = tuple({*self._needed(partition), "sequence"})
        position = partition.after
        while position < partition.to:
            try:
                for batch in self._batches(reader, partition, position, wanted):
                    position = batch.column("sequence")[-1].as_py()
                    yield self._built(partition, batch)
                return
            except DataLoss as loss:
                last = min(loss.first_available - 1, partition.to)
                log.warning("source.data_lost", stream=self.stream, first=loss.first_missing, last=last)
                position = max(position, last)

    def _needed(self, partition: RangePartition) -> tuple[str, ...]:
        return self.columns.needed if partition.group is None else partition.group.needed(self.columns)

    def _built(self, partition: RangePartition, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.columns.build(batch) if partition.group is None else partition.group.build(self.columns, batch)

    def _batches(
        self, reader: RangeReader, partition: RangePartition, after: int, wanted: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        group = partition.group
        return reader.read(
            self.stream if group is None else group.stream,
            after,
            partition.to,
            subjects=self.subjects if group is None else group.subjects,
            columns=wanted,
            created=partition.created,
        )


@contextlib.contextmanager
def _borrowed(connect: ConnectOptions, patience: float) -> Iterator[RangeReader]:
    """A reader with a live connection, for this task alone; it is kept for the next one only if all went well."""
    settle()
    key = (os.getpid(), connect)
    reader = _IDLE.pop(key, None) or RangeReader(connect, name="parti-spark-task")
    reader.patience = patience
    with contextlib.suppress(TransientError):  # the read itself tries for as long as its patience lasts
        reader.check()
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    while len(_IDLE) >= _MOST_IDLE:
        _IDLE.pop(next(iter(_IDLE))).close()
    _IDLE[key] = reader
