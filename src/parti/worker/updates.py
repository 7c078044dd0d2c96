"""Assignment updates: those that come close together become one, the last wins, and no two follow too quickly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from parti.clock import Clock
from parti.model import Lease, PartitionId
from parti.worker.routing import Routes


@dataclass(frozen=True, slots=True)
class Wanted:
    """A whole assignment of the worker, checked: nothing in it can be refused any more but by the server."""

    worker_id: str
    routes: Routes
    positions: Mapping[PartitionId, int] = field(default_factory=dict)
    """Up to where a partition that is new to us is done; unknown ones begin as configured."""
    leases: Mapping[PartitionId, Lease] = field(default_factory=dict)
    hold: Collection[PartitionId] = ()
    """Partitions that are not ours yet: filter them, hold what comes, and wait for `take_over`."""
    claimed: bool = False
    """Positions live in claims: each partition comes held, and what the durable remembers of positions is void."""


@dataclass(frozen=True, slots=True)
class Diff:
    """What changes between two sets of subjects."""

    added: tuple[str, ...]
    removed: tuple[str, ...]

    @classmethod
    def between(cls, before: Collection[str], after: Collection[str]) -> Diff:
        return cls(tuple(sorted(set(after) - set(before))), tuple(sorted(set(before) - set(after))))

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


@dataclass(slots=True)
class Batch:
    """The last of some updates, and everybody who waits for one of them."""

    wanted: Wanted
    waiters: list[asyncio.Future[None]]
    started: float

    def settle(self, error: BaseException | None) -> None:
        """Tell the waiters. One whose update was overtaken by a later one gets the later one's result."""
        for waiter in self.waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # a caller that gave up must not make asyncio complain


class Coalescer:
    """Collects updates for `window` seconds after the first, and hands out batches at least `interval` apart.

    A flush ends the window and the spacing at once: the caller says that the state is stable.
    """

    def __init__(self, *, window: float, interval: float, clock: Clock) -> None:
        self._window = window
        self._interval = interval
        self._clock = clock
        self._batch: Batch | None = None
        self._last = -interval
        self._arrived = asyncio.Event()
        self._flush = asyncio.Event()

    def put(self, wanted: Wanted, *, flush: bool = False) -> asyncio.Future[None]:
        """Make this the wanted state; the future is done when it, or a later one, is in force."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._batch is None:
            self._batch = Batch(wanted, [waiter], self._clock.now())
        else:
            self._batch.wanted = wanted
            self._batch.waiters.append(waiter)
        self._arrived.set()
        if flush:
            self._flush.set()
        return waiter

    @property
    def pending(self) -> bool:
        return self._batch is not None

    async def take(self) -> Batch:
        """The next batch, when its time has come."""
        while True:
            await self._arrived.wait()
            if self._batch is None:  # `fail` was faster
                continue
            due = max(self._batch.started + self._window, self._last + self._interval)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - self._clock.now())):
                    await self._flush.wait()
            if self._batch is not None:
                break
        batch, self._batch = self._batch, None
        self._arrived.clear()
        self._flush.clear()
        self._last = self._clock.now()
        return batch

    def fail(self, error: BaseException) -> None:
        """Nothing more will be applied."""
        if self._batch is not None:
            self._batch.settle(error)
            self._batch = None
            self._arrived.clear()
