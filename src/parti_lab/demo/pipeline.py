"""The demonstration's Spark pipeline, and the audit of the pipeline and of the workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parti.audit import AuditRules, Effects, Published, Report, audit
from parti.audit.slo import update_counts
from parti.spark.pipeline import Outcomes, Pipeline
from parti.spark.pipeline.query import RunningPipeline
from parti.spark.session import session
from parti.wire.options import ConnectOptions
from parti.worker import Message
from parti_lab.prove.fleet import STREAM

_SETTINGS: dict[str, Any] = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": 4}


def check(message: Message) -> None:
    """The handler: a message must equal what the load generator made."""
    key, producer, counter = json.loads(message.data)
    assert key, (producer, counter)


class DemoPipeline:
    """The demonstration's running pipeline."""

    def __init__(self, spark: Any, running: RunningPipeline, folder: Path, connect: ConnectOptions) -> None:
        self._spark = spark
        self._running = running
        self._folder = folder
        self._connect = connect

    @classmethod
    def open(cls, url: str, folder: Path) -> DemoPipeline:
        """Start Spark and the pipeline; returns once the pipeline runs."""
        spark = session("parti demo", master="local[2]", fast_checkpoints=True, **_SETTINGS)
        spark.sparkContext.setLogLevel("ERROR")
        connect = ConnectOptions(servers=(url,))
        pipeline = Pipeline(
            name="demo",
            stream=STREAM,
            handler=check,
            key="2",
            checkpoint=str(folder / "checkpoint"),
            trigger="500ms",
            outcomes=Outcomes(parquet=str(folder / "outcomes")),
            nats=connect,
        )
        return cls(spark, pipeline.start(spark), folder, connect)

    @property
    def plan(self) -> str:
        return str(self._running.plan)

    @property
    def handled(self) -> int:
        self._running.wait(0)  # raises when the query has failed
        return self._running.totals.messages

    def audit(self, workers: Path, metrics: Path, *, repeats: int) -> Report:
        """Stop the pipeline and judge both: what the workers' sink accepted, and the pipeline's outcome rows.

        Workers keep whole partitions in order and may repeat what was in flight at a crash or a freeze. The pipeline
        keeps keys in order, and no fault hits it: it may repeat nothing.
        """
        self._running.stop()
        return audit(
            self._spark,
            Published(stream=STREAM, connect=self._connect),
            Effects(path=str(workers), label="workers"),
            compare=Effects(path=str(self._folder / "outcomes"), label="pipeline on Spark"),
            rules=AuditRules(order="partition", duplicates=repeats),
            compare_rules=AuditRules(order="key"),
            updates=update_counts(tuple(str(page) for page in sorted(metrics.glob("*.prom")))),
        )

    def close(self) -> None:
        self._running.stop()
        self._spark.stop()
