"""JetStream in Spark: `format("jetstream")` for batch and streaming, and the ordered pipeline.

from parti.spark import Pipeline, session

spark = session("orders")
orders = spark.readStream.format("jetstream").option("stream", "ORDERS").load()

Pipeline(name="orders", stream="ORDERS", handler=handle, checkpoint="checkpoints/orders").run(spark)

Promises: a batch holds every message of its range once, in order, or fails; a replay gives the same batch.

Flow: `stream_reader` plans ranges on the driver -> `tasks` read them on executors -> rows; `sink` stores rows once.
"""

from typing import TYPE_CHECKING, Any

from parti.spark.session import session

if TYPE_CHECKING:
    from parti.spark.pipeline import Emit, Outcomes, Pipeline, Results, Retries, Standby

__all__ = ["Emit", "Outcomes", "Pipeline", "Results", "Retries", "Standby", "session"]


def __getattr__(name: str) -> Any:
    """The pipeline's names, imported when first used: Spark is an extra, and sources are looked up in this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from parti.spark import pipeline

    return getattr(pipeline, name)
