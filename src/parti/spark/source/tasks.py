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
from parti.spark.member.columns import GroupRange
from parti.spark.plain_errors import plainly
from parti.spark.source.columns import ColumnBuilder
from parti.spark.source.options import SourceOptions
from parti.spark.worker_process import settle
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader, StreamState

log = get_logger("spark.source")

# Idle connections of this worker process. Spark forks workers from a daemon, and two of them must not share a socket,
# so the process id is part of the key. A worker serves one query at a time: few are enough.
_IDLE: dict[tuple[int, ConnectOptions], RangeReader] = {}
_MOST_IDLE = 4


class RangePartition(InputPartition):
    """The messages with `after` < sequence <= `to` of one incarnation of the stream.

    With `open_start`, those that exist when the task starts: earlier ones were not promised.
    """

    def __init__(
        self, created: str, after: int, to: int, group: GroupRange | None = None, *, open_start: bool = False
    ) -> None:
        super().__init__((after, to))
        self.open_start = open_start
        self.created = created
        self.after = after
        self.to = to
        self.group = group

    def __repr__(self) -> str:
        return f"RangePartition({self.after}, {self.to}]"


def split(
    created: str,
    after: int,
    to: int,
    options: SourceOptions,
    group: GroupRange | None = None,
    *,
    open_start: bool = False,
) -> list[RangePartition]:
    """The range as tasks of nearly the same size: none smaller than the minimum, unless the maximum requires it.

    Every task costs about 25 ms (docs/evidence/spark.md#s14), reading 20,000 messages about 30 ms: smaller tasks are
    mostly overhead.
    """
    count = to - after
    if count <= 0:
        return []
    tasks = min(options.min_partitions or os.cpu_count() or 1, max(count // options.min_records, 1))
    if options.max_records is not None:
        tasks = max(tasks, -(-count // options.max_records))
    cuts = [after + count * index // tasks for index in range(tasks + 1)]
    return [RangePartition(created, low, high, group, open_start=open_start) for low, high in pairwise(cuts)]


def without_gaps(reader: RangeReader, state: StreamState, parts: list[RangePartition]) -> list[RangePartition]:
    """The tasks in whose ranges the leader holds messages; a million deleted messages do not become a thousand tasks.

    Returns all tasks if the stream lost messages from its front meanwhile: then the tasks find out what is missing.
    Also if it has another leader by now, which may not know the whole range yet.
    """
    if not state.num_deleted or len(parts) < 2:
        return parts
    held: list[RangePartition] = []
    following: int | None = 0
    for part in parts:
        if following is not None and following <= part.after:
            following = reader.next_sequence(state.name, part.after + 1)
        if following is None:
            break
        if following <= part.to:
            held.append(part)
    now = reader.state(state.name)
    moved = state.loses and now.first_seq - 1 > max(parts[0].after, state.first_seq - 1)
    return parts if moved or now.leader != state.leader else held


@dataclass(frozen=True, slots=True)
class RangeTask:
    """What all tasks of a query share; sent to the executors inside the reader."""

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
            try:
                for batch in self._batches(reader, partition):
                    yield self._built(partition, batch)
            except DataLoss as loss:  # only for the whole stream, when losses are allowed
                if self.fail_on_data_loss:
                    raise
                self._log_lost(loss.first_missing, min(loss.first_available - 1, partition.to))

    def _log_lost(self, first: int, last: int) -> None:
        log.warning("source.data_lost", stream=self.stream, first=first, last=last)

    def _needed(self, partition: RangePartition) -> tuple[str, ...]:
        return self.columns.needed if partition.group is None else partition.group.needed(self.columns)

    def _built(self, partition: RangePartition, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.columns.build(batch) if partition.group is None else partition.group.build(self.columns, batch)

    def _batches(self, reader: RangeReader, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        group = partition.group
        return reader.read(
            self.stream if group is None else group.stream,
            partition.after,
            partition.to,
            subjects=self.subjects if group is None else group.subjects,
            columns=self._needed(partition),
            created=partition.created,
            open_start=partition.open_start,
            on_loss=None if self.fail_on_data_loss else self._log_lost,
        )


@contextlib.contextmanager
def _borrowed(connect: ConnectOptions, patience: float) -> Iterator[RangeReader]:
    """A reader with a live connection, for this task alone; kept for the next task only if all went well."""
    settle()
    key = (os.getpid(), connect)
    reader = _IDLE.pop(key, None) or RangeReader(connect, name="parti-spark-task")
    reader.patience = patience
    with contextlib.suppress(TransientError):  # the read itself retries while its patience lasts
        reader.check()
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    while len(_IDLE) >= _MOST_IDLE:
        _IDLE.pop(next(iter(_IDLE))).close()
    _IDLE[key] = reader
