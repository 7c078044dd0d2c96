"""Handler results and their consequences, the same wherever the handler runs. Pure: no clock, no I/O.

The worker, groups, the Spark pipeline and delivery share the same three consequences: `Done`, `Again` and `Bury`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from parti import defaults
from parti.errors import UsageError

_LONGEST_ERROR = 1_000  # characters; an error text goes into a header of the dead letter
_MOST_STEPS = 40  # growth steps of a wait: 2 ** 40 s exceeds every cap, and 2 ** 1,100 would overflow a float


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: the message is acknowledged and not delivered again. Returning None means the same."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry the same message after `after` seconds, or after the configured wait. Counts as an attempt."""

    after: float | None = None
    error: str = ""
    timed_out: bool = False
    """Set by the worker: `handler_timeout` ended the attempt."""

    def __post_init__(self) -> None:
        if self.after is not None and not 0 <= self.after < 1e9:
            raise UsageError(f"Retry(after={self.after}) is no time to wait: give seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Reject:
    """Never retry: the message goes to the dead-letter stream at once, with this reason."""

    reason: str = ""


Outcome = Ack | Retry | Reject | None


class DeadLetterReason(StrEnum):
    """Why a message is in the dead-letter stream; a metric label and a header of the letter."""

    MAX_DELIVER = "max_deliver"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    """Its last attempt ran longer than `handler_timeout`."""
    CRASH = "crash"
    """It repeatedly killed the process, or made it lose its lease."""


@dataclass(frozen=True, slots=True)
class Done:
    """The message is done."""


@dataclass(frozen=True, slots=True)
class Again:
    """Run the handler once more after `delay` seconds."""

    delay: float
    error: str


@dataclass(frozen=True, slots=True)
class Bury:
    """Write the message to the dead-letter stream; it is done only after the server stored the letter."""

    reason: StrEnum
    """A `DeadLetterReason`, or one of delivery's own reasons (`parti.delivery.errors.Reason`)."""
    error: str


Decision = Done | Again | Bury
DONE = Done()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and at which intervals a message is tried. parti counts attempts, not the server's deliveries."""

    max_deliver: int = defaults.MAX_DELIVER
    delays: tuple[float, ...] = defaults.RETRY_DELAYS
    """Seconds to wait after the first attempt, the second, and so on; later waits grow by `growth`."""
    growth: float = 1.0
    cap: float = math.inf

    def wait(self, attempt: int) -> float:
        """Seconds to wait after attempt number `attempt` (from 1) failed."""
        beyond = max(0, attempt - len(self.delays))
        wait = self.delays[min(attempt, len(self.delays)) - 1] * self.growth ** min(beyond, _MOST_STEPS)
        return min(wait, self.cap)

    def decide(self, outcome: object, attempt: int) -> Decision:
        """What to do after attempt number `attempt` (from 1) with this result; any other type counts as a failure."""
        if outcome is None or isinstance(outcome, Ack):
            return DONE
        if isinstance(outcome, Reject):
            return Bury(DeadLetterReason.REJECTED, clean(outcome.reason))
        if isinstance(outcome, Retry):
            error = clean(outcome.error)
            if attempt >= self.max_deliver:
                return Bury(DeadLetterReason.TIMEOUT if outcome.timed_out else DeadLetterReason.MAX_DELIVER, error)
            return Again(outcome.after if outcome.after is not None else self.wait(attempt), error)
        # A truthy result such as True or a response object must not count as an Ack by accident, nor be lost.
        text = f"the handler returned {type(outcome).__name__}: return None, Ack(), Retry() or Reject()"
        return self.decide(Retry(error=text), attempt)


def clean(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Text for one header line: without line breaks and control characters, and bounded."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * longest]).split())[:longest]


def describe(error: BaseException) -> str:
    """An exception as the record of a failed attempt."""
    return clean(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
