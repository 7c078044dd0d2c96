"""The streaming reader: which sequences belong to the next batch, and what is committed to JetStream when one is done.

The object lives in its own process on the driver while the query runs. Another copy, made by Spark's planner, is sent
to the executors and only reads ranges (docs/evidence/spark.md#s3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from parti.clock import Clock, SystemClock
from parti.errors import ConfigError, DataLoss
from parti.observe.logs import get_logger
from parti.spark.plain_errors import plainly
from parti.spark.source.admission import Admission
from parti.spark.source.columns import ColumnBuilder
from parti.spark.source.commit import commit_of
from parti.spark.source.offsets import Offset
from parti.spark.source.options import SourceOptions
from parti.spark.source.outage import DriverLink
from parti.spark.source.preflight import check_subjects
from parti.spark.source.tasks import RangePartition, RangeTask, split, without_gaps
from parti.wire.ranges import BehindLeader, RangeReader, StreamState

if TYPE_CHECKING:
    from parti.spark.member.progress import GroupProgress

T = TypeVar("T")

log = get_logger("spark.source")

_UNLIMITED = 1 << 60  # rows; see getDefaultReadLimit


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream batch by batch; a batch that Spark replays has the same messages in the same order."""

    def __init__(self, schema: StructType, options: SourceOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        columns = ColumnBuilder.of(schema, options.stream, options.key, options.partitioning)
        self._task = RangeTask.of(options, columns)
        self._admission = Admission.of(options)
        self._commit = commit_of(options)
        self._link: DriverLink | None = None
        self._group: GroupProgress | None = None
        self._prepared = False
        self._committed: tuple[str, int] | None = None
        self._target: tuple[str, int] | None = None  # of AvailableNow: (created, last sequence)
        self._seen: StreamState | None = None
        self._begins = 0  # sequence of the first message of the next batch
        self._last_batch: float | None = None
        self._open = options.starting.at == "earliest"
        """Whether the query's first batch starts wherever the stream does: earlier messages were not promised."""
        self._planned: Offset | None = None  # the end of the last batch that this process planned

    @plainly()
    def initialOffset(self) -> dict[str, Any]:
        """Where a new query starts; waits through an outage, because a wrong start could never be corrected."""
        if (group := self._membership()) is not None:
            return group.initial().to_json()
        return self._ask(self._initial).to_json()

    @plainly()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch, or `start` when there is none, also while NATS is unreachable.

        `start` is done: Spark has stored the batch that ended there. For the last batch of a query this is the only
        sign of it, so the batch is committed here as well as in `commit`.
        """
        finite = self._target is not None or isinstance(limit, ReadAllAvailable)
        if (group := self._membership()) is not None:
            return group.latest(start, finite=finite).to_json()
        begin = self._offset(start)
        # Returning `start` ends a query that was started with AvailableNow or Once: those wait for the answer instead.
        ask = self._ask if finite else self._ask_briefly
        if self._options.commit_last_batch and begin.sequence > begin.started:
            ask(lambda reader: self._commit_once(reader, begin))
        state = ask(lambda reader: self._observe(reader, begin))
        if state is None:
            return begin.to_json()
        self._planned = self._next(begin, state, finite=finite, everything=isinstance(limit, ReadAllAvailable))
        return self._planned.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Always a number of rows, so that ReadAllAvailable in `latestOffset` means Trigger.Once."""
        return ReadMaxRows(self._options.max_offsets or _UNLIMITED)

    @plainly()
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The end of the stream at this trigger, for `latestOffset` in the query's progress; it shows the lag."""
        if (group := self._membership()) is not None:
            found = group.report()
            return None if found is None else found.to_json()
        state = self._seen or self._ask_briefly(lambda reader: reader.state(self._options.stream))
        self._seen = None
        return None if state is None else Offset(state.name, state.created, state.last_seq, 0).to_json()

    @plainly()
    def prepareForTriggerAvailableNow(self) -> None:
        """Read up to what the stream holds now, and nothing that comes later."""
        if (group := self._membership()) is not None:
            group.prepare_available_now()
        state = self._ask(lambda reader: reader.state(self._options.stream))
        self._target = (state.created, state.last_seq)

    @plainly()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch; the same range for the same offsets, also in another run of the query."""
        if (group := self._membership()) is not None:
            found = group.ranges(start, end)
            if found is None:
                return []
            fresh = self._open and not start["lease"] and found.after == start["sequence"]
            return list(split(found.created, found.after, found.to, self._options, found, open_start=fresh))
        begin, finish = self._offset(start), self._offset(end)
        after = begin.begin_of(finish)
        if finish.sequence <= after:
            return []
        state = self._ask(lambda reader: reader.state(self._options.stream))
        if state.created != finish.created:
            self._lost(
                after + 1,
                finish.sequence,
                f"stream {state.name!r} was deleted and recreated at {state.created}; the batch up to sequence "
                f"{finish.sequence} belongs to the one made at {finish.created}",
            )
            return []
        gone = min(state.first_seq - 1, finish.sequence)
        # A batch that another process planned is in the checkpoint: it is replayed unchanged, or its loss is reported.
        fresh = self._open and after == finish.started and finish == self._planned
        if gone > after and state.loses and not fresh:
            which = f"sequences {after + 1} to {gone} ({gone - after}) are gone unread"
            self._lost(after + 1, gone, f"stream {state.name!r} begins at sequence {state.first_seq} by now: {which}")
        parts = split(finish.created, max(after, gone), finish.sequence, self._options, open_start=fresh)
        return list(self._ask(lambda reader: without_gaps(reader, state, parts)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        assert isinstance(partition, RangePartition)
        return self._task.read(partition)

    @plainly()
    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends here is in the checkpoint. A commit that fails now is repeated with the next one."""
        if (group := self._membership()) is not None:
            group.commit(end)
        else:
            self._ask_briefly(lambda reader: self._commit_once(reader, self._offset(end)))

    def stop(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._link is not None:
            self._link.close()

    def _ask(self, question: Callable[[RangeReader], T]) -> T:
        return self._driver_link().ask(question)

    def _ask_briefly(self, question: Callable[[RangeReader], T]) -> T | None:
        return self._driver_link().ask_briefly(question)

    def _membership(self) -> GroupProgress | None:
        """The query as a member of its group: joins at the driver's first call, never in the copies for tasks."""
        if self._group is None and self._options.group is not None:
            from parti.spark.member.progress import GroupProgress

            self._group = GroupProgress(self._options, self._options.group, self._driver_link(), self._clock)
        return self._group

    def _driver_link(self) -> DriverLink:
        if self._link is None:
            self._link = DriverLink(self._options.connect, self._options.retry_budget, self._clock)
        return self._link

    def _offset(self, found: dict[str, Any]) -> Offset:
        return Offset.from_json(found, stream=self._options.stream)

    def _initial(self, reader: RangeReader) -> Offset:
        check_subjects(reader, self._options.stream, self._options.subjects)
        state = reader.state(self._options.stream)
        first = self._options.starting.first_sequence(reader, state)
        if first > state.last_seq + 1:
            raise ConfigError(f"startingOffsets {first} lies beyond the last sequence {state.last_seq} of {state.name}")
        self._open = self._options.starting.is_open(first, state)
        self._prepare(reader, state, first - 1)
        return Offset(state.name, state.created, first - 1, first - 1)

    def _prepare(self, reader: RangeReader, state: StreamState, done: int) -> None:
        if self._commit is not None and not self._prepared:
            self._commit.prepare(reader, state, done)
        self._prepared = True

    def _observe(self, reader: RangeReader, begin: Offset) -> StreamState:
        """The stream's state; asks again if the leader reports less than was already read."""
        state = reader.state(self._options.stream)
        if state.created == begin.created and state.last_seq < begin.sequence and state.replicas > 1:
            raise BehindLeader(f"stream {state.name!r} ends at {state.last_seq}, but {begin.sequence} was read already")
        self._prepare(reader, state, begin.sequence)
        self._seen = state
        self._begins = 0
        if state.num_deleted and state.created == begin.created and begin.sequence < state.last_seq:
            self._begins = reader.next_sequence(state.name, begin.sequence + 1) or state.last_seq
        return state

    def _next(self, begin: Offset, state: StreamState, *, finite: bool, everything: bool) -> Offset:
        begin = self._after_loss(begin, state)
        target = state.last_seq
        if self._target is not None and self._target[0] == state.created:
            target = min(target, self._target[1])
        if target <= begin.sequence:
            return begin
        now = self._clock.now()
        waited = now - self._last_batch if self._last_batch is not None else self._admission.max_delay
        if not finite and self._admission.too_few(state, begin.sequence, target, waited):
            return begin
        self._last_batch = now
        if everything:
            return replace(begin, sequence=target)
        return replace(begin, sequence=self._admission.end(state, begin.sequence, target, self._begins))

    def _after_loss(self, begin: Offset, state: StreamState) -> Offset:
        """Where to continue in a stream that has lost messages; raises DataLoss unless that is allowed."""
        if state.created != begin.created:
            self._lost(
                begin.sequence + 1,
                None,
                f"stream {state.name!r} was deleted and recreated at {state.created}; the query was at sequence "
                f"{begin.sequence} of the one made at {begin.created}",
            )
            return Offset(state.name, state.created, 0, 0)
        if state.last_seq < begin.sequence:
            self._lost(
                state.last_seq + 1,
                begin.sequence,
                f"stream {state.name!r} ends at sequence {state.last_seq}, but the query has read up to "
                f"{begin.sequence}: the server lost its tail, and numbers are used again",
            )
            return replace(begin, sequence=state.last_seq, started=min(begin.started, state.last_seq))
        return begin

    def _lost(self, first: int, last: int | None, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(
                f"{what}; set failOnDataLoss to false to continue without what is gone, or start with a new checkpoint",
                stream=self._options.stream,
                first_missing=first,
                first_available=(last or first) + 1,
                count=None if last is None else last - first + 1,
            )
        log.warning("source.data_lost", stream=self._options.stream, first=first, last=last, what=what)

    def _commit_once(self, reader: RangeReader, offset: Offset) -> None:
        done = (offset.created, offset.sequence)
        if self._commit is None or done == self._committed:
            return
        if reader.state(offset.stream).created != offset.created:
            return  # a commit would purge, or skip, unread messages of the new stream
        self._commit.commit(reader, offset.sequence)
        self._committed = done
