"""Lanes: one message in flight in each, many lanes at once, and no lane starves another.

A few runner tasks await the handlers. A runner whose handler has to wait keeps its lane; another runner takes the
remaining ready lanes. So a handler that never waits costs no task at all (a task per message would cost 5 us), one that
waits runs in a real task, and the number of tasks is the number of waiting handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from parti.worker.resumed import Resumed

if TYPE_CHECKING:
    from parti.worker.ledger import PartitionState
    from parti.worker.message import Message

_PARKED = 32  # idle runners kept for the next messages: waking one costs half as much as a new task
QUANTUM = 16  # messages of one lane before the next ready lane has its turn
_SLICE = 0.005  # seconds a runner works before it yields to the event loop: acks, heartbeats, other workers
_FINISHING = 0.75  # share of the drain time in which handlers may start; later ones could be cut off within an effect
CANCEL_GRACE = 1.0  # seconds a cancelled handler has to end; after that it is left behind


class Why(StrEnum):
    """Why we cancelled a handler. A cancellation that we did not request is the handler's own failure."""

    TIMEOUT = "timeout"
    """It ran longer than handler_timeout: its message is retried."""
    DRAIN = "drain"
    """Its partition is released: the next owner starts with this message."""
    FENCED = "fenced"
    """The lease is over: only the next owner may produce effects now."""
    HALT = "halt"


class Lane:
    """Messages that are handled strictly one after the other. Only the first may be in flight."""

    __slots__ = ("key", "queue", "scheduled", "state", "timer")

    def __init__(self, state: PartitionState, key: str) -> None:
        self.state = state
        self.key = key
        self.queue: deque[Message] = deque()
        self.scheduled = False  # ready, running, or waiting for its retry: its holder will look at the queue
        self.timer: asyncio.TimerHandle | None = None  # of its retry

    def __repr__(self) -> str:
        return f"<Lane {self.key} queued={len(self.queue)}>"


class Runner:
    """A task that handles lanes, and what it is doing."""

    __slots__ = ("handling", "lane", "logged_at", "lost", "parked", "since", "task", "why")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.lane: Lane | None = None
        self.parked: asyncio.Future[None] | None = None
        self.since = 0.0
        self.handling: Message | None = None  # inside its handler, not being written to the dead-letter stream
        self.logged_at = 0.0  # its run time when that was last logged
        self.why: Why | None = None
        self.lost = False  # left behind: its result is ignored

    def cancel(self, why: Why) -> None:
        """Cancel its handler, once: a handler that ignores this ignores a second cancellation too."""
        if self.why is None and self.task is not None:
            self.why = why
            self.task.cancel()


Serve = Callable[["Message", Runner], Coroutine[Any, Any, "float | None"]]
"""Run one attempt. None: the message is finished; a number: run it again after that many seconds."""


