"""The metrics of task delivery: the four of docs/requirements.md#r-304, then parti's own.

`trigger.consume.count` is `trigger_consume_count_total`, `trigger.consume.latency` is
`trigger_consume_latency_seconds`, `trigger.worker.active` and `trigger.worker.queue_size` only lose their dots.
Database names come from the data: the first 50 keep their name. A `worker_id` is one of 16 groups of lanes.
"""

from __future__ import annotations

from typing import Final

from parti.observe.metric import FirstSeen, Metric, MetricKind

WORKERS: Final = tuple(str(number) for number in range(16))
_DATABASES = FirstSeen(50)
_REASONS = (
    "malformed",
    "too_large",
    "bad_url",
    "bad_header",
    "ssrf_blocked",
    "no_secret",
    "misrouted",
    "rejected",
    "gone",
    "disabled",
    "exhausted",
    "expired",
)
_OUTCOMES = (
    "delivered",
    "gone",
    "rejected",
    "redirected",
    "throttled",
    "server_error",
    "timeout",
    "network",
    "dns",
    "tls",
    "store",
    "local",
    "blocked",
    "refused",
)

# -- docs/requirements.md#r-304 ----------------------------------------------------------------------------------------
CONSUME_COUNT: Final = Metric(
    "trigger_consume_count_total",
    MetricKind.COUNTER,
    "Finished tasks: delivered (success true), or dead-lettered (false).",
    {"database": _DATABASES, "success": ("true", "false")},
)
CONSUME_LATENCY: Final = Metric(
    "trigger_consume_latency_seconds",
    MetricKind.HISTOGRAM,
    "From a task's receipt until it finished; parked time is not counted.",
    {"database": _DATABASES},
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
WORKER_ACTIVE: Final = Metric(
    "trigger_worker_active", MetricKind.GAUGE, "Lanes with a request under way.", {"worker_id": WORKERS}
)
WORKER_QUEUE: Final = Metric(
    "trigger_worker_queue_size", MetricKind.GAUGE, "Unfinished tasks in memory.", {"worker_id": WORKERS}
)

# -- beyond the requirements -------------------------------------------------------------------------------------------
ATTEMPTS: Final = Metric(
    "parti_delivery_attempts_total", MetricKind.COUNTER, "Attempts by the class of their end.", {"outcome": _OUTCOMES}
)
ATTEMPT_SECONDS: Final = Metric(
    "parti_delivery_attempt_seconds",
    MetricKind.HISTOGRAM,
    "One request, from its start to its end.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
DEAD_LETTERS: Final = Metric(
    "parti_delivery_dead_letters_total",
    MetricKind.COUNTER,
    "Tasks that the dead-letter stream has acknowledged.",
    {"reason": _REASONS},
)
HELD_BACK: Final = Metric(
    "parti_delivery_held_back_total",
    MetricKind.COUNTER,
    "Waits for a retry or a host, by where they take place.",
    {"where": ("memory", "park", "alone")},
)
POSTPONED: Final = Metric(
    "parti_delivery_postponed_total",
    MetricKind.COUNTER,
    "Tasks that were not tried for now; no attempt was spent.",
    {"why": ("breaker", "crowded", "trigger_limit")},
)
SUPERSEDED: Final = Metric(
    "parti_delivery_superseded_total",
    MetricKind.COUNTER,
    "Tasks dropped because a newer one of their document replaced them.",
)
DUPLICATES: Final = Metric(
    "parti_delivery_duplicates_dropped_total",
    MetricKind.COUNTER,
    "Deliveries of tasks that were done or parked already.",
)
ODDITIES: Final = Metric(
    "parti_delivery_odd_input_total",
    MetricKind.COUNTER,
    "Tasks taken although something about them is odd.",
    {"what": ("unknown_field", "subject_mismatch", "policy_clamped")},
)
BREAKERS_OPEN: Final = Metric(
    "parti_delivery_breakers_open", MetricKind.GAUGE, "Hosts that nothing is sent to for now."
)
BREAKER_OPENED: Final = Metric(
    "parti_delivery_breaker_opened_total", MetricKind.COUNTER, "Times a host was found down."
)
PARKED_DOCUMENTS: Final = Metric(
    "parti_delivery_parked_documents", MetricKind.GAUGE, "Documents that wait in the park."
)
PARTITIONS: Final = Metric("parti_delivery_partitions", MetricKind.GAUGE, "Partitions that this process delivers.")
RESYNCS: Final = Metric("parti_delivery_resyncs_total", MetricKind.COUNTER, "Times a consumer had to be reattached.")
HANDED_BACK: Final = Metric(
    "parti_delivery_handed_back_total", MetricKind.COUNTER, "Tasks handed back at a stop, without an attempt spent."
)

DELIVERY_METRICS: Final[tuple[Metric, ...]] = tuple(
    value for value in globals().copy().values() if type(value) is Metric
)
