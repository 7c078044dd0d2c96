"""`parti bench spark-cost`: CPU-seconds per million rows in Spark, and the cost of a query without rows.

The client is all of Spark: driver, JVM and Python processes. Rates depend on other load on the machine; CPU time hardly
does. With `--kafka`, Spark's own Kafka source reads the same messages from that broker, in turns with parti's source:

    parti bench spark-cost --kafka 127.0.0.1:9092 --kafka-jars /tmp/kafka-jars --kafka-pid $(cat broker.pid)

The jars are those of spark-sql-kafka-0-10, for the installed Spark version, and its dependencies. `bound` is a source
that only passes the same columns: the cost of Spark itself for any source in Python.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from parti.errors import DataLoss
from parti.spark.quiet import without_chatter
from parti.spark.session import session
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import create_stream, fill
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext
from parti_lab.bench.spark_bound import BoundSource

_TINY = 1  # rows of a query that consists of its start
_SETTLED = 0.3  # seconds after a query in which its processes end, and are still counted
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_of_tree(root: int, *, without: frozenset[int] = frozenset(), only: str = "") -> float:
    """CPU-seconds of a process and its descendants, including children that ended; whole branches may be excluded.

    With `only`, those of the programs with that name, without their children.
    """
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it ended meanwhile
            continue
        words = text[text.rindex(")") + 2 :].split()
        pid = int(stat.parent.name)
        children.setdefault(int(words[1]), []).append(pid)
        mine = not only or text[text.index("(") + 1 : text.rindex(")")] == only
        spent[pid] = sum(map(int, words[11 : 13 if only else 15])) / _TICKS if mine else 0.0
    total, todo = 0.0, [root]
    while todo:
        pid = todo.pop()
        if pid not in without:
            total += spent.get(pid, 0.0)
            todo += children.get(pid, [])
    return total


class Meter:
    """CPU-seconds of client and server over one query."""

    def __init__(self, server: int, broker: int) -> None:
        self._servers = {"nats": server} | ({"kafka": broker} if broker else {})
        self._without = frozenset(self._servers.values())

    def measure(self, query: Callable[[], None]) -> dict[str, float]:
        before = self._now()
        query()
        time.sleep(_SETTLED)
        return {name: value - before[name] for name, value in self._now().items()}

    def _now(self) -> dict[str, float]:
        spent = {name: cpu_of_tree(pid) for name, pid in self._servers.items()}
        jvm = cpu_of_tree(os.getpid(), without=self._without, only="java")
        return spent | {"client": cpu_of_tree(os.getpid(), without=self._without), "jvm": jvm}


class Sources:
    """The compared queries: a batch of all columns, one of the payload only, a stream, and a tiny version of each."""

    def __init__(self, spark: Any, url: str, brokers: str) -> None:
        self.spark = spark
        self._url = url
        self._brokers = brokers
        self.names = {count: f"cost-{uuid4().hex[:8]}" for count in (0, _TINY)}

    def ours(self, reader: Any, count: int) -> Any:
        given = {"servers": self._url, "stream": self.names[count], "startingOffsets": "earliest"}
        return reader.format("jetstream").options(**given)

    def kafka(self, reader: Any, count: int) -> Any:
        given = {"kafka.bootstrap.servers": self._brokers, "subscribe": self.names[count]}
        return reader.format("kafka").options(**given, startingOffsets="earliest", minPartitions="2")

    def queries(self, *, with_kafka: bool, rows: int) -> dict[str, Callable[[], None]]:
        spark = self.spark  # a new reader each time: it keeps the options it was given
        found: dict[str, Callable[[], None]] = {
            "batch": lambda: _batch(self.ours(spark.read, 0).load()),
            "value": lambda: _batch(self.ours(spark.read.schema("value binary"), 0).load()),
            "bound": lambda: _batch(spark.read.format("jetstream-bound").option("rows", rows).load()),
            "stream": lambda: _stream(self.ours(spark.readStream, 0).load(), rows),
            "batch_start": lambda: _batch(self.ours(spark.read, _TINY).load()),
            "stream_start": lambda: _stream(self.ours(spark.readStream, _TINY).load(), _TINY),
        }
        if with_kafka:
            found |= {
                "kafka_batch": lambda: _batch(self.kafka(spark.read, 0).load()),
                "kafka_value": lambda: _batch(self.kafka(spark.read, 0).load().select("value")),
                "kafka_stream": lambda: _stream(self.kafka(spark.readStream, 0).load(), rows),
                "kafka_batch_start": lambda: _batch(self.kafka(spark.read, _TINY).load()),
                "kafka_stream_start": lambda: _stream(self.kafka(spark.readStream, _TINY).load(), _TINY),
            }
        return found

    def copy_to_kafka(self) -> None:
        """The same messages in the same order, the subject as key."""
        for count in self.names:
            rows = self.ours(self.spark.read, count).load().selectExpr("cast(subject as binary) as key", "value")
            writer = rows.write.format("kafka").option("kafka.bootstrap.servers", self._brokers)
            writer.option("topic", self.names[count]).save()


def _batch(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _stream(frame: Any, rows: int) -> None:
    with tempfile.TemporaryDirectory(prefix="parti-bench-") as folder:
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).trigger(availableNow=True).start()
        query.awaitTermination(300)
        read = sum(batch.numInputRows for batch in query.recentProgress)
    if read != rows:
        raise DataLoss(f"Spark read {read} of {rows}", stream="cost", first_missing=read, first_available=1)


@without_chatter()
def run(ctx: RunContext) -> dict[str, Figure]:
    """Fill both, then run every query in turns; medians, without the first rounds, in which the JVM compiles."""
    rows = int(ctx.options["messages"]) // (4 if ctx.quick else 1)
    rounds, warm = (2, 1) if ctx.quick else (int(ctx.options["rounds"]), 2)
    brokers, jars = str(ctx.options["kafka"]), sorted(Path(str(ctx.options["kafka_jars"])).glob("*.jar"))
    conf: dict[str, Any] = {"spark.ui.enabled": "false"} | ({"spark.jars": ",".join(map(str, jars))} if brokers else {})
    spark = session("parti-bench-spark-cost", master="local[2]", **conf)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(BoundSource)
    found: dict[str, list[dict[str, float]]] = {}
    try:
        with NatsServer() as server, ctx.progress("spark-cost", total=warm + rounds) as advance:
            options, sources = ConnectOptions(servers=(server.url,)), Sources(spark, server.url, brokers)
            for count, name in sources.names.items():
                create_stream(options, name, "file")
                fill(options, name, count or rows, int(ctx.options["size"]))
            if brokers:
                sources.copy_to_kafka()
            meter = Meter(server.pid, int(ctx.options["kafka_pid"]))
            queries = sources.queries(with_kafka=bool(brokers), rows=rows)
            for number in range(warm + rounds):
                for name, query in queries.items():
                    spent = meter.measure(query)
                    if number >= warm:
                        found.setdefault(name, []).append(spent)
                advance(1)
    finally:
        spark.stop()
    return {"messages": rows} | _figures(found, rows)


def _figures(found: Mapping[str, list[dict[str, float]]], rows: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for name, runs in found.items():
        server = "kafka" if name.startswith("kafka") else "nats"
        unit, per = ("s", 1.0) if name.endswith("_start") else ("s_per_m", rows / 1e6)
        for part in ("client", "jvm", server):
            if part in runs[0] and (part != server or name != "bound"):
                label = "server" if part == server else part
                figures[f"{name}_{label}_{unit}"] = round(statistics.median(each[part] for each in runs) / per, 2)
    for name in ("batch", "value", "stream"):
        if f"kafka_{name}" in found:
            ours, theirs = (statistics.median(each["client"] for each in found[k]) for k in (name, f"kafka_{name}"))
            figures[f"{name}_of_kafka"] = round(ours / theirs, 2)
    return figures


_GOALS = {"batch_of_kafka": "<= 1", "value_of_kafka": "<= 1", "stream_of_kafka": "<= 1"}

BENCH = Benchmark(
    name="spark-cost",
    help="CPU-seconds of client and server for a million rows in Spark, beside Spark's Kafka source if there is one.",
    run=run,
    goals=_GOALS,
    goals_of=lambda options: _GOALS if options["kafka"] else {},
    options=(
        ExperimentOption("messages", 1_000_000, "messages to read"),
        ExperimentOption("size", 128, "bytes of a message"),
        ExperimentOption("rounds", 6, "times that each query is measured"),
        ExperimentOption(
            "kafka", "", "bootstrap servers of a Kafka broker to compare with; it is filled with the messages"
        ),
        ExperimentOption("kafka_jars", "", "folder with the jars of Spark's Kafka source"),
        ExperimentOption("kafka_pid", 0, "process id of the broker, to count its CPU time as well"),
    ),
)
