"""Metrics have the required names, labels and buckets, and count what happened; scraped over HTTP.

See docs/requirements.md#metrics.
"""

from __future__ import annotations

import asyncio
import re
import time

import aiohttp
import pytest

from parti.backoff import Backoff
from parti.errors import Category
from parti.observe.catalog import CATALOG
from parti.observe.health import ObservabilityServer
from parti.testing import NatsServer, eventually
from parti.wire.errors import api_error, status_error
from parti.worker import Retry, WorkerConfig
from support.worker import Bench, Effects, bench_on, parts

SEED_000 = {
    "parti_consumer_messages_total": "counter",
    "parti_consumer_redeliveries_total": "counter",
    "parti_consumer_inflight": "gauge",
    "parti_consumer_update_duration_seconds": "histogram",
    "parti_consumer_subject_count": "gauge",
    "parti_handler_latency_seconds": "histogram",
    "parti_consumer_update_failures_total": "counter",
    "parti_consumer_update_skipped_total": "counter",
}
SEED_003: dict[str, tuple[str, dict[str, set[str]]]] = {
    "parti_worker_consumer_recreations_total": (
        "counter",
        {"result": {"success", "failure"}, "reason": {"not_found", "iterator_error"}},
    ),
    "parti_worker_consumer_recreation_attempts_total": ("counter", {"reason": {"not_found", "iterator_error"}}),
    "parti_worker_consumer_recreation_duration_seconds": ("histogram", {}),
    "parti_worker_consumer_health_status": ("gauge", {"status": {"healthy", "unhealthy"}}),
    "parti_worker_consumer_control_retries_total": ("counter", {"op": {"create", "update", "info", "iterate"}}),
    "parti_worker_consumer_retry_backoff_seconds": ("histogram", {"op": {"create", "update", "info", "iterate"}}),
    "parti_worker_consumer_subjects_current": ("gauge", {}),
    "parti_worker_consumer_guardrail_violations_total": ("counter", {"type": {"max_subjects", "workerid_mutation"}}),
    "parti_worker_consumer_subjects_threshold_warnings_total": ("counter", {}),
    "parti_worker_consumer_updates_total": ("counter", {"result": {"success", "failure", "noop"}}),
    "parti_worker_consumer_update_latency_seconds": ("histogram", {}),
    "parti_worker_consumer_subject_changes_total": ("counter", {"type": {"add", "remove"}}),
    "parti_worker_consumer_iterator_restarts_total": ("counter", {"reason": {"transient", "heartbeat"}}),
    "parti_worker_consumer_consecutive_iterator_failures": ("gauge", {}),
    "parti_worker_consumer_iterator_escalations_total": ("counter", {"reason": {"consecutive_failures"}}),
    "parti_worker_consumer_dump_requests_total": ("counter", {}),
    "parti_assignment_coalesced_batches_total": ("counter", {}),
    "parti_assignment_coalesced_updates_total": ("counter", {}),
    "parti_pull_batch_size_observed": ("histogram", {}),
    "parti_pull_cycle_duration_seconds": ("histogram", {}),
}
BUCKETS = {
    "parti_worker_consumer_recreation_duration_seconds": (0.1, 0.25, 0.5, 1, 2, 5, 10),
    "parti_worker_consumer_update_latency_seconds": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
}


def test_every_metric_of_the_seeds_is_declared_with_its_labels_and_buckets() -> None:
    declared = {metric.name: metric for metric in CATALOG}
    for name, kind in SEED_000.items():
        assert declared[name].kind == kind, name
        assert not declared[name].labels
    for name, (kind, labels) in SEED_003.items():
        assert declared[name].kind == kind, name
        found = {label: set(values) for label, values in declared[name].labels.items() if isinstance(values, tuple)}
        assert found == labels, name
    for name, buckets in BUCKETS.items():
        assert declared[name].buckets == buckets


