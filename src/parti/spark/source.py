"""The data source that Spark knows as `format("jetstream")`."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from parti.spark.columns import default_schema
from parti.spark.source_options import SOURCE_OPTIONS, SourceOptions


class JetStreamDataSource(DataSource):
    """Makes readers and writers from the options of one `load()`, `save()` or `start()`.

    Spark builds it without saying what for, so that each reader and writer checks its own options.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> str:
        """The columns of a read without a schema of the user's. A wrong option is refused here, at `load()`."""
        values = SOURCE_OPTIONS.parse(self.options)
        return default_schema(include_headers=values["includeHeaders"])

    def reader(self, schema: StructType) -> DataSourceReader:
        from parti.spark.batch_reader import JetStreamReader

        return JetStreamReader(schema, SourceOptions.parse(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from parti.spark.stream_reader import JetStreamStreamReader

        return JetStreamStreamReader(schema, SourceOptions.parse(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from parti.spark.sink import JetStreamBatchWriter

        return JetStreamBatchWriter(schema, self.options, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from parti.spark.sink import JetStreamStreamWriter

        return JetStreamStreamWriter(schema, self.options, overwrite)
