"""Lanes inside a Spark task: one message of a key in flight, many keys at once, in stream order within each key.

A lane is a key with waiting messages. A few asyncio tasks process the lanes; each keeps its lane until the lane is
empty and then takes the next one. So a message needs no asyncio task, and a handler that never waits needs no turn of
the loop. Lanes continue across Arrow batches: a barrier after each would cost 13 % to 75 %
(docs/evidence/pipeline.md#p3).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from parti.outcomes import Ack, Again, Retry, describe
from parti.spark.pipeline.executor.emit import Emit
from parti.spark.pipeline.executor.message import RowMessage
from parti.spark.pipeline.executor.outcomes import OutcomeTally, ParkedRows, RowOutcome
from parti.spark.pipeline.executor.policy import Ended, Retries
from parti.worker.errors import HandlerCancelled, HandlerTimeout

Call = Callable[[RowMessage], Awaitable[Any]]
OnEnd = Callable[[RowMessage, "Ended | tuple[Emit, ...]"], "Ended | None"]
"""Called for each message that did not simply succeed, before its end counts; may return another end."""


_NONE = object()


class KeyLane:
    """The waiting messages of one key, oldest first."""

    __slots__ = ("answer", "key", "queue", "since", "task", "timed_out")

    def __init__(self, key: str) -> None:
        self.key = key
        self.answer: object = _NONE
        """The handler's result for the first message, if it was called elsewhere."""
        self.queue: deque[RowMessage] = deque()
        self.since = 0.0
        """When the current attempt started; 0 while none runs."""
        self.task: asyncio.Task[None] | None = None
        self.timed_out = False

    def __repr__(self) -> str:
        return f"<KeyLane {self.key} queued={len(self.queue)}>"


