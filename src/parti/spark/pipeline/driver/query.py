"""A running pipeline: its Spark query, and the lease in front of it when drivers share the pipeline.

After the lease is lost, nothing from this driver is stored any more: the server refuses its publishes, nobody reads its
checkpoint, and the query is stopped. The driver then waits for the lease like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from parti.config.units import parse_duration
from parti.dead_letters import dead_letter_stream, ensure_stream, largest_message
from parti.errors import FatalError, PartiError
from parti.observe.logs import get_logger
from parti.spark.member.lookup import look_up
from parti.spark.pipeline.driver import epochs
from parti.spark.pipeline.driver.batches import BatchRunner, Totals
from parti.spark.pipeline.driver.definition import Pipeline
from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder
from parti.spark.pipeline.driver.lease import DriverLease, check_nobody_holds
from parti.spark.pipeline.driver.parking import CheckpointParking
from parti.spark.pipeline.driver.plan import Plan, PlanKind
from parti.spark.pipeline.driver.resume import known_results
from parti.spark.pipeline.driver.source import CLOSED, CLOSING, DUE, pipeline_source
from parti.spark.pipeline.executor.blocks import DDL, Packing
from parti.spark.pipeline.executor.failures import first_cause
from parti.spark.pipeline.executor.publishing import LetterSink, ResultSink, id_scope
from parti.spark.pipeline.executor.stage import HandlerStage
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.epoch_marker import marker_subject, raise_marker_blocking
from parti.wire.ranges import RangeReader
from parti.wire.target import Target, find_target

log = get_logger("spark.pipeline")

_PATIENCE = 30.0  # seconds for the first replies of NATS
_UNHURRIED = 0.2  # of the grace: in this time the running batch may end normally
_PROMPT = 1.0  # seconds between triggers for which a stop waits, so that the last batch is committed on the server too
_RESTARTS = 5  # of a query that was refused although the lease is held, as when a stream dropped its marker
_REFUSED = ("LeaseLost", "StaleEpoch", "WrongLastSequence")


class PipelineFailed(FatalError):
    """The query ended with an error: see the cause. It continues from its checkpoint when it is started again."""


class RunningPipeline:
    """Handle of a started pipeline. Use it as a context manager, or call `stop`."""

    def __init__(self, pipeline: Pipeline, spark: Any = None) -> None:
        self.pipeline = replace(pipeline, nats=pipeline.nats.self_contained())
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.plan: Plan | None = None
        self.epoch = 0
        self.query: Any = None
        """Spark's query while one runs."""
        self.started = threading.Event()
        """Set while a query runs; not set on a standby that waits."""
        self._spark = spark
        self._owns_spark = spark is None
        self._runner: BatchRunner | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="parti-pipeline-"))
        self._lease: DriverLease | None = None
        self._restarts = 0
        self._thread = threading.Thread(target=self._run, name=f"parti-pipeline-{pipeline.name}", daemon=True)

    def __repr__(self) -> str:
        state = "running" if self.started.is_set() else "waiting"
        return f"<RunningPipeline {self.pipeline.name} {state} epoch={self.epoch} owner={self.owner}>"

    @property
    def totals(self) -> Totals:
        """What was done since the query started."""
        return self._runner.totals if self._runner is not None else Totals()

    @property
    def parked_due(self) -> float | None:
        """When the first parked message is due, in seconds since 1970; None when nothing is parked."""
        try:
            return float((self._folder / DUE).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def start(self) -> RunningPipeline:
        """Start. Without a standby, returns when the query runs; a wrong setting is raised here."""
        if self._spark is None:
            from parti.spark.session import session

            conf: dict[str, Any] = dict(self.pipeline.spark)
            self._spark = session(self.pipeline.name, self.pipeline.master, **conf)
        self._thread.start()
        if self.pipeline.standby is None:
            self.started.wait()
            self._raise()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False after the timeout. Raises a failure."""
        self._thread.join(timeout)
        self._raise()
        return not self._thread.is_alive()

    def stop(self, grace: float | None = None) -> None:
        """After this returns the query is stopped and the lease is released.

        The running batch has `grace` seconds to end, by default the pipeline's own; else it is replayed later.
        """
        self._stopping.set()
        self._close(self.pipeline.grace if grace is None else grace)
        self._stop_query()
        self._thread.join()
        if self._owns_spark and self._spark is not None:
            self._spark.stop()
            self._spark = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RunningPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(None if kind is None else 0.0)

    def _close(self, grace: float) -> None:
        """Let no further batch start, and wait for the end of the running one."""
        began, hurried = time.monotonic(), self.pipeline.companion is None
        with contextlib.suppress(Exception):  # Spark reports in many ways that a query, or Spark, has already ended
            (self._folder / CLOSING).touch()
            while (waited := time.monotonic() - began) < grace and not self._closed():
                if not hurried and waited > _UNHURRIED * grace:
                    hurried = True
                    assert self.pipeline.companion is not None
                    self.pipeline.companion.closes(self.pipeline)
                self._thread.join(0.05)

    def _closed(self) -> bool:
        """Whether no batch is running any more."""
        query = self.query
        if query is None or not query.isActive or (self._folder / CLOSED).exists():
            return True
        # A trigger that fires every minute is not waited for: it would start nothing.
        prompt = self.pipeline.trigger == "available-now" or parse_duration(self.pipeline.trigger) <= _PROMPT
        return not prompt and not query.status["isTriggerActive"]

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            if self.pipeline.standby is None:
                self._run_query(0)
            else:
                self._run_leased()
        except BaseException as error:  # raised again by `wait`, in the caller's thread
            self._failure = error
        finally:
            self.started.set()

    def _run_leased(self) -> None:
        assert self.pipeline.standby is not None
        lease = DriverLease(
            self.pipeline.nats, self.pipeline.name, self.pipeline.standby, owner=self.owner, on_lost=self._stop_query
        )
        with lease:
            self._lease = lease
            while not self._stopping.is_set():
                epoch = lease.acquire(0.2)
                if epoch is None or not lease.held:
                    continue
                try:
                    self._run_query(epoch)
                    return
                except PartiError as error:
                    if lease.held and not self._may_restart(error):
                        raise
                    log.warning(
                        "pipeline.interrupted", owner=self.owner, epoch=epoch, held=lease.held, error=str(error)
                    )
                finally:
                    self.started.clear()

    def _may_restart(self, error: PartiError) -> bool:
        """Whether to start again although the lease is held: NATS was unreachable, or a stream dropped its marker."""
        refused = any(name in f"{type(error).__name__} {error}" for name in _REFUSED)
        self._restarts += 1
        return (refused or error.retriable) and self._restarts <= _RESTARTS and not self._stopping.wait(1.0)

    def _run_query(self, term: int) -> None:
        """One query, from its start to its end; returns when it was stopped or has read everything."""
        query = self._begin(term)
        try:
            if self._stopping.is_set() or (self._lease is not None and not self._lease.held):
                query.stop()
            query.awaitTermination()
        except Exception as error:  # Spark raises its own classes, with the cause as text
            if self._stopping.is_set():
                return
            failure = self._runner.failure if self._runner is not None else None
            cause = first_cause(error) if failure is None else f"{type(failure).__name__}: {failure}"
            raise _QueryEnded(f"pipeline {self.pipeline.name}: {cause}") from (failure or error)
        finally:
            self.query = None
            self._remember_cost()
        if self._lease is not None and not self._lease.held and not self._stopping.is_set():
            self._lease.check()

    def _checkpoint(self, files: HadoopFolder, term: int) -> str:
        """The folder to work in, at the pipeline's last position, whether it ran with a lease or without."""
        pipeline = self.pipeline
        if pipeline.standby is None:
            if (note := epochs.lease_of(files)) is not None:
                check_nobody_holds(pipeline.nats, note.bucket, pipeline.name, note.ttl)
            return epochs.without_lease(files)
        bucket = pipeline.standby.bucket
        lease = epochs.LeaseNote(bucket, self._created(f"KV_{bucket}"), pipeline.standby.ttl, term)
        assert self._lease is not None
        try:
            return epochs.prepare(files, lease, self._lease.check)
        except Exception:  # a file system error, when a successor has deleted the folder to copy
            self._lease.check()
            raise

    def _begin(self, term: int) -> Any:
        pipeline, spark = self.pipeline, self._spark
        if (setting := pipeline.group_setting) is not None:
            look_up(pipeline.nats, pipeline.stream, setting)  # report a wrong name here, and not later from Spark
        files = HadoopFolder(spark, pipeline.checkpoint)
        checkpoint = self._checkpoint(files, term)
        epoch = self.epoch = epochs.epoch_of(checkpoint)
        cost = json.loads(files.read(f"{checkpoint}/cost.json") or "{}")
        plan = self.plan = pipeline.planned(spark.sparkContext.defaultParallelism, cost.get("handler_us"))
        stage = replace(self._stage(files, checkpoint, epoch), tasks=plan.tasks)
        fused = plan.kind is PlanKind.FUSED
        packing = Packing(plan.tasks, parking=stage.shape.parking, by_key=pipeline.keys_are_whole is None)
        due = self._folder / DUE
        source = pipeline_source(
            f"parti-{pipeline.name}",
            connect=pipeline.nats,
            headers=pipeline.headers,
            payload=pipeline.payload_key,
            work=stage.run if fused else packing.pack,
            rows=stage.shape.ddl if fused else DDL,
            words=self._folder,
        )
        spark.dataSource.register(source)
        parking = CheckpointParking(files, f"{checkpoint}/parked", due) if stage.shape.parking else None
        runner = self._runner = BatchRunner(pipeline, plan, stage, packing, files, parking, self._lease)
        if parking is not None:
            done = [int(name) for name in files.names(f"{checkpoint}/commits") if name.isdigit()]
            parking.resume(spark, max(done, default=-1))
        options = pipeline.source_options() | ({"minPartitions": "1"} if fused else {"minPartitions": str(plan.tasks)})
        writer = (
            spark.readStream.format(source.name())
            .options(**options)
            .load()
            .writeStream.foreachBatch(runner)
            .queryName(pipeline.name)
            .option("checkpointLocation", files.at(checkpoint))
        )
        if self._lease is not None:
            self._lease.check()  # the steps above may have taken longer than the lease lasts
        log.info("pipeline.starts", pipeline=pipeline.name, plan=str(plan), epoch=epoch, owner=self.owner)
        self.query = writer.trigger(**_trigger(pipeline.trigger)).start()
        self.started.set()
        return self.query

    def _stage(self, files: HadoopFolder, checkpoint: str, epoch: int) -> HandlerStage:
        pipeline = self.pipeline
        nats, target = pipeline.nats, self._result_stream()
        created = self._created(pipeline.stream)
        largest = asyncio.run(_ensure_letters(pipeline))
        letters = LetterSink(nats, dead_letter_stream(pipeline.stream), largest)
        results = None
        if target is not None:
            assert pipeline.results.subject is not None
            replay = epochs.replay_of(files, checkpoint)
            known = known_results(nats, target, replay, scope=id_scope(pipeline.scope, pipeline.stream, created))
            results = ResultSink(nats, target.stream, pipeline.results.subject, known=known)
        stage = HandlerStage(
            handler=pipeline.handler,
            pipeline=pipeline.name,
            scope=pipeline.scope,
            stream=pipeline.stream,
            created=created,
            kind=pipeline.kind,
            retries=pipeline.retries,
            concurrency=pipeline.concurrency,
            shape=pipeline.shape,
            results=results,
            letters=letters,
        )
        return stage.at(epoch, self.owner, self._fences(target, epoch))

    def _created(self, stream: str) -> str:
        """When the stream was created."""
        reader = RangeReader(self.pipeline.nats, name="parti-pipeline")
        try:
            return reader.state(stream).created
        finally:
            reader.close()

    def _result_stream(self) -> Target | None:
        results = self.pipeline.results
        if results.subject is None:
            return None
        sample = results.subject.format(key="key", subject="subject", partition="0")
        return find_target(self.pipeline.nats, stream=results.stream, subject=sample, patience=_PATIENCE)

    def _fences(self, target: Target | None, epoch: int) -> dict[str, tuple[str, int]]:
        """The markers of this epoch; from now on the server refuses publishes of earlier owners."""
        if self._lease is None:
            return {}
        letters = dead_letter_stream(self.pipeline.stream)
        streams: dict[str, tuple[str, ...]] = {letters: (f"{letters}.>",)}
        if target is not None:
            streams[target.stream] = target.subjects
        found: dict[str, tuple[str, int]] = {}
        for stream, subjects in streams.items():
            subject = marker_subject(stream, subjects, self.pipeline.name)
            found[stream] = raise_marker_blocking(self.pipeline.nats, stream, subject, epoch=epoch, owner=self.owner)
        return found

    def _stop_query(self) -> None:
        query = self.query
        if query is not None:
            with contextlib.suppress(Exception):  # Spark reports in many ways that a query has already ended
                query.stop()

    def _remember_cost(self) -> None:
        """Store what the handler costs, for the choice of the plan at the next start."""
        cost = self.totals.handler_us
        if cost is not None and self.plan is not None:
            files = HadoopFolder(self._spark, self.pipeline.checkpoint)
            with contextlib.suppress(Exception):  # the session may be shutting down: losing one estimate does no harm
                files.write(f"{epochs.folder(self.epoch)}/cost.json", json.dumps({"handler_us": round(cost, 2)}))


def _trigger(text: str) -> dict[str, Any]:
    if text == "available-now":
        return {"availableNow": True}
    return {"processingTime": f"{int(parse_duration(text) * 1000)} milliseconds"}


class _QueryEnded(PipelineFailed):
    """The query ended with an error."""


async def _ensure_letters(pipeline: Pipeline) -> int:
    """Create the dead-letter stream before the first message may need it; returns the size of its largest message."""
    connection = await connect(pipeline.nats, name="parti-pipeline")
    try:
        js = JetStreamApi(connection)
        await ensure_stream(js, pipeline.stream)
        return await largest_message(js, pipeline.stream)
    finally:
        await connection.close()
