"""The seam between parti and any metrics system: three calls. The default does nothing and imports nothing.

    metrics.set(READY, 1)

`parti.observe.prometheus.PrometheusMetrics` is the real one; another system needs one class with these three methods.
"""

from __future__ import annotations

from typing import Final, Protocol

from parti.observe.catalog import Metric


class Metrics(Protocol):
    """Receives what happened. Calls are cheap, never block and never fail for a declared metric."""

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter."""
        ...

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Add one observation to a histogram."""
        ...


class NoMetrics:
    """Drops everything."""

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        pass

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        pass

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        pass


NO_METRICS: Final[Metrics] = NoMetrics()
