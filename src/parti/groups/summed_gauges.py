"""Gauges set by several instances of one process: the process shows their sum, not the last value."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from parti.observe.metric import Metric
from parti.observe.metrics import Metrics

_gauges: WeakKeyDictionary[Metrics, dict[str, dict[int, float]]] = WeakKeyDictionary()


class SummedGauges:
    """A `Metrics` for one instance: counters pass through, gauges are summed over instances with the same metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._all: dict[str, dict[int, float]] = {}
        with contextlib.suppress(TypeError):  # a user's class may lack weak references: then no sum over instances
            self._all = _gauges.setdefault(metrics, self._all)

    def __repr__(self) -> str:
        return f"<SummedGauges of {self._metrics!r}>"

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        self._metrics.count(metric, amount, **labels)

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set this instance's part of the gauge."""
        parts = self._all.setdefault(metric.name, {})
        parts[id(self)] = value
        self._metrics.set(metric, sum(parts.values()), **labels)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        self._metrics.observe(metric, value, **labels)

    def observe_all(self, metric: Metric, values: Sequence[float], /, **labels: str) -> None:
        self._metrics.observe_all(metric, values, **labels)

    def leave(self, *metrics: Metric) -> None:
        """This instance has ended: remove its values from the sums."""
        for metric in metrics:
            parts = self._all.get(metric.name, {})
            parts.pop(id(self), None)
            self._metrics.set(metric, sum(parts.values()))
