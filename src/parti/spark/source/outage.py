"""NATS outages on the driver: absorbed for a while, then reported.

An exception in the driver's reader ends the whole query (docs/evidence/spark.md#s4), and a restarting server or a
cluster that elects a leader is unreachable for seconds. So each request to NATS is retried until it is answered or the
budget of the outage is used up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from parti.backoff import FAST
from parti.clock import Clock, SystemClock
from parti.errors import FatalError, PartiError, TransientError
from parti.observe.logs import get_logger
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader

T = TypeVar("T")

log = get_logger("spark.source")

BRIEF = 1.0  # seconds; a trigger that waits longer blocks `query.stop()`


class OutageTooLong(FatalError):
    """NATS was unreachable for longer than `retryBudget`: bring it back, and start the query again."""


class DriverLink:
    """The driver's connection to NATS, and the budget for the time that it does not answer.

    The budget counts from the first failure to the next success, over any number of calls.
    """

    def __init__(self, connect: ConnectOptions, budget: float, clock: Clock | None = None) -> None:
        self.reader = RangeReader(connect, name="parti-spark-driver")
        self._budget = budget
        self._clock = clock or SystemClock()
        self._out_since: float | None = None

    def ask(self, question: Callable[[RangeReader], T]) -> T:
        """The answer, retried until the budget is used up; then OutageTooLong. Other errors are raised at once."""
        answer = self._ask(question, patience=None)
        assert answer is not None
        return answer[0]

    def ask_briefly(self, question: Callable[[RangeReader], T]) -> T | None:
        """As `ask`, but None after a second without an answer while the budget is not used up: ask again later."""
        answer = self._ask(question, patience=BRIEF)
        return answer[0] if answer is not None else None

    def _ask(self, question: Callable[[RangeReader], T], patience: float | None) -> tuple[T] | None:
        began = self._clock.now()
        waits = iter(FAST.delays())
        while True:
            try:
                answer = question(self.reader)
            except TransientError as error:
                now = self._clock.now()
                if self._out_since is None:
                    self._out_since = now
                    log.warning("source.outage", error=str(error))
                out = now - self._out_since
                if out >= self._budget and now - began >= min(BRIEF, self._budget):
                    raise OutageTooLong(f"NATS did not answer for {out:.0f} s (retryBudget): {error}") from error
                if patience is not None and now - began >= patience:
                    return None
                threading.Event().wait(next(waits))
                self._renew()
            else:
                if self._out_since is not None:
                    log.info("source.outage_over", seconds=round(self._clock.now() - self._out_since, 1))
                self._out_since = None
                return (answer,)

    def _renew(self) -> None:
        """Replace a connection that accepts requests and answers none; if that fails, so will the next request."""
        with contextlib.suppress(PartiError):
            self.reader.check()

    def close(self) -> None:
        """Close the connection."""
        self.reader.close()
