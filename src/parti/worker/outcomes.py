"""What a handler may answer, and what follows from it. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parti import defaults
from parti.errors import UsageError

_LONGEST_ERROR = 1_000  # characters; an error text goes into a header of the dead letter


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: the message is acknowledged and never comes again. Returning None means the same."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Not now: the same message again after `after` seconds, or after the configured wait. Counts as an attempt."""

    after: float | None = None
    error: str = ""
    timed_out: bool = False
    """Set by the worker: the attempt was ended by `handler_timeout`."""

    def __post_init__(self) -> None:
        if self.after is not None and not 0 <= self.after < 1e9:
            raise UsageError(f"Retry(after={self.after}) is no time to wait: give seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Reject:
    """Never: the message goes to the dead-letter stream at once, with this reason."""

    reason: str = ""


Outcome = Ack | Retry | Reject | None


class DeadLetterReason(StrEnum):
    """Why a message rests in the dead-letter stream; the label of a metric and a header of the letter."""

    MAX_DELIVER = "max_deliver"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    """Its last attempt ran longer than `handler_timeout`."""
    CRASH = "crash"
    """It ended the process, or cost it its lease, again and again."""


@dataclass(frozen=True, slots=True)
class Done:
    """Let the message go."""


@dataclass(frozen=True, slots=True)
class Again:
    """Run the handler once more after `delay` seconds."""

    delay: float
    error: str


@dataclass(frozen=True, slots=True)
class Bury:
    """Put the message into the dead-letter stream, and let it go only when the server has acknowledged it."""

    reason: DeadLetterReason
    error: str


Decision = Done | Again | Bury
DONE = Done()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how far apart a message is tried."""

    max_deliver: int = defaults.MAX_DELIVER
    delays: tuple[float, ...] = defaults.RETRY_DELAYS

    def decide(self, outcome: object, attempt: int) -> Decision:
        """What to do after attempt number `attempt` (from 1) ended so; what is no outcome counts as a failure."""
        if outcome is None or isinstance(outcome, Ack):
            return DONE
        if isinstance(outcome, Reject):
            return Bury(DeadLetterReason.REJECTED, clean(outcome.reason))
        if isinstance(outcome, Retry):
            error = clean(outcome.error)
            if attempt >= self.max_deliver:
                return Bury(DeadLetterReason.TIMEOUT if outcome.timed_out else DeadLetterReason.MAX_DELIVER, error)
            wait = outcome.after if outcome.after is not None else self.delays[min(attempt, len(self.delays)) - 1]
            return Again(wait, error)
        # A truthy answer such as True or a response object must not pass for an Ack by accident, nor be lost.
        text = f"the handler returned {type(outcome).__name__}: return None, Ack(), Retry() or Reject()"
        return self.decide(Retry(error=text), attempt)


def clean(text: str) -> str:
    """Text for one header line: without line breaks and control characters, and bounded."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST_ERROR]).split())[:_LONGEST_ERROR]


def describe(error: BaseException) -> str:
    """An exception as the record of a failed attempt."""
    return clean(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
