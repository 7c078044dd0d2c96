"""`format("jetstream-bound")`: the same columns, built once and passed to Spark repeatedly.

It costs what Spark itself needs for a source written in Python: no such source can be cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from parti.spark.source.schema import default_schema

BATCH = 9_000  # rows per batch, as parti's source has with 128 bytes
_PAYLOAD = 128
_SCHEMA = default_schema(include_headers=False)
_MADE: dict[int, pa.RecordBatch] = {}


def batch_of(rows: int) -> pa.RecordBatch:
    """A batch of messages, the same ones each time."""
    if rows not in _MADE:
        subjects = pa.array([f"cost.{number % 2_000}" for number in range(rows)])
        columns = {
            "key": subjects,
            "value": pa.array([bytes(_PAYLOAD)] * rows),
            "subject": subjects,
            "partition": pa.array([0] * rows, pa.int32()),
            "sequence": pa.array(range(1, rows + 1), pa.int64()),
            "timestamp": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * rows, pa.timestamp("us", tz="UTC")),
            "stream": pa.array(["cost"] * rows),
        }
        fields = [pa.field(field.name, columns[field.name].type, field.nullable) for field in _SCHEMA.fields]
        _MADE[rows] = pa.RecordBatch.from_pydict(columns, schema=pa.schema(fields))
    return _MADE[rows]


class _Rows(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._rows // 2), InputPartition(self._rows - self._rows // 2)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for begin in range(0, partition.value, BATCH):
            yield batch_of(BATCH).slice(0, min(BATCH, partition.value - begin))


class _Steps(DataSourceStreamReader):
    """An endless series of batches of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def initialOffset(self) -> dict[str, int]:
        return {"sequence": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: ARG002
        return {"sequence": start["sequence"] + self._rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(end["sequence"] - start["sequence"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield batch_of(partition.value)

    def commit(self, end: dict[str, int]) -> None:
        """No state."""


class BoundSource(DataSource):
    """`format("jetstream-bound")` with the option `rows`."""

    @classmethod
    def name(cls) -> str:
        return "jetstream-bound"

    def schema(self) -> StructType:
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        return _Rows(int(self.options["rows"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002
        return _Steps(int(self.options["rows"]))
