"""The ordered pipeline: one handler, run on Spark at scale, in order for each key.

Promises: each message is handled in order of its key; results and dead letters are stored once; a driver that lost its
lease publishes nothing more.

Flow: `driver` plans a batch -> `executor` runs the handler and publishes -> outcome rows -> `driver` checkpoints.
"""

from parti.spark.pipeline.driver.definition import Outcomes, Pipeline, Results
from parti.spark.pipeline.driver.lease import Standby
from parti.spark.pipeline.executor.emit import Emit
from parti.spark.pipeline.executor.policy import Retries

__all__ = ["Emit", "Outcomes", "Pipeline", "Results", "Retries", "Standby"]
