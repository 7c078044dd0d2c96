"""Revenue per region and minute of the enriched orders. Orders may be up to ten minutes late.

python examples/ordered/windows.py --server nats://127.0.0.1:4222 --out data/revenue
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import functions as f

from parti.spark import session

ORDER = "order bigint, customer string, happened timestamp, cents bigint, lines int, region string"


def revenue(spark: Any, server: str, stream: str) -> Any:
    """One row per region and minute, written when the watermark says that no more orders of that minute can come."""
    enriched = (
        spark.readStream.format("jetstream")
        .option("servers", server)
        .option("stream", stream)
        .option("startingOffsets", "earliest")
        .schema("value binary")
        .load()
        .select(f.from_json(f.col("value").cast("string"), ORDER).alias("order"))
        .select("order.*")
    )
    return (
        enriched.withWatermark("happened", "10 minutes")
        .groupBy(f.window("happened", "1 minute"), "region")
        .agg(
            f.sum("cents").alias("cents"),
            f.count("*").alias("orders"),
            f.approx_count_distinct("customer").alias("customers"),
        )
        .select(f.col("window.start").alias("minute"), "region", "cents", "orders", "customers")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="nats://127.0.0.1:4222")
    parser.add_argument("--stream", default="orders-enriched")
    parser.add_argument("--out", default="data/revenue")
    parser.add_argument("--checkpoint", default="checkpoints/revenue")
    asked = parser.parse_args()
    spark = session("revenue", **{"spark.sql.shuffle.partitions": 4})
    query = (
        revenue(spark, asked.server, asked.stream)
        .writeStream.format("parquet")
        .option("path", asked.out)
        .option("checkpointLocation", asked.checkpoint)
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.read.parquet(asked.out).orderBy("minute", "region").show(20, truncate=False)


if __name__ == "__main__":
    main()
