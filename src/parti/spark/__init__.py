"""JetStream in Spark: `format("jetstream")` for batch and streaming, and the ordered pipeline.

from parti.spark import Pipeline, session

spark = session("orders")
orders = spark.readStream.format("jetstream").option("stream", "ORDERS").load()

Pipeline(name="orders", stream="ORDERS", handler=handle, checkpoint="checkpoints/orders").run(spark)

Promises: a batch holds every message of its range once, in order, or fails; a replay gives the same batch.

Flow: `source` plans ranges on the driver and reads them on executors -> rows -> `pipeline` (handlers), `delivery`
(webhooks) or the user's own query; `sink` stores rows once; `member` joins a group.
"""

from typing import TYPE_CHECKING, Any

from parti.spark.session import session

if TYPE_CHECKING:
    from parti.spark.pipeline import Emit, Outcomes, Pipeline, Results, Retries, Standby

__all__ = ["Emit", "Outcomes", "Pipeline", "Results", "Retries", "Standby", "session"]


def __getattr__(name: str) -> Any:
    """The pipeline's names, imported at first use: Spark is an extra, and Spark looks up sources in this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from parti.spark import pipeline

    return getattr(pipeline, name)
