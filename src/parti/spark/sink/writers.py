"""The writers behind `format("jetstream")`: a task returns only when the stream has stored each of its rows.

A task that is run again, or a micro-batch that is replayed after a restart, publishes the same rows under the same ids,
so that within the stream's duplicate window they are stored once. An id consists of the streaming query and its batch
(or, in a plain batch job, the job), which write of the batch it is (`write_identity`), the partition, the chunk of rows
inside it, and the chunk's content. With `progressSubject` a replay is stored once, however late it comes.
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
from parti.observe.logs import get_logger
from parti.spark.options import (
    CONNECTION_OPTIONS,
    Option,
    OptionTable,
    choice,
    connect_options,
    positive,
    span,
    text,
)
from parti.spark.plain_errors import plainly
from parti.spark.sink.write_identity import WriteLedger, WritePlace, kind_of
from parti.spark.source.options import SOURCE_OPTIONS
from parti.spark.table_options import SPARKS_OWN
from parti.spark.worker_process import settle
from parti.subjects import validate_subject, validate_token
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import CHUNK_ROWS, HEADERS, Rows, chunk_id, chunks
from parti.wire.progress import PROGRESS_ROWS, ProgressPublisher
from parti.wire.publisher import Publisher
from parti.wire.target import Target, find_target


def _write_id(name: str) -> str:
    return validate_token(name, what="it")


log = get_logger("spark.sink")

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
            span,
            "how long a task waits while nothing is acknowledged (outage, full stream), before it fails",
        ),
        Option(
            "writeId",
            None,
            _write_id,
            "a name for this write: writes of other names are other writes, and a write of the same name in the same "
            "batch (in a batch job: at any time) is a repeat of it. Default: writes inside foreachBatch are counted",
        ),
        Option(
            "progressSubject",
            None,
            validate_subject,
            "keep how far each task is in messages below this subject of the same stream, stored together with the "
            "rows: a repeat is stored once, however late it comes. Needs `stream` and allow_atomic",
        ),
    ),
    # The same map holds Spark's own options of a streaming query, and the reader options of an SQL view or table. But
    # `subjects` is refused, because it is easily written for `subject`.
    accepted=("checkpointLocation", "queryName", *SPARKS_OWN, *(set(SOURCE_OPTIONS.names()) - {"subjects"})),
)

READER_COLUMNS = frozenset({"key", "partition", "sequence", "timestamp", "stream"})
"""Columns of the reader that say where a row came from; a forwarded row may keep them, they are not written."""


@dataclass(frozen=True, slots=True)
class WrittenRows(WriterCommitMessage):
    """The rows of one task that were acknowledged."""

    partition: int
    messages: int
    duplicates: int
    place: WritePlace | None = None


@dataclass(frozen=True, slots=True)
class _Name:
    """The identity of a task's rows: their run (query or job), its step, the write in it, and the partition."""

    run: str
    step: str
    write: str | None
    """Empty for the first write of a batch; None when a repeat of it could not be recognised."""
    partition: int

    @property
    def scope(self) -> str:
        """A short prefix of the ids; `run` is part of their digest."""
        return f"{self.run[:8]}-{self.step}-{f'{self.write}-' if self.write else ''}{self.partition}"

    @property
    def marker(self) -> str:
        """The last tokens of the marker's subject."""
        return f"{self.run}.{self.write or '0'}.{self.partition}"


