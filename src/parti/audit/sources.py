"""The inputs of the audit: what was published, and what took effect, each from a stream or from files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from parti.audit.streams import bounds, effect_columns, read_stream
from parti.audit.tables import FrameTable, Table, parquet
from parti.errors import ConfigError, UsageError
from parti.wire.options import ConnectOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_JSON: Final = (".json", ".jsonl", ".ndjson")
_TIMES: Final = ("finished", "timestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What was published: the stream itself, or a copy of it in files."""

    stream: str
    path: str | None = None
    """Parquet or JSON lines with `sequence`, and where needed `subject` or `key`, and `timestamp`."""
    connect: ConnectOptions | None = None
    subjects: tuple[str, ...] = ()
    key: str = "subject"
    """The key of a message, when effects do not name it: `subject`, or tokens such as `2` or `orders.*`."""
    first: int | None = None
    last: int | None = None
    """The range to audit, `first` to `last`; by default the whole stream."""

    def table(self, spark: SparkSession, *, keyed: bool = False) -> Table:
        """Columns sequence and timestamp, with `keyed` also subject and key, if they are known."""
        if self.path is not None:
            found = _files(spark, self.path)
            if "sequence" not in found.columns:
                raise ConfigError(f"{self.path} has no column sequence: it has {', '.join(sorted(found.columns))}")
            return found
        options = {"stream": self.stream, "keyTokens": self.key}
        if self.subjects:
            options["subjects"] = ",".join(self.subjects)
        if self.first is not None:
            options["startingOffsets"] = str(self.first)
        if self.last is not None:
            options["endingOffsets"] = str(self.last + 1)
        schema = "sequence bigint, timestamp timestamp" + (", subject string, key string" if keyed else "")
        return FrameTable(read_stream(spark, self.connect, options, schema))

    def keyed(self, spark: SparkSession) -> DataFrame:
        """Columns sequence, timestamp and key as a DataFrame, to look up what effects lack."""
        from pyspark.sql import functions as f

        frame = _files_frame(spark, self.path) if self.path is not None else self.table(spark, keyed=True).frame  # type: ignore[union-attr]
        names = set(frame.columns)
        nothing = f.lit(None).cast("string")
        subject = f.col("subject").cast("string") if "subject" in names else nothing
        key = f.coalesce(f.col("key").cast("string"), subject) if "key" in names else subject
        timestamp = f.col("timestamp") if "timestamp" in names else f.lit(None).cast("timestamp")
        return frame.select(
            f.col("sequence").cast("bigint").alias("sequence"),
            timestamp.alias("published_at"),
            key.alias("published_key"),
            subject.alias("published_subject"),
        ).where(f.col("sequence").between(self.first, self.last))

    def bounded(self, spark: SparkSession) -> Published:
        """A copy with first and last sequence fixed, so that messages published from now on do not count."""
        low, high = bounds(self.table(spark), self.stream, self.connect, files=self.path is not None)
        first = low if self.first is None else max(low, self.first)
        last = high if self.last is None else min(high, self.last)
        if last < first:
            raise UsageError(f"stream {self.stream!r} holds sequences {low} to {high}: nothing of it is to be audited")
        return replace(self, first=first, last=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What took effect: an effects stream, Parquet or JSON lines, or a DataFrame, of one consumer."""

    path: str | None = None
    stream: str | None = None
    frame: Any = None
    connect: ConnectOptions | None = None
    label: str = ""

    @classmethod
    def parse(cls, text: str, connect: ConnectOptions | None = None) -> Effects:
        """From the command line: `stream:NAME`, or the path of files."""
        kind, _, name = text.partition(":")
        if kind == "stream":
            if not name:
                raise UsageError("effects stream: names no stream: write stream:EFFECTS")
            return cls(stream=name, connect=connect, label=name)
        return cls(path=text, label=text.rstrip("/").rsplit("/", 1)[-1])

    def table(self, spark: SparkSession, published: Published) -> Table:
        """The effects; missing columns (key, when the message was stored) are looked up in what was published."""
        found = self._raw(spark)
        names = set(found.columns)
        if "sequence" not in names:
            raise ConfigError(f"{self.label} has no column sequence: it has {', '.join(sorted(names))}")
        if not {"finished", "order"} & names:
            raise ConfigError(f"{self.label} has neither a column finished nor order: effects must tell their order")
        # A message of a stream may lack any field; a file either has a column or does not.
        if self.stream is None and "key" in names and {"latency", "timestamp"} & names:
            return found
        frame = found.frame if isinstance(found, FrameTable) else spark.read.parquet(str(self.path))
        return FrameTable(_looked_up(frame, published.keyed(spark)))

    def _raw(self, spark: SparkSession) -> Table:
        if self.frame is not None:
            return FrameTable(_timed(self.frame))
        if self.path is not None:
            return _files(spark, self.path)
        if self.stream is None:
            raise UsageError("name effects: a path, a stream or a DataFrame")
        schema = "sequence bigint, timestamp timestamp, value binary, headers array<struct<key:string,value:binary>>"
        options = {"stream": self.stream, "includeHeaders": "true"}
        return FrameTable(effect_columns(read_stream(spark, self.connect, options, schema)))


def _looked_up(effects: DataFrame, published: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    joined = effects.join(published, "sequence", "left")
    names = set(effects.columns)

    def known(name: str, other: str) -> Column:
        return f.coalesce(f.col(name).cast("string"), f.col(other)) if name in names else f.col(other)

    when = f.coalesce("timestamp", "published_at") if "timestamp" in names else f.col("published_at")
    made = joined.withColumn("key", known("key", "published_key")).withColumn("timestamp", when)
    return made.drop("published_at", "published_key", "published_subject")


def _files(spark: SparkSession, path: str) -> Table:
    if path.endswith(_JSON):
        return FrameTable(_files_frame(spark, path))
    from pyspark.errors import AnalysisException

    try:
        found = parquet(spark, path)
    except (AnalysisException, pa.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return FrameTable(_timed(found.frame)) if isinstance(found, FrameTable) else found


def _files_frame(spark: SparkSession, path: str) -> DataFrame:
    from pyspark.errors import AnalysisException

    try:
        return _timed(spark.read.json(path) if path.endswith(_JSON) else spark.read.parquet(path))
    except AnalysisException as error:
        raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


def _timed(frame: DataFrame) -> DataFrame:
    """The same table with times in text form parsed."""
    from pyspark.sql import functions as f

    for name, kind in frame.dtypes:
        if name in _TIMES and kind == "string":
            frame = frame.withColumn(name, f.try_to_timestamp(f.col(name)))
    return frame
