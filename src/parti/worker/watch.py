"""Watches handlers: too slow, stuck, ignoring cancellation, or blocking the event loop. Each stall logs one line.

There are two watchers. A timer in the loop cancels what runs longer than `handler_timeout`, looks for work without
progress, and detects that the loop stalled: then the lease is checked before any handler continues. A thread watches
the loop from outside, since a blocked loop cannot report: it names the handler and the line that block it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Collection

from parti.observe import worker_metrics as m
from parti.worker.attempts import Attempts
from parti.worker.health import Stall
from parti.worker.lanes import Runner, Why
from parti.worker.ledger import PartitionState
from parti.worker.runtime import Runtime

_EVERY = 0.05  # seconds between two checks; also how late a handler's timeout may be
_STOOD_STILL = 0.25  # seconds late: below the margin of a lease
_TELL = 1.0  # seconds that the loop may be blocked before the line is written
_DEAF = 5.0  # seconds after its cancellation in which a handler may still clean up


class HandlerWatch:
    """Watches one pool of handlers, from `start` until `stop`."""

    def __init__(
        self,
        runtime: Runtime,
        attempts: Attempts,
        in_hand: Callable[[], tuple[int, Collection[PartitionState]]],
    ) -> None:
        """`in_hand`: returns the number of open messages, and the partitions that have them.

        `runtime.on_blocked` is called from a thread when the loop was blocked for longer than `unhealthy_limit`.
        """
        self._pool = attempts.pool
        self._attempts = attempts
        self._recorder = runtime.recorder
        self._config = runtime.config
        self._clock = runtime.clock
        self._fence = runtime.fence
        self._in_hand = in_hand
        self._js = runtime.js
        self._on_blocked = runtime.on_blocked
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._beat = self._clock.now()
        self._next_second = 0.0
        self._ended = -1
        self._ended_at = self._beat
        self._asleep: dict[int, float] = {}
        self._even_at = self._beat
        self._stopped = threading.Event()
        self._blocked_by = ""

    def __repr__(self) -> str:
        return f"<HandlerWatch {self._pool!r}>"

    def start(self) -> None:
        self._beat = self._clock.now()
        self._timer = self._loop.call_later(_EVERY, self._look)
        if getattr(self._loop, "virtual_time", False):
            return  # a simulated loop cannot be blocked, and has no outside
        threading.Thread(target=self._outside, args=(threading.get_ident(),), name="parti-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    # -- from inside the loop -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._clock.now()
        late = now - self._beat - _EVERY
        self._beat = now
        self._timer = self._loop.call_later(_EVERY, self._look)
        if late > _STOOD_STILL:
            self._stood_still(late)
        limit = self._config.handler_timeout
        if limit and not self._attempts.handler.in_thread:
            until = self._loop.time() - limit
            for runner in self._pool.handling():
                if runner.since < until:
                    runner.cancel(Why.TIMEOUT)
        if now >= self._next_second:
            self._next_second = now + 1.0
            self._each_second(now)

    def _stood_still(self, seconds: float) -> None:
        """After a stall, fence handlers that wait; the pool itself handles those about to resume (worker.resumed).

        Handlers that could not run meanwhile get the time back: the timeout counts only for the one that blocked.
        """
        cancelled, fenced = 0, not self._fence.may_pull()
        blocking, now = self._recorder.blocked, self._loop.time()
        for runner in self._pool.handling():
            message = runner.handling
            if message is not None and (message.partition.id, message.sequence) != blocking:
                runner.since = min(now, runner.since + seconds)
        if fenced:
            cancelled = self._pool.fence()
        else:
            self._recorder.blocked = None  # the block had no consequence
        if fenced or seconds > _TELL:
            cause, self._blocked_by = self._blocked_by, ""
            self._recorder.event(
                "worker.stood_still",
                op="handle",
                result="fenced" if fenced else "went_on",
                seconds=round(seconds, 2),
                cancelled=cancelled,
                error=cause or "the process was stopped, or something kept the event loop from running",
                warn=True,
            )

    def _each_second(self, now: float) -> None:
        if not self._js.connection.is_connected:
            self._recorder.health.excuse(now)
        self._recorder.stalled(Stall.LEFT_BEHIND, now, self._left_behind())
        self._recorder.stalled(Stall.HANDLER, now, self._long())
        self._recorder.stalled(Stall.NO_PROGRESS, now, self._no_progress(now))

    def _left_behind(self) -> str | None:
        left = len(self._pool.lost) + self._attempts.handler.left
        if left:
            return f"{left} handlers did not end when their partition went: they ignore cancellation, or sit in threads"
        limit = self._config.handler_timeout
        until = self._loop.time() - limit - _DEAF
        deaf = [runner for runner in self._pool.handling() if runner.since < until] if limit else []
        return f"{_named(deaf[0])} runs on past worker.handler_timeout: it cannot be cancelled" if deaf else None

    def _long(self) -> str | None:
        """Log each long-running handler, again whenever its time has doubled; returns the longest."""
        now, limit = self._loop.time(), self._config.stall_limit
        longest: Runner | None = None
        for runner in self._pool.handling():
            ran = now - runner.since
            if ran < limit:
                continue
            if runner.logged_at < runner.since or ran >= 2 * (runner.logged_at - runner.since):
                runner.logged_at = now
                self._recorder.event(
                    "message.slow", op="handle", result="running", error=_named(runner), seconds=round(ran), warn=True
                )
            if longest is None or runner.since < longest.since:
                longest = runner
        return f"{_named(longest)} runs for {now - longest.since:.0f} s" if longest is not None else None

    def _no_progress(self, now: float) -> str | None:
        limit = self._config.stall_limit
        ended, waiting = self._attempts.ended, self._pool.waiting
        if ended != self._ended or not waiting:
            self._ended, self._ended_at = ended, now
        if now - self._ended_at > limit:
            running = sum(1 for _ in self._pool.handling())
            return (
                f"{waiting} lanes are ready and {running} handlers run, but none ended for {now - self._ended_at:.0f} s"
            )
        in_hand, states = self._in_hand()
        missing = in_hand - sum(len(state.open) for state in states)
        if not missing:
            self._even_at = now
        elif now - self._even_at > limit:
            return f"{missing} places of the inbox are taken but hold no message: the worker pulls less and less"
        asleep = {
            id(lane): f"messages of partition {state.id} are queued, but no task handles them"
            for state in states
            if not state.stopped and not self._pool.halted
            for lane in state.lanes.values()
            if lane.queue and not lane.scheduled
        }
        self._asleep = {lane: self._asleep.get(lane, now) for lane in asleep}
        return next((text for lane, text in asleep.items() if now - self._asleep[lane] > limit), None)

    # -- from outside -------------------------------------------------------------------------------------------------

    def _outside(self, thread: int) -> None:
        looked = self._clock.now()
        logged = 0.0
        while not self._stopped.wait(_TELL / 2):
            now = self._clock.now()
            frozen, looked = now - looked > 2 * _TELL, now
            blocked = now - self._beat
            if frozen or blocked < _TELL:
                logged = 0.0
                continue  # the whole process was stopped, or the loop is not blocked
            if blocked >= 2 * logged:
                logged = blocked
                self._blocked_by = self._who(thread)
                self._recorder.metrics.count(m.STALLS, kind="loop_blocked")
                self._recorder.event(
                    "worker.loop_blocked",
                    op="handle",
                    result="blocked",
                    seconds=round(blocked, 1),
                    error=self._blocked_by,
                    warn=True,
                )
            limit = self._config.unhealthy_limit
            if limit and blocked > limit and self._on_blocked is not None:
                self._on_blocked(f"the event loop is blocked for {blocked:.0f} s: {self._blocked_by}")

    def _who(self, thread: int) -> str:
        frame = sys._current_frames().get(thread)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else "?"
        task = asyncio.current_task(self._loop)
        runner = next((each for each in list(self._pool.running) if each.task is task), None)
        if runner is not None and runner.handling is not None:
            self._recorder.blocked = (runner.handling.partition.id, runner.handling.sequence)
        return f"{_named(runner)} at {where}" if runner is not None else f"{where} blocks the event loop"


def _named(runner: Runner) -> str:
    message = runner.handling
    if message is None:
        return "a handler"
    return f"the handler of {message.subject} sequence {message.sequence} (partition {message.partition.id})"
