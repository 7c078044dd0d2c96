"""Streaming queries on /metrics: rows, rate, batch time, and lag in messages and in seconds.

    metrics = PrometheusMetrics((*CATALOG, *query_metrics(("orders",))))
    spark.streams.addListener(QueryMetrics(metrics, queries=("orders",)))

A query is identified by its name (`writeStream.queryName("orders")`). Names are a bounded set: one that was not
declared is counted as `other`, so that nothing can flood the metrics store.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from pyspark.sql.streaming import StreamingQueryListener

from parti.observe.catalog import Metric, MetricKind
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics

log = get_logger("spark.listener")

OTHER: Final = "other"
_BATCH_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_HISTORY: Final = (
    1024  # observations of a stream's end; one per trigger while it moves, so the lag of ~100 s at 10 triggers/s
)


def query_metrics(queries: Iterable[str]) -> tuple[Metric, ...]:
    """The metrics of these queries, for the catalog of a `Metrics`; every other query is counted as `other`."""
    labels = {"query": (*dict.fromkeys(queries), OTHER)}
    return (
        Metric("parti_spark_rows_total", MetricKind.COUNTER, "Rows that batches have read.", labels),
        Metric("parti_spark_batches_total", MetricKind.COUNTER, "Batches done, also those without rows.", labels),
        Metric("parti_spark_failures_total", MetricKind.COUNTER, "Queries that ended with an error.", labels),
        Metric(
            "parti_spark_rows_per_second", MetricKind.GAUGE, "Rows a second while the last batch was processed.", labels
        ),
        Metric(
            "parti_spark_batch_seconds", MetricKind.HISTOGRAM, "Time from trigger to commit.", labels, _BATCH_SECONDS
        ),
        Metric(
            "parti_spark_lag_messages", MetricKind.GAUGE, "Messages in the stream behind the last batch's end.", labels
        ),
        Metric(
            "parti_spark_lag_seconds",
            MetricKind.GAUGE,
            "For how long the first unread message has been seen in the stream, 0 when all is read.",
            labels,
        ),
        Metric("parti_spark_queries", MetricKind.GAUGE, "Queries that run now.", labels),
    )


class _Ends:
    """When a stream's end was first seen at or after a sequence: the age of what is not read yet."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque()

    def age(self, latest: int, done: int, now: float) -> float:
        if self._seen and latest < self._seen[-1][0]:
            self._seen.clear()  # the stream was purged or recreated
        if not self._seen or latest > self._seen[-1][0]:
            self._seen.append((latest, now))
        if len(self._seen) > _HISTORY:
            self._seen = deque(list(self._seen)[::2])
        while self._seen and self._seen[0][0] <= done:
            self._seen.popleft()
        return now - self._seen[0][1] if self._seen else 0.0


class QueryMetrics(StreamingQueryListener):
    """Turns each progress report of the session's queries into metrics."""

    def __init__(
        self, metrics: Metrics, queries: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._queries = frozenset(queries)
        self._clock = clock
        self._by_name = {metric.name.removeprefix("parti_spark_"): metric for metric in query_metrics(queries)}
        self._running: dict[str, str] = {}
        self._ends: dict[tuple[str, str], _Ends] = {}

    def onQueryStarted(self, event: Any) -> None:
        self._running[str(event.runId)] = self._label(event.name)
        self._count_running()

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        query, run = self._label(progress.name), str(progress.runId)
        count, gauge = self._metrics.count, self._metrics.set
        count(self._by_name["batches_total"], query=query)
        count(self._by_name["rows_total"], max(progress.numInputRows, 0), query=query)
        gauge(self._by_name["rows_per_second"], _number(progress.processedRowsPerSecond), query=query)
        milliseconds = progress.durationMs.get("triggerExecution", 0)
        self._metrics.observe(self._by_name["batch_seconds"], milliseconds / 1000, query=query)
        self._lag(run, query, progress.sources)

    def onQueryIdle(self, event: Any) -> None:
        """Nothing new came: the figures of the last batch stay."""

    def onQueryTerminated(self, event: Any) -> None:
        run = str(event.runId)
        query = self._running.pop(run, OTHER)
        self._ends = {key: ends for key, ends in self._ends.items() if key[0] != run}
        if event.exception is not None:
            self._metrics.count(self._by_name["failures_total"], query=query)
            log.warning("spark.query_failed", query=query, run=run, error=str(event.exception)[:500])
        self._metrics.set(self._by_name["rows_per_second"], 0, query=query)
        self._count_running()

    def _lag(self, run: str, query: str, sources: Iterable[Any]) -> None:
        """The lag over all JetStream sources of the query: the sum of messages, the maximum of ages."""
        now = self._clock()
        messages, age, found = 0, 0.0, False
        for source in sources:
            stream, done = _position(source.endOffset)
            same, latest = _position(source.latestOffset)
            if stream is None or same != stream:
                continue
            found = True
            messages += max(latest - done, 0)
            age = max(age, self._ends.setdefault((run, stream), _Ends()).age(latest, done, now))
        if found:
            self._metrics.set(self._by_name["lag_messages"], messages, query=query)
            self._metrics.set(self._by_name["lag_seconds"], age, query=query)

    def _label(self, name: str | None) -> str:
        return name if name is not None and name in self._queries else OTHER

    def _count_running(self) -> None:
        for query in (*self._queries, OTHER):
            running = sum(1 for label in self._running.values() if label == query)
            self._metrics.set(self._by_name["queries"], running, query=query)


def _position(offset: str | None) -> tuple[str | None, int]:
    """Stream (with its creation time) and sequence of a JetStream offset; (None, 0) for any other source."""
    try:
        found = json.loads(offset or "null")
        return f"{found['stream']} {found['created']}", int(found["sequence"])
    except (ValueError, TypeError, KeyError):
        return None, 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0
