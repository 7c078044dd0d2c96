"""When to rebalance: joins are gathered for a moment, a crash never waits.

A window only delays moving partitions that have an owner. Partitions without one - a crash, a leave, new partitions -
are due at once, in any window and within the cooldown (GO_PARTI W11).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from parti.errors import ConfigError


class Reason(StrEnum):
    """Why an assignment is written; the words of the record and of the metrics."""

    COLD_START = "cold_start"
    PLANNED_SCALE = "planned_scale"
    LEAVE = "leave"
    EMERGENCY = "emergency"
    PARTITIONS = "partitions"
    REFRESH = "refresh"
    ADOPT = "adopt"


_URGENT = frozenset({Reason.LEAVE, Reason.EMERGENCY, Reason.PARTITIONS, Reason.REFRESH, Reason.ADOPT})


@dataclass(frozen=True, slots=True)
class Windows:
    """How long changes of the member set are gathered, in seconds."""

    cold_start: float = 10.0  # after the very first assignment: a fleet of pods starts within this
    planned: float = 2.0  # a move costs milliseconds here, so there is little to save by waiting longer
    cooldown: float = 2.0  # least time between two planned rebalances

    def __post_init__(self) -> None:
        if min(self.cold_start, self.planned, self.cooldown) < 0:
            raise ConfigError("windows and cooldown cannot be negative")


@dataclass(frozen=True, slots=True)
class Pacing:
    """What is waiting to be rebalanced, and since when."""

    windows: Windows = field(default_factory=Windows)
    cold_until: float = float("-inf")
    last: float = float("-inf")
    waiting_since: float | None = None
    reason: Reason | None = None
    writing: Reason | None = None
    """Why the assignment that is on its way was written; what is asked for meanwhile waits for the next one."""

    def ask(self, now: float, reason: Reason) -> Pacing:
        """A change happened. An urgent reason replaces a planned one, never the other way round."""
        keep = self.reason is not None and (self.reason in _URGENT or reason not in _URGENT)
        return replace(
            self,
            waiting_since=now if self.waiting_since is None else self.waiting_since,
            reason=self.reason if keep else reason,
        )

    @property
    def due_at(self) -> float:
        """When to rebalance; infinity when nothing waits."""
        if self.reason is None or self.waiting_since is None:
            return float("inf")
        if self.reason in _URGENT or self.reason is Reason.COLD_START:
            return self.waiting_since
        # Counted from the first join that waits, so that a trickle of joins cannot push it away for ever.
        return max(self.waiting_since + self.windows.planned, self.last + self.windows.cooldown, self.cold_until)

    def sent(self) -> Pacing:
        """An assignment that answers everything asked so far is on its way."""
        return replace(self, writing=self.reason, waiting_since=None, reason=None)

    def applied(self, now: float) -> Pacing:
        """It is stored."""
        cold = now + self.windows.cold_start if self.writing is Reason.COLD_START else self.cold_until
        return replace(self, last=now, cold_until=cold, writing=None)

    def failed(self, now: float) -> Pacing:
        """It was refused, or nothing was heard of it: everything it answered is asked for again."""
        return self if self.writing is None else replace(self, writing=None).ask(now, self.writing)
