"""Read one stream and publish its messages, enriched, to another: each once, also when a batch is replayed.

    python examples/stream_to_stream.py ORDERS PRICED checkpoints/priced [--once]

Reads JSON such as {"item": "nut", "count": 3} from ORDERS and publishes it with its price to `priced.<item>`, a subject
of the stream PRICED. NATS is found through NATS_URL, or through the context of the `nats` command.
"""

from __future__ import annotations

import argparse

from pyspark.sql import functions as F

from parti.spark import session

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source")
parser.add_argument("sink")
parser.add_argument("checkpoint")
parser.add_argument("--once", action="store_true")
arguments = parser.parse_args()

spark = session("stream-to-stream")
prices = spark.createDataFrame([("nut", 0.05), ("bolt", 0.12)], "item string, price double")
orders = (
    spark.readStream.format("jetstream")
    .option("stream", arguments.source)
    .option("startingOffsets", "earliest")
    .option("includeHeaders", "true")
    .load()
    .withColumn("order", F.from_json(F.col("value").cast("string"), "item string, count int"))
    .select("stream", "sequence", "headers", "order.*")
)
priced = orders.join(F.broadcast(prices), "item").select(
    F.format_string("priced.%s", "item").alias("subject"),
    F.to_json(F.struct("item", "count", (F.col("count") * F.col("price")).alias("total"))).alias("value"),
    "headers",
    # The id of the input message: replays inside the sink's duplicate window store each order once.
    F.concat_ws(":", "stream", "sequence").alias("msg_id"),
)
query = (
    priced.writeStream.format("jetstream")
    .option("stream", arguments.sink)
    .option("checkpointLocation", arguments.checkpoint)
    .trigger(**{"availableNow": True} if arguments.once else {"processingTime": "1 second"})
    .start()
)
query.awaitTermination()
