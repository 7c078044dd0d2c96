"""What a manager gives to each of its members: everything that outlives a lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control.assign import Strategy
from parti.manager.host import PlaneFactory
from parti.manager.kv_store import Store
from parti.manager.observer import Observer
from parti.manager.partition_feed import Check
from parti.manager.sources import PartitionSource
from parti.model import Member, PartitionId, Retention
from parti.observe.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Setup:
    """One manager's."""

    store: Store
    config: ControlConfig
    clock: Clock
    metrics: Metrics
    observer: Observer
    source: PartitionSource
    check: Check
    """Refuses partitions that the source must not bring."""
    strategy: Strategy
    retention: Retention
    plane: PlaneFactory
    start_cursor: Callable[[], Coroutine[Any, Any, int]]
    """Where a partition begins that nobody ever owned."""
    nudge: Callable[[Member, PartitionId], None]
    instance: str
    """The name of this process among those that may come back under it."""
    capacity: int
    max_deliver: int = 3
    stream_gone: Callable[[], Awaitable[str]] | None = None
    """Why the stream is not the one any more that positions speak of, or nothing."""
