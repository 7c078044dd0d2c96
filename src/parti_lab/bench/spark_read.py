"""`parti bench spark-read`: a stream through `format("jetstream")` into Spark's noop sink.

Compared with the raw-socket bound, nats-py's `fetch`, and the same source with rows instead of Arrow batches; for the
fixed cost of a batch, with Spark's own rate source and a Python source that does nothing. All figures come from one run
on one server, in turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from parti.errors import DataLoss
from parti.progress import Advance
from parti.spark.quiet import without_chatter
from parti.spark.session import session
from parti.spark.source import JetStreamDataSource
from parti.spark.source_options import SourceOptions
from parti.spark.stream_reader import JetStreamStreamReader
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import best_rate, create_stream, delete_stream, fetch_read, fill, raw_read
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext
from parti_lab.bench.spark_bound import BoundSource

_FETCHED = 20_000  # nats-py reaches about 30,000 messages per second: enough to measure, short enough to wait for
_TINY = 10  # rows of a batch whose cost is only Spark's own
_SETTINGS: dict[str, Any] = {"spark.ui.enabled": "false"}
_WARM = 5  # batches until a query runs at full speed


class RowReader(JetStreamStreamReader):
    """The same reader with one tuple per message, as sources without Arrow do."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in super().read(partition):
            yield from _rows(batch)


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


class RowSource(JetStreamDataSource):
    """`format("jetstream-rows")`."""

    @classmethod
    def name(cls) -> str:
        return "jetstream-rows"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return RowReader(schema, SourceOptions.parse(self.options, streaming=True))


@without_chatter()
def run(ctx: RunContext) -> dict[str, Figure]:
    """Fill a stream, read it by each method in turns, then measure the milliseconds of tiny batches."""
    count = int(ctx.options["messages"]) // (4 if ctx.quick else 1)
    size, runs = int(ctx.options["size"]), 2 if ctx.quick else 4
    batches = 20 if ctx.quick else 50
    spark = session("parti-bench-spark-read", master="local[2]", **_SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(RowSource)
    spark.dataSource.register(BoundSource)
    try:
        with NatsServer() as server, ctx.progress("spark-read", total=count + 5 * runs) as advance:
            options = ConnectOptions(servers=(server.url,))
            figures = _throughput(spark, options, count, size, runs, advance)
            figures |= _floor(spark, options, batches)
    finally:
        spark.stop()
    return {"messages": count, "bytes": size} | figures


def _throughput(
    spark: Any, options: ConnectOptions, count: int, size: int, runs: int, advance: Advance
) -> dict[str, Figure]:
    stream = f"bench-{uuid4().hex[:8]}"
    create_stream(options, stream, "file")
    fill(options, stream, count, size, advance=advance)
    fetched = min(count, _FETCHED)
    methods: dict[str, Callable[[], float]] = {
        "raw": lambda: best_rate(count, 1, lambda: raw_read(options, stream, size)),
        "fetch": lambda: best_rate(fetched, 1, lambda: fetch_read(options, stream, fetched)),
        "arrow": lambda: _read(spark, "jetstream", options, stream, count),
        "rows": lambda: _read(spark, "jetstream-rows", options, stream, count),
    }
    methods["arrow"]()  # the first query of a session compiles and starts its workers
    rates = dict.fromkeys(methods, 0.0)
    for _ in range(runs):
        for method, measure in methods.items():
            rates[method] = max(rates[method], measure())
            advance(1)
    delete_stream(options, stream)
    figures: dict[str, Figure] = {f"{method}_per_s": round(rate) for method, rate in rates.items()}
    return figures | {
        "of_raw": round(rates["arrow"] / rates["raw"], 3),
        "of_fetch": round(rates["arrow"] / rates["fetch"], 1),
        "of_rows": round(rates["arrow"] / rates["rows"], 2),
    }


def _read(spark: Any, form: str, options: ConnectOptions, stream: str, count: int) -> float:
    """Rows per second of one batch with the whole stream, over Spark's `addBatch` time."""
    given = {"servers": ",".join(options.servers), "stream": stream, "startingOffsets": "earliest"}
    frame = spark.readStream.format(form).options(**given).load()
    progress = [batch for batch in _progress(frame, availableNow=True) if batch.numInputRows]
    rows = sum(batch.numInputRows for batch in progress)
    if rows != count:
        raise DataLoss(f"Spark read {rows} of {count}", stream=stream, first_missing=rows, first_available=1)
    milliseconds = sum(float(batch.durationMs["addBatch"]) for batch in progress)
    return float(rows) / milliseconds * 1000


def _floor(spark: Any, options: ConnectOptions, batches: int) -> dict[str, Figure]:
    """The cost of a batch of a few rows, and the same with the empty source: medians of three queries in turns.

    The first query of each does not count: the JVM still compiles then, and Spark's own source has less to compile.
    """
    stream = f"bench-{uuid4().hex[:8]}"
    create_stream(options, stream, "file")
    fill(options, stream, batches * _TINY, 128)
    given = {"servers": ",".join(options.servers), "stream": stream, "startingOffsets": "earliest"}
    sources = {
        "batch": spark.readStream.format("jetstream").options(**given, maxOffsetsPerTrigger=str(_TINY)).load(),
        "rate_batch": spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch=str(_TINY), numPartitions="1")
        .load(),
        "bound_batch": spark.readStream.format("jetstream-bound").option("rows", _TINY).load(),
    }
    times: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(4):
        for name, frame in sources.items():
            done = [batch for batch in _progress(frame, batches, processingTime="0 seconds") if batch.numInputRows]
            if turn > 0:
                times[name] += [float(batch.durationMs["triggerExecution"]) for batch in done]
    delete_stream(options, stream)
    medians = {name: statistics.median(found) for name, found in times.items()}
    figures: dict[str, Figure] = {f"{name}_ms": round(value, 1) for name, value in medians.items()}
    figures |= {f"{name}_least_ms": min(found) for name, found in times.items()}
    return figures | {
        "floor_of_rate": round(medians["batch"] / medians["rate_batch"], 2),
        "floor_of_bound": round(medians["batch"] / medians["bound_batch"], 2),
    }


def _progress(frame: Any, batches: int = 0, **trigger: Any) -> list[Any]:
    """The progress of each warm batch of a query that ran to its end, or until it had done `batches` of them."""
    with tempfile.TemporaryDirectory(prefix="parti-bench-") as folder:
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(Path(folder) / "checkpoint"))
        query = writer.trigger(**trigger).start()
        try:
            while batches and (query.lastProgress is None or query.lastProgress.batchId < batches - 1):
                if query.awaitTermination(0.1):
                    break
            if not batches:
                query.awaitTermination(300)
            return [batch for batch in query.recentProgress if not batches or batch.batchId >= _WARM]
        finally:
            query.stop()


BENCH = Benchmark(
    name="spark-read",
    help="A stream into Spark's noop sink beside the raw socket, nats-py fetch, rows, and the rate source.",
    run=run,
    goals={"of_raw": ">= 0.4", "of_fetch": ">= 10", "of_rows": ">= 1.5", "floor_of_rate": "<= 1.3"},
    options=(
        ExperimentOption("messages", 400_000, "messages to read"),
        ExperimentOption("size", 128, "bytes of a message"),
    ),
)
