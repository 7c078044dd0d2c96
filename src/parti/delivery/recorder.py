"""What delivery reports: metrics, log events (docs/requirements.md#r-305), and the attempt log."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from parti.clock import Clock
from parti.config.deliver import DeliverSection
from parti.delivery.names import DeliveryNames
from parti.delivery.order import OrderHold
from parti.delivery.pending import Pending, subject_disagrees
from parti.delivery.policy import AttemptOutcome, DeliveryAttempt, is_out_of_bounds
from parti.observe import delivery_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics

_LONGEST = 1_024  # characters of a name in the attempt log: the server closes a connection after a too large message
_STUCK_AFTER = 30.0  # seconds; a restart of the server takes a few
_WARNED = 1_000  # triggers warned about once; beyond that there are no more warnings, so that memory does not grow


class AttemptRecord(msgspec.Struct, frozen=True):
    """One line of the attempt log."""

    id: str
    trigger: str
    database: str
    collection: str
    document: str
    host: str
    attempt: int
    outcome: str
    status: int
    seconds: float
    at: float
    error: str = ""


class DeliveryRecorder:
    """One per process. The log contains ids, triggers and hosts; never urls, headers or payloads."""

    def __init__(self, config: DeliverSection, metrics: Metrics, clock: Clock) -> None:
        self.metrics = metrics
        self._config = config
        self._clock = clock
        self._log = get_logger("deliver").bind()  # bound once: binding costs more than a message below the log level
        self._subjects = {
            outcome: f"{DeliveryNames(config.stream).attempts}.{outcome.value}" for outcome in AttemptOutcome
        }
        self._warned: set[tuple[str, str]] = set()
        self.write: Callable[[str, bytes], None] | None = None
        """Publishes one message without waiting; None while there is no connection."""
        self._unstored: dict[object, tuple[float, str]] = {}

    def received(self, held: Pending) -> None:
        self._log.debug("deliver.received", id=held.id, origin=held.source, attempts=held.attempts)
        if held.unknown_fields:
            self.metrics.count(m.ODDITIES, what="unknown_field")
        if subject_disagrees(held):
            self.metrics.count(m.ODDITIES, what="subject_mismatch")
            if self._config.partitions > 1:
                # Harmless if each document always has one subject; this process cannot know that.
                self._warn_once("deliver.subject_mismatch", held, "another partition may overtake it")
        policy = held.task.retry_policy if held.task is not None else None
        if policy is not None and is_out_of_bounds(policy):
            self.metrics.count(m.ODDITIES, what="policy_clamped")
            self._warn_once("deliver.policy_clamped", held, "parti's limit is used instead")

    def _warn_once(self, event: str, held: Pending, why: str) -> None:
        """Warn once per trigger."""
        if (event, held.trigger) not in self._warned and len(self._warned) < _WARNED:
            self._warned.add((event, held.trigger))
            self._log.warning(event, trigger=held.trigger, id=held.id, why=why)

    def attempted(self, held: Pending, attempt: DeliveryAttempt, seconds: float) -> None:
        self.metrics.count(m.ATTEMPTS, outcome=attempt.outcome.value)
        self.metrics.observe(m.ATTEMPT_SECONDS, seconds)
        failed = attempt.outcome is not AttemptOutcome.DELIVERED
        wanted = self._config.attempt_log
        if wanted == "off" or (wanted == "failures" and not failed) or self.write is None:
            return
        task = held.task
        assert task is not None
        record = AttemptRecord(
            id=held.id,
            trigger=task.trigger_id[:_LONGEST],
            database=task.database[:_LONGEST],
            collection=task.collection[:_LONGEST],
            document=task.document_id[:_LONGEST],
            host=held.host,
            attempt=held.attempts,
            outcome=attempt.outcome.value,
            status=attempt.status,
            seconds=round(seconds, 4),
            at=round(self._clock.wall(), 3),
            error=attempt.error,
        )
        self.write(self._subjects[attempt.outcome], msgspec.json.encode(record))

    def delivered(self, held: Pending) -> None:
        self._log.debug("deliver.acked", id=held.id, trigger=held.trigger, attempts=held.attempts)
        self._let_go(held, "true")

    def failed(self, held: Pending, attempt: DeliveryAttempt, wait: float, where: OrderHold) -> None:
        """A retryable failure: a warning (docs/requirements.md#r-305)."""
        self.metrics.count(m.HELD_BACK, where=where.value)
        self._log.warning(
            "deliver.nacked",
            id=held.id,
            trigger=held.trigger,
            host=held.host,
            attempts=held.attempts,
            outcome=attempt.outcome.value,
            status=attempt.status,
            error=attempt.error,
            wait=round(wait, 3),
            where=where.value,
        )

    def postponed(self, held: Pending, wait: float, why: str, where: OrderHold) -> None:
        self.metrics.count(m.POSTPONED, why=why)
        self.metrics.count(m.HELD_BACK, where=where.value)
        self._log.debug("deliver.postponed", id=held.id, host=held.host, wait=round(wait, 3), why=why)

    def buried(self, held: Pending, reason: StrEnum, attempt: DeliveryAttempt) -> None:
        """A final failure: an error (docs/requirements.md#r-305)."""
        self.metrics.count(m.DEAD_LETTERS, reason=reason.value)
        self._let_go(held, "false")
        self._log.error(
            "deliver.termed",
            id=held.id,
            trigger=held.trigger,
            host=held.host,
            attempts=held.attempts,
            reason=reason.value,
            status=attempt.status,
            error=attempt.error,
        )

    def superseded(self, count: int) -> None:
        if count:
            self.metrics.count(m.SUPERSEDED, count)

    def duplicate(self, what: str) -> None:
        """A task came again that was handled before; `what` names it."""
        self.metrics.count(m.DUPLICATES)
        self._log.debug("deliver.duplicate", what=what)

    def parked(self, held: Pending) -> None:
        self._log.debug("deliver.parked", id=held.id, origin=held.source)

    def breaker_opened(self, host: str) -> None:
        self.metrics.count(m.BREAKER_OPENED)
        self._log.warning("deliver.host_down", host=host, wait=self._config.breaker_open)

    def storing_failed(self, what: object, error: str, wait: float) -> None:
        """A required write to the server failed: it is retried, until `stored` or given up."""
        since, _ = self._unstored.get(what, (self._clock.now(), ""))
        self._unstored[what] = since, error
        self.event("deliver.storing_failed", warn=True, error=error, wait=round(wait, 2))

    def stored(self, what: object) -> None:
        self._unstored.pop(what, None)

    def stuck(self) -> str | None:
        """A text about writes that have failed for long; None when there are none."""
        since, error = min(self._unstored.values(), default=(self._clock.now(), ""))
        took = self._clock.now() - since
        return f"what must be stored could not be for {took:.0f} s: {error}" if took > _STUCK_AFTER else None

    def event(self, event: str, *, warn: bool = False, **fields: object) -> None:
        """A change of state of the process or of a partition."""
        (self._log.warning if warn else self._log.info)(event, **fields)

    def _let_go(self, held: Pending, success: str) -> None:
        self.metrics.count(m.CONSUME_COUNT, database=held.database, success=success)
        self.metrics.observe(m.CONSUME_LATENCY, self._clock.now() - held.received, database=held.database)
