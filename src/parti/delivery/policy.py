"""Decides what follows an attempt. Pure: no clock, no I/O, and randomness is a parameter.

The same functions decide in the TaskConsumer and in a Spark job.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

import msgspec

from parti.clock import Randomness
from parti.config.deliver import DeliverSection
from parti.delivery.errors import Reason
from parti.delivery.task import TaskRetryPolicy, duration_seconds, is_bad_duration
from parti.outcomes import DONE, Again, Bury, Decision, RetryPolicy

MOST_ATTEMPTS = 50
LONGEST_TIMEOUT = 30.0
LONGEST_WAIT = 6 * 3600.0
_LEAST_WAIT = 0.1  # seconds, for retries that do not count as attempts and so never run out
_RETRY_AFTER = frozenset({429, 503})


class AttemptOutcome(StrEnum):
    """How an attempt ended, as a class; the label of a metric, a word in the logs and in the attempt log."""

    DELIVERED = "delivered"
    GONE = "gone"
    REJECTED = "rejected"
    REDIRECTED = "redirected"
    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    NETWORK = "network"
    DNS = "dns"
    TLS = "tls"
    STORE = "store"
    """The secret cannot be read at the moment; nothing was sent."""
    LOCAL = "local"
    """A local problem (descriptors, memory, the resolver): nothing was sent, and the host is not at fault."""
    BLOCKED = "blocked"
    REFUSED = "refused"
    """The task itself cannot be sent; nothing was sent."""

    @property
    def hurts_host(self) -> bool:
        """Whether it counts against the host's health: the host was called, and failed."""
        return self in _HOST_FAILURES


_HOST_FAILURES = frozenset(
    {
        AttemptOutcome.THROTTLED,
        AttemptOutcome.SERVER_ERROR,
        AttemptOutcome.TIMEOUT,
        AttemptOutcome.NETWORK,
        AttemptOutcome.DNS,
        AttemptOutcome.TLS,
    }
)
UNSPENT = frozenset({AttemptOutcome.STORE, AttemptOutcome.LOCAL, AttemptOutcome.REFUSED, AttemptOutcome.BLOCKED})
"""Outcomes where nothing was sent: the task loses no attempt."""


class DeliveryAttempt(msgspec.Struct, frozen=True):
    """How one attempt ended."""

    outcome: AttemptOutcome
    status: int = 0
    error: str = ""
    response: bytes = b""
    """The first bytes of the endpoint's response."""
    retry_after: float | None = None
    reason: Reason | None = None
    """The reason of a refusal."""

    def __repr__(self) -> str:
        return f"<DeliveryAttempt {self.outcome.value} status={self.status} {self.error}>"


def classify(status: int, retry_statuses: Sequence[int] = (408, 425, 429)) -> AttemptOutcome:
    """The class of an HTTP status: the table of docs/requirements.md#r-303, with 408 and 425 retried like 429."""
    if 200 <= status < 300:
        return AttemptOutcome.DELIVERED
    if status == 410:
        return AttemptOutcome.GONE
    if status in retry_statuses:
        return AttemptOutcome.THROTTLED
    if 300 <= status < 400:
        return AttemptOutcome.REDIRECTED
    if 400 <= status < 500:
        return AttemptOutcome.REJECTED
    return AttemptOutcome.SERVER_ERROR


def parse_retry_after(status: int, value: str | None, now: float) -> float | None:
    """Seconds that the endpoint asks for, in either form of RFC 9110; only respected for 429 and 503."""
    if status not in _RETRY_AFTER or not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    try:
        wait = (moment - datetime.fromtimestamp(now, UTC)).total_seconds()
    except OverflowError:
        return None
    return max(0.0, wait)


def retry_policy(wanted: TaskRetryPolicy | None, config: DeliverSection) -> RetryPolicy:
    """The task's own policy where it is valid, else the configured schedule."""
    waits = config.waits
    if wanted is None:
        return RetryPolicy(len(waits) + 1, waits, cap=LONGEST_WAIT)
    attempts = _attempts(wanted.max_attempts) or len(waits) + 1
    cap = min(duration_seconds(wanted.max_backoff) or LONGEST_WAIT, LONGEST_WAIT)
    initial = duration_seconds(wanted.initial_backoff)
    if initial is None:
        return RetryPolicy(attempts, waits, cap=cap)
    return RetryPolicy(attempts, (min(initial, LONGEST_WAIT),), growth=2.0, cap=cap)


def is_out_of_bounds(wanted: TaskRetryPolicy) -> bool:
    """Whether the task asks for values that are not valid, and gets a configured limit instead."""
    attempts = wanted.max_attempts
    odd = attempts is not None and attempts != 0 and _attempts(attempts) is None
    return odd or is_bad_duration(wanted.initial_backoff) or is_bad_duration(wanted.max_backoff)


def _attempts(wanted: int | float | None) -> int | None:
    # NaN, infinity and numbers of any length compare; `isfinite` would raise.
    return int(wanted) if wanted is not None and 1 <= wanted <= MOST_ATTEMPTS else None


def request_timeout(wanted: str | int | float | None, config: DeliverSection) -> float:
    """Seconds for the whole request: the task's wish within bounds, else the configured one."""
    return min(duration_seconds(wanted) or config.total_timeout, LONGEST_TIMEOUT)


def decide(
    attempt: DeliveryAttempt, *, attempts: int, age: float, policy: RetryPolicy, config: DeliverSection, rng: Randomness
) -> Decision:
    """What to do after an attempt; `attempts` is how many were made, this one included."""
    match attempt.outcome:
        case AttemptOutcome.DELIVERED:
            return DONE
        case AttemptOutcome.GONE:
            return Bury(Reason.GONE, attempt.error)
        case AttemptOutcome.REJECTED | AttemptOutcome.REDIRECTED:
            return Bury(Reason.REJECTED, attempt.error)
        case AttemptOutcome.REFUSED | AttemptOutcome.BLOCKED:
            return Bury(attempt.reason or Reason.MALFORMED, attempt.error)
    if age >= config.max_task_age:
        return Bury(Reason.EXPIRED, attempt.error)
    if attempts >= policy.max_deliver and attempt.outcome not in UNSPENT:
        return Bury(Reason.EXHAUSTED, attempt.error)
    # A failure of the secret store, or a local problem, is not the endpoint's fault: retried soon.
    step = policy.wait(max(attempts, 1)) if attempt.outcome not in UNSPENT else max(config.waits[0], _LEAST_WAIT)
    wait = step * (1.0 + rng.uniform(-config.jitter, config.jitter))
    if attempt.retry_after is not None:
        wait = max(wait, min(attempt.retry_after, config.retry_after_max))
    # It expires at its time, also while it waits.
    return Again(min(wait, config.max_task_age - age), attempt.error)
