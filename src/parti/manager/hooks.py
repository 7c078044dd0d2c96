"""What a user is told about: plain or async functions, called one after the other, never able to stop a worker."""

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

_WAITING = 10_000  # calls not made yet; a hook that hangs must not fill the memory


class ManagerState(StrEnum):
    """Where this worker stands. The words are those of the Go library."""

    INIT = "init"
    CLAIMING_ID = "claiming_id"
    WAITING_ASSIGNMENT = "waiting_assignment"
    """A member, live, without an assignment yet."""
    STABLE = "stable"
    """Owns exactly what it is assigned."""
    REBALANCING = "rebalancing"
    """Partitions are on their way to this worker or from it."""
    DEGRADED = "degraded"
    """NATS is out of reach: it goes on with what it holds until its lease runs out."""
    SHUTDOWN = "shutdown"


class AlertLevel(StrEnum):
    """How long degraded mode lasts already."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


Hook = Callable[..., Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Each is optional. What a hook raises is logged and told to `on_error`; it changes nothing else.

    A partition's grant is told before its first message is handled or while it is, its revocation after its last.
    """

    on_assignment_changed: Callable[[tuple[PartitionId, ...], tuple[PartitionId, ...]], Any] | None = None
    """(old, new): also for the first assignment, never with equal values (docs/evidence/go-library.md#w13)."""
    on_state_changed: Callable[[ManagerState, ManagerState], Any] | None = None
    """(old, new)."""
    on_error: Callable[[Exception], Any] | None = None
    on_partition_granted: Callable[[Lease], Any] | None = None
    on_partition_revoked: Callable[[Lease], Any] | None = None
    on_stream_replaced: Callable[[Any], Any] | None = None
    """(replacement): the stream is not the one that positions were stored for; see `stream_identity.Replacement`."""
    on_partitions_unassigned: Callable[[tuple[PartitionId, ...]], Any] | None = None
    """On the leader: the partitions that nobody can carry (`worker.max_subjects`, workers that are not well); again
    with each change, and with none when all are placed."""
    on_degraded_alert: Callable[[AlertLevel, float], Any] | None = None
    """(level, seconds since NATS was reached)."""


class HookRunner:
    """Calls hooks in order, in a task of their own."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self._calls: asyncio.Queue[tuple[Hook, tuple[Any, ...]]] = asyncio.Queue(_WAITING)

    def call(self, hook: Hook | None, *arguments: Any) -> None:
        """Have it called soon."""
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
        """Make the calls that are waiting."""
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
