"""The tables of the pipeline. `spark-pipelines` calls these functions and keeps the tables up to date."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()


@dp.table
def orders() -> DataFrame:
    """Every message of the stream, each once; a run adds the messages published since the last run."""
    return (
        spark.readStream.format("jetstream")
        .option("stream", spark.conf.get("orders.stream", "ORDERS"))
        .option("startingOffsets", "earliest")
        .load()
    )


@dp.materialized_view
def orders_by_subject() -> DataFrame:
    """The number of messages per subject."""
    return spark.read.table("orders").groupBy("subject").agg(F.count("*").alias("messages"))