class LanePool:
    """Runs the first message of every lane, at most `concurrency` at once, until halted.

    After `halt()` returns no handler of this pool will start, and none runs except those that ignored their
    cancellation: `lost` lists them.
    """

    def __init__(
        self,
        serve: Serve,
        *,
        concurrency: int,
        strict: bool = True,
        may_act: Callable[[], bool] | None = None,
        on_left: Callable[[Message], None] | None = None,
        on_bug: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`may_act`: whether we still hold the lease; checked whenever a runner resumes in the middle of a message.

        `on_left` is called with a message whose handler did not end when cancelled, `on_bug` with an unexpected error
        in a runner: its lane would otherwise stall silently.
        """
        self._serve = serve
        self._concurrency = concurrency
        self._strict = strict
        self._may_act = may_act
        self._on_left = on_left
        self._on_bug = on_bug
        self._ready: deque[Lane] = deque()
        self._runners: set[Runner] = set()
        self._parked: list[Runner] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self.lost: set[Runner] = set()
        self._pausing = 0
        self._check_due = False
        self._halted = False
        self._draining: list[PartitionState] = []
        self._idle: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        busy = len(self._runners) - len(self._parked)
        return f"<LanePool ready={len(self._ready)} busy={busy}{' halted' if self._halted else ''}>"

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing could start at once; lanes may still wait for a retry."""
        return not self._ready and len(self._runners) == len(self._parked)

    async def idled(self) -> None:
        """Return when the pool is idle."""
        while not self.idle:
            self._idle = asyncio.Event()
            await self._idle.wait()

    @property
    def running(self) -> Iterator[Runner]:
        """The runners that are inside a handler."""
        return (runner for runner in self._runners if runner.lane is not None)

    def handling(self) -> list[Runner]:
        """The runners whose handler runs, without those that are writing a dead letter."""
        return [runner for runner in self._runners if runner.handling is not None]

    @property
    def waiting(self) -> int:
        """Number of lanes that could run at once."""
        return len(self._ready)

    @property
    def halted(self) -> bool:
        return self._halted

    def running_of(self, state: PartitionState) -> set[int]:
        """The sequences of this partition that are inside a handler."""
        lanes = (runner.lane for runner in self.running)
        return {lane.queue[0].sequence for lane in lanes if lane is not None and lane.state is state and lane.queue}

    def push(self, message: Message) -> None:
        """Queue a message behind all others of its lane."""
        lane = message._lane
        lane.queue.append(message)
        if not lane.scheduled and not lane.state.stopped:
            self.schedule(lane)

    def schedule(self, lane: Lane) -> None:
        """Give the lane a turn; it must not be scheduled already."""
        lane.scheduled = True
        self._ready.append(lane)
        if not self._check_due and not self._halted:
            self._check_due = True
            self._loop.call_soon(self._check)

    def resume(self, state: PartitionState) -> None:
        """Let the lanes of a stopped partition continue."""
        for lane in list(state.lanes.values()):
            if lane.queue and not lane.scheduled:
                self.schedule(lane)

    def fence(self, only: PartitionState | None = None) -> int:
        """The lease is over: cancel every handler before it can continue, and start none; returns how many.

        `only`: one partition, which another worker now owns.
        """
        inside = self.running if only is None else self._inside(only)
        running = [runner for runner in inside if runner.why is None]
        for runner in running:
            assert runner.lane is not None
            runner.lane.state.stopped, runner.lane.state.finish_through = True, 0
            runner.cancel(Why.FENCED)
        return len(running)

    async def drained(self, state: PartitionState, within: float) -> None:
        """When this returns nothing of the stopped partition runs; handlers that ran beyond `within` were cancelled.

        The time counts from the first stop request in this handler's run: otherwise a move that is aborted and retried
        would give a hanging handler the full time again. In a halted pool nothing can finish any more.
        """
        self._draining.append(state)
        try:
            await self._drained(state, within)
        finally:
            self._draining.remove(state)

    async def _drained(self, state: PartitionState, within: float) -> None:
        if self._halted:
            state.finish_through = 0
        now = self._loop.time()
        oldest = min((runner.since for runner in self._inside(state)), default=now)
        if state.draining is None or oldest > state.draining:
            state.draining = now
        since = state.draining  # another call may end and clear it while this one waits
        try:
            async with asyncio.timeout_at(since + within * _FINISHING):
                await state.finished()
        except TimeoutError:
            state.finish_through = 0
        try:
            async with asyncio.timeout_at(since + within):
                await state.finished()
        except TimeoutError:
            if not state.stopped:
                return  # the partition resumed: the stop was withdrawn
            await self.cancel(state)
        if not state.running:
            state.draining = None

    async def cancel(self, state: PartitionState) -> None:
        """When this returns nothing of the stopped partition runs, except handlers left behind after the grace."""
        for runner in self._inside(state):
            runner.cancel(Why.DRAIN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_GRACE):
                await state.finished()
        for runner in self._inside(state):
            self._leave_behind(runner)

    def _inside(self, state: PartitionState) -> list[Runner]:
        return [runner for runner in self.running if runner.lane is not None and runner.lane.state is state]

    async def halt(self) -> bool:
        """Start nothing more, cancel what runs and wait until it has ended; True when nothing had to be cancelled."""
        self._halted = True
        for state in self._draining:
            state.finish_through = 0
        quiet = not any(True for _ in self.running) and not self.lost
        runners = list(self._runners)
        for runner in runners:
            runner.cancel(Why.HALT)
        if tasks := [runner.task for runner in runners if runner.task is not None]:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
        for runner in list(self.running):
            self._leave_behind(runner)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._ready.clear()
        for state in self._draining:
            if state.drained is not None:
                state.drained.set()
        return quiet

    def _leave_behind(self, runner: Runner) -> None:
        """The handler ignores its cancellation: free its slot. Its message is not done."""
        lane, message = runner.lane, runner.handling
        runner.lost = True
        self._runners.discard(runner)
        self.lost.add(runner)
        if lane is not None:
            lane.scheduled = False
            lane.state.running -= 1
            if not lane.state.running and lane.state.drained is not None:
                lane.state.drained.set()
        if message is not None and self._on_left is not None:
            self._on_left(message)
        self._tell_idle()

    def forget(self, state: PartitionState) -> None:
        """Drop the partition's queued messages and cancel its pending retries."""
        for lane in state.lanes.values():
            lane.queue.clear()
            if lane.timer is not None:
                lane.timer.cancel()
                self._timers.discard(lane.timer)
                lane.timer, lane.scheduled = None, False

    def _check(self) -> None:
        """Runs when no runner does: each has ended, waits inside a handler, or yields."""
        self._check_due = False
        if not self._ready or self._pausing or self._halted:
            return
        while self._parked:
            parked = self._parked.pop().parked
            if parked is not None and not parked.done():  # done: its handler cancelled the task, which is ending
                parked.set_result(None)
                return
        if len(self._runners) < self._concurrency:
            runner = Runner()
            self._runners.add(runner)
            work: Coroutine[Any, Any, None] = self._run(runner)
            if self._may_act is not None:
                work = Resumed(work, lambda: self._stale(runner))
            runner.task = self._loop.create_task(work, name="parti-lane")

    def _stale(self, runner: Runner) -> BaseException | None:
        """Called before a runner resumes: the error to raise there if the lease ended while it waited."""
        if runner.lane is None or runner.why is not None or self._may_act is None or self._may_act():
            return None
        runner.why = Why.FENCED
        runner.lane.state.stopped, runner.lane.state.finish_through = True, 0
        self.fence()
        return asyncio.CancelledError()

    def _check_later(self) -> None:
        if not self._check_due:
            self._check_due = True
            self._loop.call_soon(self._check)

    async def _run(self, runner: Runner) -> None:
        try:
            while not self._halted:
                await self._work(runner)
                if self._halted or len(self._parked) >= _PARKED:
                    return
                runner.parked = self._loop.create_future()
                self._parked.append(runner)
                self._tell_idle()
                await runner.parked
        except asyncio.CancelledError:
            if not self._halted and not runner.lost:
                raise
        except BaseException as bug:
            if self._on_bug is None:
                raise
            self._on_bug(bug)
        finally:
            self._runners.discard(runner)
            self.lost.discard(runner)
            if runner in self._parked:
                self._parked.remove(runner)
            if self._ready and not self._halted:
                self._check_later()
            self._tell_idle()

    async def _work(self, runner: Runner) -> None:
        """Handle ready lanes until there is none."""
        self._check_later()
        until = self._loop.time() + _SLICE
        while self._ready and not self._halted:
            await self._turn(self._ready.popleft(), runner)
            if runner.lost:
                return
            if self._ready and self._loop.time() > until:
                self._pausing += 1
                try:
                    await asyncio.sleep(0)
                finally:
                    self._pausing -= 1
                self._check_later()
                until = self._loop.time() + _SLICE

    def _tell_idle(self) -> None:
        if self._idle is not None and self.idle:
            self._idle.set()

    async def _turn(self, lane: Lane, runner: Runner) -> None:
        queue, state = lane.queue, lane.state
        runner.lane = lane
        try:
            for _ in range(QUANTUM):
                if not queue or self._halted or (state.stopped and not state.may_start(queue[0])):
                    break
                message = queue[0]
                state.running += 1
                try:
                    delay = await self._serve(message, runner)
                finally:
                    if not runner.lost:
                        state.running -= 1
                        if not state.running and state.drained is not None:
                            state.drained.set()
                if runner.lost:
                    return
                if not queue or queue[0] is not message:
                    continue  # the partition and its messages were removed meanwhile
                if delay is None:
                    queue.popleft()
                elif self._strict:
                    self._wait(lane, delay)
                    return
                else:
                    queue.popleft()
                    self._later(delay, self._again, message)
        except asyncio.CancelledError:
            if not runner.lost:
                self._leave(lane)
            raise
        except BaseException:
            lane.scheduled = False
            raise
        finally:
            runner.lane = runner.handling = None
        self._leave(lane)

    def _leave(self, lane: Lane) -> None:
        """The runner releases the lane: it gets another turn, or waits until it is scheduled."""
        queue, state = lane.queue, lane.state
        if queue and not self._halted and state.may_start(queue[0]):
            self._ready.append(lane)
            self._check_later()
            return
        lane.scheduled = False
        if not queue and lane.key != state.id:
            state.lanes.pop(lane.key, None)  # a key's lane exists only while it has work

    def _wait(self, lane: Lane, delay: float) -> None:
        """Keep the lane scheduled, so that nothing overtakes its first message, and give it a turn after the delay."""
        lane.timer = self._later(delay, self._due, lane)

    def _later(self, delay: float, call: Callable[[Any], None], subject: Any) -> asyncio.TimerHandle:
        def fire() -> None:
            self._timers.discard(handle)
            call(subject)

        handle = self._loop.call_later(delay, fire)
        self._timers.add(handle)
        return handle

    def _due(self, lane: Lane) -> None:
        lane.timer, lane.scheduled = None, False
        if lane.queue and not self._halted and lane.state.may_start(lane.queue[0]):
            self.schedule(lane)

    def _again(self, message: Message) -> None:
        """Relaxed order: the message goes to the front when its wait is over."""
        state = message._lane.state
        if state.open.get(message.sequence) is not message or self._halted:
            return
        lane = message._lane = state.lane(message._lane.key)
        if lane.scheduled:
            lane.queue.insert(1, message)  # the first message may be in flight
        else:
            lane.queue.appendleft(message)
        if not lane.scheduled and state.may_start(message):
            self.schedule(lane)
