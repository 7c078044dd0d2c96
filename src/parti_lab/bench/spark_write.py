"""`parti bench spark-write`: rows through `format("jetstream")` into a stream, beside a bare socket that publishes.

The bare socket sends frames with ids over one connection and only counts the acknowledgements: the bound of any client
with the same guarantee. A write counts from `save()` to its return, when every row is acknowledged. All figures of a
kind come from the same run on the same server, in turns, best of several.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import nats
import pyarrow as pa

from parti.errors import ConnectionFailed
from parti.spark.quiet import without_chatter
from parti.testing import NatsServer
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import CHUNK_ROWS, Rows, chunk_id, chunks
from parti.wire.publisher import MAX_IN_FLIGHT, Publisher
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import best_rate, create_stream, delete_stream
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_SUBJECTS = 2_000
_ONE_BY_ONE = 5_000  # a publish that waits for each answer reaches about 5,000 per second
_CASES = (("file", False), ("file", True), ("memory", False), ("memory", True))


@without_chatter()
def run(ctx: RunContext) -> dict[str, Figure]:
    """Write the same number of rows by each method to streams of each kind."""
    from parti.spark.session import session  # Spark is an extra

    count = int(ctx.options["messages"]) // (4 if ctx.quick else 1)
    size, runs = int(ctx.options["size"]), 2 if ctx.quick else 4
    figures: dict[str, Figure] = {"messages": count, "bytes": size}
    conf: dict[str, Any] = {"spark.ui.enabled": "false"}
    spark = session("parti-bench-spark-write", master="local[2]", **conf)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with NatsServer() as server, ctx.progress("spark-write", total=len(_CASES) * runs) as advance:
            options = ConnectOptions(servers=(server.url,))
            for storage, atomic in _CASES:
                rates: dict[str, float] = {}
                for _ in range(runs):
                    for method, rate in _measure(spark, options, storage, atomic, count, size).items():
                        rates[method] = max(rates.get(method, 0.0), rate)
                    advance(1)
                label = f"{storage}_atomic" if atomic else storage
                figures |= {f"{label}_{method}_per_s": round(rate) for method, rate in rates.items()}
                figures[f"{label}_of_raw"] = round(rates["spark"] / rates["raw"], 3)
    finally:
        spark.stop()
    figures["of_nats_py"] = round(float(figures["file_spark_per_s"]) / float(figures["file_nats_py_per_s"]), 1)
    return figures


def _measure(
    spark: Any, options: ConnectOptions, storage: str, atomic: bool, count: int, size: int
) -> dict[str, float]:
    few = min(count, _ONE_BY_ONE)
    methods = {
        "raw": (count, lambda stream: _raw(options, stream, count, size)),
        "publisher": (count, lambda stream: _publisher(options, stream, count, size)),
        "spark": (count, lambda stream: _spark(spark, options, stream, count, size)),
        "nats_py": (few, lambda stream: asyncio.run(_nats_py(options, stream, few, size))),
    }
    rates = {}
    for method, (rows, write) in methods.items():
        stream = f"bench-{uuid4().hex[:8]}"
        create_stream(options, stream, storage, allow_atomic=atomic)
        if method == "spark":
            _spark(spark, options, stream, 100, size)  # the workers of the last write may have ended meanwhile
        before = _stored(options, stream)
        rates[method] = best_rate(rows, 1, lambda write=write, stream=stream: write(stream))  # type: ignore[misc]
        stored = _stored(options, stream) - before
        delete_stream(options, stream)
        if stored != rows:
            raise ConnectionFailed(f"{method} stored {stored} of {rows} messages")
    return rates


def _stored(options: ConnectOptions, stream: str) -> int:
    with BlockingConnection.open(options) as connection:
        return int(connection.api(f"STREAM.INFO.{stream}")["state"]["messages"])


def _raw(options: ConnectOptions, stream: str, count: int, size: int) -> None:
    with BlockingConnection.open(options) as connection:
        inbox = f"_INBOX.{uuid4().hex}"
        connection.subscribe(inbox)
        line, payload = f"{stream}.%d {inbox}".encode(), b"x" * size
        sent = acknowledged = 0
        rest = b""
        for first in range(0, count, CHUNK_ROWS):
            while sent - acknowledged > MAX_IN_FLIGHT - CHUNK_ROWS:
                found, rest = _acknowledgements(connection, rest)
                acknowledged += found
            numbers = range(first, min(first + CHUNK_ROWS, count))
            connection.send(b"".join(_frame(line % (n % _SUBJECTS), n, payload) for n in numbers))
            sent = min(sent + CHUNK_ROWS, count)
        while acknowledged < count:
            found, rest = _acknowledgements(connection, rest)
            acknowledged += found


def _frame(line: bytes, number: int, payload: bytes) -> bytes:
    head = b"NATS/1.0\r\nNats-Msg-Id: 3f2a9c1e-0-0-0-9f8e7d6c5b4a3210-%d\r\n\r\n" % number
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (line, len(head), len(head) + len(payload), head, payload)


def _acknowledgements(connection: BlockingConnection, rest: bytes) -> tuple[int, bytes]:
    connection.socket.settimeout(connection.options.request_timeout)
    got = connection.socket.recv(1 << 20)
    if not got:
        raise ConnectionFailed("the server closed the connection during the raw write")
    data = rest + got
    cut = data.rfind(b"\n") + 1
    return data.count(b'{"stream":', 0, cut), data[cut:]


def _publisher(options: ConnectOptions, stream: str, count: int, size: int) -> None:
    subjects = pa.array([f"{stream}.{n}".encode() for n in range(_SUBJECTS)], pa.binary())
    rows = Rows(pa.repeat(pa.scalar(b"x" * size), _SUBJECTS), subjects)
    parts = (rows.slice(0, min(_SUBJECTS, count - done)) for done in range(0, count, _SUBJECTS))
    with Publisher(options) as publisher:
        for number, chunk in enumerate(chunks(parts)):
            publisher.publish(chunk, chunk_id("bench", number, chunk))
        publisher.flush()


def _spark(spark: Any, options: ConnectOptions, stream: str, count: int, size: int) -> None:
    frame = spark.range(count, numPartitions=2).selectExpr(
        f"rpad(cast(id AS string), {size}, 'x') AS value", f"concat('{stream}.', id % {_SUBJECTS}) AS subject"
    )
    frame.write.format("jetstream").mode("append").option("servers", ",".join(options.servers)).save()


async def _nats_py(options: ConnectOptions, stream: str, count: int, size: int) -> None:
    """How other sinks publish: row by row, waiting for each acknowledgement."""
    client = await nats.connect(list(options.servers))
    try:
        publish = client.jetstream().publish
        deadline = time.monotonic() + 60
        for number in range(count):
            await publish(f"{stream}.{number % _SUBJECTS}", b"x" * size, timeout=deadline - time.monotonic())
    finally:
        await client.close()


BENCH = Benchmark(
    name="spark-write",
    help="Spark rows into streams, every one acknowledged, beside a bare socket and nats-py; file and memory.",
    run=run,
    goals={"file_spark_per_s": ">= 60000", "file_of_raw": ">= 0.4"},
    options=(
        ExperimentOption("messages", 400_000, "rows of a write"),
        ExperimentOption("size", 128, "bytes of a message"),
    ),
)