class KeyLanes:
    """Runs handlers of pushed messages on the running loop until each has ended in its tally."""

    def __init__(
        self,
        call: Call,
        retries: Retries,
        tally_of: Callable[[RowMessage], OutcomeTally],
        on_end: OnEnd,
        *,
        concurrency: int,
    ) -> None:
        self.pending = 0
        """Messages that were pushed and have not ended."""
        self.busy: dict[str, KeyLane | float] = {}
        """Keys that a new message must queue behind: a running lane, or the time until which the key is parked."""
        self.stopped = False
        self._call = call
        self._retries = retries
        self._tally_of = tally_of
        self._on_end = on_end
        self._concurrency = concurrency
        self._ready: deque[KeyLane] = deque()
        self._active: set[KeyLane] = set()
        self._failure: BaseException | None = None
        self._low = 0
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_event_loop()
        self._watch: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<KeyLanes pending={self.pending} active={len(self._active)} ready={len(self._ready)}>"

    def push(self, message: RowMessage, key: str) -> None:
        """Queue a message behind all others of its key."""
        self.pending += 1
        lane = self.busy.get(key)
        if lane is None:
            lane = self.busy[key] = KeyLane(key)
            lane.queue.append(message)
            if len(self._active) < self._concurrency:
                self._start(lane)
            else:
                self._ready.append(lane)
        elif isinstance(lane, KeyLane):
            lane.queue.append(message)
        else:
            self._hold(message, lane)

    def resume(self, message: RowMessage, key: str, answer: object) -> None:
        """Queue a message of an idle key whose first attempt was made elsewhere and had this result."""
        self.push(message, key)
        lane = self.busy[key]
        assert isinstance(lane, KeyLane)
        lane.answer = answer

    def park(self, key: str, until: float) -> None:
        """Start no more messages of this key in this task; they wait with those parked before."""
        self.busy[key] = until

    async def below(self, limit: int, tally: OutcomeTally | None = None) -> None:
        """Return when at most `limit` messages are pending, or all of `tally` have ended."""
        while self.pending > limit and (tally is None or tally.remaining):
            if self._failure is not None:
                break
            self._low = limit
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """After this returns no handler of these lanes runs."""
        if self._watch is not None:
            self._watch.cancel()
        tasks = [lane.task for lane in self._active if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, lane: KeyLane) -> None:
        self._active.add(lane)
        lane.task = self._loop.create_task(self._work(lane))
        lane.task.add_done_callback(self._ended)
        if self._watch is None and self._retries.timeout:
            self._watch = self._loop.call_later(self._retries.timeout / 4, self._look)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _work(self, lane: KeyLane) -> None:
        clock, call, tally_of = time.perf_counter, self._call, self._tally_of
        try:
            while True:
                queue = lane.queue
                while queue:
                    message = queue.popleft()
                    if self.stopped:
                        self._end(message, RowOutcome.SKIPPED)
                        continue
                    lane.since = started = clock()
                    outcome, lane.answer = lane.answer, _NONE
                    if outcome is _NONE:
                        try:
                            outcome = await call(message)
                        except asyncio.CancelledError:
                            outcome = self._cancelled(lane)
                        except Exception as error:  # any error of a handler is a failed attempt of its message
                            outcome = Retry(error=describe(error))
                    if outcome is None or type(outcome) is Ack:
                        tally = tally_of(message)
                        index = message.index
                        tally.ended[index] = now = clock()
                        tally.took[index] += now - started
                        tally.remaining -= 1
                        self.pending -= 1
                        if not tally.remaining or self.pending == self._low:
                            self._wake()
                        continue
                    if await self._follow(lane, message, outcome, started):
                        break
                lane.since = 0.0
                if self.busy.get(lane.key) is lane:
                    del self.busy[lane.key]
                self._active.discard(lane)
                if not self._ready:
                    return
                following = self._ready.popleft()
                following.task, lane = lane.task, following
                self._active.add(lane)
        finally:
            self._active.discard(lane)

    async def _follow(self, lane: KeyLane, message: RowMessage, outcome: object, started: float) -> bool:
        """Continue with a message that did not simply succeed, until it has ended; True when its key is parked now."""
        tally, index, waited = self._tally_of(message), message.index, 0.0
        parked = tally.parked.pop(index, ParkedRows()).times
        while True:
            now = time.perf_counter()
            tally.took[index] += now - started
            lane.since = 0.0
            verdict = self._retries.decide(outcome, attempt=message.attempt, waited=waited, parked=parked)
            if isinstance(verdict, Again):
                message.failed(verdict.error)
                await asyncio.sleep(verdict.delay)
                waited += verdict.delay
                lane.since = started = time.perf_counter()
                try:
                    outcome = await self._call(message)
                except asyncio.CancelledError:
                    outcome = self._cancelled(lane)
                except Exception as error:  # as above
                    outcome = Retry(error=describe(error))
                continue
            replaced: Ended | None = None
            if isinstance(verdict, Ended):
                replaced = self._on_end(message, verdict) or verdict
            elif isinstance(outcome, Emit):
                replaced = self._on_end(message, outcome.all())
            return self._settle(lane, message, tally, replaced, parked)

    def _settle(
        self, lane: KeyLane, message: RowMessage, tally: OutcomeTally, ended: Ended | None, parked: int
    ) -> bool:
        index = message.index
        if ended is None:
            self._end(message, None)
            return False
        tally.errors[index] = ended.error
        if ended.outcome is RowOutcome.FAILED:
            self.stopped = True
        if ended.outcome is not RowOutcome.PARKED:
            self._end(message, ended.outcome)
            return False
        until = time.time() + ended.park_for
        tally.parked[index] = ParkedRows(until, parked + ended.counted, ended.alone)
        self._end(message, RowOutcome.PARKED)
        if ended.alone:
            return False
        waiting, lane.queue = lane.queue, deque()
        self.park(lane.key, until)
        for behind in waiting:
            self._hold(behind, until)
        return True

    def _hold(self, message: RowMessage, until: float) -> None:
        """A message behind a parked one of its key: it waits equally long, and loses no attempt."""
        tally = self._tally_of(message)
        before = tally.parked.get(message.index, ParkedRows())
        tally.parked[message.index] = before._replace(until=until)
        self._end(message, RowOutcome.PARKED)

    def _end(self, message: RowMessage, outcome: RowOutcome | None) -> None:
        tally = self._tally_of(message)
        if outcome is not None:
            tally.codes[message.index] = outcome
        tally.ended[message.index] = time.perf_counter()
        tally.remaining -= 1
        self.pending -= 1
        if not tally.remaining or self.pending == self._low:
            self._wake()

    def _cancelled(self, lane: KeyLane) -> Retry:
        """A handler was cancelled: by its timeout, by itself, or because the task ends."""
        task = asyncio.current_task()
        if lane.timed_out:
            lane.timed_out = False
            if task is not None:
                task.uncancel()
            return Retry(error=describe(HandlerTimeout(f"the handler ran longer than {self._retries.timeout:g} s")))
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return Retry(error=describe(HandlerCancelled("the handler was cancelled from inside")))

    def _look(self) -> None:
        """Cancel attempts that run for too long."""
        timeout = self._retries.timeout
        late = time.perf_counter() - timeout
        for lane in self._active:
            if 0 < lane.since < late and not lane.timed_out and lane.task is not None:
                lane.timed_out = True
                lane.task.cancel()
        self._watch = self._loop.call_later(timeout / 4, self._look)
