"""The writers behind `format("jetstream")`: a task returns only when the stream has stored each of its rows.

A task that is run again, or a micro-batch that is replayed after a restart, publishes the same rows under the same
ids, so that inside the stream's duplicate window they are stored once. What the ids are made of: the streaming query
and its batch (or, in a plain batch job, the job), the partition, the chunk of rows inside it, and the chunk's content.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, StringType, StructType

from parti.errors import ConfigError, UsageError
from parti.spark.options import (
    CONNECTION_OPTIONS,
    Option,
    OptionTable,
    choice,
    connect_options,
    duration,
    positive,
    text,
)
from parti.spark.worker_process import settle
from parti.subjects import validate_subject, validate_token
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import HEADERS, Rows, chunk_id, chunks
from parti.wire.publisher import Publisher
from parti.wire.target import Target, find_target

WRITER_OPTIONS = OptionTable(
    (
        *CONNECTION_OPTIONS,
        Option("subject", None, validate_subject, "subject of every row; without it the column `subject` decides"),
        Option("stream", None, text, "the stream that must take the rows; one that belongs to another is refused"),
        Option(
            "atomic",
            "auto",
            choice("auto", "true", "false"),
            "publish chunks all-or-nothing: `auto` where the stream has allow_atomic, `true` demands it",
        ),
        Option(
            "maxInFlight",
            "4000",
            positive,
            "rows of a task that wait for their acknowledgement at the same time; a chunk of 1000 always may",
        ),
        Option(
            "retryTimeout",
            "30s",
            duration,
            "how long a task goes on while nothing is acknowledged (outage, full stream), before it fails",
        ),
    ),
    # Spark's own options of a streaming query travel in the same map.
    accepted=("checkpointLocation", "path", "queryName"),
)

READER_COLUMNS = frozenset({"key", "partition", "sequence", "timestamp", "stream"})
"""Columns of the reader that say where a row came from; a row that is passed on may keep them, they are not written."""

_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"  # local properties that Spark sets for its tasks


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What one task has had acknowledged."""

    partition: int
    messages: int
    duplicates: int


class _Writer:
    """What both writers do. Built on the driver, where it checks all that can be known before the first row."""

    def __init__(self, schema: StructType, options: Mapping[str, str], overwrite: bool) -> None:
        if overwrite:
            raise UsageError("a stream cannot be overwritten: use mode('append'), or outputMode('append' or 'update')")
        given = WRITER_OPTIONS.parse(options)
        self.connect: ConnectOptions = connect_options(options)
        self.subject: str | None = given["subject"]
        self.stream: str | None = given["stream"] and validate_token(given["stream"], what="option stream")
        self.atomic = given["atomic"] != "false"
        self.max_in_flight: int = given["maxInFlight"]
        self.patience: float = given["retryTimeout"]
        self.job = uuid.uuid4().hex
        check_columns(schema, subject_given=self.subject is not None)
        self._check_stream(demand_atomic=given["atomic"] == "true")

    def _check_stream(self, *, demand_atomic: bool) -> None:
        if self.stream is None and self.subject is None:
            if demand_atomic:
                raise ConfigError(
                    "atomic=true needs the option stream (or subject), to know which stream must allow it"
                )
            return  # each row names its subject: the tasks will see
        # Spark builds a writer for every micro-batch: an outage now must cost time, not the query.
        target = find_target(self.connect, stream=self.stream, subject=self.subject or "", patience=self.patience)
        _check_target(target, demand_atomic=demand_atomic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """When this returns, the stream has stored every row of the task."""
        settle()
        task = TaskContext.get()
        assert task is not None
        query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        # Also inside foreachBatch a plain write belongs to the query's batch, and is replayed with it.
        run, step = (query.replace("-", ""), batch) if query and batch else (self.job, "0")
        scope = f"{run[:8]}-{step}-{task.partitionId()}"
        with Publisher(
            self.connect,
            stream=self.stream,
            atomic=self.atomic,
            max_in_flight=self.max_in_flight,
            patience=self.patience,
            name="parti-spark-sink",
        ) as publisher:
            for number, rows in enumerate(chunks(self._rows(part) for part in iterator)):
                publisher.publish(rows, chunk_id(scope, number, rows, salt=run))
            done = publisher.flush()
        return Written(task.partitionId(), done.messages, done.duplicates)

    def _rows(self, part: pa.RecordBatch) -> Rows:
        names = part.schema.names
        if self.subject is not None:
            subject = pa.repeat(pa.scalar(self.subject.encode(), pa.binary()), part.num_rows)
        else:
            subject = part.column("subject").cast(pa.binary())
        return Rows(
            value=part.column("value").cast(pa.binary()),
            subject=subject,
            headers=part.column("headers").cast(HEADERS) if "headers" in names else None,
            msg_id=part.column("msg_id").cast(pa.binary()) if "msg_id" in names else None,
        )


class JetStreamBatchWriter(_Writer, DataSourceArrowWriter):
    """`df.write.format("jetstream").mode("append")`; a task that is tried again stores nothing twice."""


class JetStreamStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream.format("jetstream")`; a micro-batch that is replayed stores nothing twice."""


def check_columns(schema: StructType, *, subject_given: bool) -> None:
    """ConfigError unless the columns are ones the sink writes, with types it writes."""
    texts = (BinaryType, StringType)
    types: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
    wanted = ["value"] if subject_given else ["value", "subject"]
    for name in wanted:
        if name not in types:
            hint = "; add the column, or the option subject" if name == "subject" else ""
            raise ConfigError(f"the sink needs a column {name!r}, and the rows have {', '.join(types) or 'none'}{hint}")
    for name in ("value", "subject", "msg_id"):
        if name in types and not isinstance(types[name], texts):
            raise ConfigError(f"column {name!r} is {types[name].simpleString()}: cast it to binary or string")
    if "headers" in types and not _is_headers(types["headers"]):
        raise ConfigError(
            f"column 'headers' is {types['headers'].simpleString()}: make it array<struct<key:string,value:binary>>"
        )
    extra = sorted(set(types) - {"value", "subject", "headers", "msg_id"} - READER_COLUMNS)
    if extra:
        raise ConfigError(f"the sink does not write the columns {', '.join(extra)}: put them into value, or drop them")


def _is_headers(kind: Any) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = [(field.name, field.dataType) for field in kind.elementType.fields]
    return [name for name, _ in fields] == ["key", "value"] and all(
        isinstance(inner, BinaryType | StringType) for _, inner in fields
    )


def _check_target(target: Target, *, demand_atomic: bool) -> None:
    if target.no_ack:
        raise ConfigError(
            f"stream {target.stream!r} has no_ack: it never says what it stored, so that rows could be lost unseen"
        )
    if demand_atomic and not target.allow_atomic:
        raise ConfigError(
            f"stream {target.stream!r} takes no atomic batch: set allow_atomic, or the option atomic=auto"
        )
