"""The ordered pipeline: one handler, run on Spark at scale, in order for each key.

Promises: each message is handled in order of its key; results and dead letters are stored once; a driver that lost its
lease publishes nothing more.

Flow: `source` -> `batches` -> `stage` on executors -> `publishing` -> outcome rows -> checkpoint.
"""

from parti.spark.pipeline.definition import Outcomes, Pipeline, Results
from parti.spark.pipeline.emit import Emit
from parti.spark.pipeline.lease import Standby
from parti.spark.pipeline.policy import Retries

__all__ = ["Emit", "Outcomes", "Pipeline", "Results", "Retries", "Standby"]
