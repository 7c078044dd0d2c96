"""The objectives of the design: how fast handlers are, how rarely work repeats, how often updates succeed."""

from __future__ import annotations

from pathlib import Path

from parti.audit.measures import Spread
from parti.audit.model import Slo
from parti.errors import ConfigError

_UPDATES = "parti_worker_consumer_updates_total"
_SUCCESS, _FAILURE = "success", "failure"


def slos(took: Spread, redelivery_ratio: float, updates: tuple[float, float] | None) -> tuple[Slo, ...]:
    """The SLO table; an objective without a measurement stays open and does not count as met."""
    return (_handlers(took), _redeliveries(redelivery_ratio), _updates(updates))


def update_counts(paths: tuple[str, ...]) -> tuple[float, float] | None:
    """Consumer updates (succeeded, total), from saved /metrics pages of the workers; None without a page."""
    from prometheus_client.parser import text_string_to_metric_families

    good = total = 0.0
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read metrics from {path}: {error.strerror}") from error
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            raise ConfigError(f"{path} is no metrics page in the Prometheus text format: {error}") from error
        for sample in (sample for family in families for sample in family.samples if sample.name == _UPDATES):
            result = sample.labels.get("result")
            good += sample.value if result == _SUCCESS else 0.0
            total += sample.value if result in (_SUCCESS, _FAILURE) else 0.0  # not updates with nothing to do
    return (good, total) if paths else None


def _handlers(took: Spread) -> Slo:
    name, target = "messages within 2 x p95 of the handler", ">= 99 %"
    if not took.total:
        return Slo(name, target, "not measured: effects have no column took", None)
    share = took.share_below(2 * took.percentile(0.95))
    return Slo(name, target, f"{100 * share:.2f} %", share >= 0.99)


def _redeliveries(ratio: float) -> Slo:
    return Slo("redeliveries", "< 3 %", f"{100 * ratio:.2f} %", ratio < 0.03)


def _updates(counts: tuple[float, float] | None) -> Slo:
    name, target = "consumer updates that succeed", ">= 99.9 %"
    if counts is None or not counts[1]:
        return Slo(name, target, "not measured: give metrics of the workers", None)
    share = counts[0] / counts[1]
    return Slo(name, target, f"{100 * share:.2f} %", share >= 0.999)
