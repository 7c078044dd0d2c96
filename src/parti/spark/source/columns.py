"""The columns of a JetStream DataFrame, built from the range reader's batches, in exactly Spark's Arrow schema.

Spark refuses a batch whose schema differs in any type or nullability, and it prunes no columns of a Python source
(docs/evidence/spark.md#s2). So the schema decides: columns that it does not name are not parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, StructType

from parti.spark.source.schema import COLUMNS, HEADERS, check_schema
from parti.spark.tokens import Partitioning, Tokens

_ARROW: dict[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


@dataclass(frozen=True, slots=True)
class ColumnBuilder:
    """Turns batches of the range reader into batches of the requested schema; immutable and picklable."""

    schema: pa.Schema
    stream: str
    key: Tokens
    partitioning: Partitioning

    @classmethod
    def of(cls, schema: StructType, stream: str, key: Tokens, partitioning: Partitioning) -> ColumnBuilder:
        check_schema(schema)
        fields = [pa.field(field.name, _arrow_type(field.dataType), field.nullable) for field in schema.fields]
        return cls(pa.schema(fields), stream, key, partitioning)

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns to request from the range reader; at least one, because a batch without columns has no rows."""
        wanted = {source for name in self.schema.names for source in COLUMNS[name][1]}
        if not self.partitioning.needs_subject and {"key", "subject"}.isdisjoint(self.schema.names):
            wanted.discard("subject")
        return tuple(sorted(wanted)) or ("sequence",)

    def build(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same messages in the requested columns."""
        return pa.RecordBatch.from_arrays(
            [self._column(field, batch) for field in self.schema],
            schema=self.schema,
        )

    def _column(self, field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
        match field.name:
            case "key":
                return self.key.column(batch.column("subject"))
            case "value":
                return batch.column("data")
            case "partition":
                if not self.partitioning.needs_subject:
                    return _constant(0, field.type, batch.num_rows)
                return self.partitioning.column(batch.column("subject"))
            case "timestamp":
                return batch.column("timestamp").cast(field.type, safe=False)  # Spark has only microseconds
            case "stream":
                return _constant(self.stream, field.type, batch.num_rows)
            case "headers":
                return _never_null(batch.column(HEADERS)).cast(field.type)
            case _:
                return batch.column(field.name)


def _constant(value: str | int, kind: pa.DataType, rows: int) -> pa.Array:
    """`rows` times the same value, from an array that is created once."""
    return _repeated(value, kind, 1 << rows.bit_length())[:rows]


@lru_cache(maxsize=32)
def _repeated(value: str | int, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def _never_null(lists: pa.Array) -> pa.Array:
    """The same lists, empty where there was none.

    Direct Get adds its own headers to every message, so a missing header block and an empty one look the same there.
    The same message must look the same whichever way it is read.
    """
    return pa.ListArray.from_arrays(lists.offsets, lists.values, type=lists.type)


def _arrow_type(spark_type: DataType) -> Any:
    name = spark_type.simpleString()
    if not isinstance(spark_type, ArrayType):
        return _ARROW[name]
    entry = spark_type.elementType
    assert isinstance(entry, StructType)
    fields = [pa.field(part.name, _arrow_type(part.dataType), part.nullable) for part in entry.fields]
    return pa.list_(pa.field("element", pa.struct(fields), spark_type.containsNull))
