"""A job as a user would submit it: `python cluster_job.py MASTER SERVERS STREAM FOLDER [audit]`; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from parti.audit import Effects, Published, audit
from parti.spark import session
from parti.wire.options import ConnectOptions

master, servers, stream, folder, *more = sys.argv[1:]
settings: dict[str, Any] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "1g",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
}
spark = session("parti-cluster-job", master=master, **settings)
options = {"servers": servers, "stream": stream, "startingOffsets": "earliest", "maxRecordsPerPartition": "250"}
query = (
    spark.readStream.format("jetstream")
    .options(**options)
    .load()
    .writeStream.format("parquet")
    .option("checkpointLocation", str(Path(folder) / "checkpoint"))
    .option("path", str(Path(folder) / "out"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination(500)
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1  # the driver is one of them
rows = spark.read.parquet(str(Path(folder) / "out"))
found = {}
if more == ["audit"]:
    effects = rows.where("sequence <> 500").selectExpr("*", "sequence as order")  # one is lost
    published = Published(stream=stream, connect=ConnectOptions(servers=(servers,)))
    (side,) = audit(spark, published, Effects(frame=effects)).sides
    found = {finding.name: list(finding.examples) for finding in side.findings if finding.count}
print(
    json.dumps(
        {
            "rows": rows.count(),
            "distinct": rows.select("sequence").distinct().count(),
            "executors": executors,
            "audit": found,
        }
    )
)
spark.stop()