async def test_a_scrape_shows_what_happened_and_readiness_follows_the_worker(bench: Bench) -> None:
    effects = Effects(answer=lambda m: Retry(after=0.01) if m.attempt == 1 and m.sequence == 1 else None)
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await worker.update_worker_consumer("w1", parts("a"))
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 10)
    await effects.count(10)
    await bench.js.consumer_delete(bench.stream, "parti-w1")
    await bench.publish("a", 1)
    await effects.count(11)
    await bench.settled()
    await eventually(lambda: bench.metric("parti_handler_latency_seconds_count") == 12)
    worker.info()
    server = ObservabilityServer(bench.metrics.registry, [worker.health_check()], metrics=bench.metrics)
    async with server, aiohttp.ClientSession() as http:
        async with http.get(f"{server.url}/metrics") as answer:
            page = await answer.text()
        async with http.get(f"{server.url}/readyz") as answer:
            assert answer.status == 200
    shown = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, flags=re.MULTILINE))
    for name in [*SEED_000, *SEED_003]:
        assert name in shown or name.removesuffix("_total") in shown, name
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[0] != "#"}
    assert values["parti_consumer_messages_total"] >= 11
    assert values["parti_handler_latency_seconds_count"] == 12
    assert values["parti_consumer_inflight"] == 0
    assert values['parti_worker_consumer_updates_total{result="success"}'] == 2
    assert values['parti_worker_consumer_updates_total{result="noop"}'] == 1
    assert values['parti_worker_consumer_subject_changes_total{type="add"}'] == 2
    assert values['parti_worker_consumer_subject_changes_total{type="remove"}'] == 1
    assert values["parti_worker_consumer_subjects_current"] == values["parti_consumer_subject_count"] == 1
    assert values['parti_worker_consumer_recreations_total{reason="not_found",result="success"}'] == 1
    assert values['parti_worker_consumer_health_status{status="healthy"}'] == 1
    assert values["parti_worker_consumer_dump_requests_total"] >= 1
    assert values["parti_worker_consumer_update_latency_seconds_count"] == 3
    assert values["parti_pull_batch_size_observed_count"] >= 1


async def test_what_happens_to_a_partition_is_attributed_to_it(bench: Bench) -> None:
    effects = Effects(answer=lambda m: Retry(after=0.01) if m.partition.id == "b" and m.attempt == 1 else None)
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await bench.publish("a", 3)
    await bench.publish("b", 2)
    await effects.count(5)
    await bench.settled()
    seen = {info.partition.id: (info.done, info.retries, info.cursor) for info in worker.info().partitions}
    assert seen["a"][:2] == (3, 0)
    assert seen["b"] == (2, 2, 5)


# -- regressions of the Go library (docs/evidence/go-library.md) -------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "err_code", "category"),
    [
        (404, 10014, Category.NOT_FOUND),
        (400, 10149, Category.NOT_FOUND),
        (404, 10059, Category.POLICY),
        (401, 0, Category.POLICY),
        (403, 0, Category.POLICY),
        (429, 0, Category.TRANSIENT),
        (503, 0, Category.TRANSIENT),
        (500, 0, Category.TRANSIENT),
        (400, 10100, Category.POLICY),
        (777, 0, Category.UNKNOWN),
    ],
)
def test_api_errors_are_classified_as_seed_003_says(code: int, err_code: int, category: Category) -> None:
    """There all of 401, 403, 404, 409, 429 and 503 came out as unknown."""
    assert api_error({"code": code, "err_code": err_code}, request="x").category is category


@pytest.mark.parametrize(
    ("status", "text", "category"),
    [
        (409, "Consumer Deleted", Category.NOT_FOUND),
        (409, "Leadership Change", Category.TRANSIENT),
        (409, "Server Shutdown", Category.TRANSIENT),
        (503, "", Category.TRANSIENT),
        (403, "", Category.POLICY),
    ],
)
def test_status_lines_are_classified(status: int, text: str, category: Category) -> None:
    assert status_error(status, text, request="x").category is category


def test_the_defaults_in_force_are_the_documented_ones() -> None:
    """There a legacy field made the base 100 ms and the retries 3."""
    config, backoff = WorkerConfig(stream="s"), Backoff()
    assert (backoff.base, backoff.multiplier, backoff.cap, backoff.max_tries) == (0.2, 1.6, 5.0, 6)
    assert (config.max_recreation_retries, config.max_subjects, config.allow_worker_id_change) == (6, 500, False)
    assert (config.ack_wait, config.max_deliver, config.max_ack_pending, config.max_waiting) == (30.0, 3, 500, 256)
    assert (config.pull_batch_size, config.delays, config.capacity) == (50, (2.0, 5.0, 15.0), 400)
    assert (config.update_coalescing_window, config.on_empty_assignment) == (0.075, "apply-empty-filter")
    assert (config.health_failure_threshold, config.health_window) == (3, 60.0)


@pytest.mark.slow
async def test_a_closed_connection_burns_no_core(own_server: NatsServer, name: str) -> None:
    """docs/evidence/go-library.md#w4: there a closed connection made a loop spin, 5.02 s of CPU in 5 s."""
    async with bench_on(own_server, name) as bench:
        await bench.create()
        worker = bench.worker(Effects())
        await worker.update_worker_consumer("w1", parts("a"))
        await asyncio.to_thread(own_server.kill)
        await eventually(lambda: not worker.is_healthy, what="unhealthy")
        before = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before < 0.5
        await asyncio.to_thread(own_server.start)
