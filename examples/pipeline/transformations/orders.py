"""The tables of the pipeline; `spark-pipelines` calls these functions and keeps what they describe up to date."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()


@dp.table
def orders() -> DataFrame:
    """Every message of the stream, each once; a run adds what came since the last."""
    return (
        spark.readStream.format("jetstream")
        .option("stream", spark.conf.get("orders.stream", "ORDERS"))
        .option("startingOffsets", "earliest")
        .load()
    )


@dp.materialized_view
def orders_by_subject() -> DataFrame:
    """How many messages each subject has."""
    return spark.read.table("orders").groupBy("subject").agg(F.count("*").alias("messages"))
