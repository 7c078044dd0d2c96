"""Chooses the plane for a layout and consumer; both layouts must pass the same proofs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parti.control.subject_buckets import check_subjects
from parti.errors import ConfigError
from parti.manager.host import Host, Plane
from parti.manager.layouts.foreign import UpdaterPlane
from parti.manager.layouts.per_partition.durable import subjects_of
from parti.manager.layouts.per_partition.plane import PerPartitionPlane
from parti.manager.layouts.per_worker import PerWorkerPlane
from parti.manager.partition_feed import Check
from parti.manager.slot_source import SlotSource
from parti.manager.sources import PartitionSource
from parti.model import Layout, Member, Partition, PartitionId, Retention
from parti.overlap import refuse_overlaps
from parti.worker import WorkerConsumer


def check_layout(layout: str, consumer: Any, source: PartitionSource) -> None:
    """ConfigError when the consumer or the source does not fit the layout: at startup, not at the first partition."""
    if not isinstance(consumer, WorkerConsumer):
        return
    template = consumer.config.subject_template
    if Layout(layout) is Layout.PER_PARTITION:
        if not isinstance(source, SlotSource):
            check_subjects(PartitionId("example"), subjects_of(template, PartitionId("example")))
    elif isinstance(source, SlotSource) or "," in template:
        raise ConfigError(
            "partitions of several subjects need the layout per-partition: set control.layout, or give each partition "
            f"one subject (worker.subject_template is {template!r})"
        )


def capacity_of(layout: str, consumer: Any) -> int:
    """The most partitions a worker can own; its lease reports this to the leader; 0 means no limit is stated."""
    if isinstance(consumer, WorkerConsumer) and Layout(layout) is Layout.PER_WORKER:
        return consumer.config.max_subjects
    return 0


def overlap_check(consumer: Any, source: PartitionSource) -> Check:
    """Refuses partitions that share subjects; a user-supplied consumer checks its subjects itself."""
    if not isinstance(consumer, WorkerConsumer):
        return lambda partitions: None  # noqa: ARG005 - the protocol's signature
    template = consumer.config.subject_template
    single = template.count("{partition}") == 1 and "," not in template

    def check(partitions: Sequence[Partition]) -> None:
        if isinstance(source, SlotSource):
            refuse_overlaps((p.id, source.subjects_of(p.id)) for p in partitions)
        elif not single or len({len(p.keys) for p in partitions}) > 1:
            # Two partitions with the same number of keys differ in a literal token at the same place.
            refuse_overlaps((p.id, subjects_of(template, p.id)) for p in partitions)

    return check


def plane_for(
    layout: str, host: Host, member: Member, consumer: Any, retention: Retention, source: PartitionSource
) -> Plane:
    """The plane of a member; any object with `update_worker_consumer` is served, whatever the layout."""
    if not isinstance(consumer, WorkerConsumer):
        return UpdaterPlane(host, member, consumer)
    if Layout(layout) is Layout.PER_WORKER:
        return PerWorkerPlane(host, member, consumer, retention)
    subjects = source.subjects_of if isinstance(source, SlotSource) else None
    plane = PerPartitionPlane(host, member, consumer.runtime(), retention, subjects)
    consumer.show(plane.shown)
    return plane