class _Writer:
    """Common to both writers. Built on the driver, where it checks all that can be known before the first row."""

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
        self.write_id: str | None = given["writeId"]
        self.progress: str | None = given["progressSubject"]
        check_columns(schema, subject_given=self.subject is not None)
        self._check_progress(schema)
        self._check_stream(demand_atomic=given["atomic"] == "true" or self.progress is not None)
        self.job = uuid.uuid4().hex

    def _check_progress(self, schema: StructType) -> None:
        if self.progress is None:
            return
        if self.stream is None:
            raise ConfigError("progressSubject needs the option stream: the stream that keeps rows and progress")
        if "msg_id" in schema.names:
            raise ConfigError("progressSubject and a column msg_id exclude each other: both say what a repeat is")

    def _check_stream(self, *, demand_atomic: bool) -> None:
        if self.stream is None and self.subject is None:
            if demand_atomic:
                raise ConfigError(
                    "atomic=true needs the option stream (or subject), to know which stream must allow it"
                )
            return  # each row names its subject: the tasks will check
        # Spark builds a writer for every micro-batch: an outage now must cost time, not the query.
        target = find_target(self.connect, stream=self.stream, subject=self.subject or "", patience=self.patience)
        _check_target(target, demand_atomic=demand_atomic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """When this returns, the stream has stored every row of the task."""
        with plainly():
            return self._write(iterator)

    def _write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        settle()
        task = TaskContext.get()
        assert task is not None
        place = WritePlace.of(task._localProperties or {})
        name = self._named(place, task.partitionId())
        with self._publisher(name) as publisher:
            most = CHUNK_ROWS if self.progress is None else PROGRESS_ROWS
            for number, rows in enumerate(chunks((self._rows(part) for part in iterator), most)):
                publisher.publish(rows, chunk_id(name.scope, number, rows, salt=name.run))
            done = publisher.flush()
        return WrittenRows(task.partitionId(), done.messages, done.duplicates, place)

    def _write_number(self, _place: WritePlace) -> int | None:
        """The index of this write in its batch; None when it cannot be known."""
        return 0  # a streaming query writes each batch once

    def _named(self, place: WritePlace | None, partition: int) -> _Name:
        """The identity of the task's rows; the same when repeated, and different for every other write."""
        named = f"w-{self.write_id}" if self.write_id else None  # never equal to a counted one
        if place is None:
            return _Name("job" if named else self.job, "0", named, partition)
        if named is not None:
            return _Name(place.query, place.batch, named, partition)
        # Also inside foreachBatch a plain write belongs to the query's batch, and is replayed with it.
        number = self._write_number(place)
        if number is None:
            log.warning("sink.write_unknown", batch=place.batch, fix="give writes at the same time a writeId each")
            return _Name(self.job, place.batch, None, partition)
        return _Name(place.query, place.batch, str(number) if number else "", partition)

    def _publisher(self, name: _Name) -> Publisher | ProgressPublisher:
        if self.progress is None:
            return Publisher(
                self.connect,
                stream=self.stream,
                atomic=self.atomic,
                max_in_flight=self.max_in_flight,
                patience=self.patience,
                name="parti-spark-sink",
            )
        if name.write is None:
            raise ConfigError(
                "progressSubject needs the option writeId here: in a batch job, and for writes at the same time, "
                "nothing else tells a repeat from a new write"
            )
        assert self.stream is not None
        return ProgressPublisher(
            self.connect,
            stream=self.stream,
            subject=f"{self.progress}.{name.marker}",
            step=int(name.step),
            patience=self.patience,
            name="parti-spark-sink",
        )

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
    """`df.write.format("jetstream").mode("append")`; a task that is retried stores nothing twice.

    Inside `foreachBatch` each write is counted: two writes of equal rows are both stored, a replay of either is not.
    """

    def __init__(self, schema: StructType, options: Mapping[str, str], overwrite: bool) -> None:
        super().__init__(schema, options, overwrite)
        self._ledger = WriteLedger.of_application() if self.write_id is None else None
        kind = kind_of(self.stream, self.subject, self.progress, *schema.names)
        self._ticket = self._ledger.begin(kind) if self._ledger is not None else None

    def _write_number(self, _place: WritePlace) -> int | None:
        return None if self._ticket is None else self._ticket.number(_place)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when all tasks have succeeded."""
        if self._ledger is not None and self._ticket is not None:
            written = [message for message in messages if isinstance(message, WrittenRows)]
            self._ledger.succeeded(self._ticket, written[0].place if written else None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - Spark's signature
        """Runs on the driver when the write failed; rows already stored stay, and a repeat recognises them."""
        if self._ledger is not None and self._ticket is not None:
            self._ledger.failed(self._ticket)


class JetStreamStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream.format("jetstream")`; a replayed micro-batch stores nothing twice."""


def check_columns(schema: StructType, *, subject_given: bool) -> None:
    """Raise ConfigError unless the sink can write these columns and their types."""
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
