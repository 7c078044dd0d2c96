"""Count the messages per key in time windows, and publish the counts of a window when it is complete.

    python examples/windowed_counts.py ORDERS counts.orders checkpoints/counts [--once] [--metrics 9464]

A window is complete when a message arrives that is later than its end by `--late`. With `--metrics`, rate, lag and
batch times are served on http://127.0.0.1:9464/metrics. NATS is found through NATS_URL, or through the `nats` context.
"""

from __future__ import annotations

import argparse

from prometheus_client import start_http_server
from pyspark.sql import functions as F

from parti.observe.prometheus import PrometheusMetrics
from parti.spark import session
from parti.spark.listener import QueryMetrics, query_metrics

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("stream")
parser.add_argument("subject", help="where the counts go; a subject of some stream")
parser.add_argument("checkpoint")
parser.add_argument("--window", default="1 minute")
parser.add_argument("--late", default="2 minutes", help="how long to wait for messages that come late")
parser.add_argument("--once", action="store_true")
parser.add_argument("--metrics", type=int, metavar="PORT")
arguments = parser.parse_args()

spark = session("windowed-counts", **{"spark.sql.shuffle.partitions": 4})
if arguments.metrics:
    metrics = PrometheusMetrics(query_metrics(["counts"]))
    start_http_server(arguments.metrics, addr="127.0.0.1", registry=metrics.registry)
    spark.streams.addListener(QueryMetrics(metrics, ["counts"]))

messages = (
    spark.readStream.format("jetstream")
    .option("stream", arguments.stream)
    .option("startingOffsets", "earliest")
    .schema("key string, timestamp timestamp")  # the payloads are never parsed
    .load()
)
counts = (
    messages.withWatermark("timestamp", arguments.late)
    .groupBy(F.window("timestamp", arguments.window), "key")
    .count()
    .select(
        F.to_json(F.struct("window.start", "key", "count")).alias("value"),
        # A shuffle returns rows in any order. With its own id, each count is still stored once.
        F.concat_ws("/", "window.start", "key").alias("msg_id"),
    )
)
query = (
    counts.writeStream.queryName("counts")
    .format("jetstream")
    .option("subject", arguments.subject)
    .option("checkpointLocation", arguments.checkpoint)
    .outputMode("append")
    .trigger(**{"availableNow": True} if arguments.once else {"processingTime": "10 seconds"})
    .start()
)
query.awaitTermination()
