"""Retries a write until it succeeds, while this process owns the partition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from parti.clock import Clock
from parti.dead_letters import until_stored
from parti.delivery.errors import LeaseLost
from parti.delivery.lease import SlotLease
from parti.delivery.recorder import DeliveryRecorder
from parti.errors import PartiError, UsageError

T = TypeVar("T")


class RetryWhileOwner:
    """Call it with an operation that may be repeated; it returns when the operation has succeeded."""

    def __init__(self, lease: SlotLease, recorder: DeliveryRecorder, clock: Clock) -> None:
        self._lease = lease
        self._recorder = recorder
        self._clock = clock

    async def __call__(self, operation: Callable[[], Awaitable[T]]) -> T:
        """The operation's result, however long NATS is unavailable: nothing is released before.

        Raises `LeaseLost` when the partition is no longer owned, and `UsageError` for data that can never be stored.
        """

        async def once() -> T:
            self._lease.check()
            return await operation()

        def failed(error: PartiError, wait: float) -> None:
            self._recorder.storing_failed(once, str(error), wait)

        try:
            return await until_stored(once, clock=self._clock, on_failure=failed, final=(UsageError, LeaseLost))
        finally:
            self._recorder.stored(once)
