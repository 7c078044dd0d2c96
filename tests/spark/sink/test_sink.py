"""Writing to JetStream from a real Spark: every row stored, replays stored once, and errors that say what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import InheritableThread, TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from parti.spark.sink.writers import WRITER_OPTIONS
from parti.testing import NatsServer, eventually_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import NOT_COPIED, Rows
from parti.wire.publisher import Publisher
from parti.wire.ranges import RangeReader
from support.spark_streams import Stream

pytestmark = pytest.mark.spark


def read_all(stream: Stream) -> list[dict[str, Any]]:
    """Every message of the stream, in its order, read without Spark."""
    reader = RangeReader(ConnectOptions(servers=(stream.url,)))
    try:
        last = reader.state(stream.name).last_seq
        return [row for batch in reader.read(stream.name, 0, last, allow_gone=True) for row in batch.to_pylist()]
    finally:
        reader.close()


def numbers(stream: Stream) -> list[int]:
    return sorted(int(row["data"]) for row in read_all(stream))


def rows(spark: Any, stream: Stream, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(count, numPartitions=partitions).select(
        F.col("id").cast("string").alias("value"), F.concat(F.lit(f"{stream.name}.k"), F.col("id") % 7).alias("subject")
    )


def save(frame: DataFrame, to: Any, /, **options: object) -> None:
    given = {"servers": to.url} | {name: str(value) for name, value in options.items()}
    frame.write.format("jetstream").mode("append").options(**given).save()


@pytest.mark.parametrize("allow_atomic", [False, True])
def test_every_row_of_a_batch_is_stored_once_under_its_subject(
    spark: Any, make_stream: Callable[..., Stream], allow_atomic: Any
) -> None:
    stream = make_stream(allow_atomic=allow_atomic)
    save(rows(spark, stream, 5000), stream)
    found = read_all(stream)
    assert sorted(int(row["data"]) for row in found) == list(range(5000))
    assert all(row["subject"] == f"{stream.name}.k{int(row['data']) % 7}" for row in found)


def test_the_order_inside_a_partition_is_kept(spark: Any, stream: Stream) -> None:
    save(rows(spark, stream, 3000, partitions=1), stream)
    assert [int(row["data"]) for row in read_all(stream)] == list(range(3000))


def test_headers_and_message_ids_are_written_and_the_ids_decide_what_is_new(spark: Any, stream: Stream) -> None:
    frame = spark.sql(f"""
        SELECT '{stream.name}.a' AS subject, CAST('v' || id AS BINARY) AS value, 'id-' || (id % 3) AS msg_id,
               array(struct('h' AS key, CAST(id AS STRING) AS value), struct('h' AS key, 'two' AS value)) AS headers
        FROM range(0, 5, 1, 1)
    """)
    save(frame, stream, stream=stream.name)
    found = read_all(stream)
    assert [row["data"] for row in found] == [b"v0", b"v1", b"v2"]
    assert [[(h["key"], h["value"]) for h in row["headers"]] for row in found][1] == [
        ("Nats-Expected-Stream", stream.name.encode()),
        ("Nats-Msg-Id", b"id-1"),
        ("h", b"1"),
        ("h", b"two"),
    ]


def test_what_the_reader_yields_can_be_written_with_its_headers_to_another_subject(
    spark: Any, make_stream: Callable[..., Stream]
) -> None:
    stream = make_stream()
    stream.publish(20, subject="in", headers={"trace": "abc", "Nats-Msg-Id": ""})
    frame = spark.read.format("jetstream").options(**stream.options(includeHeaders="true")).load()
    save(frame, stream, subject=f"{stream.name}.out")
    copies = [row for row in read_all(stream) if row["subject"].endswith(".out")]
    assert [row["data"] for row in copies] == [f"m{n}".encode() for n in range(1, 21)]
    assert all(("trace", b"abc") in [(h["key"], h["value"]) for h in row["headers"]] for row in copies)


def test_a_task_that_is_tried_again_stores_nothing_twice(spark: Any, stream: Stream) -> None:
    def fail_once(batches: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 3 and TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("the first attempt fails after it has published")
            yield batch

    frame = rows(spark, stream, 40_000, partitions=1)
    broken = frame.mapInArrow(fail_once, frame.schema)
    save(broken, stream, maxInFlight=1000)
    assert numbers(stream) == list(range(40_000))
    assert stream.state()["last_seq"] == 40_000


def test_rows_that_come_in_another_order_at_the_second_try_are_never_lost(spark: Any, stream: Stream) -> None:
    def shuffled(batches: Any) -> Iterator[Any]:
        table = pa.Table.from_batches(batches)
        first = TaskContext.get().attemptNumber() == 0
        yield from (table if first else table.take(list(reversed(range(len(table)))))).to_batches()
        if first:
            raise RuntimeError("the first attempt fails after it has published")

    frame = rows(spark, stream, 2500, partitions=1)
    save(frame.mapInArrow(shuffled, frame.schema), stream)
    assert set(numbers(stream)) == set(range(2500))


def start(frame: DataFrame, to: Any, folder: Path, /, **options: object) -> Any:
    given = {"servers": to.url} | {name: str(value) for name, value in options.items()}
    return (
        frame.writeStream.format("jetstream")
        .options(**given)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


def forget_last_commit(folder: Path) -> None:
    """As if the driver had died between the last batch's tasks and its commit: Spark replays that batch."""
    commits = sorted(int(path.name) for path in (folder / "checkpoint" / "commits").iterdir() if path.name.isdigit())
    for name in (f"{commits[-1]}", f".{commits[-1]}.crc"):
        (folder / "checkpoint" / "commits" / name).unlink(missing_ok=True)


