"""Metrics in a prometheus-client registry: every declared metric, and no undeclared series."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

import parti
from parti.errors import UsageError
from parti.observe.catalog import BUILD_INFO, CATALOG, Metric, MetricKind
from parti.observe.metric import OTHER, FirstSeen

_Instrument = Counter | Gauge | Histogram
_TYPES: Final[dict[MetricKind, type[Counter] | type[Gauge]]] = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge}


class PrometheusMetrics:
    """A `Metrics` over its own registry, so that two of them in one process, as in tests, do not collide.

    Series of metrics without labels exist from the start: an alert on a counter that never increased must see 0.
    """

    def __init__(self, catalog: Iterable[Metric] = CATALOG, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._instruments = {metric: self._instrument(metric) for metric in catalog}
        # Bounded by the catalog: each series is looked up and checked once.
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], _Instrument] = {}
        self._bare: dict[str, _Instrument] = {}
        self._seen: dict[tuple[str, str], set[str]] = {}
        if BUILD_INFO in self._instruments:
            self.set(BUILD_INFO, 1, version=parti.__version__)

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        series = self._at(metric, labels)
        if not isinstance(series, Counter):
            raise UsageError(f"metric {metric.name} is a {metric.kind}, not a counter")
        series.inc(amount)

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        series = self._at(metric, labels)
        if not isinstance(series, Gauge):
            raise UsageError(f"metric {metric.name} is a {metric.kind}, not a gauge")
        series.set(value)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        series = self._at(metric, labels)
        if not isinstance(series, Histogram):
            raise UsageError(f"metric {metric.name} is a {metric.kind}, not a histogram")
        series.observe(value)

    def observe_all(self, metric: Metric, values: Sequence[float], /, **labels: str) -> None:
        series = self._at(metric, labels)
        if not isinstance(series, Histogram):
            raise UsageError(f"metric {metric.name} is a {metric.kind}, not a histogram")
        # As Histogram.observe, with one lock per bucket instead of two per value (0.2 us per value, not 1.3).
        bounds, counts = series._upper_bounds, [0] * len(series._upper_bounds)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        series._sum.inc(sum(values))
        for bucket, count in zip(series._buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def __repr__(self) -> str:
        return f"<PrometheusMetrics metrics={len(self._instruments)} series={len(self._series)}>"

    def _at(self, metric: Metric, labels: dict[str, str]) -> _Instrument:
        if not labels and (bare := self._bare.get(metric.name)) is not None:  # once per message: half the cost
            return bare
        key = (metric.name, tuple(sorted(labels.items())))
        found = self._series.get(key)
        if found is not None:
            return found
        metric.check(labels)
        try:
            instrument = self._instruments[metric]
        except KeyError:
            raise UsageError(f"metric {metric.name} is not in the catalog: declare it there") from None
        known = self._known(metric, labels)
        series = instrument.labels(**known) if labels else instrument
        if known == labels:
            self._series[key] = series
        if not labels:
            self._bare[metric.name] = series
        return series

    def _known(self, metric: Metric, labels: dict[str, str]) -> dict[str, str]:
        """The labels, with "other" for a value that came after the first ones."""
        known = dict(labels)
        for name, value in labels.items():
            if isinstance(limit := metric.labels[name], FirstSeen):
                seen = self._seen.setdefault((metric.name, name), set())
                if value not in seen and len(seen) >= limit.count:
                    known[name] = OTHER
                else:
                    seen.add(value)
        return known

    def _instrument(self, metric: Metric) -> _Instrument:
        names = tuple(metric.labels)
        if metric.kind is MetricKind.HISTOGRAM:
            return Histogram(metric.name, metric.help, names, registry=self.registry, buckets=metric.buckets)
        return _TYPES[metric.kind](metric.name, metric.help, names, registry=self.registry)


def process_metrics(registry: CollectorRegistry) -> None:
    """Add the process's own metrics (memory, descriptors, garbage collection), once per process."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
