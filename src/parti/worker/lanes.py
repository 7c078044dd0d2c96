"""Lanes: one message in flight in each, many lanes at once, and no lane starves another.

Handlers are awaited by a few runner tasks. A runner that a handler makes wait keeps its lane; the remaining ready lanes
go to another runner. So a handler that never waits costs no task at all (a task per message would cost 5 us), one that
waits has a real task around it, and the number of tasks is the number of handlers that are waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parti.worker.ledger import PartitionState
    from parti.worker.message import Message

_PARKED = 32  # runners kept for the next messages: waking one costs half of what a new task costs
QUANTUM = 16  # messages of one lane before the next ready lane has its turn
_SLICE = 0.005  # seconds a runner works before it lets the loop do other things: acks, heartbeats, other workers


class Lane:
    """Messages that are handled strictly one after the other. Only its head may be in flight."""

    __slots__ = ("key", "queue", "scheduled", "state")

    def __init__(self, state: PartitionState, key: str) -> None:
        self.state = state
        self.key = key
        self.queue: deque[Message] = deque()
        self.scheduled = False  # ready, running, or waiting for its retry: whoever holds it will look at the queue

    def __repr__(self) -> str:
        return f"<Lane {self.key} queued={len(self.queue)}>"


class Runner:
    """A task that handles lanes, and what it is doing."""

    __slots__ = ("lane", "parked", "since", "task", "timed_out")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.lane: Lane | None = None
        self.parked: asyncio.Future[None] | None = None
        self.since = 0.0
        self.timed_out = False


Serve = Callable[["Message", Runner], Coroutine[Any, Any, "float | None"]]
"""Run one attempt. None: the message was let go; a number: run it again after that many seconds."""


class LanePool:
    """Runs the heads of all lanes, at most `concurrency` at once, until halted.

    After `halt()` returns no handler of this pool runs and none will start.
    """

    def __init__(self, serve: Serve, *, concurrency: int, strict: bool = True) -> None:
        self._serve = serve
        self._concurrency = concurrency
        self._strict = strict
        self._ready: deque[Lane] = deque()
        self._runners: set[Runner] = set()
        self._parked: list[Runner] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self._pausing = 0
        self._check_due = False
        self._halted = False
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
        """Let the lane have its turn; it must not be scheduled already."""
        lane.scheduled = True
        self._ready.append(lane)
        if not self._check_due and not self._halted:
            self._check_due = True
            self._loop.call_soon(self._check)

    def resume(self, state: PartitionState) -> None:
        """Let the lanes of a partition that was stopped go on."""
        for lane in list(state.lanes.values()):
            if lane.queue and not lane.scheduled:
                self.schedule(lane)

    async def halt(self) -> bool:
        """Start nothing more, cancel what runs, and wait until it has ended; True when nothing had to be cancelled."""
        self._halted = True
        quiet = not any(True for _ in self.running)
        tasks = [runner.task for runner in self._runners if runner.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._ready.clear()
        return quiet

    def _check(self) -> None:
        """Runs when no runner does: they have all ended, or wait inside a handler, or pause."""
        self._check_due = False
        if not self._ready or self._pausing or self._halted:
            return
        if self._parked:
            parked = self._parked.pop().parked
            assert parked is not None
            parked.set_result(None)
        elif len(self._runners) < self._concurrency:
            runner = Runner()
            self._runners.add(runner)
            runner.task = self._loop.create_task(self._run(runner), name="parti-lane")

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
            if not self._halted:
                raise
        finally:
            self._runners.discard(runner)
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
                    state.running -= 1
                    if not state.running and state.idle is not None:
                        state.idle.set()
                if delay is None:
                    if queue and queue[0] is message:
                        queue.popleft()
                elif self._strict:
                    self._wait(lane, delay)
                    return
                else:
                    queue.popleft()
                    self._later(delay, self._again, message)
        except BaseException:
            lane.scheduled = False
            raise
        finally:
            runner.lane = None
        if queue and not self._halted and state.may_start(queue[0]):
            self._ready.append(lane)
            self._check_later()
            return
        lane.scheduled = False
        if not queue and lane.key != state.id:
            state.lanes.pop(lane.key, None)  # a lane of a key lives as long as it has work

    def _wait(self, lane: Lane, delay: float) -> None:
        """Keep the lane scheduled, so that nothing overtakes its head, and give it its turn after the delay."""
        self._later(delay, self._due, lane)

    def _later(self, delay: float, call: Callable[[Any], None], subject: Any) -> None:
        def fire() -> None:
            self._timers.discard(handle)
            call(subject)

        handle = self._loop.call_later(delay, fire)
        self._timers.add(handle)

    def _due(self, lane: Lane) -> None:
        lane.scheduled = False
        if lane.queue and not self._halted and lane.state.may_start(lane.queue[0]):
            self.schedule(lane)

    def _again(self, message: Message) -> None:
        """Relaxed order: the message goes first when its wait is over."""
        state = message._lane.state
        if message.sequence not in state.open or self._halted:
            return
        lane = message._lane = state.lane(message._lane.key)
        if lane.scheduled:
            lane.queue.insert(1, message)  # its head may be in flight
        else:
            lane.queue.appendleft(message)
        if not lane.scheduled and state.may_start(message):
            self.schedule(lane)
