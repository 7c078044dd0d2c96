"""Streaming queries as metrics: rows, batches, rate, lag in messages and seconds, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parti.errors import UsageError
from parti.observe.prometheus import PrometheusMetrics
from parti.spark.listener import QueryMetrics, _Ends, query_metrics
from parti.testing import eventually_blocking
from support.spark_streams import Stream

pytestmark = pytest.mark.spark


class Watched:
    """A listener on a session, and what its metrics say."""

    def __init__(self, spark: Any, name: str) -> None:
        self.query = name
        self.metrics = PrometheusMetrics(query_metrics([name]))
        self.listener = QueryMetrics(self.metrics, [name])
        spark.streams.addListener(self.listener)

    def value(self, metric: str, query: str | None = None) -> float | None:
        return self.metrics.registry.get_sample_value(f"parti_spark_{metric}", {"query": query or self.query})


@pytest.fixture
def watched(spark: Any, name: str) -> Iterator[Any]:
    made = Watched(spark, name)
    yield made
    spark.streams.removeListener(made.listener)


def start(spark: Any, stream: Stream, name: str, folder: Any, **options: Any) -> Any:
    frame = spark.readStream.format("jetstream").options(**stream.options(startingOffsets="earliest", **options)).load()
    return frame.writeStream.queryName(name).format("noop").option("checkpointLocation", str(folder))


def test_a_query_that_is_behind_shows_its_lag_and_one_that_has_caught_up_shows_none(
    spark: Any, stream: Stream, watched: Any, tmp_path: Path
) -> None:
    stream.publish(1000)
    writer = start(spark, stream, watched.query, tmp_path / "c", maxOffsetsPerTrigger=400)
    first = writer.trigger(processingTime="1 hour").start()
    try:
        eventually_blocking(lambda: watched.value("lag_messages") == 600, 60, "a lag of 600")
        assert watched.value("queries") == 1
        assert watched.value("rows_total") == 400
    finally:
        first.stop()
    assert start(spark, stream, watched.query, tmp_path / "c").trigger(availableNow=True).start().awaitTermination(60)
    eventually_blocking(lambda: watched.value("rows_total") == 1000, 60, "all rows")
    eventually_blocking(lambda: watched.value("queries") == 0, 60, "no query running")
    assert watched.value("lag_messages") == 0
    assert watched.value("lag_seconds") == 0
    assert watched.value("batches_total") >= 2
    assert watched.value("batch_seconds_count") == watched.value("batches_total")
    assert watched.value("failures_total") is None


def test_a_query_that_fails_is_counted_and_one_without_a_declared_name_is_other(
    spark: Any, stream: Stream, watched: Any, tmp_path: Path
) -> None:
    stream.publish(10)
    frame = spark.readStream.format("jetstream").options(**stream.options(startingOffsets="earliest")).load()

    def fail(batch: Any, number: int) -> None:
        raise RuntimeError("no")

    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match="no"):
        query.awaitTermination(60)
    eventually_blocking(lambda: watched.value("failures_total", "other") == 1, 60, "a failure")


def test_the_age_of_unread_messages_counts_from_when_they_were_first_seen() -> None:
    ends = _Ends()
    assert ends.age(latest=100, done=100, now=0.0) == 0.0
    assert ends.age(latest=150, done=100, now=1.0) == 0.0
    assert ends.age(latest=180, done=120, now=5.0) == 4.0
    assert ends.age(latest=180, done=150, now=7.0) == 2.0
    assert ends.age(latest=180, done=180, now=9.0) == 0.0
    assert ends.age(latest=20, done=10, now=10.0) == 0.0  # a stream recreated


def test_a_long_backlog_keeps_its_age_in_bounded_memory() -> None:
    ends = _Ends()
    for second in range(10_000):
        age = ends.age(latest=second + 1, done=0, now=float(second))
    assert age == 9_999.0
    assert len(ends._seen) <= 1024


def test_a_query_name_that_was_not_declared_has_no_series() -> None:
    metrics = PrometheusMetrics(query_metrics(["orders"]))
    rows = query_metrics(["orders"])[0]
    with pytest.raises(UsageError, match="not one of orders, other"):
        metrics.count(rows, query="invented")
