"""Whether the worker does its work, and when repeated failures call for a refresh. Pure: the time is handed in.

Unhealthy after `threshold` failures within `window` seconds without a success in between, of the pull loop, of the
recreation of its consumer, or of updates. Healthy again by itself at the first success. (SC-P0-4, SC-P0-6)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """What can fail."""

    ITERATOR = "iterator"
    RECREATION = "recreation"
    UPDATE = "update"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """A snapshot; `last_updated` is on the monotonic clock of the worker."""

    healthy: bool
    consecutive_iterator_failures: int
    consecutive_recreation_failures: int
    consecutive_update_failures: int
    last_error: str
    last_updated: float


class HealthTracker:
    """Counts failures by part, each in its own window."""

    def __init__(self, *, threshold: int = 3, window: float = 60.0) -> None:
        self._threshold = threshold
        self._window = window
        self._failures: dict[Part, deque[float]] = {part: deque(maxlen=1000) for part in Part}
        self._unhealthy: set[Part] = set()
        self._escalated: float | None = None
        self._broken = False
        self.last_error = ""
        self.last_updated = 0.0

    @property
    def healthy(self) -> bool:
        return not self._unhealthy and not self._broken

    def failures(self, part: Part) -> int:
        """Failures of the part since its last success, as far as they lie within the window."""
        return len(self._failures[part])

    def failed(self, part: Part, now: float, error: str, *, certain: bool = False) -> None:
        """Count one failure; with `certain` there is no doubt that the next ones follow."""
        times = self._failures[part]
        times.append(now)
        while times and now - times[0] > self._window:
            times.popleft()
        if certain or len(times) >= self._threshold:
            self._unhealthy.add(part)
        self.last_error, self.last_updated = error, now

    def worked(self, part: Part, now: float) -> None:
        """The part did its work: its failures are forgiven."""
        self._failures[part].clear()
        self._unhealthy.discard(part)
        self.last_updated = now

    def broke(self, now: float, error: str) -> None:
        """A bug ended the worker: it stays unhealthy."""
        self._broken = True
        self.last_error, self.last_updated = error, now

    def escalate(self, now: float) -> bool:
        """True once per window, when the pull loop has failed `threshold` times in it."""
        if self.failures(Part.ITERATOR) < self._threshold:
            return False
        if self._escalated is not None and now - self._escalated < self._window:
            return False
        self._escalated = now
        return True

    def snapshot(self) -> WorkerHealth:
        return WorkerHealth(
            healthy=self.healthy,
            consecutive_iterator_failures=self.failures(Part.ITERATOR),
            consecutive_recreation_failures=self.failures(Part.RECREATION),
            consecutive_update_failures=self.failures(Part.UPDATE),
            last_error=self.last_error,
            last_updated=self.last_updated,
        )
