"""Assignment updates: close ones are merged, the last wins, and a minimum interval separates them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from parti.clock import Clock
from parti.model import Lease, PartitionId
from parti.worker.routing import Routes


@dataclass(frozen=True, slots=True)
class Wanted:
    """A whole assignment of the worker, validated: only the server can still refuse it."""

    worker_id: str
    routes: Routes
    positions: Mapping[PartitionId, int] = field(default_factory=dict)
    """Up to where a new partition is done; partitions not listed start as configured."""
    leases: Mapping[PartitionId, Lease] = field(default_factory=dict)
    hold: Collection[PartitionId] = ()
    """Partitions that this worker does not own yet: filter them, hold their messages, and wait for `take_over`."""
    claimed: bool = False
    """Claims hold the positions: each partition starts held, and positions stored in the durable are void."""


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
    """The last of several updates, and all callers that wait for one of them."""

    wanted: Wanted
    waiters: list[asyncio.Future[None]]
    started: float

    def settle(self, error: BaseException | None) -> None:
        """Notify the waiters. A caller whose update was replaced by a later one gets the later one's result."""
        for waiter in self.waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # a caller that gave up must not cause an asyncio warning


class Pace:
    """When the next update is due: `window` seconds after the first change in it, `interval` after the last update.

    An urgent change ends the wait at once, for all gathered changes.
    """

    def __init__(self, *, window: float, interval: float, clock: Clock) -> None:
        self._window = window
        self._interval = interval
        self._clock = clock
        self._updated = float("-inf")
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def changed(self, *, urgent: bool = False) -> None:
        """Report a change."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def due(self, since: float, patience: Callable[[], int] = lambda: 1) -> None:
        """Returns when an update with changes since `since` is due; the code that applies it calls `begin`.

        `patience`: the number of intervals to wait, read again at every change; when it falls, the window restarts with
        that change.
        """
        intervals = patience()
        while not self._urgent.is_set():
            before, intervals = intervals, patience()
            if intervals < before:
                since = self._clock.now()
            left = max(since + self._window, self._updated + self._interval * intervals) - self._clock.now()
            if left <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def begin(self) -> None:
        """Urgent changes from now on trigger the next update."""
        self._urgent.clear()

    def updated(self) -> None:
        """The interval counts from now."""
        self._updated = self._clock.now()


class Coalescer:
    """Merges updates into batches at its `Pace`. A flush is urgent: the caller says that the state is stable."""

    def __init__(self, *, window: float, interval: float, clock: Clock) -> None:
        self._pace = Pace(window=window, interval=interval, clock=clock)
        self._clock = clock
        self._batch: Batch | None = None
        self._arrived = asyncio.Event()

    def put(self, wanted: Wanted, *, flush: bool = False) -> asyncio.Future[None]:
        """Make this the wanted state; the future completes when it, or a later one, is in force."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._batch is None:
            self._batch = Batch(wanted, [waiter], self._clock.now())
        else:
            self._batch.wanted = wanted
            self._batch.waiters.append(waiter)
        self._arrived.set()
        self._pace.changed(urgent=flush)
        return waiter

    @property
    def pending(self) -> bool:
        return self._batch is not None

    async def take(self) -> Batch:
        """The next batch, when it is due."""
        while True:
            await self._arrived.wait()
            if self._batch is None:  # `fail` came first
                continue
            await self._pace.due(self._batch.started)
            if self._batch is not None:
                break
        batch, self._batch = self._batch, None
        self._arrived.clear()
        self._pace.begin()
        self._pace.updated()
        return batch

    def fail(self, error: BaseException) -> None:
        """No further update will be applied."""
        if self._batch is not None:
            self._batch.settle(error)
            self._batch = None
            self._arrived.clear()
