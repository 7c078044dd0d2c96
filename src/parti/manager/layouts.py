"""Which plane serves which layout and consumer; both are held to the same proofs."""

from __future__ import annotations

from typing import Any

from parti.errors import ConfigError
from parti.manager.host import Host, Plane
from parti.manager.per_partition import PerPartitionPlane
from parti.manager.per_worker import PerWorkerPlane
from parti.model import Layout, Member, Retention
from parti.worker import WorkerConsumer


def plane_for(layout: str, host: Host, member: Member, consumer: Any, retention: Retention) -> Plane:
    """The plane of a member."""
    if isinstance(consumer, WorkerConsumer) and Layout(layout) is Layout.PER_WORKER:
        return PerWorkerPlane(host, member, consumer, retention)
    if isinstance(consumer, WorkerConsumer):
        return PerPartitionPlane(host, member, consumer.parts(), retention)
    raise ConfigError(f"no layout {layout!r} for a {type(consumer).__name__}")
