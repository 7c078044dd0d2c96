"""Whether the worker makes progress, and when repeated failures require a refresh. Pure: the caller passes the time in.

Unhealthy after `threshold` failures within `window` seconds without a success in between, of the pull loop, of
recreating its consumer, or of updates; also while something is stalled: a handler that was left behind, or work without
progress. Healthy again automatically at the first success, or when the stall ends. (docs/requirements.md#r-104, #r-106)
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


class Stall(StrEnum):
    """What can stall."""

    LEFT_BEHIND = "left_behind"
    """A handler that did not end when it was cancelled, or a thread that nothing waits for any more."""
    HANDLER = "handler"
    """A handler that runs for very long. That may be normal for it: it is reported, and no action follows."""
    NO_PROGRESS = "no_progress"
    """There is work, and no attempt ends."""

    @property
    def acted_on(self) -> bool:
        """Whether the worker gives up when this lasts longer than `unhealthy_limit`."""
        return self is not Stall.HANDLER


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """A snapshot; `last_updated` is on the monotonic clock of the worker."""

    healthy: bool
    consecutive_iterator_failures: int
    consecutive_recreation_failures: int
    consecutive_update_failures: int
    last_error: str
    last_updated: float
    stalls: tuple[str, ...] = ()
    """Descriptions of what is stalled."""
    broken: str = ""
    """The bug that ended the worker."""


class HealthTracker:
    """Counts failures by part, each in its own window."""

    def __init__(self, *, threshold: int = 3, window: float = 60.0) -> None:
        self._threshold = threshold
        self._window = window
        self._failures: dict[Part, deque[float]] = {part: deque(maxlen=1000) for part in Part}
        self._unhealthy: set[Part] = set()
        self._escalated: float | None = None
        self._broken = ""
        self._stalls: dict[Stall, str] = {}
        self._since: float | None = None
        self.last_error = ""
        self.last_updated = 0.0

    @property
    def healthy(self) -> bool:
        return not self._unhealthy and not self._broken and not self._stalls

    @property
    def broken(self) -> str:
        """The bug that ended the worker; empty while it runs."""
        return self._broken

    def hopeless_for(self, now: float) -> float:
        """Seconds that the worker has been in a state that only another worker can resolve; 0 when it is not."""
        acted_on = self._unhealthy or any(stall.acted_on for stall in self._stalls)
        return now - self._since if acted_on and self._since is not None else 0.0

    def cause(self) -> str:
        """Why it is unhealthy, as text; empty when it is healthy."""
        if self._broken:
            return self._broken
        return "; ".join(self._stalls.values()) or (self.last_error or "unhealthy" if self._unhealthy else "")

    def stalled(self, stall: Stall, now: float, error: str | None) -> bool:
        """Report a stall, or (None) its end; True when that is a change."""
        if error is None:
            news = self._stalls.pop(stall, None) is not None
        else:
            news = stall not in self._stalls
            self._stalls[stall] = error
            self.last_error = error
        if news:
            self.last_updated = now
        self._look(now)
        return news

    def excuse(self, now: float) -> None:
        """NATS is unreachable: that is not this worker's fault, and no other worker could do better."""
        if self._since is not None:
            self._since = now

    def _look(self, now: float) -> None:
        if not self._unhealthy and not any(stall.acted_on for stall in self._stalls):
            self._since = None
        elif self._since is None:
            self._since = now

    def failures(self, part: Part) -> int:
        """Failures of the part since its last success, within the window."""
        return len(self._failures[part])

    def failed(self, part: Part, now: float, error: str, *, certain: bool = False) -> None:
        """Count one failure; with `certain` the worker is unhealthy at once, because the next tries will fail too."""
        times = self._failures[part]
        times.append(now)
        while times and now - times[0] > self._window:
            times.popleft()
        if certain or len(times) >= self._threshold:
            self._unhealthy.add(part)
        self.last_error, self.last_updated = error, now
        self._look(now)

    def worked(self, part: Part, now: float) -> None:
        """The part succeeded: reset its failures."""
        self._failures[part].clear()
        self._unhealthy.discard(part)
        self.last_updated = now
        self._look(now)

    def broke(self, now: float, error: str) -> None:
        """A bug ended the worker: it stays unhealthy."""
        self._broken = error
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
            stalls=tuple(self._stalls.values()),
            broken=self._broken,
        )
