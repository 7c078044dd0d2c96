"""Copy a stream into a Parquet table: complete, each message once, also when the job is killed and restarted.

    python examples/stream_to_parquet.py ORDERS data/orders            # follow the stream until Ctrl-C
    python examples/stream_to_parquet.py ORDERS data/orders --once     # copy the current messages and end

NATS is found through NATS_URL, or through the context of the `nats` command.
"""

from __future__ import annotations

import argparse

from parti.spark import session

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("stream")
parser.add_argument("folder")
parser.add_argument("--once", action="store_true")
arguments = parser.parse_args()

spark = session("stream-to-parquet")
messages = (
    spark.readStream.format("jetstream")
    .option("stream", arguments.stream)
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 500_000)  # limits the size of the files and the memory of a batch
    .load()
)
query = (
    messages.selectExpr("sequence", "timestamp", "subject", "value", "date(timestamp) AS day")
    .writeStream.format("parquet")
    .partitionBy("day")
    .option("path", f"{arguments.folder}/table")
    # The position of the query. It belongs to the table: with both, each message is stored once.
    .option("checkpointLocation", f"{arguments.folder}/checkpoint")
    .trigger(**{"availableNow": True} if arguments.once else {"processingTime": "10 seconds"})
    .start()
)
query.awaitTermination()
