"""`parti bench pipeline`: messages through read, order, handler, outcome and commit, beside the plain Spark read.

Throughput is rows over Spark's `addBatch` time, the best of several interleaved turns of each method. The first queries
do not count, because a pipeline runs for days and a JVM compiles for its first minute. Latency counts from when the
stream stored a message until its handler was done, while another process publishes at a steady rate. The worker plane
runs the same handler on the same messages for comparison.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from parti.errors import DataLoss
from parti.progress import Advance
from parti.spark.pipeline import Outcomes, Pipeline
from parti.spark.quiet import without_chatter
from parti.spark.session import session
from parti.testing import NatsServer, eventually_blocking
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Partition, WorkerConfig, WorkerConsumer
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import create_stream, delete_stream, fill
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_KEYS = 2_000
_SIZE = 128
_WAIT = 0.005
_RATE = 1_000
_WITHIN = 300.0
_WARM = 3  # queries of each kind before they count: in the fifth the JVM's compilers still took a fifth of its time
_SETTINGS: dict[str, Any] = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": 2}

PlanName = Literal["auto", "fused", "shuffled"]


def trivial(message: Message) -> None:
    """Reads the payload and returns."""
    assert message.data


async def waiting(message: Message) -> None:
    """Waits, as for a request to another machine."""
    assert message.data
    await asyncio.sleep(_WAIT)


@without_chatter()
def run(ctx: RunContext) -> dict[str, Figure]:
    """Throughput of every method in turns, then small batches, latency, and the worker plane."""
    count = int(ctx.options["messages"]) // (4 if ctx.quick else 1)
    turns, seconds = 2 if ctx.quick else 3, 6.0 if ctx.quick else 15.0
    spark = session("parti-bench-pipeline", master="local[2]", fast_checkpoints=True, **_SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with NatsServer() as server, ctx.progress("pipeline", total=count + 5 * turns + 3) as advance:
            bench = _Bench(spark, ConnectOptions(servers=(server.url,)), count)
            figures = bench.throughput(turns, 1 if ctx.quick else _WARM, advance)
            figures |= bench.small_batches()
            advance(1)
            figures |= bench.latency(seconds, ctx.seed)
            advance(1)
            figures |= bench.worker()
            advance(1)
    finally:
        spark.stop()
    return {"messages": count, "keys": _KEYS, "bytes": _SIZE, **figures}


class _Bench:
    def __init__(self, spark: Any, options: ConnectOptions, count: int) -> None:
        self.spark = spark
        self.options = options
        self.count = count
        self.stream = f"bench-{uuid4().hex[:8]}"

    def throughput(self, turns: int, warm: int, advance: Advance) -> dict[str, Figure]:
        create_stream(self.options, self.stream, "file")
        fill(self.options, self.stream, self.count, _SIZE, _KEYS, advance=advance)
        ways: dict[str, Callable[[], float]] = {
            "read": self._read,
            "fused": lambda: self._rate(trivial, "fused"),
            "shuffled": lambda: self._rate(trivial, "shuffled"),
            "io": lambda: self._rate(waiting, "auto"),
        }
        for name in warm * ("read", "fused", "shuffled"):
            ways[name]()  # the first queries of each kind start workers and let the JVM compile
        best = dict.fromkeys(ways, 0.0)
        for _ in range(turns):
            for name, measure in ways.items():
                best[name] = max(best[name], measure())
                advance(1)
        figures: dict[str, Figure] = {f"{name}_per_s": round(rate) for name, rate in best.items()}
        return figures | {
            "fused_of_read": round(best["fused"] / best["read"], 3),
            "shuffled_of_read": round(best["shuffled"] / best["read"], 3),
        }

    def small_batches(self) -> dict[str, Figure]:
        """Ten thousand messages per batch, in the plan that the pipeline chooses itself."""
        times: list[float] = []
        best = max(self._rate(trivial, "auto", batch_size=10_000, times=times) for _ in range(2))
        ordered = np.sort(times)
        return {
            "batches_of_10k_per_s": round(best),
            "batch_p50_ms": round(float(np.percentile(ordered, 50)), 1),
            "batch_p99_ms": round(float(np.percentile(ordered, 99)), 1),
        }

    def latency(self, seconds: float, seed: int) -> dict[str, Figure]:
        """From stored to done at a steady rate; the first half of the run is warm-up."""
        stream = f"bench-{uuid4().hex[:8]}"
        create_stream(self.options, stream, "file")
        found: list[tuple[float, float]] = []

        def collect(frame: Any, _number: int) -> None:
            table = frame.select("latency").toArrow()
            found.extend((time.monotonic(), value) for value in table.column("latency").to_pylist())

        with tempfile.TemporaryDirectory(prefix="parti-bench-") as folder:
            sink = Outcomes(write=collect)
            pipeline = self._pipeline(trivial, "auto", folder, stream=stream, trigger="0s", outcomes=sink)
            with pipeline.start(self.spark) as running:
                began = time.monotonic()
                command = [sys.executable, "-m", "parti_lab.bench.paced", self.options.servers[0], stream, str(_KEYS)]
                command += [str(_RATE), str(2 * seconds), str(_SIZE), str(seed)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_WITHIN)
                sent = running.totals
                eventually_blocking(lambda: len(found) >= _RATE * seconds, _WITHIN, "the messages are handled")
                plan = str(running.plan.kind) if running.plan is not None else ""
        delete_stream(self.options, stream)
        late = np.array([value for at, value in found if at > began + seconds])
        return {
            "latency_p50_ms": round(float(np.percentile(late, 50)) * 1000, 1),
            "latency_p99_ms": round(float(np.percentile(late, 99)) * 1000, 1),
            "latency_plan": plan,
            "latency_batches": sent.batches,
        }

    def worker(self) -> dict[str, Figure]:
        """The worker plane on the same messages: one process, 2,000 partitions."""
        count = min(self.count, 50_000)
        return {
            f"worker_{name}_per_s": round(asyncio.run(_worker(self.options, count, handler)))
            for name, handler in (("trivial", _trivial), ("io", waiting))
        }

    def _read(self) -> float:
        """Rows per second of the plain source into Spark's noop sink."""
        given = {"servers": ",".join(self.options.servers), "stream": self.stream, "startingOffsets": "earliest"}
        frame = self.spark.readStream.format("jetstream").options(**given).load()
        with tempfile.TemporaryDirectory(prefix="parti-bench-") as folder:
            writer = frame.writeStream.format("noop").option("checkpointLocation", str(Path(folder) / "checkpoint"))
            query = writer.trigger(availableNow=True).start()
            try:
                query.awaitTermination(int(_WITHIN))
                return self._per_second(query.recentProgress)
            finally:
                query.stop()

    def _rate(
        self,
        handler: Callable[..., Any],
        plan: PlanName,
        *,
        batch_size: int | None = None,
        times: list[float] | None = None,
    ) -> float:
        """Rows per second through the pipeline, counted as for the plain read; `times` gets the batch times in ms."""
        with tempfile.TemporaryDirectory(prefix="parti-bench-") as folder:
            running = self._pipeline(handler, plan, folder, batch_size=batch_size).start(self.spark)
            with running:
                query = running.query
                running.wait(_WITHIN)
            if running.totals.done != self.count:
                raise DataLoss(
                    f"{running.totals.done} of {self.count} messages were handled",
                    stream=self.stream,
                    first_missing=running.totals.done,
                    first_available=1,
                )
            progress = query.recentProgress
            if times is not None:
                times += [float(batch.durationMs["triggerExecution"]) for batch in progress if batch.numInputRows][2:]
            return self._per_second(progress)

    def _per_second(self, progress: list[Any]) -> float:
        return self.count / sum(float(batch.durationMs.get("addBatch", 0)) for batch in progress) * 1000

    def _pipeline(self, handler: Callable[..., Any], plan: PlanName, folder: str, **more: Any) -> Pipeline:
        settings: dict[str, Any] = {
            "name": f"bench-{uuid4().hex[:8]}",
            "stream": self.stream,
            "handler": handler,
            "plan": plan,
            "key": "2",
            "checkpoint": str(Path(folder) / "checkpoint"),
            "trigger": "available-now",
            "batch_size": None,
            "nats": self.options,
        }
        return Pipeline(**(settings | more))


