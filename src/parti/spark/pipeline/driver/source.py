"""The source of a pipeline's query: `format("jetstream")` with what only a pipeline needs.

The reading task processes its messages further: it runs the handler (fused plan), or packs them for the shuffle to the
tasks that run it. If the pipeline asks for it, the key comes from a field of the payload, and parked messages make
their own batch when nothing new comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
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
from parti.spark.source.data_source import JetStreamDataSource
from parti.spark.source.options import SourceOptions
from parti.spark.source.stream_reader import JetStreamStreamReader
from parti.spark.tokens import Partitioning
from parti.wire.options import ConnectOptions

_REDRIVE = "redrive"
DUE, CLOSING, CLOSED = "due", "closing", "closed"
"""Files through which the driver and the reader, which Spark runs in another process on the same machine, communicate:
when parked messages are due; that no further batch may start; that none will, and the last one is committed."""

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What a reading task does with its messages: `HandlerStage.run` or `Packing.pack`."""


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

    Each of several parts follows its length, so that ("ab", "c") and ("a", "bc") are two keys. A payload without the
    field, or that is not JSON, leaves the key unset: then its subject is its key.
    """

    field: str
    partitions: int

    def __post_init__(self) -> None:
        _decoder(self.field)  # report a malformed name here, and not from every task

    def rekeyed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same messages with key and partition from the payload."""
        decode = _decoder(self.field)
        keys = pa.array([decode(value) for value in batch.column("value").to_pylist()], pa.string())
        partition = Partitioning(self.partitions).column(pc.coalesce(keys, batch.column("subject")))
        columns = [
            keys if name == "key" else partition if name == "partition" else batch.column(name)
            for name in batch.schema.names
        ]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


@lru_cache(maxsize=64)
def _decoder(fields: str) -> Callable[[bytes], str | None]:
    """From payload to key. One pass over the bytes for all fields; msgspec decodes only those on the paths."""
    paths = [tuple(field.split(".")) for field in fields.split(",")]
    tree: dict[str, Any] = {}
    for path in paths:
        place: Any = tree
        for name in path[:-1]:
            place = place.setdefault(name, {}) if place is not None else None
        if not all(path) or place is None or place.setdefault(path[-1], None) is not None:
            raise ConfigError(f"key payload:{fields}: name a field, inner ones as outer.inner, several with commas")
    decoder = msgspec.json.Decoder(_struct(tree))
    getters = [attrgetter(".".join(_attribute(name) for name in path)) for path in paths]

    def parts(value: bytes) -> list[str] | None:
        try:
            found = decoder.decode(value)
            values = [get(found) for get in getters]
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            return None
        return None if None in values else [part if type(part) is str else str(part) for part in values]

    def single(value: bytes) -> str | None:
        found = parts(value)
        return None if found is None else found[0]

    def several(value: bytes) -> str | None:
        found = parts(value)
        return None if found is None else "".join([f"{len(part)}:{part}" for part in found])

    return single if len(paths) == 1 else several


def _struct(tree: dict[str, Any]) -> Any:
    """A type with only these fields, and those inside them."""
    leaf = str | int | float | bool | None
    fields = [
        (_attribute(name), leaf if inner is None else _struct(inner) | None, None) for name, inner in tree.items()
    ]
    return msgspec.defstruct("Fields", fields, rename={_attribute(name): name for name in tree})


def _attribute(name: str) -> str:
    """A valid Python name for any field name."""
    return "f_" + name.encode().hex()


class PipelineReader(JetStreamStreamReader):
    """Reads batches for a pipeline, and yields what its work makes of them."""

    def __init__(
        self,
        options: SourceOptions,
        *,
        headers: bool,
        payload: PayloadKey | None,
        work: Work,
        words: Path,
    ) -> None:
        super().__init__(message_schema(headers=headers), options)
        self._payload = payload
        self._work = work
        self._words = words
        self._due_until = math.inf  # with AvailableNow: messages due later are for the next run, or this one never ends

    def prepareForTriggerAvailableNow(self) -> None:
        super().prepareForTriggerAvailableNow()
        self._due_until = time.time()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As in the source; when nothing new is there and parked messages are due, an offset with a higher count."""
        found = super().latestOffset(start, limit)
        if (self._words / CLOSING).exists():
            (self._words / CLOSED).touch()
            return start
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
        """Whether the driver has written that parked messages are due by now."""
        try:
            return float((self._words / DUE).read_text()) <= min(time.time(), self._due_until)
        except (FileNotFoundError, ValueError):
            return False  # nothing is parked, or the driver is just writing it


def pipeline_source(
    name: str,
    *,
    connect: ConnectOptions,
    headers: bool,
    payload: PayloadKey | None,
    work: Work,
    rows: str,
    words: Path,
) -> type[JetStreamDataSource]:
    """A source under this name for `spark.dataSource.register`; `rows` is the schema of what the work yields.

    `words` is a folder on the driver's machine where driver and reader write their files for each other.

    The class is created here and not at the top of the module, so that Spark ships it by value, with the handler. It
    also contains the connection: options are visible in plans and logs, where secrets must not appear.
    """

    class PipelineSource(JetStreamDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            return rows

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - Spark's signature
            options = replace(SourceOptions.parse(self.options, streaming=True), connect=connect)
            return PipelineReader(options, headers=headers, payload=payload, work=work, words=words)

    return PipelineSource
