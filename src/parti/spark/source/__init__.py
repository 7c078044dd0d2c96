"""The reading side of `format("jetstream")`.

Promises: a batch holds every message of its range once, in order, or fails; a replay gives the same batch.

Flow: Spark -> `data_source` -> `batch_reader` or `stream_reader` plan ranges on the driver (`offsets`, `admission`) ->
`tasks` read them on executors -> `columns` -> rows; `commit` reports to JetStream what is done.
"""

from parti.spark.source.data_source import JetStreamDataSource

__all__ = ["JetStreamDataSource"]
