"""The handler stage of a Spark task: messages in, outcome rows out, in stream order for each key.

The stage is sent from the driver to the executors once. There both plans call `run`: the fused plan inside the reading
task, the shuffled plan after the shuffle. It chooses how to run the handler:

- inline: a plain function, called message by message. The fastest by far, and right while it does not wait;
- threads: a plain function that was seen to wait for most of its time;
- async: a coroutine function, in lanes;
- batch: a function over Arrow or pandas, called with many messages at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from parti.spark.pipeline.executor.blocks import unpacked
from parti.spark.pipeline.executor.message import MessageRows
from parti.spark.pipeline.executor.outcomes import OutcomeTally, ParkedRows, RowShape
from parti.spark.pipeline.executor.policy import Retries
from parti.spark.pipeline.executor.publishing import LetterSink, ResultSink, TaskSinks
from parti.spark.worker_process import settle
from parti.worker.handler import is_async

Kind = Literal["message", "arrow", "pandas"]


@dataclass(frozen=True, slots=True)
class HandlerStage:
    """What every task of a pipeline does with its messages; immutable and picklable."""

    handler: Callable[..., Any]
    pipeline: str
    stream: str
    kind: Kind = "message"
    retries: Retries = field(default_factory=Retries)
    concurrency: int = (
        1000  # concurrent handlers in a task; 256 reached 53 k/s, this reached 94 k/s (docs/evidence/pipeline.md#p3)
    )
    window: int = 20_000  # messages in the lanes of a task at once
    batch_rows: int = 10_000  # messages per call of a batch function
    created: str = ""
    """When the stream was created, which is part of the result ids."""
    scope: str = ""
    """The prefix of result ids; the pipeline's name when it is empty."""
    owner: str = ""
    epoch: int = 0
    tasks: int = 1
    """Tasks that run the handler in parallel, including this one."""
    shape: RowShape = field(default_factory=RowShape)
    """Which columns the outcome rows have."""
    results: ResultSink | None = None
    letters: LetterSink | None = None

    def at(self, epoch: int, owner: str, fences: dict[str, tuple[str, int]]) -> HandlerStage:
        """The stage of one owner: the server refuses its publishes once another owner has set its marker."""
        return replace(
            self,
            epoch=epoch,
            owner=owner,
            results=self.results and self.results.fenced(fences),
            letters=self.letters and self.letters.fenced(fences),
        )

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Every message of the batches with its outcome. When it ends, results and dead letters are stored."""
        from parti.spark.pipeline.executor.batch_calls import run_batches
        from parti.spark.pipeline.executor.handlers import run_inline, run_lanes

        settle()
        named = {"pipeline": self.pipeline, "stream": self.stream, "created": self.created, "scope": self.scope}
        with TaskSinks(self.results, self.letters, **named) as sinks:
            if self.kind != "message":
                run = run_batches
            elif is_async(self.handler):
                run = run_lanes
            else:
                run = run_inline
            for tally in run(self, (part for part in batches if part.num_rows), sinks):
                sinks.check()
                yield tally.to_arrow(self.shape)
            sinks.flush()

    def run_blocks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """As `run`, after a shuffle."""
        return self.run(unpacked(batches))

    def open(self, batch: pa.RecordBatch) -> OutcomeTally:
        """The rows of an Arrow batch, with room for their outcomes."""
        tally = OutcomeTally(MessageRows(batch, self.stream, self.epoch, self.owner, self.tasks))
        tally.rows.tally = tally
        if self.shape.parking and "parked_until" in batch.schema.names:
            columns = (batch.column(name).to_pylist() for name in ("parked_until", "parked_times", "parked_alone"))
            tally.parked = {
                index: ParkedRows(*found) for index, found in enumerate(zip(*columns, strict=True)) if found[0]
            }
            tally.leave_aside()
        return tally
