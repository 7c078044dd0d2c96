"""What follows from a handler's result inside a batch: done, retry after a wait, or no further attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parti.errors import ConfigError
from parti.outcomes import Again, Bury, DeadLetterReason, Done, Retry, RetryPolicy, clean
from parti.spark.pipeline.executor.outcomes import RowOutcome

Then = Literal["dead-letter", "park", "stop"]


@dataclass(frozen=True, slots=True)
class ParkKey:
    """Not now, and nothing was tried: the key waits for `after` seconds, parked if that is the policy."""

    after: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class ParkAlone:
    """Not now, and nothing waits for it: parked alone for `after` seconds, while later messages of its key continue."""

    after: float
    error: str = ""
    tried: bool = True
    """Whether this was an attempt that failed."""


@dataclass(frozen=True, slots=True)
class AlreadyDeadLettered:
    """Never; the handler itself has stored the message: it counts as dead-lettered, and no letter is written."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """No further attempt in this batch."""

    outcome: RowOutcome
    error: str
    reason: DeadLetterReason = DeadLetterReason.MAX_DELIVER
    park_for: float = 0.0
    counted: bool = True
    """Whether this parking counts; it does not when nothing was tried."""
    alone: bool = False
    """Whether later messages of the key may continue."""
    buried: bool = False
    """Whether the message is already stored elsewhere."""


Verdict = Done | Again | Ended


@dataclass(frozen=True, slots=True)
class Retries:
    """How a failed message is retried, and what happens when that does not help."""

    attempts: int = 3  # survives a short failure of what the handler calls
    delays: tuple[float, ...] = (0.1, 0.5, 2.0)  # seconds; the batch waits for its slowest key, so they are short
    budget: float = 10.0  # total seconds a message may wait within one batch, also with Retry(after=...)
    timeout: float = 0.0  # seconds of one attempt; 0: no limit, because only the handler's author knows one
    then: Then = "dead-letter"
    park_delays: tuple[float, ...] = (10.0, 60.0, 300.0)  # between the retries of a parked key; the last one repeats
    park_limit: int = 0  # retries before a parked message is dead-lettered after all; 0: never

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retry attempts {self.attempts}: give at least 1")
        if not self.delays or min(self.delays) < 0 or not self.park_delays or min(self.park_delays) <= 0:
            raise ConfigError("retry delays and park delays need at least one wait each, none of them negative")
        if self.budget < 0 or self.timeout < 0:
            raise ConfigError(f"retry budget {self.budget} and timeout {self.timeout} must not be negative")
        if self.then not in ("dead-letter", "park", "stop"):
            raise ConfigError(f"retry then = {self.then!r}: choose dead-letter, park or stop")

    def decide(self, outcome: object, *, attempt: int, waited: float, parked: int) -> Verdict:
        """What follows when attempt number `attempt` ended with `outcome`.

        `waited`: seconds that the message has waited in this batch. `parked`: how often it was parked before.
        """
        if isinstance(outcome, AlreadyDeadLettered):
            return Ended(RowOutcome.DEAD, clean(outcome.error), DeadLetterReason.REJECTED, buried=True)
        if isinstance(outcome, ParkKey):
            if self.then == "park":
                return Ended(RowOutcome.PARKED, clean(outcome.error), park_for=outcome.after, counted=False)
            outcome = Retry(outcome.after, outcome.error)
        if isinstance(outcome, ParkAlone):
            if self.then == "park":
                error = clean(outcome.error)
                return Ended(RowOutcome.PARKED, error, park_for=outcome.after, counted=outcome.tried, alone=True)
            outcome = Retry(outcome.after, outcome.error)
        decision = RetryPolicy(self.attempts, self.delays).decide(outcome, attempt)
        asked = outcome.after if isinstance(outcome, Retry) else None
        if isinstance(decision, Again) and waited + decision.delay > self.budget:
            return self._end(decision.error, parked, asked)
        if isinstance(decision, Bury):
            if decision.reason is DeadLetterReason.REJECTED:
                return Ended(RowOutcome.DEAD, decision.error, DeadLetterReason.REJECTED)
            return self._end(decision.error, parked, asked)
        return decision

    def _end(self, error: str, parked: int, asked: float | None) -> Ended:
        """No further attempt in this batch; `asked` is the wait that the handler asked for, if any."""
        if self.then == "stop":
            return Ended(RowOutcome.FAILED, error)
        if self.then == "park" and not 0 < self.park_limit <= parked:
            wait = self.park_delays[min(parked, len(self.park_delays) - 1)] if asked is None else asked
            return Ended(RowOutcome.PARKED, error, park_for=wait)
        return Ended(RowOutcome.DEAD, error)
