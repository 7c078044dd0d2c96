"""JetStream in Spark: `format("jetstream")` for batch and streaming, reading and writing.

from parti.spark import session

spark = session("orders")
orders = spark.readStream.format("jetstream").option("stream", "ORDERS").load()
"""

from parti.spark.session import session

__all__ = ["session"]
