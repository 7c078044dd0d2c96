"""Publishes the manager's state: metrics, hooks, and wake-ups for tasks that wait for a state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from parti.manager.hooks import HookRunner, ManagerState
from parti.manager.stream_identity import Replacement
from parti.model import Lease, PartitionId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics

log = get_logger("control")


class ManagerView(Protocol):
    """The values to publish, computed from the member's state."""

    @property
    def state(self) -> ManagerState: ...

    def assigned(self) -> tuple[PartitionId, ...] | None: ...

    def owned(self) -> frozenset[PartitionId]: ...

    def leading(self) -> bool: ...

    def unassigned(self) -> tuple[PartitionId, ...]: ...

    def claims_known(self) -> int: ...


class Observer:
    """Compares the state once per turn of the loop, calls hooks for the differences, and wakes waiting tasks."""

    def __init__(self, hooks: HookRunner, metrics: Metrics) -> None:
        self._runner = hooks
        self._metrics = metrics
        self._view: ManagerView | None = None
        self._state = ManagerState.INIT
        self._assigned: tuple[PartitionId, ...] | None = None
        self._unassigned: tuple[PartitionId, ...] = ()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._due = False

    def watch(self, view: ManagerView) -> None:
        self._view = view
        self.look()

    def touched(self) -> None:
        """The state may have changed."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.look)

    def granted(self, lease: Lease) -> None:
        self._runner.call(self._runner.hooks.on_partition_granted, lease)
        self.touched()

    def revoked(self, lease: Lease) -> None:
        self._runner.call(self._runner.hooks.on_partition_revoked, lease)
        self.touched()

    def failed(self, error: Exception) -> None:
        log.warning("control.error", kind=type(error).__name__, error=str(error))
        self._runner.call(self._runner.hooks.on_error, error)

    def stream_replaced(self, replacement: Replacement) -> None:
        """Log a warning, count it and call the hook: everything is handled again from the stream's beginning."""
        log.warning(
            "stream.replaced",
            op="identity",
            result="started_over",
            kind=replacement.kind.value,
            was=replacement.before.identity,
            now=replacement.now.identity,
            last_seq=replacement.last_seq,
            counted_as_done=replacement.done,
        )
        self._metrics.count(m.STREAM_REPLACED, kind=replacement.kind.value)
        self._runner.call(self._runner.hooks.on_stream_replaced, replacement)

    def look(self) -> None:
        """Compare with the values published last."""
        self._due = False
        view, hooks = self._view, self._runner.hooks
        if view is None:
            return
        state = view.state
        if state is not self._state:
            log.info("manager.state", old=self._state.value, new=state.value)
            self._runner.call(hooks.on_state_changed, self._state, state)
            self._state = state
        assigned = view.assigned()
        if assigned is not None and assigned != self._assigned:
            self._runner.call(hooks.on_assignment_changed, self._assigned or (), assigned)
            self._assigned = assigned
        self._look_at_unassigned(view.unassigned())
        self._metrics.set(m.CLAIMS, view.claims_known())
        self._metrics.set(m.OWNED, len(view.owned()))
        self._metrics.set(m.IS_LEADER, 1 if view.leading() else 0)
        waiting = []
        for condition, future in self._waiters:
            if future.done():
                continue
            if condition():
                future.set_result(None)
            else:
                waiting.append((condition, future))
        self._waiters = waiting

    def _look_at_unassigned(self, unassigned: tuple[PartitionId, ...]) -> None:
        if unassigned == self._unassigned:
            return
        self._unassigned = unassigned
        self._metrics.set(m.UNASSIGNED, len(unassigned))
        self._runner.call(self._runner.hooks.on_partitions_unassigned, unassigned)
        if unassigned:
            log.warning(
                "partitions.unassigned",
                op="assign",
                result="no_room",
                count=len(unassigned),
                first=list(unassigned[:10]),
                hint="start more workers, raise worker.max_subjects, or look at workers that are not well",
            )
        else:
            log.info("partitions.unassigned", op="assign", result="placed", count=0)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition is true; it is checked after every change."""
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, future))
        await future
