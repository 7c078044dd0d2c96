"""Taking a partition's filter off the durable of an owner that is gone: a work queue refuses two of them (10100)."""

from __future__ import annotations

from collections.abc import Collection

from parti.model import Partition, PartitionId
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ConsumerDoesNotExist, ConsumerNotFound
from parti.worker import WorkerConsumer
from parti.worker.routing import SubjectTemplate


async def strip_filters(consumer: WorkerConsumer, partitions: Collection[PartitionId]) -> None:
    """After this returns no other durable of this prefix filters these partitions.

    Call it only for partitions whose claim names us: nobody else may own them. A durable that would be left without a
    filter is deleted, because an empty filter list matches the whole stream; on a work queue nothing is lost by that.
    """
    js, config = consumer.js, consumer.config
    template = SubjectTemplate(config.subject_template)
    unwanted = {template.subject(Partition(tuple(p.split(".")))) for p in partitions}
    for info in await js.consumer_list(config.stream):
        found = info["config"]
        name = info["name"]
        filters = set(filters_of(found))
        ours = name.startswith(f"{config.consumer_prefix}-") and name != consumer.consumer_name
        if not ours or not filters & unwanted:
            continue
        left = sorted(filters - unwanted)
        try:
            if left:
                await js.consumer_update(config.stream, found | {"filter_subjects": left})
            else:
                await js.consumer_delete(config.stream, name)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            continue