@pytest.mark.parametrize("allow_atomic", [False, True])
def test_a_batch_that_spark_replays_is_stored_once(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path, allow_atomic: Any
) -> None:
    stream = make_stream(allow_atomic=allow_atomic)
    stream.publish(3000, subject="in")
    source = stream.options(subjects=f"{stream.name}.in", startingOffsets="earliest", maxOffsetsPerTrigger=2000)
    for _ in range(3):
        frame = spark.readStream.format("jetstream").options(**source).load()
        query = start(frame, stream, tmp_path, subject=f"{stream.name}.out")
        assert query.awaitTermination(60)
        forget_last_commit(tmp_path)
    copies = [row["data"] for row in read_all(stream) if row["subject"].endswith(".out")]
    assert sorted(copies) == sorted(f"m{n}".encode() for n in range(1, 3001))


def test_a_write_inside_foreach_batch_is_replayed_once_too(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream()
    stream.publish(1500, subject="in")
    source = stream.options(subjects=f"{stream.name}.in", startingOffsets="earliest")

    def write(batch: DataFrame, number: int) -> None:
        save(batch.select("value"), stream, subject=f"{stream.name}.out")

    for _ in range(2):
        query = (
            spark.readStream.format("jetstream")
            .options(**source)
            .load()
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        forget_last_commit(tmp_path)
    copies = [row["data"] for row in read_all(stream) if row["subject"].endswith(".out")]
    assert sorted(copies) == sorted(f"m{n}".encode() for n in range(1, 1501))


def each_batch(spark: Any, count: int, folder: Path, write: Any) -> str:
    """Run a query with this function over `count` lines to its end; returns how it failed, or nothing."""
    lines = folder / "in" / "lines.txt"
    lines.parent.mkdir(exist_ok=True)
    if not lines.exists():
        lines.write_text("".join(f"m{n}\n" for n in range(1, count + 1)))
    query = (
        spark.readStream.text(str(folder / "in"))
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(60)
    except PySparkException as error:
        return str(error)
    return ""


def copies(stream: Stream) -> list[bytes]:
    return sorted(row["data"] for row in read_all(stream) if row["subject"].endswith(".out"))


def test_two_writes_of_equal_rows_in_one_batch_are_both_stored_and_a_replay_of_either_is_not(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    """Three tries of one batch: the first dies between its writes, the second and third run to their end."""
    stream = make_stream()
    tries = []

    def write(batch: DataFrame, number: int) -> None:
        tries.append(number)
        save(batch.select("value"), stream, subject=f"{stream.name}.out")
        if len(tries) == 1:
            raise RuntimeError("died between two writes")
        save(batch.select("value"), stream, subject=f"{stream.name}.out")

    assert "died between two writes" in each_batch(spark, 20, tmp_path, write)
    assert each_batch(spark, 20, tmp_path, write) == ""
    forget_last_commit(tmp_path)
    assert each_batch(spark, 20, tmp_path, write) == ""
    assert tries == [0, 0, 0]
    assert copies(stream) == sorted(2 * [f"m{n}".encode() for n in range(1, 21)])


def test_writes_of_other_names_are_others_and_a_batch_job_of_the_same_name_is_a_repeat(
    spark: Any, stream: Stream
) -> None:
    frame = rows(spark, stream, 50)
    for name in ("monday", "tuesday", "monday"):
        save(frame, stream, writeId=name)
    assert numbers(stream) == sorted(2 * list(range(50)))


def test_a_write_that_the_user_tries_again_in_the_same_batch_is_stored_once(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream()

    def write(batch: DataFrame, number: int) -> None:
        def fail(batches: Any) -> Iterator[Any]:
            yield from batches
            raise RuntimeError("after everything was handed over")

        frame = batch.select("value").coalesce(1)
        with pytest.raises(PySparkException):
            save(frame.mapInArrow(fail, frame.schema), stream, subject=f"{stream.name}.out", maxInFlight=1000)
        save(frame, stream, subject=f"{stream.name}.out", maxInFlight=1000)

    assert each_batch(spark, 3000, tmp_path, write) == ""
    assert copies(stream) == sorted(f"m{n}".encode() for n in range(1, 3001))


def test_writes_at_the_same_time_lose_nothing_and_those_with_names_repeat_nothing(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream()
    named = {"value": False}

    def write(batch: DataFrame, number: int) -> None:
        frame = batch.select("value").persist()
        frame.count()

        def one(index: int) -> None:
            made = frame.sparkSession  # a new thread of the JVM has no session, and without one Spark finds no format
            made._jvm.SparkSession.setActiveSession(made._jsparkSession)
            name = {"writeId": f"part{index}"} if named["value"] else {}
            save(frame, stream, subject=f"{stream.name}.out", **name)

        threads = [InheritableThread(target=one, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    expected = [f"m{n}".encode() for n in range(1, 31)]
    assert each_batch(spark, 30, tmp_path, write) == ""
    assert copies(stream) == sorted(2 * expected)
    named["value"] = True
    for _ in range(2):
        forget_last_commit(tmp_path)
        assert each_batch(spark, 30, tmp_path, write) == ""
    assert copies(stream) == sorted(4 * expected)  # two more names, each stored once


def test_with_a_progress_subject_a_replay_behind_the_duplicate_window_is_stored_once(
    spark: Any, make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream(allow_atomic=True, duplicate_window=100_000_000)
    options = {"stream": stream.name, "progressSubject": f"{stream.name}.progress"}

    def write(batch: DataFrame, number: int) -> None:
        for _ in range(2):
            save(batch.select("value"), stream, subject=f"{stream.name}.out", **options)

    for attempt in range(2):
        assert each_batch(spark, 3000, tmp_path, write) == ""
        frame = spark.readStream.text(str(tmp_path / "in"))
        query = start(frame, stream, tmp_path / "plain", subject=f"{stream.name}.plain", **options)
        assert query.awaitTermination(60)
        save(rows(spark, stream, 100).select("value"), stream, subject=f"{stream.name}.job", writeId="job", **options)
        if attempt == 0:
            forget_last_commit(tmp_path)
            forget_last_commit(tmp_path / "plain")
            assert not is_known(stream, b"probe")
            eventually_blocking(lambda: not is_known(stream, b"probe"), 10, "the window is over")
    wanted = [f"m{n}".encode() for n in range(1, 3001)]
    found = read_all(stream)
    assert copies(stream) == sorted(2 * wanted)
    assert sorted(row["data"] for row in found if row["subject"].endswith(".plain")) == sorted(wanted)
    assert sum(row["subject"].endswith(".job") for row in found) == 100


def is_known(stream: Stream, msg_id: bytes) -> bool:
    """Publish a message of this id; whether the stream remembers one."""
    row = Rows(*(pa.array([text], pa.binary()) for text in (b"", f"{stream.name}.probe".encode())))
    with Publisher(ConnectOptions(servers=(stream.url,))) as publisher:
        publisher.publish(Rows(row.value, row.subject, None, pa.array([msg_id], pa.binary())), "probe")
        return publisher.flush().duplicates == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"progressSubject": "a.b"}, "progressSubject needs the option stream"),
        ({"progressSubject": "a.*", "stream": "x"}, "option progressSubject"),
        ({"writeId": "a.b"}, "option writeId"),
    ],
)
def test_identities_that_cannot_be_are_refused(spark: Any, stream: Stream, options: Any, words: Any) -> None:
    assert words in refused(rows(spark, stream, 3), stream, **options)


def test_progress_in_a_batch_job_needs_a_name_and_a_stream_that_takes_atomic_batches(
    spark: Any, make_stream: Callable[..., Stream]
) -> None:
    stream = make_stream()
    options = {"stream": stream.name, "progressSubject": f"{stream.name}.progress"}
    assert "allow_atomic" in refused(rows(spark, stream, 3), stream, **options)
    config = stream.connection.api(f"STREAM.INFO.{stream.name}")["config"]
    stream.connection.api(f"STREAM.UPDATE.{stream.name}", config | {"allow_atomic": True})
    assert "needs the option writeId" in refused(rows(spark, stream, 3), stream, **options)
    frame = rows(spark, stream, 3).selectExpr("*", "value AS msg_id")
    assert "exclude each other" in refused(frame, stream, writeId="a", **options)


def test_two_batches_with_the_same_rows_are_both_stored(spark: Any, stream: Stream, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for number in range(2):
        spark.createDataFrame([("same",)] * 3, "value string").coalesce(1).write.json(str(tmp_path / f"part{number}"))
        folder.mkdir(exist_ok=True)
        (file,) = (tmp_path / f"part{number}").glob("*.json")
        shutil.copy(file, folder / f"{number}.json")
        frame = spark.readStream.schema("value string").json(str(folder))
        query = start(frame, stream, tmp_path, subject=f"{stream.name}.a")
        assert query.awaitTermination(60)
    assert stream.state()["messages"] == 6


@pytest.mark.slow
def test_a_server_that_restarts_under_a_streaming_write_costs_no_row(
    spark: Any, own_server: NatsServer, name: str, tmp_path: Path
) -> None:
    with BlockingConnection.open(ConnectOptions(servers=(own_server.url,))) as admin:
        admin.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "file"})
    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 500).load()
    query = (
        frame.select(F.col("value").cast("string").alias("value"))
        .writeStream.format("jetstream")
        .options(servers=own_server.url, subject=f"{name}.a", stream=name)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        eventually_blocking(lambda: len(query.recentProgress) >= 2, 60, "two batches")
        own_server.kill()
        own_server.start()
        seen = len(query.recentProgress)
        eventually_blocking(lambda: len(query.recentProgress) >= seen + 2 or not query.isActive, 60, "two more batches")
        assert query.exception() is None
        done = 500 * (query.lastProgress.batchId + 1)
    finally:
        query.stop()
    reader = RangeReader(ConnectOptions(servers=(own_server.url,)))
    last = reader.state(name).last_seq
    found = sorted(int(v) for b in reader.read(name, 0, last, columns=("data",)) for v in b.column("data").to_pylist())
    reader.close()
    assert found[:done] == list(range(done))
    assert len(set(found)) == len(found)  # of the batch that stop() cut off, some rows are there, and each once


# Errors


def refused(frame: DataFrame, to: Any, /, **options: object) -> str:
    with pytest.raises(PySparkException) as caught:
        save(frame, to, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subjct": "a"}, "did you mean 'subject'"),
        ({"subject": "a.*"}, "wildcard"),
        ({"subject": "nobody.listens"}, "no stream takes subject 'nobody.listens'"),
        ({"stream": "no_such_stream"}, "no_such_stream"),
        ({"maxInFlight": "0"}, "option maxInFlight"),
        ({"retryTimeout": "soon"}, "option retryTimeout"),
        ({"atomic": "maybe"}, "option atomic"),
        ({"atomic": "true"}, "needs the option stream"),
        ({"nats.tokn": "x"}, "token"),
    ],
)
def test_a_wrong_option_is_refused_before_any_task_runs(spark: Any, stream: Stream, options: Any, words: Any) -> None:
    assert words in refused(rows(spark, stream, 3), stream, **options)
    assert stream.state()["messages"] == 0


def test_atomic_batches_that_are_demanded_and_not_allowed_are_refused(spark: Any, stream: Stream) -> None:
    assert "set allow_atomic" in refused(rows(spark, stream, 3), stream, stream=stream.name, atomic="true")


def test_a_stream_that_never_acknowledges_is_refused(spark: Any, make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(no_ack=True)
    assert "no_ack" in refused(rows(spark, stream, 3), stream, stream=stream.name)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("'a' AS subject", "needs a column 'value'"),
        ("'a' AS value", "needs a column 'subject'"),
        ("1 AS value, 'a' AS subject", "column 'value' is int"),
        ("'a' AS value, 'a' AS subject, 1 AS msg_id", "column 'msg_id' is int"),
        ("'a' AS value, 'a' AS subject, map('a', 'b') AS headers", "column 'headers' is map"),
        ("'a' AS value, 'a' AS subject, 1 AS customer", "does not write the columns customer"),
    ],
)
def test_columns_that_cannot_be_written_are_refused(spark: Any, stream: Stream, columns: Any, words: Any) -> None:
    assert words in refused(spark.sql(f"SELECT {columns}"), stream)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("CAST(NULL AS STRING) AS value, '{name}.a' AS subject", "row 0: value is null"),
        ("'a' AS value, CAST(NULL AS STRING) AS subject", "row 0: subject is null"),
        ("'a' AS value, '{name}.a b' AS subject", "blank"),
        ("'a' AS value, '{name}.>' AS subject", "wildcard"),
        ("'a' AS value, 'nobody.listens' AS subject", "no stream takes subject 'nobody.listens'"),
        ("repeat('x', 1100000) AS value, '{name}.a' AS subject", "max_payload"),
    ],
)
def test_a_row_that_cannot_be_stored_fails_the_task_and_is_named(
    spark: Any, stream: Stream, columns: Any, words: Any
) -> None:
    assert words in refused(spark.sql(f"SELECT {columns.format(name=stream.name)}"), stream)


