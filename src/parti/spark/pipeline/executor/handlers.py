"""Runs per-message handlers over the Arrow batches of a task: one by one, in threads, or in lanes on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from parti.outcomes import Ack, Retry, describe
from parti.spark.pipeline.executor.emit import Emit
from parti.spark.pipeline.executor.guard import Guard
from parti.spark.pipeline.executor.lanes import KeyLanes
from parti.spark.pipeline.executor.message import RowMessage
from parti.spark.pipeline.executor.outcomes import OutcomeTally, RowOutcome
from parti.spark.pipeline.executor.policy import Ended
from parti.spark.pipeline.executor.publishing import TaskSinks

if TYPE_CHECKING:
    from parti.spark.pipeline.executor.stage import HandlerStage

_TOGETHER = 0.0002  # seconds of plain calls between two readings of the clock
_MOST_TOGETHER = 512  # ... and calls
_THREADS = 32
_SLOW_CALL = 0.0005  # seconds: a handler that takes longer, and yields the processor meanwhile, is moved to threads
_SLOW_CALLS = 100  # ... after this many of its calls were measured
_SLOW: set[tuple[int, str]] = set()
"""Pipelines whose plain handler was seen to wait, by process: the next task of this worker starts in threads."""


def _waits() -> int:
    """How often this thread yielded the processor voluntarily; a busy machine does not make a handler look idle."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class _Task:
    """Common to all ways to run: the lanes of one task, and the batches that are not finished."""

    def __init__(self, stage: HandlerStage, sinks: TaskSinks, loop: asyncio.AbstractEventLoop, call: Any) -> None:
        self.stage = stage
        self.sinks = sinks
        self.loop = loop
        self.open: deque[OutcomeTally] = deque()
        self.lanes = KeyLanes(call, stage.retries, _tally_of, self.on_end, concurrency=stage.concurrency)

    def on_end(self, message: RowMessage, end: Ended | tuple[Emit, ...]) -> Ended | None:
        """Pass results and letters to the sinks; a result that no stream can store ends its message instead."""
        if isinstance(end, Ended):
            if end.outcome is RowOutcome.DEAD and not end.buried:
                self.sinks.bury(message, end)
            return None
        refused = self.sinks.emit(message, end)
        if refused is not None:
            self.sinks.bury(message, refused)
            return refused
        if self.stage.shape.results:
            message.rows.tally.results[message.index] = self.sinks.named(message, end)
        return None

    def add(self, batch: pa.RecordBatch) -> OutcomeTally:
        tally = self.stage.open(batch)
        self.open.append(tally)
        self._park(tally)
        return tally

    def _park(self, tally: OutcomeTally) -> None:
        """Keys whose parked messages are not due stay parked for the whole task."""
        now, keys = time.time(), tally.rows.keys if tally.parked else []
        for index, parked in tally.parked.items():
            if parked.until > now and not parked.alone and keys[index] not in self.lanes.busy:
                self.lanes.park(keys[index], parked.until)

    def finished(self) -> Iterator[OutcomeTally]:
        while self.open and not self.open[0].remaining:
            yield self.open.popleft()


def _tally_of(message: RowMessage) -> OutcomeTally:
    return message.rows.tally  # type: ignore[no-any-return]


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop for this task; uvloop where it is installed."""
    try:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def run_lanes(stage: HandlerStage, batches: Iterator[pa.RecordBatch], sinks: TaskSinks) -> Iterator[OutcomeTally]:
    """An async handler: a thread reads the next batch while lanes process the earlier ones."""
    with _event_loop() as loop, ThreadPoolExecutor(1, thread_name_prefix="parti-read") as reader:
        task = _Task(stage, sinks, loop, stage.handler)
        yield from _through_lanes(task, batches, reader)


def _through_lanes(
    task: _Task, batches: Iterator[pa.RecordBatch], reader: ThreadPoolExecutor
) -> Iterator[OutcomeTally]:
    lanes, loop, window = task.lanes, task.loop, task.stage.window

    async def feed() -> bool:
        """Take in one more batch, if there is room for it; False when there is none."""
        coming = loop.run_in_executor(reader, next, batches, None)
        batch = await coming
        if batch is None:
            return False
        tally = task.add(batch)
        rows, aside, push = tally.rows, tally.aside, lanes.push
        for index, (key, data) in enumerate(zip(rows.keys, rows.values, strict=True)):
            if aside and index in aside:
                continue
            push(RowMessage(rows, index, data), key)
            if lanes.pending > window:
                await lanes.below(window // 2)
        return True

    async def finish() -> None:
        await lanes.below(0, task.open[0])

    try:
        while loop.run_until_complete(feed()):
            yield from task.finished()
        while task.open:
            loop.run_until_complete(finish())
            yield from task.finished()
    finally:
        loop.run_until_complete(lanes.close())


def run_inline(stage: HandlerStage, batches: Iterator[pa.RecordBatch], sinks: TaskSinks) -> Iterator[OutcomeTally]:
    """A plain handler: called one by one; retries continue in the message's lane while others run."""
    slow = (os.getpid(), stage.pipeline)
    with _event_loop() as loop, Guard(stage.retries.timeout) as guard:
        inline = _Inline(stage, sinks, loop, guard)
        if slow not in _SLOW:
            yield from inline.run(batches)
            if inline.waits:
                _SLOW.add(slow)
    if slow in _SLOW:
        rest = inline.rest
        yield from _run_threads(stage, batches if rest is None else _chain(rest, batches), sinks)


