"""Storing something for certain: as often as it takes, for as long as the partition is ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from parti.backoff import Backoff
from parti.clock import Clock
from parti.delivery.errors import LeaseLost
from parti.delivery.lease import SlotLease
from parti.delivery.recorder import DeliveryRecorder
from parti.errors import PartiError, UsageError

T = TypeVar("T")
_BACKOFF = Backoff(base=0.1, cap=5.0, max_tries=None)


class RetryWhileOwner:
    """Call it with an operation that may be repeated; it returns when the operation has succeeded."""

    def __init__(self, lease: SlotLease, recorder: DeliveryRecorder, clock: Clock) -> None:
        self._lease = lease
        self._recorder = recorder
        self._clock = clock

    async def __call__(self, operation: Callable[[], Awaitable[T]]) -> T:
        """The operation's result, however long NATS is away: nothing is let go before.

        Raises `LeaseLost` when the partition is not ours any more, and `UsageError` for what can never be stored.
        """
        for wait in _BACKOFF.delays():
            self._lease.check()
            try:
                return await operation()
            except (UsageError, LeaseLost):
                raise
            except PartiError as error:
                self._recorder.event("deliver.storing_failed", warn=True, error=str(error), wait=round(wait, 2))
            await self._clock.sleep(wait)
        raise AssertionError("the waits never end")
