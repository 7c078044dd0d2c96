"""Time and randomness as small protocols, so that the simulator and tests can pass their own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio


class Clock(Protocol):
    """Seconds that never run backwards, and a way to wait for them to pass."""

    def now(self) -> float:
        """Monotonic seconds that also count while the process is stopped or the machine sleeps."""
        ...

    def wall(self) -> float:
        """Unix seconds, for records that people and other machines read; never for a deadline."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` have passed on this clock."""
        ...


class Randomness(Protocol):
    """The part of `random.Random` that parti uses; `random.Random(seed)` satisfies it."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def uniform(self, a: float, b: float) -> float:
        """A float between a and b."""
        ...

    def randrange(self, start: int, stop: int, /) -> int:
        """An int in [start, stop)."""
        ...


class SystemClock:
    """The real clock: CLOCK_BOOTTIME, because a lease must also run out while its holder is frozen.

    See docs/evidence/cluster.md#c12.
    """

    def now(self) -> float:
        return time.clock_gettime(_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        import asyncio  # the caller has loaded it already; Spark's processes only read the time and do not need it

        await asyncio.sleep(seconds)


# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC counts sleep as well.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def by_clock(clock: Clock, moment: float) -> float:
    """The Unix time `moment` on the clock's own scale; the result is never too early.

    The wall clock is read first: a process that is descheduled between the two reads waits longer, not shorter.
    """
    ahead = moment - clock.wall()
    return clock.now() + max(0.0, ahead)


class SimulatedClock:
    """A clock that moves only by `advance()`, which wakes the sleepers that are due, in order."""

    def __init__(self, start: float = 0.0, wall_start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall_start - start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def jump_wall(self, seconds: float) -> None:
        """Step the wall clock as an NTP correction would; `now()` is unaffected."""
        self._wall_offset += seconds

    async def sleep(self, seconds: float) -> None:
        import asyncio

        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        self._sleepers.append((self._now + seconds, self._count, future))
        await future

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper that is due, earliest first."""
        self._now += seconds
        due = sorted(entry for entry in self._sleepers if entry[0] <= self._now)
        self._sleepers = [entry for entry in self._sleepers if entry[0] > self._now]
        for _, _, future in due:
            if not future.done():
                future.set_result(None)


@dataclass(frozen=True, slots=True)
class Deadline:
    """One time budget, passed down through every call that shares it."""

    clock: Clock
    at: float

    @classmethod
    def after(cls, clock: Clock, *, seconds: float) -> Deadline:
        return cls(clock, clock.now() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock.now())

    @property
    def expired(self) -> bool:
        return self.clock.now() >= self.at
