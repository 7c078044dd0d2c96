"""The source of a pipeline's query: `format("jetstream")` with what only a pipeline needs.

The reading task goes on with its messages: it runs the handler (fused plan), or packs them for the shuffle to the tasks
that do. And where the pipeline asks for it, the key comes from a field of the payload, and parked messages make a batch
of their own when nothing new comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from parti.errors import ConfigError
from parti.spark.source import JetStreamDataSource
from parti.spark.source_options import SourceOptions
from parti.spark.stream_reader import JetStreamStreamReader
from parti.spark.tokens import Partitioning
from parti.wire.options import ConnectOptions

_REDRIVE = "redrive"

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What a reading task does with its messages: `Stage.run` or `Packing.pack`."""


def message_schema(*, headers: bool) -> StructType:
    """The columns that the handler stage reads."""
    fields = [
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("subject", StringType()),
        StructField("partition", IntegerType()),
        StructField("sequence", LongType()),
        StructField("timestamp", TimestampType()),
    ]
    if headers:
        entry = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
        fields.append(StructField("headers", ArrayType(entry)))
    return StructType(fields)


@dataclass(frozen=True, slots=True)
class PayloadKey:
    """The key of a message is a field of its JSON payload, such as `customer.id`, or several: `database,documentId`.

    Of several, each stands behind its length, so that ("ab", "c") and ("a", "bc") are two keys. A payload without the
    field, or that is no JSON, leaves the key unset: its subject is its key then.
    """

    field: str
    partitions: int

    def rekeyed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same messages with key and partition by the payload."""
        decode = self._composed()
        keys = pa.array([decode(value) for value in batch.column("value").to_pylist()], pa.string())
        partition = Partitioning(self.partitions).column(pc.coalesce(keys, batch.column("subject")))
        columns = [
            keys if name == "key" else partition if name == "partition" else batch.column(name)
            for name in batch.schema.names
        ]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)

    def _composed(self) -> Any:
        """From payload to key."""
        decoders = [self._decoder(field) for field in self.field.split(",")]
        if len(decoders) == 1:
            return decoders[0]

        def key(value: bytes) -> str | None:
            parts = [decode(value) for decode in decoders]
            return None if None in parts else "".join(f"{len(part)}:{part}" for part in parts)

        return key

    def _decoder(self, field: str) -> Any:
        """From payload to one field; msgspec reads nothing but the fields on the path."""
        *outer, last = field.split(".")
        if not last or not all(outer):
            raise ConfigError(f"key payload:{self.field}: name a field, or fields separated by dots")
        kind: Any = msgspec.defstruct(
            "Leaf", [("found", str | int | float | bool | None, None)], rename={"found": last}
        )
        for name in reversed(outer):
            kind = msgspec.defstruct("Inner", [("found", kind | None, None)], rename={"found": name})
        decoder = msgspec.json.Decoder(kind)

        def key(value: bytes) -> str | None:
            try:
                found: Any = decoder.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
            while isinstance(found, msgspec.Struct):
                found = found.found  # type: ignore[attr-defined]
            return None if found is None else found if isinstance(found, str) else str(found)

        return key


class PipelineReader(JetStreamStreamReader):
    """Reads batches for a pipeline, and yields what its work makes of them."""

    def __init__(
        self,
        options: SourceOptions,
        *,
        headers: bool,
        payload: PayloadKey | None,
        work: Work,
        due: Path | None,
    ) -> None:
        super().__init__(message_schema(headers=headers), options)
        self._payload = payload
        self._work = work
        self._due_file = due
        self._due_until = math.inf  # with AvailableNow: what comes due later is for the next run, or it never ends

    def prepareForTriggerAvailableNow(self) -> None:
        super().prepareForTriggerAvailableNow()
        self._due_until = time.time()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As the source's; when nothing new is there and parked messages are due, an offset that differs in a count."""
        found = super().latestOffset(start, limit)
        ticks = int(start.get(_REDRIVE, 0))
        if found == {name: value for name, value in start.items() if name != _REDRIVE} and self._is_due():
            ticks += 1
        return found | {_REDRIVE: ticks} if ticks else found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        batches = super().read(partition)
        if self._payload is not None:
            batches = map(self._payload.rekeyed, batches)
        return self._work(batches)

    def _is_due(self) -> bool:
        """Whether the driver has left word that parked messages are to be driven by now."""
        if self._due_file is None:
            return False
        try:
            return float(self._due_file.read_text()) <= min(time.time(), self._due_until)
        except (FileNotFoundError, ValueError):
            return False  # nothing is parked, or the driver is writing it


def pipeline_source(
    name: str,
    *,
    connect: ConnectOptions,
    headers: bool,
    payload: PayloadKey | None,
    work: Work,
    rows: str,
    due: Path | None,
) -> type[JetStreamDataSource]:
    """A source under this name for `spark.dataSource.register`; `rows` is the schema of what the work yields.

    The class is made here and not at the top of the module, so that Spark ships it by value, with the user's handler.
    The connection travels in it as well: options show up in plans and logs, where no secret belongs.
    """

    class PipelineSource(JetStreamDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            return rows

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - Spark's signature
            options = replace(SourceOptions.parse(self.options, streaming=True), connect=connect)
            return PipelineReader(options, headers=headers, payload=payload, work=work, due=due)

    return PipelineSource
