"""What the worker reports: metrics, and log events that all carry the same five fields.

See docs/requirements.md#r-107.
"""

from __future__ import annotations

import traceback
from typing import Any, Literal

from parti.model import PartitionId
from parti.observe import worker_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics
from parti.worker.errors import ForeignDurable
from parti.worker.health import HealthTracker, Part, Stall

Op = Literal["create", "update", "info", "iterate"]


class Recorder:
    """One per worker; records every transition, so that log, metrics and health agree.

    See docs/requirements.md#r-107.
    """

    def __init__(self, metrics: Metrics, health: HealthTracker) -> None:
        self.metrics = metrics
        self.health = health
        self.worker_id = ""
        self.consumer_name = ""
        self.subject_count = 0
        self.blocked: tuple[PartitionId, int] | None = None
        """The message whose handler last blocked the event loop."""
        self._log = get_logger("worker")
        self._shown_healthy: bool | None = None

    def event(self, event: str, *, op: str, result: str, warn: bool = False, **fields: Any) -> None:
        """One transition."""
        write = self._log.warning if warn else self._log.info
        write(
            event,
            worker_id=self.worker_id,
            consumer_name=self.consumer_name,
            subject_count=self.subject_count,
            op=op,
            result=result,
            **fields,
        )

    def retried(self, op: Op, tries: int, wait: float, error: Exception) -> None:
        self.metrics.count(m.CONTROL_RETRIES, op=op)
        self.metrics.observe(m.RETRY_BACKOFF, wait, op=op)
        self.event("worker.retry", op=op, result="retry", tries=tries, wait=round(wait, 3), error=str(error), warn=True)

    def subjects(self, count: int, added: int, removed: int) -> None:
        self.subject_count = count
        self.metrics.set(m.SUBJECTS_CURRENT, count)
        self.metrics.set(m.SUBJECT_COUNT, count)
        if added:
            self.metrics.count(m.SUBJECT_CHANGES, added, type="add")
        if removed:
            self.metrics.count(m.SUBJECT_CHANGES, removed, type="remove")

    def failed(self, part: Part, now: float, error: BaseException | str) -> None:
        # An error that only an operator can fix is not transient: it shows at once.
        self.health.failed(part, now, str(error), certain=isinstance(error, ForeignDurable))
        self.show_health()

    def worked(self, part: Part, now: float) -> None:
        if self.health.failures(part) or not self.health.healthy or self._shown_healthy is None:
            self.health.worked(part, now)
            self.show_health()

    def stalled(self, stall: Stall, now: float, error: str | None) -> None:
        """A stall began, or ended (None): health shows it, and one log line reports it."""
        if self.health.stalled(stall, now, error):
            result = "over" if error is None else "stalled"
            if error is not None:
                self.metrics.count(m.STALLS, kind=stall.value)
            self.event(f"worker.{stall.value}", op="health", result=result, error=error or "", warn=error is not None)
        self.show_health()

    def broke(self, bug: BaseException, now: float) -> None:
        """An unexpected error ended the worker: health shows it, and its manager gives its partitions to others."""
        if self.health.broken:
            return
        self.health.broke(now, repr(bug))
        self.show_health()
        where = str(traceback.extract_tb(bug.__traceback__)[-1:])
        self.event("worker.broke", op="run", result="failure", error=repr(bug), where=where, warn=True)

    def show_health(self) -> None:
        """Update the gauges, and log a change."""
        healthy = self.health.healthy
        self.metrics.set(m.ITERATOR_FAILURES, self.health.failures(Part.ITERATOR))
        self.metrics.set(m.HEALTH_STATUS, int(healthy), status="healthy")
        self.metrics.set(m.HEALTH_STATUS, int(not healthy), status="unhealthy")
        if self._shown_healthy is not None and healthy != self._shown_healthy:
            result = "healthy" if healthy else "unhealthy"
            error = "" if healthy else self.health.last_error
            self.event("worker.health", op="health", result=result, error=error, warn=not healthy)
        self._shown_healthy = healthy
