"""Metrics: declared once, bounded in number, and without cost when disabled."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import generate_latest

import parti
from parti.errors import UsageError
from parti.observe.catalog import CATALOG, MAX_SERIES, READY, Metric, MetricKind
from parti.observe.metric import OTHER, FirstSeen
from parti.observe.metrics import NO_METRICS, Metrics
from parti.observe.prometheus import PrometheusMetrics, process_metrics

RETRIES = Metric("x_retries_total", MetricKind.COUNTER, "Retries.", {"op": ("create", "update")})
LAG = Metric("x_lag", MetricKind.GAUGE, "Lag.")
WAIT = Metric("x_wait_seconds", MetricKind.HISTOGRAM, "Waits.", {"op": ("create",)}, (0.1, 1.0))


@pytest.fixture
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics((RETRIES, LAG, WAIT))


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_counts_gauges_and_observations_reach_the_registry(metrics: PrometheusMetrics) -> None:
    metrics.count(RETRIES, op="create")
    metrics.count(RETRIES, 4, op="create")
    metrics.set(LAG, 7)
    metrics.observe(WAIT, 0.5, op="create")
    assert value(metrics, "x_retries_total", op="create") == 5
    assert value(metrics, "x_lag") == 7
    assert value(metrics, "x_wait_seconds_bucket", op="create", le="1.0") == 1
    assert value(metrics, "x_wait_seconds_bucket", op="create", le="0.1") == 0


def test_a_metric_without_labels_is_there_before_it_first_moves(metrics: PrometheusMetrics) -> None:
    assert value(metrics, "x_lag") == 0


def test_a_label_value_that_was_not_declared_is_refused(metrics: PrometheusMetrics) -> None:
    with pytest.raises(UsageError, match="op='w-17' is not one of create, update"):
        metrics.count(RETRIES, op="w-17")
    with pytest.raises(UsageError, match=r"has the labels \['op'\], not \[\]"):
        metrics.count(RETRIES)
    assert b"w-17" not in generate_latest(metrics.registry)


def test_a_metric_of_the_wrong_kind_or_unknown_to_the_catalog_is_refused(metrics: PrometheusMetrics) -> None:
    with pytest.raises(UsageError, match="not a gauge"):
        metrics.set(RETRIES, 1, op="create")
    with pytest.raises(UsageError, match="not a counter"):
        metrics.count(LAG)
    with pytest.raises(UsageError, match="not a histogram"):
        metrics.observe(LAG, 1)
    with pytest.raises(UsageError, match="not in the catalog"):
        metrics.set(READY, 1)


def test_of_values_that_only_the_data_tells_the_first_keep_their_name() -> None:
    metric = Metric("x_db_total", MetricKind.COUNTER, "By database.", {"database": FirstSeen(2), "ok": ("yes", "no")})
    metrics = PrometheusMetrics((metric,))
    for database in ("a", "b", "c", "d", "a", "c"):
        metrics.count(metric, database=database, ok="yes")
    assert metric.series == 6
    counts = {name: value(metrics, "x_db_total", database=name, ok="yes") for name in ("a", "b", "c", "d", OTHER)}
    assert counts == {"a": 2, "b": 1, "c": None, "d": None, OTHER: 3}
    with pytest.raises(UsageError, match="is not one of"):
        metrics.count(metric, database="a", ok="maybe")


@pytest.mark.parametrize(
    ("name", "kind", "labels", "buckets", "message"),
    [
        ("x_total", MetricKind.GAUGE, {}, (), "ends with _total"),
        ("x", MetricKind.COUNTER, {}, (), "ends with _total"),
        ("x", MetricKind.HISTOGRAM, {}, (), "needs buckets"),
        ("x", MetricKind.GAUGE, {}, (1.0,), "needs buckets"),
        ("x", MetricKind.HISTOGRAM, {}, (2.0, 1.0), "must rise"),
        ("x", MetricKind.GAUGE, {"a": tuple(map(str, range(MAX_SERIES + 1)))}, (), "series are more than"),
    ],
)
def test_a_malformed_declaration_is_refused(
    name: str, kind: MetricKind, labels: dict[str, tuple[str, ...]], buckets: tuple[float, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Metric(name, kind, "Help.", labels, buckets)


def test_every_name_of_the_catalog_is_unique_and_ours() -> None:
    names = [metric.name for metric in CATALOG]
    assert len(set(names)) == len(names)
    seed_004 = {
        "trigger_consume_count_total",
        "trigger_consume_latency_seconds",
        "trigger_worker_active",
        "trigger_worker_queue_size",
    }
    assert all(name.startswith("parti_") or name in seed_004 for name in names)
    assert all(metric.help.endswith(".") for metric in CATALOG)


def test_the_running_version_is_a_metric() -> None:
    assert value(PrometheusMetrics(), "parti_build_info", version=parti.__version__) == 1


def test_the_process_own_metrics_can_be_added_to_a_registry() -> None:
    metrics = PrometheusMetrics()
    process_metrics(metrics.registry)
    assert b"python_info" in generate_latest(metrics.registry)


def test_the_default_takes_everything_and_keeps_nothing() -> None:
    nothing: Metrics = NO_METRICS
    nothing.count(RETRIES, op="create")
    nothing.set(LAG, 3)
    nothing.observe(WAIT, 1.0, op="create")


def test_the_seam_does_not_import_prometheus() -> None:
    code = "import sys, parti.observe.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_many_observations_at_once_count_like_one_by_one() -> None:
    metric = Metric("parti_test_seconds", MetricKind.HISTOGRAM, "help", buckets=(0.1, 1, 10))
    values = [0.05, 0.1, 0.100001, 1, 5, 10, 11, 1e9]
    one, many = PrometheusMetrics([metric]), PrometheusMetrics([metric])
    for value in values:
        one.observe(metric, value)
    many.observe_all(metric, values)
    for le in ("0.1", "1.0", "10.0", "+Inf"):
        labels = {"le": le}
        expected = one.registry.get_sample_value("parti_test_seconds_bucket", labels)
        assert many.registry.get_sample_value("parti_test_seconds_bucket", labels) == expected
    for name in ("parti_test_seconds_count", "parti_test_seconds_sum"):
        assert many.registry.get_sample_value(name) == one.registry.get_sample_value(name)
