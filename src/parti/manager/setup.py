"""What a manager passes to each of its members: everything that outlives a lease."""

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
from parti.model import Member, PartitionId
from parti.observe.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of one manager."""

    store: Store
    config: ControlConfig
    clock: Clock
    metrics: Metrics
    observer: Observer
    source: PartitionSource
    check: Check
    """Refuses partitions that cannot be served together."""
    strategy: Strategy
    plane: PlaneFactory
    start_cursor: Callable[[], Coroutine[Any, Any, int]]
    """The start position of a partition that never had an owner."""
    nudge: Callable[[Member, PartitionId], None]
    instance: str
    """The name under which this process may return after a restart."""
    capacity: int
    max_deliver: int = 3
    stream_gone: Callable[[], Awaitable[str]] | None = None
    """Why positions no longer refer to the current stream; empty while they do."""
