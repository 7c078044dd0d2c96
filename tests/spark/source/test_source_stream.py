"""`spark.readStream.format("jetstream")` in a real Spark: triggers, restarts, faults, commits, replays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from parti.testing import NatsServer, eventually_blocking
from support.spark_streams import Query, Stream

pytestmark = pytest.mark.spark

EARLIEST = {"startingOffsets": "earliest"}


def failure_of(query: Query, options: Any) -> str:
    with pytest.raises(StreamingQueryException) as error:
        query.run(options)
    return str(error.value)


def test_available_now_reads_all_in_batches_and_goes_on_from_its_checkpoint(query: Query, stream: Stream) -> None:
    stream.publish(10)
    options = stream.options(**EARLIEST, maxOffsetsPerTrigger=4)
    ran = query.run(options)
    assert query.sequences() == list(range(1, 11))
    progress = [batch for batch in ran.recentProgress if batch.numInputRows]
    assert [batch.numInputRows for batch in progress] == [4, 4, 2]
    first = progress[0].sources[0]
    assert json.loads(first.endOffset)["sequence"] == 4
    assert json.loads(first.latestOffset)["sequence"] == 10
    stream.publish(5)
    query.run(options)
    assert query.sequences() == list(range(1, 16))


def test_the_state_of_a_query_from_before_columns_were_never_null_is_continued(
    spark: Any, stream: Stream, tmp_path: Path, name: str
) -> None:
    view = f"counts_{name}"

    def counts(schema: str | None) -> dict[str, int]:
        reader = spark.readStream.format("jetstream").options(**stream.options(**EARLIEST))
        frame = (reader.schema(schema) if schema else reader).load()
        writer = frame.groupBy("subject").count().writeStream.format("memory").queryName(view).outputMode("complete")
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        assert query.awaitTermination(90)
        return {row.subject: row["count"] for row in spark.table(view).collect()}

    stream.publish(3, subject="a")
    assert counts("subject string, value binary") == {f"{stream.name}.a": 3}  # nullable, as all once were
    stream.publish(2, subject="a")
    assert counts(None) == {f"{stream.name}.a": 5}
    stream.publish(1, subject="b")
    assert counts("subject string NOT NULL") == {f"{stream.name}.a": 5, f"{stream.name}.b": 1}


def test_workers_use_one_connection_for_many_batches(
    query: Query, own_server: NatsServer, stream_on: Callable[..., Stream]
) -> None:
    stream = stream_on(own_server)
    stream.publish(10)
    query.run(stream.options(**EARLIEST, maxOffsetsPerTrigger=1))
    assert query.sequences() == list(range(1, 11))
    with urllib.request.urlopen(f"{own_server.monitor_url}/connz?state=any") as answer:
        names = [connection.get("name") for connection in json.load(answer)["connections"]]
    assert 1 <= names.count("parti-spark-task") <= 2  # as many as there are workers
    assert names.count("parti-spark-driver") == 1


def test_trigger_once_reads_everything_in_one_batch(query: Query, stream: Stream) -> None:
    stream.publish(10)
    ran = query.run(stream.options(**EARLIEST, maxOffsetsPerTrigger=4), once=True)
    assert query.sequences() == list(range(1, 11))
    assert [batch.numInputRows for batch in ran.recentProgress if batch.numInputRows] == [10]


def test_a_processing_time_query_reads_what_comes_and_survives_a_restart_of_the_server(
    query: Query, own_server: NatsServer, stream_on: Callable[..., Stream]
) -> None:
    stream = stream_on(own_server)
    running = query.start(stream.options(), processingTime="100 milliseconds")
    try:
        eventually_blocking(lambda: running.lastProgress is not None, 60, "the query has found its start")
        stream.publish(100)
        eventually_blocking(lambda: query.sequences() == list(range(1, 101)), 60, "the first batch")
        own_server.kill()
        before = running.lastProgress.batchId
        own_server.restart()
        again = stream_on(own_server, exists=True)
        again.publish(100)
        eventually_blocking(lambda: query.sequences() == list(range(1, 201)), 60, "the batch after the restart")
        assert running.isActive
        assert running.lastProgress.batchId > before
    finally:
        running.stop()


def test_what_is_published_right_after_start_is_read_when_the_moment_is_named(query: Query, stream: Stream) -> None:
    """`latest` is where the stream ends when the first trigger asks; a time is a time."""
    stream.publish(5)
    started = query.start(stream.options(startingTimestamp=datetime.now(UTC).isoformat()), processingTime="0 seconds")
    try:
        stream.publish(7)
        eventually_blocking(lambda: len(query.sequences()) >= 7, 90, "all of them are read")
    finally:
        started.stop()
    assert query.sequences() == list(range(6, 13))


def test_killed_workers_are_replaced_and_nothing_is_lost_or_doubled(query: Query, stream: Stream) -> None:
    stream.publish(1200)
    running = query.start(stream.options(**EARLIEST, maxOffsetsPerTrigger=300), availableNow=True)
    killed_in: set[int] = set()
    while not running.awaitTermination(0.2):  # once a batch: a task that is killed four times ends the query
        batch = running.lastProgress.batchId if running.lastProgress else -1
        if batch not in killed_in and kill_a_worker():
            killed_in.add(batch)
    assert killed_in
    assert query.sequences() == list(range(1, 1201))


def kill_a_worker() -> int:
    """SIGKILL one of Spark's Python workers below this process; 1 if there was one."""
    daemons, parents = set(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_text()
        except OSError:  # it ended while we looked
            continue
        parents[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
        if "pyspark.daemon" in command and "pyspark.worker" in command:  # the one that forks, and its workers
            daemons.add(int(entry.name))
    workers = [pid for pid in daemons if parents[pid] in daemons and os.getpid() in lineage(pid, parents)]
    for pid in workers[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(workers[:1])


def lineage(pid: int, parents: dict[int, int]) -> list[int]:
    line = []
    while pid in parents:
        pid = parents[pid]
        line.append(pid)
    return line


def test_a_query_that_dies_in_its_first_batch_replays_it_wherever_it_would_start_now(
    spark: Any, tmp_path: Path, stream: Stream
) -> None:
    stream.publish(5)
    seen: list[list[int]] = []

    def run(handle: Any, starting: str) -> None:
        frame = spark.readStream.format("jetstream").options(**stream.options(startingOffsets=starting)).load()
        writer = frame.writeStream.foreachBatch(handle).option("checkpointLocation", str(tmp_path))
        assert writer.trigger(availableNow=True).start().awaitTermination(60)

    def keep(batch: Any, _: Any) -> None:
        seen.append(sorted(row.sequence for row in batch.select("sequence").collect()))

    def fail(batch: Any, number: Any) -> None:
        keep(batch, number)
        raise RuntimeError("the sink is down")

    with pytest.raises(StreamingQueryException, match="the sink is down"):
        run(fail, "earliest")
    stream.publish(4)
    run(keep, "latest")
    assert seen == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_lost_messages_fail_the_query_or_are_passed_over(query: Query, stream: Stream) -> None:
    stream.publish(10)
    options = stream.options(**EARLIEST, maxOffsetsPerTrigger=5)
    query.run(options)
    stream.publish(10)
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"seq": 14})
    gone = "begins at sequence 14 by now: sequences 11 to 13 (3) are gone unread; set failOnDataLoss to false"
    assert gone in failure_of(query, options)
    query.run(options | {"failOnDataLoss": "false"})
    assert query.sequences() == [*range(1, 11), *range(14, 21)]


def test_a_stream_made_anew_fails_the_query(query: Query, stream: Stream) -> None:
    stream.publish(5)
    query.run(stream.options(**EARLIEST))
    stream.connection.api(f"STREAM.DELETE.{stream.name}")
    stream.create()
    stream.publish(10)
    assert "deleted and recreated" in failure_of(query, stream.options())


def test_purge_leaves_an_empty_work_queue_behind_also_after_the_last_batch(
    query: Query, make_stream: Callable[..., Stream]
) -> None:
    stream = make_stream(retention="workqueue")
    stream.publish(10)
    query.run(stream.options(commit="purge", maxOffsetsPerTrigger=6))
    assert query.sequences() == list(range(1, 11))
    assert stream.state()["messages"] == 0


def test_a_durable_shows_the_end_of_the_last_batch(query: Query, make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(retention="interest")
    query.run(stream.options(**EARLIEST, commit="durable", durable="spark"))
    stream.publish(10)
    query.run(stream.options(**EARLIEST, commit="durable", durable="spark", maxOffsetsPerTrigger=6))
    assert query.sequences() == list(range(1, 11))
    info = stream.connection.api(f"CONSUMER.INFO.{stream.name}.spark")
    assert (info["ack_floor"]["stream_seq"], info["num_pending"]) == (10, 0)
    assert stream.state()["messages"] == 0


def test_an_outage_beyond_the_budget_fails_the_query_with_its_cause(
    query: Query, own_server: NatsServer, stream_on: Callable[..., Stream]
) -> None:
    stream = stream_on(own_server)
    running = query.start(stream.options(retryBudget="500ms"), processingTime="50 milliseconds")
    try:
        eventually_blocking(lambda: running.lastProgress is not None, 60, "the query has found its start")
        own_server.kill()
        with pytest.raises(StreamingQueryException, match=r"NATS did not answer for .*retryBudget.*cannot connect"):
            running.awaitTermination(60)
    finally:
        running.stop()


def test_wrong_options_fail_before_the_query_runs(query: Query, stream: Stream) -> None:
    for given, sentence in [
        ({"endingOffsets": 7}, "option endingOffsets has no meaning for a streaming query"),  # by the reader's options
        ({"startingOffsets": 7}, "startingOffsets 7 lies beyond the last sequence 0"),  # by the first question
    ]:
        told = failure_of(query, stream.options(**given))
        assert f"parti.errors.ConfigError: {sentence}" in told.splitlines()[0]
        assert "Traceback" not in told
        assert "UnboundLocalError" not in told
