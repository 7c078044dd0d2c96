"""When to rebalance: joins are gathered for a short window, a crash never waits.

A window only delays moves of partitions that have an owner. Partitions without one - a crash, a leave, new partitions -
are due at once, in any window and within the cooldown (docs/evidence/go-library.md#w11).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from parti import defaults
from parti.errors import ConfigError


class RebalanceReason(StrEnum):
    """Why an assignment is written; used as label in the record and in the metrics."""

    COLD_START = "cold_start"
    PLANNED_SCALE = "planned_scale"
    LEAVE = "leave"
    EMERGENCY = "emergency"
    PARTITIONS = "partitions"
    REFRESH = "refresh"
    ADOPT = "adopt"


_GATHERED: Final = 5  # windows; successive joins are one storm, but the first of them waits no longer than this
_MOVING: Final = 1.0  # seconds; moves in progress take a tenth of that, unless a handler is slow
_PATIENT: Final = {RebalanceReason.PLANNED_SCALE: 0, RebalanceReason.REFRESH: 1}
_URGENT: Final = 2  # every other reason: a partition lacks an owner, or soon will


def _urgency(reason: RebalanceReason) -> int:
    return _PATIENT.get(reason, _URGENT)


@dataclass(frozen=True, slots=True)
class PacingTerms:
    """How long membership changes are gathered, in seconds."""

    cold_start: float = defaults.COLD_START_WINDOW
    planned: float = defaults.PLANNED_WINDOW
    cooldown: float = defaults.REBALANCE_COOLDOWN

    def __post_init__(self) -> None:
        if min(self.cold_start, self.planned, self.cooldown) < 0:
            raise ConfigError("windows and cooldown cannot be negative")


@dataclass(frozen=True, slots=True)
class Pacing:
    """The pending reasons to rebalance, and since when they wait."""

    windows: PacingTerms = field(default_factory=PacingTerms)
    cold_until: float = float("-inf")
    last: float = float("-inf")
    waiting_since: float | None = None
    asked_last: float = float("-inf")
    reason: RebalanceReason | None = None
    writing: RebalanceReason | None = None
    """Why the assignment now being written was made; later requests wait for the next one."""

    def ask(self, now: float, reason: RebalanceReason) -> Pacing:
        """Request a rebalance. A more urgent reason replaces a less urgent one, never the reverse."""
        keep = self.reason is not None and _urgency(self.reason) >= _urgency(reason)
        return replace(
            self,
            waiting_since=now if self.waiting_since is None else self.waiting_since,
            asked_last=max(self.asked_last, now),
            reason=self.reason if keep else reason,
        )

    @property
    def due_at(self) -> float:
        """When to rebalance; infinity when nothing is pending."""
        if self.reason is None or self.waiting_since is None:
            return float("inf")
        if self.reason is not RebalanceReason.PLANNED_SCALE:
            return self.waiting_since
        # A partition that moves to a joiner and then to the next one moves twice: growing from 25 to 100 workers step
        # by step cost 1.6 times the minimum. So the window restarts with each join, up to a limit.
        quiet = self.asked_last + self.windows.planned
        gathered = min(quiet, self.waiting_since + _GATHERED * self.windows.planned)
        return max(gathered, self.last + self.windows.cooldown, self.cold_until)

    def due(self, now: float, *, moving: bool) -> bool:
        """Whether to rebalance now. A mere refresh waits until moves in progress are finished.

        So a hundred requests within two seconds become a few rebalances, and a partition wanted in two places moves
        once. A partition without an owner never waits.
        """
        if self.reason is RebalanceReason.REFRESH and moving and self.waiting_since is not None:
            return now >= self.waiting_since + _MOVING
        return now >= self.due_at

    def sent(self) -> Pacing:
        """An assignment that covers all requests so far is being written."""
        return replace(self, writing=self.reason, waiting_since=None, reason=None)

    def applied(self, now: float) -> Pacing:
        """The assignment is stored."""
        cold = now + self.windows.cold_start if self.writing is RebalanceReason.COLD_START else self.cold_until
        return replace(self, last=now, cold_until=cold, writing=None)

    def failed(self, now: float) -> Pacing:
        """The write was refused or got no answer: request again everything it covered."""
        return self if self.writing is None else replace(self, writing=None).ask(now, self.writing)
