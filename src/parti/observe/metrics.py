"""The seam between parti and any metrics system: four calls. The default does nothing and imports nothing.

    metrics.set(READY, 1)

`parti.observe.prometheus.PrometheusMetrics` is the real one; another system needs one class with these four methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from parti.observe.catalog import Metric


class Metrics(Protocol):
    """Receives measurements. Calls are cheap, never block and never fail for a declared metric."""

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter."""
        ...

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Add one observation to a histogram."""
        ...

    def observe_all(self, metric: Metric, values: Sequence[float], /, **labels: str) -> None:
        """Add many observations at once, for measurements made once per message."""
        ...


class NoMetrics:
    """Drops everything."""

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        pass

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        pass

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        pass

    def observe_all(self, metric: Metric, values: Sequence[float], /, **labels: str) -> None:
        pass


NO_METRICS: Final[Metrics] = NoMetrics()
