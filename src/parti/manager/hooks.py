"""User callbacks: plain or async functions, called one at a time and in order. A hook can never stop a worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from parti.model import Lease, PartitionId
from parti.observe.logs import get_logger

log = get_logger("control")

_WAITING = 10_000  # pending calls; a hook that hangs must not fill the memory


class ManagerState(StrEnum):
    """The state of this worker. The names are those of the Go library."""

    INIT = "init"
    CLAIMING_ID = "claiming_id"
    WAITING_ASSIGNMENT = "waiting_assignment"
    """A member, live, without an assignment yet."""
    STABLE = "stable"
    """Owns exactly what it is assigned."""
    REBALANCING = "rebalancing"
    """Partitions are moving to or from this worker."""
    DEGRADED = "degraded"
    """NATS is unreachable: the worker keeps processing what it owns until its lease expires."""
    SHUTDOWN = "shutdown"


class AlertLevel(StrEnum):
    """How long degraded mode has lasted."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


Hook = Callable[..., Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Each hook is optional. An exception in a hook is logged and passed to `on_error`; it has no other effect.

    A grant is reported before or while the partition's first message is handled, a revocation after its last one.
    """

    on_assignment_changed: Callable[[tuple[PartitionId, ...], tuple[PartitionId, ...]], Any] | None = None
    """(old, new): called for the first assignment too, never with equal values (docs/evidence/go-library.md#w13)."""
    on_state_changed: Callable[[ManagerState, ManagerState], Any] | None = None
    """(old, new)."""
    on_error: Callable[[Exception], Any] | None = None
    on_partition_granted: Callable[[Lease], Any] | None = None
    on_partition_revoked: Callable[[Lease], Any] | None = None
    on_stream_replaced: Callable[[Any], Any] | None = None
    """(replacement): positions were stored for another stream than this one; see `stream_identity.Replacement`."""
    on_partitions_unassigned: Callable[[tuple[PartitionId, ...]], Any] | None = None
    """On the leader: the partitions that no worker has capacity for (`worker.max_subjects`, workers that are not well).
    Called again after each change, and with none when all are placed."""
    on_degraded_alert: Callable[[AlertLevel, float], Any] | None = None
    """(level, seconds since NATS was reached)."""


class HookRunner:
    """Calls hooks in order, in a separate task."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self._calls: asyncio.Queue[tuple[Hook, tuple[Any, ...]]] = asyncio.Queue(_WAITING)

    def call(self, hook: Hook | None, *arguments: Any) -> None:
        """Queue the call; it is made soon."""
        if hook is None:
            return
        try:
            self._calls.put_nowait((hook, arguments))
        except asyncio.QueueFull:
            log.warning("hook.dropped", hook=getattr(hook, "__name__", str(hook)))

    async def run(self) -> None:
        while True:
            await self._one(*await self._calls.get())

    async def drain(self) -> None:
        """Make all pending calls."""
        while not self._calls.empty():
            await self._one(*self._calls.get_nowait())

    async def _one(self, hook: Hook, arguments: tuple[Any, ...]) -> None:
        try:
            result = hook(*arguments)
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            log.exception("hook.failed", hook=getattr(hook, "__name__", str(hook)))
            if hook is not self.hooks.on_error:
                self.call(self.hooks.on_error, error)
