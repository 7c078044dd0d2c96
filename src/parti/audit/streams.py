"""Streams as the audit reads them: whole ranges, and messages that describe effects.

A message of an effects stream is a JSON object with the columns of an outcome row, or carries the headers of parti's
dead letters (`Parti-Sequence`, `Parti-Epoch`, `Parti-Worker` ...). Its own stream sequence gives the order.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from parti.audit.tables import FileTable, Table
from parti.dead_letters.headers import ATTEMPTS, EPOCH, REASON, SEQUENCE, STREAM, SUBJECT, WORKER
from parti.spark.source import JetStreamDataSource
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_BODY: Final = (
    "stream string, sequence bigint, subject string, partition string, key string, outcome string, attempts int, "
    "latency double, took double, epoch bigint, owner string"
)
_HEADERS: Final = {
    "stream": STREAM,
    "sequence": SEQUENCE,
    "subject": SUBJECT,
    "partition": "Parti-Partition",
    "key": "Parti-Key",
    "attempts": ATTEMPTS,
    "epoch": EPOCH,
    "owner": WORKER,
}


def effect_columns(messages: DataFrame) -> DataFrame:
    """Messages of an effects stream as effects; a message that names no sequence is not an effect and is ignored."""
    from pyspark.sql import functions as f

    def header(name: str) -> Column:
        found = f.filter("headers", lambda entry: f.lower(entry["key"]) == name.lower())
        return f.when(f.size(found) > 0, f.element_at(found, 1)["value"].cast("string"))

    body = messages.withColumn("body", f.from_json(f.col("value").cast("string"), _BODY))
    columns = []
    for field in _BODY.split(", "):
        name, kind = field.split(" ")
        value = f.col(f"body.{name}")
        if name in _HEADERS:
            value = f.coalesce(header(_HEADERS[name]).cast(kind), value)
        if name == "outcome":
            value = f.when(header(REASON).isNotNull(), f.lit("dead-lettered")).otherwise(value)
        columns.append(value.alias(name))
    made = body.select(*columns, f.col("timestamp").alias("finished"), body["sequence"].alias("order"))
    return made.where("sequence is not null")


def bounds(table: Table, stream: str, connect: ConnectOptions | None, *, files: bool) -> tuple[int, int]:
    """First and last sequence of what was published; (1, 0) when empty."""
    if not files:
        reader = RangeReader(connect or ConnectOptions.resolve())
        try:
            state = reader.state(stream)
        finally:
            reader.close()
        return state.first_seq, state.last_seq
    from pyspark.sql import functions as f

    if isinstance(table, FileTable):
        return table.bounds("sequence")
    row = table.frame.agg(f.min("sequence").cast("bigint"), f.max("sequence").cast("bigint")).first()
    return (int(row[0]), int(row[1])) if row is not None and row[0] is not None else (1, 0)


def read_stream(spark: SparkSession, connect: ConnectOptions | None, options: dict[str, str], schema: str) -> DataFrame:
    """A batch read. The source object carries the connection: options show up in plans, where no secret may be."""
    reach = (connect or ConnectOptions.resolve()).self_contained()
    name = f"jetstream-audit-{secrets.token_hex(4)}"
    spark.dataSource.register(_bound_source(name, reach))
    return spark.read.format(name).options(**options).schema(schema).load()


def _bound_source(name: str, reach: ConnectOptions) -> type[JetStreamDataSource]:
    class BoundSource(JetStreamDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def reader(self, schema: Any) -> Any:
            from parti.spark.batch_reader import JetStreamReader
            from parti.spark.source_options import SourceOptions

            return JetStreamReader(schema, replace(SourceOptions.parse(self.options, streaming=False), connect=reach))

    return BoundSource
