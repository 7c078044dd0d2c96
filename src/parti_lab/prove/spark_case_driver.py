"""The process that runs the queries of generated cases on a real Spark, and that the proof kills.

    python -m parti_lab.prove.spark_case_driver '{"folder": ...}'

It reads jobs from standard input, one JSON line each, and answers each with one line: the number of files with the
result, or the error. A streaming query writes each batch into its own folder, so a batch that runs again replaces
its earlier output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("sequence", "subject", "timestamp", "value", "headers")


def main(config: dict[str, Any]) -> None:
    from parti.spark.session import session  # Spark is an extra

    conf: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": f"{config['folder']}/warehouse",
    }
    spark = session("parti-prove-cases", master="local[2]", **conf)
    spark.sparkContext.setLogLevel("ERROR")
    _say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            (_stream if job["streaming"] else _batch)(spark, job)
            _say({"answer": job["id"], "error": ""})
        except Exception as error:  # Spark raises many kinds; the proof judges by the message
            _say({"answer": job["id"], "error": str(error)})


def _batch(spark: Any, job: dict[str, Any]) -> None:
    rows = spark.read.format("jetstream").options(**job["given"]).load().select(*COLUMNS)
    _say({"started": job["id"]})
    rows.write.mode("overwrite").parquet(f"{job['folder']}/out/batch")


def _stream(spark: Any, job: dict[str, Any]) -> None:
    folder = Path(job["folder"])

    def store(rows: Any, number: int) -> None:
        rows.select(*COLUMNS).write.mode("overwrite").parquet(str(folder / "out" / f"{number:06d}"))

    writer = spark.readStream.format("jetstream").options(**job["given"]).load().writeStream.foreachBatch(store)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    triggers: dict[str, dict[str, Any]] = {
        "now": {"availableNow": True},
        "once": {"once": True},
        "processing": {"processingTime": "0 seconds"},
    }
    query = writer.trigger(**triggers[job["trigger"]]).start()
    _say({"started": job["id"]})
    try:
        if job["trigger"] == "processing":
            query.processAllAvailable()
        else:
            query.awaitTermination()
    finally:
        query.stop()


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
