"""Spark finds this module by its name: if it is installed, `format("jetstream")` needs no registration.

Promises: provides only the source of `parti.spark`.

Flow: Spark -> `pyspark_jetstream` -> `parti.spark.source.data_source`.
"""

from parti.spark.source.data_source import JetStreamDataSource


class DefaultSource(JetStreamDataSource):
    """Spark looks for this name in every importable module `pyspark_*`."""
