"""The module that Spark finds by its name: with it installed, `format("jetstream")` needs no registration.

Promises: nothing but the source of `parti.spark`.

Flow: Spark -> `pyspark_jetstream` -> `parti.spark.source.data_source`.
"""

from parti.spark.source.data_source import JetStreamDataSource


class DefaultSource(JetStreamDataSource):
    """Spark looks for this name in every importable module `pyspark_*`."""
