"""The worker plane's metrics: the exact names, labels and buckets of docs/requirements.md#metrics, then others."""

from __future__ import annotations

from typing import Final

from parti.observe.metric import Metric, MetricKind

_OPS = ("create", "update", "info", "iterate")
_RECREATION = ("not_found", "iterator_error")
# Around the SLO of a fast handler (1 ms) and of an HTTP call (1 s); three to four buckets per decade.
_LATENCY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_UPDATE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

# -- docs/requirements.md#r-007 ----------------------------------------------------------------------------------------
MESSAGES: Final = Metric(
    "parti_consumer_messages_total", MetricKind.COUNTER, "Messages received, redeliveries included."
)
REDELIVERIES: Final = Metric(
    "parti_consumer_redeliveries_total",
    MetricKind.COUNTER,
    "Messages that the server delivered for a second time or more.",
)
INFLIGHT: Final = Metric(
    "parti_consumer_inflight",
    MetricKind.GAUGE,
    "Messages that wait at the server (as of the last read or look) and those held by the worker: pending and ack "
    "pending.",
)
UPDATE_DURATION: Final = Metric(
    "parti_consumer_update_duration_seconds",
    MetricKind.HISTOGRAM,
    "One create or update call to the server, tries included.",
    buckets=_UPDATE,
)
SUBJECT_COUNT: Final = Metric("parti_consumer_subject_count", MetricKind.GAUGE, "Filter subjects of the consumer.")
HANDLER_LATENCY: Final = Metric(
    "parti_handler_latency_seconds", MetricKind.HISTOGRAM, "From a handler's start to its outcome.", buckets=_LATENCY
)
UPDATE_FAILURES: Final = Metric(
    "parti_consumer_update_failures_total", MetricKind.COUNTER, "Updates that failed after all tries."
)
UPDATE_SKIPPED: Final = Metric(
    "parti_consumer_update_skipped_total", MetricKind.COUNTER, "Updates that changed nothing and were not sent."
)

