"""The sink of a proof: receives every effect, in the order in which it took effect, and judges it at once.

Worker processes connect over a loopback socket, so a broken broker cannot hide an effect. With `fenced`, the sink
fences: it refuses an effect whose epoch is below the highest it has seen for the partition.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from parti.clock import SystemClock
from parti.testing.history import Effect, History, HistoryVerdict
from parti_lab.prove.asking import Answering, Asking

Origin = tuple[int, float, int, float]
"""The sequence of an effect's message, when it was stored, the number of the attempt, and when its handler began."""
Record = Callable[[Effect, int, float, int, float], None]
"""Called with each accepted effect and its origin."""
_GAPS = 200_000  # gaps kept, enough for the percentiles of any run


class Sink(Answering):
    """Accepts effects; `verdict()` counts what was lost, repeated, out of order, doubly owned or stale."""

    def __init__(self, *, fenced: bool = False, record: Record | None = None) -> None:
        self.history = History()
        self._record = record
        self.refused = 0
        self.last: dict[str, tuple[float, str]] = {}
        """Partition -> time and owner of its last effect."""
        self.moved: deque[float] = deque(maxlen=_GAPS)
        """Seconds between the last effect of one owner and the first of the next."""
        self.steady: deque[float] = deque(maxlen=_GAPS)
        """Seconds between two effects of one owner."""
        self.first_since: dict[str, float] = {}
        self._fenced = fenced
        self._newest: dict[str, int] = {}
        self._clock = SystemClock()
        self._changed = asyncio.Event()

    def answer(self, said: list[Any]) -> bool:
        effect, origin = said
        return self.effect(Effect(*effect), origin)

    def effect(self, effect: Effect, origin: Origin | None = None) -> bool:
        """Accept one effect; False if it is refused as stale."""
        partition, owner, epoch = effect.partition, effect.owner, effect.epoch
        if self._fenced and epoch < self._newest.get(partition, 0):
            self.refused += 1
            return False
        self._newest[partition] = max(epoch, self._newest.get(partition, 0))
        now = self._clock.now()
        before = self.last.get(partition)
        if before is not None:
            (self.steady if before[1] == owner else self.moved).append(now - before[0])
            if before[1] != owner:
                self.first_since[partition] = now
        self.last[partition] = (now, owner)
        self.history.effect(effect)
        if self._record is not None and origin is not None:
            self._record(effect, *origin)
        self._changed.set()
        return True

    def verdict(self) -> HistoryVerdict:
        return self.history.verdict()

    async def complete(self, timeout: float) -> HistoryVerdict:
        """Wait until nothing is missing, at most `timeout` seconds; then judge."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.verdict().lost:
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await self._changed.wait()
        return self.verdict()


class SinkClient(Asking):
    """The handler's side: `effect` returns when the sink has accepted or refused it."""

    async def effect(self, effect: Effect, origin: Origin | None = None) -> bool:
        return await self.ask(astuple(effect), origin)


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