def test_a_full_stream_fails_the_task_after_the_retry_timeout(spark: Any, make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(max_bytes=5000, discard="new")
    assert "maximum bytes exceeded" in refused(rows(spark, stream, 500), stream, retryTimeout="300ms")


def test_a_user_who_may_not_publish_is_told_so(spark: Any, name: str) -> None:
    config = """
    authorization { users = [
      { user: admin, password: pw }
      { user: app, password: pw, permissions: { publish: ["mine.>"], subscribe: ["_INBOX.>"] } }
    ] }
    """
    with NatsServer(config=config) as server:
        admin = ConnectOptions(servers=(server.client_url(user="admin", password="pw"),))
        with BlockingConnection.open(admin) as connection:
            connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": ["mine.>", "theirs.>"]})
        frame = spark.sql("SELECT 'a' AS value, 'theirs.x' AS subject").write.format("jetstream").mode("append")
        with pytest.raises(PySparkException, match=r"(?i)permissions violation for publish to .theirs.x"):
            frame.options(**{"servers": server.url, "nats.user": "app", "nats.password": "pw"}).save()


def test_a_stream_cannot_be_overwritten(spark: Any, stream: Stream) -> None:
    frame = rows(spark, stream, 3).write.format("jetstream").option("servers", stream.url)
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.mode("overwrite").save()


def test_the_table_in_the_docs_says_what_the_code_says() -> None:
    text = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    section = text.split("<!-- sink options -->")[1].split("<!-- end of sink options -->")[0]
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert found == [(o.name, f"`{o.default}`" if o.default else "", o.doc) for o in WRITER_OPTIONS]
    left_out = re.search(r"Of `headers`.*?\n\n", text, re.DOTALL)
    assert left_out is not None
    assert re.findall(r"`(Nats-[^`]*)`", left_out[0]) == NOT_COPIED.split(", ")
