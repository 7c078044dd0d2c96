"""The demonstration's pipeline on Spark, and the check of what it did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parti.prove.fleet import STREAM
from parti.spark.pipeline import Outcomes, Pipeline
from parti.spark.pipeline.running_query import RunningPipeline
from parti.spark.session import session
from parti.wire.options import ConnectOptions
from parti.worker import Message

_SETTINGS: dict[str, Any] = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": 4}


def check(message: Message) -> None:
    """The handler: a message must be what the load generator made."""
    key, producer, counter = json.loads(message.data)
    assert key, (producer, counter)


@dataclass(frozen=True, slots=True)
class Judged:
    """What the outcome rows say, beside what the stream holds."""

    published: int
    outcomes: int
    lost: int
    repeated: int
    inversions: int
    latency_p50: float

    @property
    def ok(self) -> bool:
        return not (self.lost or self.repeated or self.inversions)


class DemoPipeline:
    """The pipeline of the demonstration, running."""

    def __init__(self, spark: Any, running: RunningPipeline, folder: Path) -> None:
        self._spark = spark
        self._running = running
        self._folder = folder

    @classmethod
    def open(cls, url: str, folder: Path) -> DemoPipeline:
        """Start Spark and the pipeline; returns when it runs."""
        spark = session("parti demo", master="local[2]", fast_checkpoints=True, **_SETTINGS)
        spark.sparkContext.setLogLevel("ERROR")
        pipeline = Pipeline(
            name="demo",
            stream=STREAM,
            handler=check,
            key="2",
            checkpoint=str(folder / "checkpoint"),
            trigger="500ms",
            outcomes=Outcomes(parquet=str(folder / "outcomes")),
            nats=ConnectOptions(servers=(url,)),
        )
        return cls(spark, pipeline.start(spark), folder)

    @property
    def plan(self) -> str:
        return str(self._running.plan)

    @property
    def handled(self) -> int:
        self._running.wait(0)  # raises when the query has failed
        return self._running.totals.messages

    def judge(self, last: int) -> Judged:
        """Each sequence of the stream once, and in order for each key by the time it was finished."""
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        self._running.stop()
        rows = self._spark.read.parquet(str(self._folder / "outcomes"))
        before = f.max("finished").over(
            Window.partitionBy("key").orderBy("sequence").rowsBetween(Window.unboundedPreceding, -1)
        )
        found = rows.withColumn("before", before).agg(
            f.count("*").alias("outcomes"),
            f.countDistinct("sequence").alias("distinct"),
            f.count(f.when(f.col("finished") < f.col("before"), 1)).alias("inversions"),
            f.percentile_approx("latency", 0.5).alias("latency"),
        )
        row = found.first()
        return Judged(
            published=last,
            outcomes=row["outcomes"],
            lost=last - row["distinct"],
            repeated=row["outcomes"] - row["distinct"],
            inversions=row["inversions"],
            latency_p50=round(float(row["latency"] or 0.0), 3),
        )

    def close(self) -> None:
        self._running.stop()
        self._spark.stop()