def _chain(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _run_threads(stage: HandlerStage, batches: Iterator[pa.RecordBatch], sinks: TaskSinks) -> Iterator[OutcomeTally]:
    """A plain handler that waits: lanes as for an async one, each call in a thread. A stuck call ends the worker."""
    with (
        _event_loop() as loop,
        ThreadPoolExecutor(1, thread_name_prefix="parti-read") as reader,
        ThreadPoolExecutor(min(stage.concurrency, _THREADS), thread_name_prefix="parti-handler") as threads,
        Guard(stage.retries.timeout) as guard,
    ):

        def watched(message: RowMessage) -> Any:
            guard.threads[threading.get_ident()] = time.monotonic()
            try:
                return stage.handler(message)
            finally:
                del guard.threads[threading.get_ident()]

        def call(message: RowMessage) -> Any:
            return loop.run_in_executor(threads, watched, message)

        # A call in a thread cannot be cancelled: the guard watches it instead of the lanes.
        unlimited = replace(stage, retries=replace(stage.retries, timeout=0.0))
        yield from _through_lanes(_Task(unlimited, sinks, loop, call), batches, reader)


class _Inline(_Task):
    """Calls one by one, watched by the guard."""

    def __init__(self, stage: HandlerStage, sinks: TaskSinks, loop: asyncio.AbstractEventLoop, guard: Guard) -> None:
        super().__init__(stage, sinks, loop, self._again)
        self._guard = guard
        self._slice = 1
        self._slow_calls = self._slow_waits = 0
        self.waits = False
        """Whether the handler was seen to wait for most of its time."""
        self.rest: pa.RecordBatch | None = None
        """The rest of a batch at the moment this was seen."""

    async def _again(self, message: RowMessage) -> Any:
        return self._guarded(message)

    def _guarded(self, message: RowMessage) -> Any:
        guard = self._guard
        if not guard.limit:
            return self.stage.handler(message)
        guard.since = time.monotonic()
        try:
            return self.stage.handler(message)
        finally:
            guard.since = 0.0

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[OutcomeTally]:
        wait = self.loop.run_until_complete
        try:
            for batch in batches:
                done = self._run_batch(batch)
                if self.lanes.pending:
                    wait(self._turn())
                yield from self.finished()
                if done < batch.num_rows:
                    self.rest = batch.slice(done)
                    break
            while self.open:
                wait(self.lanes.below(0, self.open[0]))
                yield from self.finished()
        finally:
            wait(self.lanes.close())

    async def _turn(self) -> None:
        """Let lanes run whose wait is over, and limit how many wait."""
        await asyncio.sleep(0)
        await self.lanes.below(self.stage.window)

    def _run_batch(self, batch: pa.RecordBatch) -> int:
        """Call the handler for each message; stops early when the handler turns out to wait."""
        tally = self.add(batch)
        count, start = len(tally.rows), 0
        while start < count:
            if self._has_stopped():
                self._skip(tally, start)
                break
            stop = min(start + self._slice, count)
            began, waits = time.perf_counter(), _waits()
            self._run_slice(tally, start, stop)
            each, waits = (time.perf_counter() - began) / (stop - start), _waits() - waits
            tally.took_together(start, stop, began, each)
            # One reading of the clock per slice of about this time: latency is only that exact, and calls are cheap.
            self._slice = max(1, min(int(_TOGETHER / each), 2 * self._slice, _MOST_TOGETHER))
            if self.lanes.pending:
                self.loop.run_until_complete(self._turn())
            if each > _SLOW_CALL:
                self._slow_calls += stop - start
                self._slow_waits += waits
                if self._slow_calls >= _SLOW_CALLS and self._slow_waits > self._slow_calls / 2:
                    self.waits = True
                    tally.shorten(stop)
                    return stop
            start = stop
        return count

    def _has_stopped(self) -> bool:
        return self.lanes.stopped

    def _skip(self, tally: OutcomeTally, start: int) -> None:
        """The pipeline stops: try nothing more."""
        tally.remaining -= tally.open_from(start)
        for index in range(start, len(tally.rows)):
            if index not in tally.aside:
                tally.codes[index] = RowOutcome.SKIPPED
                tally.ended[index] = time.perf_counter()

    def _run_slice(self, tally: OutcomeTally, start: int, stop: int) -> None:
        rows, lanes, make = tally.rows, self.lanes, RowMessage
        busy, values, aside = lanes.busy, rows.values, tally.aside
        call = self._guarded if self._guard.limit else self.stage.handler
        elsewhere = 0
        outcome: object
        for index in range(start, stop):
            if aside and index in aside:
                elsewhere += 1
                continue
            message = make(rows, index, values[index])
            if busy and rows.keys[index] in busy:
                lanes.push(message, rows.keys[index])
                elsewhere += 1
                continue
            try:
                outcome = call(message)
            except Exception as error:  # any error of a handler is a failed attempt of its message
                outcome = Retry(error=describe(error))
            if outcome is None or type(outcome) is Ack:
                continue
            if isinstance(outcome, Emit):
                self._emitted(message, outcome)
            else:
                lanes.resume(message, rows.keys[index], outcome)
                elsewhere += 1
        tally.remaining -= stop - start - elsewhere

    def _emitted(self, message: RowMessage, outcome: Emit) -> None:
        refused = self.on_end(message, outcome.all())
        if refused is not None:
            tally = _tally_of(message)
            tally.codes[message.index], tally.errors[message.index] = refused.outcome, refused.error
