"""The process that `parti prove spark` kills: a Spark driver with two streaming queries on one input stream.

    python -m parti.prove.spark_driver '{"url": ..., "folder": ..., "source": ..., "sink": ..., "per_trigger": 400}'

One query writes Parquet, the other publishes to a second stream. It goes on from its checkpoints until its standard
input ends, or one of its queries fails (exit code 1). A line `{"replay": [first, last]}` on standard input is answered
on standard output with the hash of that range, read anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = ("sequence", "subject", "value", "headers")


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    """The hash of rows in their order; equal only for equal bytes in each of them."""
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
    folder = Path(config["folder"])
    source = {
        "servers": config["url"],
        "stream": config["source"],
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": config["per_trigger"],
    }
    # Two tasks a batch, so that one may be done when the other dies. The copy is one task, which keeps the order.
    split = spark.readStream.format("jetstream").options(minRecordsPerPartition=config["per_trigger"] // 2, **source)
    parquet = split.load().select("sequence", "subject", "value").writeStream.format("parquet")
    parquet.option("path", str(folder / "parquet")).option("checkpointLocation", str(folder / "check-parquet")).start()
    whole = spark.readStream.format("jetstream").options(**source)
    copied = whole.load().selectExpr("value", f"concat('{config['sink']}.', split_part(subject, '.', 2)) AS subject")
    copied.writeStream.format("jetstream").options(servers=config["url"], stream=config["sink"]).option(
        "checkpointLocation", str(folder / "check-stream")
    ).start()
    _say({"ready": True})
    try:
        spark.streams.awaitAnyTermination()
    except Exception as error:  # Spark raises many kinds here; whatever it was, the proof starts a new driver
        _say({"failed": str(error)[-2000:]})
    os._exit(1)  # Spark's orderly end takes seconds, and the proof kills drivers anyway


def _obey(spark: Any, config: dict[str, Any]) -> None:
    for line in sys.stdin:
        first, last = json.loads(line)["replay"]
        options = {"startingOffsets": first, "endingOffsets": last + 1, "includeHeaders": "true"}
        reader = spark.read.format("jetstream").options(servers=config["url"], stream=config["source"], **options)
        table = reader.option("maxRecordsPerPartition", 500).load().select(*COLUMNS).toArrow()
        _say({"replay": digest(tuple(row.values()) for row in table.to_pylist())})
    os._exit(0)  # the proof has ended, or died: Spark's own threads must not keep this process alive


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
