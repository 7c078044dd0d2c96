"""What wakes a supervising task: signals in the order they came, or a time that it set itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from parti.clock import Clock

Signal = Callable[[], Awaitable[None] | None]
"""What to do because of it; run by the supervisor, so that two things never happen at once."""


class Signals:
    """The inbox of one supervising task."""

    _clock: Clock

    def __init__(self) -> None:
        self._signals: asyncio.Queue[Signal] = asyncio.Queue()
        self._wake_at: float | None = None
        """When to look again without a signal; while it is set, joining waits."""
        self._not_before = 0.0
        """Whatever happens, nothing is tried before this."""

    def _signal(self, act: Signal) -> None:
        self._signals.put_nowait(act)

    def _later(self, seconds: float) -> None:
        self._wake_at = self._clock.now() + seconds

    def _leave_to_others(self, seconds: float) -> None:
        """Try nothing for so long, whatever happens meanwhile."""
        self._later(seconds)
        self._not_before = self._clock.now() + seconds

    def _soon(self) -> None:
        """What was waited for may be there: look now, or when others have had their time."""
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
    """A signal that only makes the supervisor look again."""
