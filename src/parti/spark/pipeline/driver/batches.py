"""One micro-batch: plan it, run the handler once for each message, store the results.

Spark calls this for each batch, and again with the same number when a batch is replayed. Everything stored here is
idempotent by the batch number, or has ids by which the server detects duplicates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from parti.errors import FatalError, PartiError
from parti.observe.logs import get_logger
from parti.spark.pipeline.driver.definition import Pipeline
from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder
from parti.spark.pipeline.driver.lease import DriverLease
from parti.spark.pipeline.driver.parking import CheckpointParking
from parti.spark.pipeline.driver.plan import Plan, PlanKind
from parti.spark.pipeline.executor.blocks import BLOCK, BLOCK_BYTES, FIRST, PARKED, TASK, Packing, unpacked
from parti.spark.pipeline.executor.failures import BatchFailed, first_cause
from parti.spark.pipeline.executor.outcomes import COUNTED, PARKED_DDL, RESULTS, Counts, RowOutcome
from parti.spark.pipeline.executor.stage import HandlerStage

log = get_logger("spark.pipeline")


class PipelineStopped(FatalError):
    """A message could not be handled and the policy is to stop; its batch is not committed and will be replayed."""


@dataclass(slots=True)
class Totals:
    """What a running pipeline has done; replayed batches count again."""

    batches: int = 0
    messages: int = 0
    done: int = 0
    dead_lettered: int = 0
    parked: int = 0
    """Messages that are parked now."""
    handler_seconds: float = 0.0
    by_batch: list[dict[str, float]] = field(default_factory=list)
    """For the last thousand batches: number, messages, seconds."""

    @property
    def handler_us(self) -> float | None:
        """Average microseconds per message in the handler."""
        return self.handler_seconds / self.messages * 1e6 if self.messages else None


class BatchRunner:
    """Spark calls this for each batch of one query."""

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        stage: HandlerStage,
        packing: Packing,
        files: HadoopFolder,
        parking: CheckpointParking | None,
        lease: DriverLease | None,
    ) -> None:
        self.totals = Totals()
        self.failure: Exception | None = None
        """The error that ended the query, when a batch raised it."""
        self._pipeline = pipeline
        self._plan = plan
        self._stage = stage
        self._packing = packing
        self._lease = lease
        self._files = files
        self._metrics: tuple[Any, ...] = ()
        self._parking = parking

    def __call__(self, frame: Any, number: int) -> None:
        """Returns when everything from the batch is stored; any error it raises ends the query."""
        try:
            self._run(frame, number)
        except Exception as error:
            self.failure = error
            # Spark matches the text of an error raised here with an expression that overflows its stack on a long text
            # ("Py4JJavaError ... ((.|\\n)*)"), and the query then neither runs nor ends. So the text is shortened.
            if not isinstance(error, PartiError):
                self.failure = BatchFailed(f"batch {number}: {first_cause(error)}")
            raise self.failure from None

    def _run(self, frame: Any, number: int) -> None:
        began = time.perf_counter()
        self._check_lease()
        if not self.totals.batches:
            # The batches use a clone of the session that Spark made for the query: the user's keeps its settings.
            conf = frame.sparkSession.conf
            conf.set("spark.sql.adaptive.enabled", "false")  # it would merge the ordered tasks
            conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(BLOCK_BYTES))  # default: wait for 64M
            if self._pipeline.companion is not None:
                self._pipeline.companion.begins(self._pipeline)
        outcomes = self._outcomes(frame, number)
        counts = self._counted(outcomes, number) if self._stage.shape.counted else self._kept(outcomes, number)
        self._judge(counts, number)
        self._check_lease()
        if self._pipeline.companion is not None:
            self._pipeline.companion.stored(self._pipeline, counts)
        self._count(counts, number, time.perf_counter() - began)

    def _counted(self, outcomes: Any, number: int) -> Counts:
        """Run the batch; its tasks do the counting, and only parked messages are kept."""
        parking = self._parking
        if parking is None:
            return _total(outcomes)
        outcomes = outcomes.persist()  # evaluated again for the parked messages, and the handler must run once
        try:
            counts = _total(outcomes.select(*COUNTED))
            blocks = outcomes.select(BLOCK).where(f"{BLOCK} is not null")
            parking.store(blocks.mapInArrow(unpacked, PARKED_DDL), number, counts.parked, counts.due)
        finally:
            outcomes.unpersist()
        return counts

    def _kept(self, outcomes: Any, number: int) -> Counts:
        """Run the batch into the sinks on Spark's side, and count its rows on the way."""
        outcomes, counted = self._observed(outcomes)
        several = self._parking is not None or self._sinks() > 1
        if several:
            outcomes = outcomes.persist()  # each sink evaluates it, and the handler must run once
        try:
            self._store(outcomes, number)
            counts = Counts.of(counted.get)
            if self._parking is not None:
                parked = outcomes.where(f"outcome = '{RowOutcome.PARKED}'").select(*PARKED.names)
                self._parking.store(parked, number, counts.parked, counts.due)
        finally:
            if several:
                outcomes.unpersist()
        return counts

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _outcomes(self, frame: Any, number: int) -> Any:
        if self._plan.kind is PlanKind.FUSED:
            return frame
        if self._parking is not None:
            frame = self._parking.joined(frame, number, self._packing)
        # By sequence alone, not by partition and sequence: lanes then find many keys at once
        # (docs/evidence/pipeline.md#p3).
        ordered = frame.repartitionById(self._plan.tasks, TASK).sortWithinPartitions(FIRST)
        return ordered.mapInArrow(self._stage.run_blocks, self._stage.shape.ddl)

    def _observed(self, outcomes: Any) -> tuple[Any, Any]:
        """The same rows, and the counts that are collected as they are evaluated."""
        from pyspark.sql import Observation

        # Built once for all batches: each expression takes some calls into the JVM, together 25 ms per batch.
        self._metrics = self._metrics or _metrics(parking=self._parking is not None)
        observation = Observation()
        return outcomes.observe(observation, *self._metrics), observation

    def _sinks(self) -> int:
        sinks = (self._pipeline.results, self._pipeline.outcomes)
        return sum((sink.parquet is not None) + (sink.write is not None) for sink in sinks)

    def _store(self, outcomes: Any, number: int) -> None:
        """Evaluate the batch into every sink on Spark's side, at least once."""
        names = [name for name, _, _ in self._stage.shape.columns]
        kept = [name for name in names if name not in _INTERNAL]
        rows = outcomes if kept == names else outcomes.select(*kept)
        sinks = self._pipeline.outcomes
        if self._parking is not None:
            outcomes.write.format("noop").mode("append").save()
        if sinks.parquet is not None:
            self._parquet(rows, sinks.parquet, number)
        if sinks.write is not None:
            sinks.write(rows, number)
        if self._stage.shape.results:
            results = _exploded(outcomes)
            if self._pipeline.results.parquet is not None:
                self._parquet(results, self._pipeline.results.parquet, number)
            if self._pipeline.results.write is not None:
                self._pipeline.results.write(results, number)

    def _parquet(self, rows: Any, folder: str, number: int) -> None:
        """Write the batch to a temporary folder, then rename it: a reader sees all of it or nothing."""
        files = self._files.within(folder)
        fresh = f".batch-{number}-{self._stage.epoch}"
        rows.write.mode("overwrite").parquet(files.at(fresh))
        self._check_lease()
        files.move(fresh, f"batch={number}")

    def _judge(self, counts: Counts, number: int) -> None:
        if counts.failed:
            raise PipelineStopped(
                f"pipeline {self._pipeline.name}: {counts.failed} messages of batch {number} failed, first "
                f"{counts.first_failed}; nothing of the batch is committed. Correct the handler and start again"
            )

    def _count(self, counts: Counts, number: int, seconds: float) -> None:
        totals, messages = self.totals, counts.messages
        totals.batches += 1
        totals.messages += messages
        totals.dead_lettered += counts.dead
        totals.parked = counts.parked
        totals.done += messages - counts.dead - counts.parked
        totals.handler_seconds += counts.took
        totals.by_batch.append({"batch": number, "messages": messages, "seconds": round(seconds, 4)})
        del totals.by_batch[:-1000]
        if counts.dead or counts.parked:
            log.warning(
                "pipeline.batch", batch=number, messages=messages, dead_lettered=counts.dead, parked=counts.parked
            )


