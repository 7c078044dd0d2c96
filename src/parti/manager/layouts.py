"""Which plane serves which layout and consumer; both layouts are held to the same proofs."""

from __future__ import annotations

from typing import Any

from parti.manager.host import Host, Plane
from parti.manager.per_partition import PerPartitionPlane
from parti.manager.per_worker import PerWorkerPlane
from parti.manager.updater import UpdaterPlane
from parti.model import Layout, Member, Retention
from parti.worker import WorkerConsumer


def plane_for(layout: str, host: Host, member: Member, consumer: Any, retention: Retention) -> Plane:
    """The plane of a member; any object with `update_worker_consumer` is served, whatever the layout."""
    if not isinstance(consumer, WorkerConsumer):
        return UpdaterPlane(host, member, consumer)
    if Layout(layout) is Layout.PER_WORKER:
        return PerWorkerPlane(host, member, consumer, retention)
    return PerPartitionPlane(host, member, consumer.parts(), retention)
