"""Input rows for the tasks of an audit: any DataFrame, or Parquet files that the tasks read themselves.

On one machine the tasks read Parquet with pyarrow directly into the columns they need: going through Spark's rows takes
five times the CPU time.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from parti.audit.effects import TEXTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Group = tuple[str, int]
"""A file, and one of its row groups."""

_BATCH: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class FrameTable:
    """Rows of a DataFrame."""

    frame: DataFrame

    @property
    def columns(self) -> list[str]:
        return list(self.frame.columns)

    def run(self, spark: SparkSession, task: Task, rows: str, columns: tuple[str, ...]) -> DataFrame:  # noqa: ARG002
        """The task's result for these columns, if they exist."""
        chosen = [name for name in columns if name in self.frame.columns]
        return self.frame.select(*chosen).mapInArrow(task, rows)


@dataclass(frozen=True, slots=True)
class FileTable:
    """Rows of Parquet files on this machine."""

    groups: tuple[Group, ...]
    schema: pa.Schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def bounds(self, column: str) -> tuple[int, int]:
        """The smallest and the largest value of a numeric column; (1, 0) when empty."""
        found: list[int] = []
        for path in dict.fromkeys(path for path, _ in self.groups):
            file = pq.ParquetFile(path)
            place = file.schema_arrow.names.index(column)
            for number in range(file.num_row_groups):
                known = file.metadata.row_group(number).column(place).statistics
                if known is not None and known.has_min_max:
                    found += [int(known.min), int(known.max)]
                else:
                    values = pc.min_max(file.read_row_group(number, columns=[column]).column(0)).as_py()
                    found += [int(value) for value in values.values() if value is not None]
        return (min(found), max(found)) if found else (1, 0)

    def run(self, spark: SparkSession, task: Task, rows: str, columns: tuple[str, ...]) -> DataFrame:
        """The same as for a DataFrame; each task reads adjacent parts of the files."""
        chosen = [name for name in columns if name in self.schema.names]
        count = max(1, min(len(self.groups), 2 * int(spark.sparkContext.defaultParallelism)))
        shares = [
            self.groups[len(self.groups) * n // count : len(self.groups) * (n + 1) // count] for n in range(count)
        ]

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
            return task(_read([group for number in numbers for group in shares[number]], chosen))

        return spark.range(0, count, 1, count).mapInArrow(read, rows)


Table = FrameTable | FileTable


def parquet(spark: SparkSession, path: str) -> Table:
    """A Parquet file, folder or pattern; anything else raises Spark's own error."""
    found = _local(spark, path)
    return FrameTable(spark.read.parquet(path)) if found is None else found


def _local(spark: SparkSession, path: str) -> FileTable | None:
    """The files in a form that the tasks can read; None when they are not on this machine or need Spark's reader."""
    if not str(spark.sparkContext.master).startswith("local") or "://" in path:
        return None
    paths = sorted(glob.glob(path))
    if not paths or any((Path(found) / "_spark_metadata").exists() for found in paths):
        return None  # a Spark sink lists there which files count
    files = [file for found in paths for file in ds.dataset(found, format="parquet", partitioning=None).files if file]
    if not files:
        return None
    read = {file: pq.read_metadata(file) for file in files}
    merged = pa.unify_schemas([one.schema.to_arrow_schema() for one in read.values()], promote_options="permissive")
    if any(pa.types.is_string(merged.field(name).type) for name in ("finished", "timestamp") if name in merged.names):
        return None  # Spark reads times as text
    groups = [(file, number) for file, one in read.items() for number in range(one.num_row_groups)]
    return FileTable(tuple(groups), merged)


def _read(groups: list[Group], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Runs on an executor. Texts stay dictionary-encoded, as in the file."""
    opened: dict[str, Any] = {}
    for path, number in groups:
        if path not in opened:
            opened = {path: pq.ParquetFile(path, read_dictionary=[name for name in TEXTS if name in columns])}
        file = opened[path]
        present = [name for name in columns if name in file.schema_arrow.names]
        yield from file.iter_batches(_BATCH, row_groups=[number], columns=present, use_threads=False)