def _total(rows: Any) -> Counts:
    return sum((Counts.of(row) for row in rows.collect()), Counts())


def _metrics(*, parking: bool) -> tuple[Any, ...]:
    """`Counts` as expressions over outcome rows."""
    from pyspark.sql import functions as f

    def count(outcome: RowOutcome) -> Any:
        return f.count(f.when(f.col("outcome") == outcome.value, 1))

    due = f.when(f.col("outcome") == RowOutcome.PARKED.value, f.col("parked_until")) if parking else f.lit(None)
    first = f.min(f.when(f.col("outcome") == RowOutcome.FAILED.value, f.concat_ws(" ", "sequence", "subject", "error")))
    return (
        f.count(f.lit(1)).alias("messages"),
        count(RowOutcome.DEAD).alias("dead"),
        count(RowOutcome.PARKED).alias("parked"),
        count(RowOutcome.FAILED).alias("failed"),
        f.sum("took").alias("took"),
        first.alias("first_failed"),
        f.min(due).alias("due"),
    )


_INTERNAL = frozenset({RESULTS, "value", "timestamp", "headers", "parked_until", "parked_times", "parked_alone"})


def _exploded(outcomes: Any) -> Any:
    """One row per result, with its origin."""
    from pyspark.sql import functions as f

    origin = ("stream", "sequence", "key", "partition", "epoch")
    each = outcomes.select(*origin, f.posexplode(RESULTS).alias("number", "result"))
    return each.select(*origin, "number", "result.subject", "result.value")
