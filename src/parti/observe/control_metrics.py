"""The metrics of the control plane; the handoff metrics have the names of docs/requirements.md#r-111."""

from __future__ import annotations

from typing import Final

from parti.observe.metric import Metric, MetricKind

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

IS_LEADER: Final = Metric("parti_leader", MetricKind.GAUGE, "1 while this worker leads its namespace.")
MEMBERS: Final = Metric("parti_members", MetricKind.GAUGE, "Live members of the namespace, as this worker sees them.")
OWNED: Final = Metric("parti_partitions_owned", MetricKind.GAUGE, "Partitions that this worker may act on.")
UNASSIGNED: Final = Metric(
    "parti_partitions_unassigned",
    MetricKind.GAUGE,
    "On the leader: partitions without a worker, because of capacity or because no worker is healthy.",
)
CLAIMS: Final = Metric("parti_claim_store_size", MetricKind.GAUGE, "Claims that this worker knows of.")
DEGRADED: Final = Metric(
    "parti_degraded", MetricKind.GAUGE, "1 while NATS is unreachable for longer than degraded_after."
)
FENCED: Final = Metric(
    "parti_fenced_total", MetricKind.COUNTER, "Times this worker lost its lease and stopped by itself."
)
LEADER_CHANGES: Final = Metric("parti_leader_changes_total", MetricKind.COUNTER, "Times this worker became the leader.")
REBALANCES: Final = Metric(
    "parti_rebalances_total",
    MetricKind.COUNTER,
    "Assignments written, by reason.",
    {"reason": ("cold_start", "planned_scale", "leave", "emergency", "partitions", "refresh", "adopt")},
)
HANDOFFS: Final = Metric(
    "parti_handoff_total",
    MetricKind.COUNTER,
    "Moves that this leader watched, by how they ended.",
    {"result": ("success", "timeout", "abort", "rollback")},
)
HANDOFF_DURATION: Final = Metric(
    "parti_handoff_duration_seconds",
    MetricKind.HISTOGRAM,
    "From prepare to stable, as the leader saw it.",
    {},
    _SECONDS,
)
HANDOFF_PHASE: Final = Metric(
    "parti_handoff_phase_duration_seconds",
    MetricKind.HISTOGRAM,
    "Time a move spent in one phase.",
    {"phase": ("prepare", "commit", "catch_up", "done")},
    _SECONDS,
)
CLAIM_WRITES: Final = Metric(
    "parti_claim_cas_total",
    MetricKind.COUNTER,
    "Claim writes: accepted, refused (another writer was first), or unknown.",
    {"result": ("success", "conflict", "unknown")},
)
CAS_CONFLICTS: Final = Metric(
    "parti_handoff_cas_conflicts_total",
    MetricKind.COUNTER,
    "Claim writes that lost their compare-and-set to another writer.",
)
CLAIMS_STALE: Final = Metric(
    "parti_claim_store_stale_total",
    MetricKind.COUNTER,
    "Claims found that did not tell the truth any more: removed, damaged, or of an owner that is gone.",
)
STREAM_REPLACED: Final = Metric(
    "parti_stream_replaced_total",
    MetricKind.COUNTER,
    "Times the stream was not the one that positions were stored for, so that processing started over.",
    {"kind": ("recreated", "rewound", "exchanged")},
)
CHECKPOINTS: Final = Metric("parti_checkpoints_total", MetricKind.COUNTER, "Position records written.")
UNREADABLE: Final = Metric(
    "parti_records_unreadable_total",
    MetricKind.COUNTER,
    "Records of the bucket that were skipped.",
    {"fault": ("foreign", "corrupt", "future")},
)

CONTROL_METRICS: Final = (
    IS_LEADER,
    MEMBERS,
    OWNED,
    UNASSIGNED,
    CLAIMS,
    DEGRADED,
    FENCED,
    LEADER_CHANGES,
    REBALANCES,
    HANDOFFS,
    HANDOFF_DURATION,
    HANDOFF_PHASE,
    CLAIM_WRITES,
    CAS_CONFLICTS,
    CLAIMS_STALE,
    STREAM_REPLACED,
    CHECKPOINTS,
    UNREADABLE,
)
