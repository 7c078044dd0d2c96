"""The data source that Spark knows as `format("jetstream")`.

Spark imports this module for every session that uses any Python source, and reports an error in it as "failed to find
the data source". So it imports next to nothing; readers and writers are imported when needed.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from parti.errors import PartiError
from parti.spark.plain_errors import plainly


class JetStreamDataSource(DataSource):
    """Creates readers and writers from the options of one `load()`, `save()` or `start()`.

    Spark creates it without saying what for, so each reader and writer checks its own options.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> StructType:
        """The columns of a read without a user schema. A wrong option is refused here, at `load()`."""
        from parti.spark.source.options import SOURCE_OPTIONS
        from parti.spark.source.schema import default_schema
        from parti.spark.table_options import effective, is_create_table, kept_in, of_new_table

        with plainly():
            new_table = is_create_table(self.options)
            options = of_new_table(self.options) if new_table else effective(StructType(), self.options)
            values = SOURCE_OPTIONS.parse(options)
            columns = default_schema(include_headers=values["includeHeaders"])
            return kept_in(columns, options) if new_table else columns

    def reader(self, schema: StructType) -> DataSourceReader:
        from parti.spark.source.batch_reader import JetStreamReader
        from parti.spark.source.options import SourceOptions
        from parti.spark.table_options import effective

        with plainly():
            return JetStreamReader(schema, SourceOptions.parse(effective(schema, self.options), streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from parti.spark.source.options import SourceOptions
        from parti.spark.source.stream_reader import JetStreamStreamReader
        from parti.spark.table_options import effective

        try:
            return JetStreamStreamReader(schema, SourceOptions.parse(effective(schema, self.options), streaming=True))
        except PartiError as error:
            from parti.spark.source.refused_reader import RefusedReader

            return RefusedReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from parti.spark.sink.writers import JetStreamBatchWriter
        from parti.spark.table_options import effective

        with plainly():
            return JetStreamBatchWriter(schema, effective(schema, self.options), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from parti.spark.sink.writers import JetStreamStreamWriter
        from parti.spark.table_options import effective

        with plainly():
            return JetStreamStreamWriter(schema, effective(schema, self.options), overwrite)
