"""The batch reader: one range of a stream, fixed when the query is planned."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from parti.errors import ConfigError, DataLoss
from parti.observe.logs import get_logger
from parti.spark.plain_errors import plainly
from parti.spark.source.columns import ColumnBuilder
from parti.spark.source.options import SourceOptions
from parti.spark.source.outage import DriverLink
from parti.spark.source.preflight import check_subjects
from parti.spark.source.tasks import RangePartition, RangeTask, split, without_gaps
from parti.wire.ranges import RangeReader, StreamState

log = get_logger("spark.source")


class JetStreamReader(DataSourceReader):
    """Reads everything between two positions of a stream, complete and each message once.

    From `earliest` a task starts at the first message that exists when it starts: a stream at its limits continues to
    remove messages while the query is planned, and those were not promised.

    It has no `pushFilters`: with it Spark refuses the reader unless a setting that is off by default is on
    (docs/evidence/spark.md#s1). The option `subjects` filters where it is cheap.
    """

    def __init__(self, schema: StructType, options: SourceOptions) -> None:
        self._options = options
        columns = ColumnBuilder.of(schema, options.stream, options.key, options.partitioning)
        self._task = RangeTask.of(options, columns)

    def partitions(self) -> list[InputPartition]:
        """The range as of now, split into tasks."""
        link = DriverLink(self._options.connect, self._options.retry_budget)
        try:
            with plainly():
                return list(link.ask(self._parts))
        finally:
            link.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        assert isinstance(partition, RangePartition)
        return self._task.read(partition)

    def _parts(self, reader: RangeReader) -> list[RangePartition]:
        state, whole = self._range(reader)
        parts = split(whole.created, whole.after, whole.to, self._options, open_start=whole.open_start)
        return without_gaps(reader, state, parts) or [whole]

    def _range(self, reader: RangeReader) -> tuple[StreamState, RangePartition]:
        check_subjects(reader, self._options.stream, self._options.subjects)
        state = reader.state(self._options.stream)
        first = self._options.starting.first_sequence(reader, state)
        end = self._options.ending.first_sequence(reader, state)  # the first one that is not read, as in Kafka
        for option, place in (("startingOffsets", first), ("endingOffsets", end)):
            if place > state.last_seq + 1:
                raise ConfigError(
                    f"{option} {place} lies beyond the last sequence {state.last_seq} of stream {state.name!r}: a "
                    f"batch reads what is there, up to {state.last_seq + 1} (or latest)"
                )
        starting = self._options.starting
        if first > end and starting.at != "earliest" and not starting.is_time:
            raise ConfigError(
                f"startingOffsets {first} lies behind endingOffsets {end}, which is the first sequence not to read: "
                "exchange them"
            )
        if first < state.first_seq and first < end and state.loses:
            last = min(state.first_seq, end) - 1
            if self._options.fail_on_data_loss:
                raise DataLoss(
                    f"sequences {first} to {last} of stream {state.name!r} are gone: start at earliest, or set "
                    "failOnDataLoss to false",
                    stream=state.name,
                    first_missing=first,
                    first_available=state.first_seq,
                )
            log.warning("source.data_lost", stream=state.name, first=first, last=last)
        open_start = self._options.starting.is_open(first, state)
        return state, RangePartition(state.created, max(first, state.first_seq) - 1, end - 1, open_start=open_start)
