"""The module that Spark finds by its name: with it installed, `format("jetstream")` needs no registration."""

from parti.spark.source import JetStreamDataSource


class DefaultSource(JetStreamDataSource):
    """Spark looks for this name in every importable module `pyspark_*`."""