async def _trivial(message: Message) -> None:
    assert message.data


async def _worker(options: ConnectOptions, count: int, handler: Callable[..., Any]) -> float:
    """Messages per second of one worker with every partition, from its start on a full stream."""
    stream = f"bench-{uuid4().hex[:8]}"
    # a file stream with that many filters hits the cliff of docs/evidence/jetstream.md#j8
    create_stream(options, stream, "memory")
    fill(options, stream, count, _SIZE, _KEYS)
    done, ended = 0, asyncio.Event()

    async def counted(message: Message) -> None:
        nonlocal done
        await handler(message)
        done += 1
        if done == count:
            ended.set()

    config = WorkerConfig(
        stream=stream,
        subject_template=f"{stream}.{{partition}}",
        concurrency=1_000,
        max_ack_pending=20_000,
        max_subjects=_KEYS,
        update_coalescing_window=0.0,
    )
    async with await connect(options) as connection:
        worker = WorkerConsumer(JetStreamApi(connection), config, counted)
        try:
            began = time.perf_counter()
            await worker.update_worker_consumer("bench", [Partition((str(number),)) for number in range(_KEYS)])
            async with asyncio.timeout(_WITHIN):
                await ended.wait()
            return count / (time.perf_counter() - began)
        finally:
            await worker.close()
            delete_stream(options, stream)


BENCH = Benchmark(
    name="pipeline",
    help="The ordered pipeline on Spark: both plans, a handler that waits, small batches, latency; beside the worker.",
    run=run,
    goals={
        "fused_of_read": ">= 1.0",
        "shuffled_of_read": ">= 0.65",
        "io_per_s": ">= 90000",
        "batches_of_10k_per_s": ">= 100000",
        "latency_p50_ms": "<= 130",
        "latency_p99_ms": "<= 250",
    },
    options=(ExperimentOption("messages", 400_000, "messages of a turn"),),
)
