"""Streams that remove messages while they are read: at their limits, with deletions, with gaps."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType
from structlog.testing import capture_logs

from parti.errors import DataLoss
from parti.spark.pipeline import Outcomes, Pipeline
from parti.spark.source.batch_reader import JetStreamReader
from parti.spark.source.options import SourceOptions
from parti.spark.source.stream_reader import JetStreamStreamReader
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from support.spark_streams import Query, Stream

SEQUENCE = StructType([StructField("sequence", LongType())])


@contextmanager
def load(stream: Stream, *, burst: int = 300, pause: float = 0.003) -> Iterator[None]:
    """Messages come all the time, so many at once."""
    done = threading.Event()

    def publish() -> None:
        block = b"".join(b"PUB %s.k%d 64\r\n%s\r\n" % (stream.name.encode(), i % 7, bytes(64)) for i in range(burst))
        with BlockingConnection.open(ConnectOptions(servers=(stream.url,))) as connection:
            while not done.wait(pause):
                connection.send(block)
                connection.ping()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def batch_of(stream: Stream, **options: Any) -> list[list[int]]:
    """The sequences that each task of a batch query reads."""
    reader = JetStreamReader(SEQUENCE, SourceOptions.parse(stream.options(**options), streaming=False))
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
    return [[row for batch in reader.read(part) for row in batch.column("sequence").to_pylist()] for part in parts]


def stream_reader(stream: Stream, **options: Any) -> JetStreamStreamReader:
    given = stream.options(startingOffsets="earliest") | {key: str(value) for key, value in options.items()}
    return JetStreamStreamReader(SEQUENCE, SourceOptions.parse(given, streaming=True))


def next_batch(reader: Any, start: Any) -> tuple[dict[str, Any], list[int]]:
    end = json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))
    remote = pickle.loads(pickle.dumps(JetStreamStreamReader(SEQUENCE, reader._options)))
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions(start, end)]
    return end, [r for part in parts for batch in remote.read(part) for r in batch.column("sequence").to_pylist()]


LIMITS = [
    {"max_msgs": 4_000},
    {"max_bytes": 400_000},
    {"max_age": 150_000_000},
    {"max_msgs": 4_000, "max_msgs_per_subject": 900},
]


@pytest.mark.parametrize("limit", LIMITS, ids=["msgs", "bytes", "age", "subject"])
@pytest.mark.parametrize("options", [{}, {"maxRecordsPerPartition": 700}], ids=["defaults", "small tasks"])
def test_a_stream_at_its_limits_is_read_from_earliest_while_it_loses_messages(
    make_stream: Callable[..., Stream], limit: Any, options: Any
) -> None:
    stream = make_stream(storage="memory", **limit)
    stream.publish(5_000, payload="x" * 64)
    with load(stream, pause=0.01):  # the stream holds 130 ms: a reader that gets no CPU for as long does lose messages
        for _ in range(5):
            for task in batch_of(stream, **options):
                assert "max_msgs_per_subject" in limit or all(b == a + 1 for a, b in pairwise(task))
        rows: list[int] = []
        while not rows:  # a slow machine reads none of a batch before it has left the stream: once more from earliest
            reader = stream_reader(stream, **options)
            start = reader.initialOffset()
            end, rows = next_batch(reader, start)
    assert end["sequence"] > start["sequence"]
    assert rows


def test_what_a_checkpoint_promised_and_is_gone_is_lost_with_exact_numbers(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(max_msgs=100)
    stream.publish(100)
    reader = stream_reader(stream)
    end, rows = next_batch(reader, reader.initialOffset())
    assert rows == list(range(1, 101))
    stream.publish(130)  # 101 to 130 come and go unread
    with pytest.raises(DataLoss, match=r"sequences 101 to 130 \(30\) are gone unread") as error:
        next_batch(reader, end)
    assert (error.value.first_missing, error.value.first_available, error.value.count) == (101, 131, 30)
    with capture_logs() as logs:
        _, rows = next_batch(stream_reader(stream, failOnDataLoss="false"), end)
    assert rows == list(range(131, 231))
    assert [(log["first"], log["last"]) for log in logs if log["event"] == "source.data_lost"] == [(101, 130)]


def test_a_first_batch_that_is_replayed_from_its_checkpoint_tells_what_is_gone_since(
    make_stream: Callable[..., Stream],
) -> None:
    stream = make_stream(max_msgs=100)
    stream.publish(100)
    reader = stream_reader(stream)
    end, _ = next_batch(reader, reader.initialOffset())
    stream.publish(10)
    after_crash = stream_reader(stream)
    with pytest.raises(DataLoss, match=r"sequences 1 to 10 \(10\) are gone unread"):
        after_crash.partitions(after_crash.initialOffset(), end)


def test_deletions_that_the_front_has_passed_are_no_loss(make_stream: Callable[..., Stream]) -> None:
    """Holes that were there before the read are known to the leader; what aged out behind the reader was read."""
    stream = make_stream(max_msgs=300)
    stream.publish(300)
    for sequence in (20, 21, 60, 150):
        stream.connection.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": sequence})
    reader = JetStreamReader(SEQUENCE, SourceOptions.parse(stream.options(startingOffsets=1), streaming=False))
    (part,) = reader.partitions()
    batches = reader.read(part)
    rows = next(batches).column("sequence").to_pylist()
    stream.publish(250)
    rows += [row for batch in batches for row in batch.column("sequence").to_pylist()]
    assert rows == [n for n in range(1, 301) if n not in (20, 21, 60, 150)]


def test_messages_that_later_ones_supersede_are_no_loss(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(max_msgs_per_subject=1)
    stream.publish(50)
    reader = stream_reader(stream)
    end, rows = next_batch(reader, reader.initialOffset())
    assert rows == list(range(1, 51))
    stream.publish(30, subject="one")  # all but the last are gone, and the stream begins where it did
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.k*"})
    for sequence in range(1, 51):
        stream.connection.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.k{sequence}"})
    assert stream.state()["first_seq"] == 80
    assert next_batch(reader, end)[1] == [80]


@pytest.mark.parametrize("wide", [1_000, 100_000])
def test_a_gap_costs_neither_tasks_nor_batches(stream: Stream, wide: Any) -> None:
    stream.publish(10)
    stream.publish(wide, subject="gap")
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.gap"})
    stream.publish(10)
    expected = [*range(1, 11), *range(wide + 11, wide + 21)]
    tasks = batch_of(stream, maxRecordsPerPartition=7, startingOffsets="earliest")
    assert [row for task in tasks for row in task] == expected
    assert len(tasks) <= 6
    reader = stream_reader(stream, maxOffsetsPerTrigger=9)
    start, batches, found = reader.initialOffset(), 0, list[int]()
    while len(found) < 20:
        start, rows = next_batch(reader, start)
        found += rows
        batches += 1
    assert found == expected
    assert batches <= 4


def test_deletions_and_purges_leave_every_other_message(stream: Stream) -> None:
    stream.publish(2_000, subject="k{0}")
    for sequence in (*range(3, 1_500, 7), 1_999, 2_000):
        stream.connection.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": sequence})
    gone = {*range(3, 1_500, 7), 1_999, 2_000}
    expected = [n for n in range(1, 2_001) if n not in gone]
    options: dict[str, Any]
    for options in ({"maxRecordsPerPartition": 30}, {"minPartitions": 9, "minRecordsPerPartition": 1}):
        assert [row for task in batch_of(stream, **options) for row in task] == expected
    for options in ({"maxOffsetsPerTrigger": 333}, {"maxBytesPerTrigger": "4KB"}):
        reader = stream_reader(stream, **options)
        start, found = reader.initialOffset(), list[int]()
        while start["sequence"] < 2_000:
            start, rows = next_batch(reader, start)
            found += rows
        assert found == expected


@pytest.mark.spark
def test_spark_reads_a_stream_at_its_limits_with_defaults(
    spark: Any, query: Query, make_stream: Callable[..., Stream]
) -> None:
    stream = make_stream(storage="memory", max_msgs=60_000)
    stream.publish(60_000)
    with load(stream, burst=20, pause=0.01):  # each message stays for half a minute: longer than Spark takes to begin
        assert spark.read.format("jetstream").options(**stream.options()).load().count() > 0
        query.run(stream.options(startingOffsets="earliest"))
    rows = query.sequences()
    assert rows == list(range(rows[0], rows[-1] + 1))


@pytest.mark.spark
def test_a_new_pipeline_begins_on_a_stream_at_its_limits(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream(storage="memory", max_msgs=60_000)
    stream.publish(60_000)
    pipeline = Pipeline(
        name=f"p-{stream.name}",
        stream=stream.name,
        handler=lambda message: None,
        key="2",
        checkpoint=str(tmp_path / "checkpoint"),
        trigger="available-now",
        nats=ConnectOptions(servers=(stream.url,)),
        outcomes=Outcomes(parquet=str(tmp_path / "outcomes")),
    )
    with load(stream, burst=20, pause=0.01), pipeline.start(spark) as running:
        assert running.wait(100)
    found = spark.read.parquet(str(tmp_path / "outcomes")).selectExpr("min(sequence)", "max(sequence)", "count(*)")
    first, last, count = found.first()
    assert count == last - first + 1 == running.totals.done > 0
