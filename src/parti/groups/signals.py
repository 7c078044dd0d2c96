"""Wakes a supervising task: signals in order of arrival, or a time that it set itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from parti.clock import Clock

Signal = Callable[[], Awaitable[None] | None]
"""An action for the supervisor, which runs one at a time."""


class Signals:
    """The inbox of one supervising task."""

    _clock: Clock

    def __init__(self) -> None:
        self._signals: asyncio.Queue[Signal] = asyncio.Queue()
        self._wake_at: float | None = None
        """When to check again without a signal; while it is set, joining waits."""
        self._not_before = 0.0
        """No attempt is made before this time, whatever happens."""

    def _signal(self, act: Signal) -> None:
        self._signals.put_nowait(act)

    def _later(self, seconds: float) -> None:
        self._wake_at = self._clock.now() + seconds

    def _leave_to_others(self, seconds: float) -> None:
        """Make no attempt for this long, whatever happens meanwhile."""
        self._later(seconds)
        self._not_before = self._clock.now() + seconds

    def _soon(self) -> None:
        """The awaited change may have happened: check now, or when the time left to others is over."""
        self._wake_at = self._not_before if self._not_before > self._clock.now() else None

    async def _next_signal(self) -> Signal | None:
        """The next signal, or None when the time that `_later` set has come."""
        wait = None if self._wake_at is None else max(0.0, self._wake_at - self._clock.now())
        try:
            async with asyncio.timeout(wait):
                return await self._signals.get()
        except TimeoutError:
            self._wake_at = None
            return None


async def look_again() -> None:
    """A signal that only makes the supervisor check again."""
