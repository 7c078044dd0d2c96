"""The metrics of consumer groups. A process in several groups reports their sum; the log distinguishes the groups."""

from __future__ import annotations

from typing import Final

from parti.observe.metric import Metric, MetricKind

MESSAGES: Final = Metric(
    "parti_group_messages_total",
    MetricKind.COUNTER,
    "Handler calls of group members by their outcome.",
    {"outcome": ("ack", "retry", "reject")},
)
REDELIVERED: Final = Metric(
    "parti_group_redelivered_total", MetricKind.COUNTER, "Messages that the server delivered for a second time or more."
)
IN_HAND: Final = Metric(
    "parti_group_in_hand", MetricKind.GAUGE, "Messages held by the member: queued, running, or waiting."
)
PENDING: Final = Metric(
    "parti_group_pending",
    MetricKind.GAUGE,
    "Messages of the member that the server has not delivered yet, as of the last delivery.",
)
SOURCE_STUCK: Final = Metric(
    "parti_group_source_stuck",
    MetricKind.GAUGE,
    "Instances whose work queue takes no more messages from its stream: an alert above 0.",
)
PARTITIONS: Final = Metric("parti_group_partitions", MetricKind.GAUGE, "Partitions that the member owns.")
PINNED: Final = Metric(
    "parti_group_pinned", MetricKind.GAUGE, "1 while this instance is the one that gets the messages."
)
EVENTS: Final = Metric(
    "parti_group_events_total",
    MetricKind.COUNTER,
    "Turns in a member's life, such as assigned, revoked, pinned and consumer_lost.",
    {
        "kind": (
            "assigned",
            "revoked",
            "waiting",
            "blocked",
            "joined",
            "pinned",
            "unpinned",
            "consumer_lost",
            "frozen",
            "template_differs",
            "record_invalid",
            "source_stuck",
            "source_resumed",
            "old_names",
            "group_deleted",
            "stopped",
            "failed",
        )
    },
)

GROUP_METRICS: Final = (MESSAGES, REDELIVERED, IN_HAND, PENDING, SOURCE_STUCK, PARTITIONS, PINNED, EVENTS)
