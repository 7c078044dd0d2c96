"""The process that `parti prove spark` kills: a Spark driver with two streaming queries on one input stream.

    python -m parti_lab.prove.spark_driver '{"url": ..., "folder": ..., "source": ..., "sink": ..., "per_trigger": 400}'

One query writes Parquet, the other publishes to a second stream. The driver continues from its checkpoints, and
restarts a failed query, until its standard input ends. A line `{"replay": [first, last]}` on standard input is
answered on standard output with the hash of that range, read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from parti.testing import eventually_blocking

COLUMNS = ("sequence", "subject", "value", "headers")
_TRIES = 5


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    """The hash of the rows in their order; equal only if all bytes of all rows are equal."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(repr(row).encode())
    return found.hexdigest()


def main(config: dict[str, Any]) -> None:
    from parti.spark.session import session  # Spark is an extra

    conf: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": f"{config['folder']}/warehouse",
    }
    spark = session("parti-prove-spark", master="local[2]", **conf)
    spark.sparkContext.setLogLevel("ERROR")
    threading.Thread(target=_obey, args=(spark, config), daemon=True).start()
    writers = {"parquet": _parquet(spark, config), "stream": _copy(spark, config)}
    running: dict[str, Any] = {}
    while True:
        for name, writer in writers.items():
            if name not in running or not running[name].isActive:
                running[name] = writer.start()
                _wait_initialized(running[name])
        _say({"ready": True})
        try:
            spark.streams.awaitAnyTermination()
        except Exception as error:  # Spark raises many kinds here; restart the query, as any supervisor would
            _say({"failed": str(error)[-2000:]})
        spark.streams.resetTerminated()


def _source(spark: Any, config: dict[str, Any], **more: Any) -> Any:
    options = {"servers": config["url"], "stream": config["source"], "maxOffsetsPerTrigger": config["per_trigger"]}
    return spark.readStream.format("jetstream").options(startingOffsets="earliest", **options, **more).load()


def _parquet(spark: Any, config: dict[str, Any]) -> Any:
    """Two tasks per batch, so that one may be done when the other dies."""
    rows = _source(spark, config, minRecordsPerPartition=config["per_trigger"] // 2)
    writer = rows.select("sequence", "subject", "value").writeStream.format("parquet")
    folder = config["folder"]
    return writer.option("path", f"{folder}/parquet").option("checkpointLocation", f"{folder}/check-parquet")


def _copy(spark: Any, config: dict[str, Any]) -> Any:
    """One task per batch, which keeps the order."""
    subject = f"concat('{config['sink']}.', split_part(subject, '.', 2)) AS subject"
    writer = _source(spark, config).selectExpr("value", subject).writeStream.format("jetstream")
    writer = writer.options(servers=config["url"], stream=config["sink"])
    return writer.option("checkpointLocation", f"{config['folder']}/check-stream")


def _wait_initialized(query: Any) -> None:
    """Start queries one by one: Spark gives a source's Python process 10 s to start, too few on a busy machine."""

    def done() -> bool:
        return not query.isActive or "Initializing" not in query.status["message"]

    eventually_blocking(done, 120, "the start of a query")


def _obey(spark: Any, config: dict[str, Any]) -> None:
    for line in sys.stdin:
        first, last = json.loads(line)["replay"]
        for _ in range(_TRIES):
            try:
                _say({"replay": _replay(spark, config, first, last)})
                break
            except Exception as error:  # a failed read is no difference; _wait_initialized says why it may fail
                _say({"failed": str(error)[-2000:]})
    os._exit(0)  # the proof has ended or crashed: Spark's threads must not keep this process alive


def _replay(spark: Any, config: dict[str, Any], first: int, last: int) -> str:
    options = {"startingOffsets": first, "endingOffsets": last + 1, "includeHeaders": "true"}
    reader = spark.read.format("jetstream").options(servers=config["url"], stream=config["source"], **options)
    table = reader.option("maxRecordsPerPartition", 500).load().select(*COLUMNS).toArrow()
    return digest(tuple(row.values()) for row in table.to_pylist())


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