# -- docs/requirements.md#r-101 to #r-114 ------------------------------------------------------------------------------
RECREATIONS: Final = Metric(
    "parti_worker_consumer_recreations_total",
    MetricKind.COUNTER,
    "Recreations of the consumer at the partitions' position, by result.",
    {"result": ("success", "failure"), "reason": _RECREATION},
)
RECREATION_ATTEMPTS: Final = Metric(
    "parti_worker_consumer_recreation_attempts_total",
    MetricKind.COUNTER,
    "Tries to recreate the consumer.",
    {"reason": _RECREATION},
)
CONSUMER_REPAIRS: Final = Metric(
    "parti_worker_consumer_repairs_total",
    MetricKind.COUNTER,
    "Times another client changed the consumer and parti restored it.",
)
RECREATION_DURATION: Final = Metric(
    "parti_worker_consumer_recreation_duration_seconds",
    MetricKind.HISTOGRAM,
    "From noticing that the consumer is gone until it pulls again.",
    buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10),
)
HEALTH_STATUS: Final = Metric(
    "parti_worker_consumer_health_status",
    MetricKind.GAUGE,
    "1 for the status the worker is in, 0 for the other.",
    {"status": ("healthy", "unhealthy")},
)
CONTROL_RETRIES: Final = Metric(
    "parti_worker_consumer_control_retries_total", MetricKind.COUNTER, "Repeated calls, by operation.", {"op": _OPS}
)
RETRY_BACKOFF: Final = Metric(
    "parti_worker_consumer_retry_backoff_seconds",
    MetricKind.HISTOGRAM,
    "Waits before a repeated call.",
    {"op": _OPS},
    buckets=(0.1, 0.2, 0.5, 1, 2, 5),
)
SUBJECTS_CURRENT: Final = Metric(
    "parti_worker_consumer_subjects_current", MetricKind.GAUGE, "Filter subjects applied at the moment."
)
GUARDRAIL_VIOLATIONS: Final = Metric(
    "parti_worker_consumer_guardrail_violations_total",
    MetricKind.COUNTER,
    "Updates refused before any call to the server.",
    {"type": ("max_subjects", "workerid_mutation")},
)
THRESHOLD_WARNINGS: Final = Metric(
    "parti_worker_consumer_subjects_threshold_warnings_total",
    MetricKind.COUNTER,
    "Updates with at least 90 % of the subjects allowed.",
)
UPDATES: Final = Metric(
    "parti_worker_consumer_updates_total",
    MetricKind.COUNTER,
    "Updates of the assignment, by result.",
    {"result": ("success", "failure", "noop")},
)
UPDATE_LATENCY: Final = Metric(
    "parti_worker_consumer_update_latency_seconds",
    MetricKind.HISTOGRAM,
    "From the call of an update until it is in force, coalescing included.",
    buckets=_UPDATE,
)
SUBJECT_CHANGES: Final = Metric(
    "parti_worker_consumer_subject_changes_total",
    MetricKind.COUNTER,
    "Filter subjects added and removed.",
    {"type": ("add", "remove")},
)
ITERATOR_RESTARTS: Final = Metric(
    "parti_worker_consumer_iterator_restarts_total",
    MetricKind.COUNTER,
    "Times the pull loop had to reattach.",
    {"reason": ("transient", "heartbeat")},
)
ITERATOR_FAILURES: Final = Metric(
    "parti_worker_consumer_consecutive_iterator_failures",
    MetricKind.GAUGE,
    "Failures of the pull loop since it last worked.",
)
ITERATOR_ESCALATIONS: Final = Metric(
    "parti_worker_consumer_iterator_escalations_total",
    MetricKind.COUNTER,
    "Forced refreshes of the consumer after repeated failures, once per window.",
    {"reason": ("consecutive_failures",)},
)
DUMP_REQUESTS: Final = Metric(
    "parti_worker_consumer_dump_requests_total", MetricKind.COUNTER, "Calls of info(), which shows the worker's state."
)
COALESCED_BATCHES: Final = Metric(
    "parti_assignment_coalesced_batches_total",
    MetricKind.COUNTER,
    "Batches into which assignment updates were collapsed.",
)
COALESCED_UPDATES: Final = Metric(
    "parti_assignment_coalesced_updates_total", MetricKind.COUNTER, "Assignment updates that went into those batches."
)
PULL_BATCH: Final = Metric(
    "parti_pull_batch_size_observed",
    MetricKind.HISTOGRAM,
    "Messages that came with one read of the socket.",
    buckets=(1, 2, 5, 10, 25, 50, 100, 250, 500, 1000),
)
PULL_CYCLE: Final = Metric(
    "parti_pull_cycle_duration_seconds",
    MetricKind.HISTOGRAM,
    "Between two reads that brought messages.",
    buckets=(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
)

# -- beyond the requirements -------------------------------------------------------------------------------------------
RETRIES: Final = Metric("parti_handler_retries_total", MetricKind.COUNTER, "Attempts that ended in a retry.")
DEAD_LETTERS: Final = Metric(
    "parti_dead_letters_total",
    MetricKind.COUNTER,
    "Messages that the dead-letter stream has acknowledged.",
    {"reason": ("max_deliver", "rejected", "timeout", "crash")},
)
STALLS: Final = Metric(
    "parti_worker_stalls_total",
    MetricKind.COUNTER,
    "Things that stood still and were logged: a handler that runs for long or was left behind, no progress, the loop.",
    {"kind": ("handler", "left_behind", "no_progress", "loop_blocked")},
)
CAUGHT_UP: Final = Metric(
    "parti_consumer_catchup_messages_total",
    MetricKind.COUNTER,
    "Messages that came by range reads, not by the consumer.",
)
SKIPPED: Final = Metric(
    "parti_consumer_duplicates_dropped_total",
    MetricKind.COUNTER,
    "Deliveries of messages that were already done or in memory.",
)

WORKER_METRICS: Final[tuple[Metric, ...]] = tuple(value for value in globals().copy().values() if type(value) is Metric)
