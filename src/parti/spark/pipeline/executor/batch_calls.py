"""Batch functions: a handler that takes many messages at once, as Arrow or pandas.

    def enrich(messages: pyarrow.Table) -> pyarrow.Table | None: ...

Messages come in stream order, cut into calls of the same size in every run. A failed call is retried as a whole; if it
still fails, it is split in two, and so on, until each message that cannot be handled is alone and the policy decides
about it. A result table has the column `value`, optionally `subject`, and `sequence` of the message that a result
belongs to, which makes its id the same in every run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from parti.errors import UsageError
from parti.outcomes import Again, Retry, describe
from parti.spark.pipeline.executor.emit import Emit
from parti.spark.pipeline.executor.message import RowMessage
from parti.spark.pipeline.executor.outcomes import OutcomeTally, ParkedRows, RowOutcome
from parti.spark.pipeline.executor.policy import Ended
from parti.spark.pipeline.executor.publishing import TaskSinks

if TYPE_CHECKING:
    from parti.spark.pipeline.executor.stage import HandlerStage


def run_batches(stage: HandlerStage, batches: Iterator[pa.RecordBatch], sinks: TaskSinks) -> Iterator[OutcomeTally]:
    """Call the function for every `batch_rows` messages."""
    calls = _Calls(stage, sinks)
    for batch in rebatched(batches, stage.batch_rows):
        yield calls.run(batch)


def rebatched(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same messages in batches of exactly `rows`, except the last: how they arrived makes no difference."""
    waiting: list[pa.RecordBatch] = []
    have = 0
    for batch in batches:
        waiting.append(batch)
        have += batch.num_rows
        while have >= rows:
            whole = pa.Table.from_batches(waiting).combine_chunks().to_batches()[0]
            yield whole.slice(0, rows)
            waiting, have = [whole.slice(rows)], have - rows
    if have:
        yield pa.Table.from_batches(waiting).combine_chunks().to_batches()[0]


class _Calls:
    def __init__(self, stage: HandlerStage, sinks: TaskSinks) -> None:
        self._stage = stage
        self._sinks = sinks
        self._parked: dict[str, float] = {}
        self._stopped = False
        self._never = threading.Event()

    def run(self, batch: pa.RecordBatch) -> OutcomeTally:
        tally = self._stage.open(batch)
        now, keys = time.time(), tally.rows.keys if tally.parked or self._parked else []
        for index, parked in tally.parked.items():
            if parked.until > now and not parked.alone:
                self._parked.setdefault(keys[index], parked.until)
        self._run(tally, np.setdiff1d(np.arange(batch.num_rows), list(tally.aside)))
        tally.remaining = 0
        return tally

    def _run(self, tally: OutcomeTally, indexes: Any) -> None:
        indexes = self._held_back(tally, indexes)
        if not len(indexes):
            return
        began = time.perf_counter()
        results, error, attempts = self._try(tally.rows.batch.take(pa.array(indexes)))
        now = time.perf_counter()
        for index in indexes:
            tally.ended[index] = now
            tally.took[index] += (now - began) / len(indexes)
            tally.rows.attempts[int(index)] = attempts
        if error is None:
            self._emit(tally, indexes, results)
        elif len(indexes) > 1:
            middle = len(indexes) // 2
            self._run(tally, indexes[:middle])
            self._run(tally, indexes[middle:])
        else:
            self._end(tally, int(indexes[0]), error, attempts)

    def _held_back(self, tally: OutcomeTally, indexes: Any) -> Any:
        """Mark the messages that wait behind a parked key or a stop; the rest may run."""
        if self._stopped:
            for index in indexes:
                tally.codes[int(index)], tally.ended[index] = RowOutcome.SKIPPED, time.perf_counter()
            return indexes[:0]
        if not self._parked:
            return indexes
        keys = tally.rows.keys
        held = np.array([keys[index] in self._parked for index in indexes], dtype=bool)
        for index in indexes[held]:
            before = tally.parked.get(int(index), ParkedRows())
            tally.parked[int(index)] = before._replace(until=self._parked[keys[index]])
            tally.codes[int(index)], tally.ended[index] = RowOutcome.PARKED, time.perf_counter()
        return indexes[~held]

    def _try(self, batch: pa.RecordBatch) -> tuple[Any, str | None, int]:
        """The function's result, or the error of its last attempt."""
        attempt, waited = 1, 0.0
        while True:
            try:
                return self._call(batch), None, attempt
            except Exception as error:  # any error of a function is a failed attempt of its messages
                failure = describe(error)
            decision = self._stage.retries.decide(Retry(error=failure), attempt=attempt, waited=waited, parked=0)
            if not isinstance(decision, Again):
                return None, failure, attempt
            self._never.wait(decision.delay)
            attempt, waited = attempt + 1, waited + decision.delay

    def _call(self, batch: pa.RecordBatch) -> Any:
        table = pa.Table.from_batches([batch])
        if self._stage.kind == "arrow":
            return self._stage.handler(table)
        made = self._stage.handler(table.to_pandas())
        return None if made is None else pa.Table.from_pandas(made, preserve_index=False)

    def _emit(self, tally: OutcomeTally, indexes: Any, results: Any) -> None:
        if results is None:
            return
        if not isinstance(results, pa.Table | pa.RecordBatch) or "value" not in results.schema.names:
            raise UsageError("a batch function returns None, or a table with the column value")
        by_sequence = {sequence: index for index, sequence in enumerate(tally.rows.sequences)}
        emitted: dict[int, list[Emit]] = {}
        first = int(indexes[0])
        for row in results.to_pylist():
            index = by_sequence.get(row.get("sequence"), first)
            emitted.setdefault(index, []).append(Emit(row["value"], row.get("subject")))
        for index, found in emitted.items():
            message = RowMessage(tally.rows, index, tally.rows.values[index])
            refused = self._sinks.emit(message, tuple(found))
            if refused is not None:
                self._bury(tally, message, refused)
            elif self._stage.shape.results:
                tally.results[index] = self._sinks.named(message, tuple(found))

    def _end(self, tally: OutcomeTally, index: int, error: str, attempts: int) -> None:
        parked = tally.parked.pop(index, ParkedRows()).times
        # The waits are over: only the final decision counts.
        retries = self._stage.retries
        end = retries.decide(Retry(error=error), attempt=max(attempts, retries.attempts), waited=0.0, parked=parked)
        assert isinstance(end, Ended)
        message = RowMessage(tally.rows, index, tally.rows.values[index])
        if end.outcome is RowOutcome.DEAD:
            self._bury(tally, message, end)
            return
        tally.codes[index], tally.errors[index] = end.outcome, end.error
        self._stopped = end.outcome is RowOutcome.FAILED
        if end.outcome is RowOutcome.PARKED:
            until = time.time() + end.park_for
            tally.parked[index] = ParkedRows(until, parked + 1)
            self._parked[message.key] = until

    def _bury(self, tally: OutcomeTally, message: RowMessage, end: Ended) -> None:
        self._sinks.bury(message, end)
        tally.codes[message.index], tally.errors[message.index] = end.outcome, end.error
