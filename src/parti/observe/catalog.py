"""Every metric parti can emit. Each part declares its own metrics; this module collects them."""

from __future__ import annotations

from typing import Final

import parti
from parti.observe.control_metrics import CONTROL_METRICS
from parti.observe.delivery_metrics import DELIVERY_METRICS
from parti.observe.group_metrics import GROUP_METRICS
from parti.observe.metric import MAX_SERIES, Metric, MetricKind
from parti.observe.worker_metrics import WORKER_METRICS

__all__ = ["BUILD_INFO", "CATALOG", "MAX_SERIES", "READY", "Metric", "MetricKind"]

BUILD_INFO: Final = Metric(
    "parti_build_info",
    MetricKind.GAUGE,
    "1, labelled with the version of parti that is running.",
    {"version": (parti.__version__,)},
)
READY: Final = Metric(
    "parti_ready",
    MetricKind.GAUGE,
    "1 when every health check passed at the last question, 0 when one failed.",
)

CATALOG: Final[tuple[Metric, ...]] = (
    BUILD_INFO,
    READY,
    *WORKER_METRICS,
    *CONTROL_METRICS,
    *GROUP_METRICS,
    *DELIVERY_METRICS,
)
"""All metrics of `/metrics`. A new part adds its metrics here."""
