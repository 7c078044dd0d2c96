"""The Spark session of an audit: little memory, few logs, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from parti.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS: Final[dict[str, Any]] = {
    "spark.ui.enabled": "false",
    # The data is in the Python workers; the JVM moves and sorts packets, and spills when memory is short.
    "spark.driver.memory": "700m",
    "spark.executor.memory": "700m",
    # A short job in a fresh JVM, most of it in Python: the second compiler and parallel collection cost 14 s of CPU
    # time and 120 MB for ten million messages, and gain nothing (33 against 47 s in total).
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    # Rows hold packets of effects here, up to 8 MB each: a batch of rows must stay small.
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


@contextmanager
def audit_session(master: str = "local[*]") -> Iterator[SparkSession]:
    """A session for `audit`, stopped at the end; a session that already runs is used unchanged and not stopped."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    spark = session("parti audit", master=master, **_SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
