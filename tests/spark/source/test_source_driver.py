"""The streaming reader as Spark's driver uses it, against a real server: offsets, limits, loss, outages, commits."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StringType, StructField, StructType
from structlog.testing import capture_logs

from parti.clock import SimulatedClock
from parti.errors import ConfigError, DataLoss
from parti.spark.source import tasks
from parti.spark.source.options import SourceOptions
from parti.spark.source.outage import OutageTooLong
from parti.spark.source.stream_reader import JetStreamStreamReader
from parti.testing import NatsServer
from parti.wire.errors import StreamNotFound
from support.spark_streams import Stream

SEQUENCE = StructType([StructField("sequence", LongType())])


def reader_of(stream: Stream, clock: Any = None, **options: Any) -> JetStreamStreamReader:
    start = {} if "startingTimestamp" in options else {"startingOffsets": "earliest"}
    given = stream.options(**(start | options))
    return JetStreamStreamReader(SEQUENCE, SourceOptions.parse(given, streaming=True), clock)


def latest(reader: Any, start: Any, limit: Any = None) -> Any:
    """What Spark stores: the offset after a round trip through JSON."""
    return json.loads(json.dumps(reader.latestOffset(start, limit or reader.getDefaultReadLimit())))


def read(reader: Any, start: Any, end: Any) -> list[int]:
    """The sequences of a batch, read by a copy of the reader as on an executor."""
    remote = pickle.loads(pickle.dumps(JetStreamStreamReader(SEQUENCE, reader._options)))
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions(start, end)]
    batches = [batch for part in parts for batch in remote.read(part)]
    return [row for batch in batches for row in batch.column("sequence").to_pylist()]


def test_offsets_are_readable_and_name_the_stream_its_creation_and_the_last_sequence_read(stream: Stream) -> None:
    stream.publish(5)
    reader = reader_of(stream)
    start = reader.initialOffset()
    created = stream.connection.api(f"STREAM.INFO.{stream.name}")["created"]
    assert start == {"stream": stream.name, "created": created, "sequence": 0, "started": 0}
    end = latest(reader, start)
    assert list(end.items()) == [("stream", stream.name), ("created", created), ("sequence", 5), ("started", 0)]
    assert read(reader, start, end) == [1, 2, 3, 4, 5]
    assert latest(reader, end) == end
    assert read(reader, end, end) == []


@pytest.mark.parametrize(("given", "before"), [("earliest", 0), ("latest", 10), ("4", 3), ("11", 10)])
def test_a_start_is_earliest_latest_or_the_first_sequence_to_read(stream: Stream, given: Any, before: Any) -> None:
    stream.publish(10)
    assert reader_of(stream, startingOffsets=given).initialOffset()["sequence"] == before


def test_a_start_beyond_the_end_is_refused(stream: Stream) -> None:
    stream.publish(10)
    with pytest.raises(ConfigError, match="startingOffsets 12 lies beyond the last sequence 10"):
        reader_of(stream, startingOffsets=12).initialOffset()


def test_a_time_becomes_the_first_sequence_stored_since(stream: Stream) -> None:
    stream.publish(20)
    for sequence in (1, 7, 8, 19):
        stream.connection.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": sequence})
    times = {
        sequence: stream.connection.api(f"STREAM.MSG.GET.{stream.name}", {"seq": sequence})["message"]["time"]
        for sequence in (2, 6, 9, 20)
    }

    def started(time: Any) -> int:
        return int(reader_of(stream, startingTimestamp=time).initialOffset()["sequence"]) + 1

    for sequence, time in times.items():
        assert started(time) == sequence
    assert started("1000") == 2
    with pytest.raises(ConfigError, match="in the future"):
        started("2999-01-01")


def test_a_start_by_time_in_an_empty_stream_is_its_first_message(stream: Stream) -> None:
    assert reader_of(stream, startingTimestamp="2020-01-01T00:00:00+02:00").initialOffset()["sequence"] == 0


def test_a_batch_holds_at_most_maxOffsetsPerTrigger_sequences(stream: Stream) -> None:
    stream.publish(10)
    reader = reader_of(stream, maxOffsetsPerTrigger=4)
    offset, batches = reader.initialOffset(), []
    while (end := latest(reader, offset)) != offset:
        batches.append(read(reader, offset, end))
        offset = end
    assert batches == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert latest(reader, reader.initialOffset(), ReadAllAvailable())["sequence"] == 10


def test_a_batch_holds_about_maxBytesPerTrigger(stream: Stream) -> None:
    stream.publish(100, payload="x" * 1000)
    mean = stream.state()["bytes"] / 100
    reader = reader_of(stream, maxBytesPerTrigger=int(mean * 7.5))
    assert latest(reader, reader.initialOffset())["sequence"] == 7
    tiny = reader_of(stream, maxBytesPerTrigger=1)
    assert latest(tiny, tiny.initialOffset())["sequence"] == 1


def test_few_messages_are_held_back_until_there_are_enough_or_the_delay_is_over(stream: Stream) -> None:
    clock = SimulatedClock()
    reader = reader_of(stream, clock, minOffsetsPerTrigger=5, maxTriggerDelay="10s")
    stream.publish(1)
    first = latest(reader, reader.initialOffset())
    assert first["sequence"] == 1  # the first batch does not wait, as with Kafka
    stream.publish(3)
    assert latest(reader, first) == first
    stream.publish(1)
    assert latest(reader, first)["sequence"] == 1  # 4 of 5
    stream.publish(1)
    second = latest(reader, first)
    assert second["sequence"] == 6
    stream.publish(1)
    assert latest(reader, second) == second
    clock.advance(10)
    assert latest(reader, second)["sequence"] == 7


def test_available_now_reads_up_to_what_was_there_and_waits_for_no_minimum(stream: Stream) -> None:
    stream.publish(6)
    reader = reader_of(stream, minOffsetsPerTrigger=100, maxOffsetsPerTrigger=100)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    stream.publish(3)
    end = latest(reader, start)
    assert end["sequence"] == 6
    assert latest(reader, end) == end


def test_progress_gets_the_end_of_the_stream_so_that_lag_is_visible(stream: Stream) -> None:
    stream.publish(6)
    reader = reader_of(stream, maxOffsetsPerTrigger=2)
    assert latest(reader, reader.initialOffset())["sequence"] == 2

    def reported() -> int:
        found = reader.reportLatestOffset()
        assert found is not None
        return int(found["sequence"])

    assert reported() == 6
    stream.publish(1)
    assert reported() == 7


def test_the_first_batch_is_replayed_from_where_it_began_although_spark_asks_for_the_start_anew(stream: Stream) -> None:
    stream.publish(5)
    reader = reader_of(stream, startingOffsets="latest")
    start = reader.initialOffset()
    stream.publish(3)
    end = latest(reader, start)
    assert read(reader, start, end) == [6, 7, 8]
    stream.publish(4)
    again = reader_of(stream, startingOffsets="latest")
    assert read(again, again.initialOffset(), end) == [6, 7, 8]


def test_a_checkpoint_of_another_stream_is_refused(stream: Stream) -> None:
    offset = reader_of(stream).initialOffset() | {"stream": "OTHER"}
    with pytest.raises(ConfigError, match=r"belongs to .OTHER., not to stream"):
        latest(reader_of(stream), offset)


def test_a_missing_stream_ends_the_query_at_once(stream: Stream) -> None:
    reader = reader_of(stream)
    start = reader.initialOffset()
    stream.connection.api(f"STREAM.DELETE.{stream.name}")
    with pytest.raises(StreamNotFound):
        latest(reader, start)


def test_lost_messages_fail_the_batch(stream: Stream) -> None:
    stream.publish(10)
    reader = reader_of(stream, startingOffsets=1)
    start = reader.initialOffset()
    end = latest(reader, start)
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"seq": 4})
    gone = r"begins at sequence 4 by now: sequences 1 to 3 \(3\) are gone unread.*failOnDataLoss"
    with pytest.raises(DataLoss, match=gone) as error:
        reader.partitions(start, end)
    assert (error.value.first_missing, error.value.first_available, error.value.count) == (1, 4, 3)


def test_lost_messages_are_logged_one_by_one_when_that_is_allowed(stream: Stream) -> None:
    stream.publish(10)
    reader = reader_of(stream, failOnDataLoss="false", startingOffsets=1)
    start = reader.initialOffset()
    end = latest(reader, start)
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"seq": 4})
    with capture_logs() as logs:
        assert read(reader, start, end) == [4, 5, 6, 7, 8, 9, 10]
    assert [(log["event"], log["first"], log["last"]) for log in logs] == [("source.data_lost", 1, 3)]


def test_what_is_lost_after_planning_is_logged_by_the_task(stream: Stream) -> None:
    stream.publish(10)
    reader = reader_of(stream, failOnDataLoss="false", startingOffsets=1)
    start = reader.initialOffset()
    parts = reader.partitions(start, latest(reader, start))
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"seq": 6})
    with capture_logs() as logs:
        rows = [row for part in parts for batch in reader.read(part) for row in batch.column("sequence").to_pylist()]
    assert rows == [6, 7, 8, 9, 10]
    assert [(log["event"], log["first"], log["last"]) for log in logs] == [("source.data_lost", 1, 5)]


def test_deleted_messages_inside_a_range_are_no_loss(stream: Stream) -> None:
    stream.publish(6)
    for sequence in (3, 6):
        stream.connection.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": sequence})
    reader = reader_of(stream)
    start = reader.initialOffset()
    assert read(reader, start, latest(reader, start)) == [1, 2, 4, 5]


def test_a_filter_that_can_match_nothing_is_refused_before_the_first_batch(stream: Stream) -> None:
    with pytest.raises(ConfigError, match=r"'other.>' matches nothing in stream .*, which holds .*>"):
        reader_of(stream, subjects="other.>").initialOffset()
    assert reader_of(stream, subjects="*.a").initialOffset()["sequence"] == 0


def recreate(stream: Stream) -> None:
    stream.connection.api(f"STREAM.DELETE.{stream.name}")
    stream.create()


def test_a_stream_made_anew_fails_the_query(stream: Stream) -> None:
    stream.publish(5)
    reader = reader_of(stream)
    end = latest(reader, reader.initialOffset())
    recreate(stream)
    stream.publish(20)
    with pytest.raises(DataLoss, match="deleted and recreated"):
        latest(reader, end)


def test_a_stream_made_anew_is_read_from_its_start_when_loss_is_allowed(stream: Stream) -> None:
    stream.publish(5)
    reader = reader_of(stream, failOnDataLoss="false", maxOffsetsPerTrigger=3)
    old = latest(reader, reader.initialOffset())
    recreate(stream)
    stream.publish(4)
    with capture_logs() as logs:
        first = latest(reader, old)
    assert "recreated" in logs[0]["what"]
    assert read(reader, old, first) == [1, 2, 3]
    assert read(reader, first, latest(reader, first)) == [4]


def test_a_batch_of_a_stream_that_is_no_more_is_never_filled_with_the_messages_of_its_successor(stream: Stream) -> None:
    stream.publish(5)
    reader = reader_of(stream, failOnDataLoss="false")
    start = reader.initialOffset()
    end = latest(reader, start)
    parts = reader.partitions(start, end)
    recreate(stream)
    stream.publish(5)
    with capture_logs() as logs:
        assert [batch for part in parts for batch in reader.read(part)] == []
        assert reader.partitions(start, end) == []
    assert [(log["first"], log["last"]) for log in logs] == [(1, 5), (1, 5)]


def test_a_tail_that_the_server_lost_is_noticed(stream: Stream) -> None:
    stream.publish(5)
    ahead = reader_of(stream).initialOffset() | {"sequence": 9}
    with pytest.raises(DataLoss, match="ends at sequence 5, but the query has read up to 9"):
        latest(reader_of(stream), ahead)
    with capture_logs() as logs:
        assert latest(reader_of(stream, failOnDataLoss="false"), ahead)["sequence"] == 5
    assert [(log["first"], log["last"]) for log in logs] == [(6, 9)]


@pytest.mark.slow
def test_an_outage_is_absorbed_and_the_query_goes_on_after_it(
    own_server: NatsServer, name: str, stream_on: Callable[..., Stream]
) -> None:
    stream = stream_on(own_server)
    stream.publish(5)
    reader = reader_of(stream)
    start = reader.initialOffset()
    own_server.kill()
    with capture_logs() as logs:
        assert latest(reader, start) == start
        assert reader.reportLatestOffset() is None
        reader.commit(start)
        own_server.restart()
        assert latest(reader, start)["sequence"] == 5
    assert [log["event"] for log in logs] == ["source.outage", "source.outage_over"]


def wait_for_failure(reader: Any, start: Any) -> None:
    while latest(reader, start) == start:
        pass


def test_an_outage_beyond_the_budget_fails_with_its_cause(
    own_server: NatsServer, stream_on: Callable[..., Stream]
) -> None:
    stream = stream_on(own_server)
    reader = reader_of(stream, retryBudget="300ms")
    start = reader.initialOffset()
    own_server.kill()
    with pytest.raises(OutageTooLong, match=r"retryBudget.*cannot connect"):
        wait_for_failure(reader, start)


def test_a_finite_query_waits_for_nats_instead_of_ending_early(
    own_server: NatsServer, stream_on: Callable[..., Stream]
) -> None:
    stream = stream_on(own_server)
    stream.publish(5)
    reader = reader_of(stream, retryBudget="500ms")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    own_server.kill()
    with pytest.raises(OutageTooLong):
        latest(reader, start)
    own_server.restart()
    assert latest(reader, start)["sequence"] == 5


def position_of(stream: Stream, durable: str) -> tuple[int, int]:
    info = stream.connection.api(f"CONSUMER.INFO.{stream.name}.{durable}")
    return info["ack_floor"]["stream_seq"], info["num_pending"]


@pytest.mark.parametrize("retention", ["limits", "interest"])
def test_a_durable_shows_the_position_of_the_query_also_after_its_last_batch(
    make_stream: Callable[..., Stream], retention: Any
) -> None:
    stream = make_stream(retention=retention)
    reader = reader_of(stream, commit="durable", durable="spark")
    start = reader.initialOffset()
    stream.publish(10)
    middle = latest(reader_of(stream, commit="durable", durable="spark", maxOffsetsPerTrigger=4), start)
    reader.commit(middle)
    assert position_of(stream, "spark") == (4, 6)
    end = latest(reader, middle)
    assert read(reader, middle, end) == [5, 6, 7, 8, 9, 10]
    assert position_of(stream, "spark") == (4, 6)
    assert latest(reader, end) == end
    assert position_of(stream, "spark") == (10, 0)
    assert stream.state()["messages"] == (10 if retention == "limits" else 0)


def test_a_durable_that_somebody_deleted_is_made_again_at_the_right_place(stream: Stream) -> None:
    stream.publish(10)
    reader = reader_of(stream, commit="durable", durable="spark", subjects=f"{stream.name}.>")
    end = latest(reader, reader.initialOffset())
    stream.connection.api(f"CONSUMER.DELETE.{stream.name}.spark")
    reader.commit(end)
    assert position_of(stream, "spark") == (10, 0)


def test_purge_empties_a_work_queue_batch_by_batch_and_after_the_last(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(retention="workqueue")
    stream.publish(10)
    reader = reader_of(stream, commit="purge", maxOffsetsPerTrigger=6)
    start = reader.initialOffset()
    middle = latest(reader, start)
    assert read(reader, start, middle) == [1, 2, 3, 4, 5, 6]
    assert stream.state()["messages"] == 10
    end = latest(reader, middle)
    assert stream.state()["first_seq"] == 7
    assert read(reader, middle, end) == [7, 8, 9, 10]
    assert latest(reader, end) == end
    assert stream.state()["messages"] == 0


def test_purge_takes_only_the_subjects_that_were_read(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(retention="workqueue")
    stream.publish(3, subject="a.{0}")
    stream.publish(3, subject="b.{0}")
    reader = reader_of(stream, commit="purge", subjects=f"{stream.name}.a.*")
    start = reader.initialOffset()
    end = latest(reader, start)
    assert read(reader, start, end) == [1, 2, 3]
    reader.commit(end)
    assert (stream.state()["messages"], stream.state()["first_seq"]) == (3, 4)


def test_a_query_with_async_progress_commits_only_what_spark_says_is_done(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(retention="workqueue")
    stream.publish(4)
    reader = reader_of(stream, commit="purge", commitLastBatch="false")
    end = latest(reader, reader.initialOffset())
    assert latest(reader, end) == end
    assert stream.state()["messages"] == 4
    reader.commit(end)
    assert stream.state()["messages"] == 0


def test_a_commit_never_touches_the_successor_of_the_stream(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream(retention="workqueue")
    stream.publish(4)
    reader = reader_of(stream, commit="purge", failOnDataLoss="false")
    end = latest(reader, reader.initialOffset())
    stream.connection.api(f"STREAM.DELETE.{stream.name}")
    stream.create(retention="workqueue")
    stream.publish(4)
    reader.commit(end)
    assert latest(reader, end)["sequence"] == 4
    assert stream.state()["messages"] == 4


@pytest.mark.parametrize(
    ("retention", "options", "words"),
    [
        ("limits", {"commit": "purge"}, "takes messages from others: use commit=durable"),
        ("workqueue", {"commit": "durable", "durable": "d"}, "use commit=purge"),
    ],
)
def test_a_commit_that_does_not_fit_the_stream_is_refused_before_the_first_batch(
    make_stream: Callable[..., Stream], retention: Any, options: Any, words: Any
) -> None:
    with pytest.raises(ConfigError, match=words):
        reader_of(make_stream(retention=retention), **options).initialOffset()


def test_a_worker_process_keeps_its_connection_between_tasks(stream: Stream) -> None:
    stream.publish(5)
    reader = reader_of(stream, maxRecordsPerPartition=2)
    start = reader.initialOffset()
    parts = reader.partitions(start, latest(reader, start))
    assert len(parts) == 3
    key = (os.getpid(), reader._options.connect)
    kept = []
    for part in parts:
        assert pa.Table.from_batches(reader.read(part)).num_rows in (1, 2)
        kept.append(tasks._IDLE[key].connection)
    assert kept[0] is kept[1] is kept[2]
    kept[2].close()  # as the server does with one that idled for long
    assert pa.Table.from_batches(reader.read(parts[0])).num_rows == 1


def test_a_task_that_is_abandoned_leaves_a_clean_connection(stream: Stream) -> None:
    stream.publish(50)
    reader = reader_of(stream)
    start = reader.initialOffset()
    end = latest(reader, start)
    abandoned: Any = reader.read(reader.partitions(start, end)[0])
    next(abandoned)
    abandoned.close()
    assert read(reader, start, end) == list(range(1, 51))


def test_a_stream_in_a_domain_is_reached_by_name_or_by_prefix(
    name: str, tmp_path: Path, stream_on: Callable[..., Stream]
) -> None:
    store = json.dumps(str(tmp_path / "store"))
    with NatsServer(config=f"jetstream {{ domain: hub, store_dir: {store} }}") as server:
        stream = stream_on(server)
        stream.publish(3)
        for way in ({"jsDomain": "hub"}, {"apiPrefix": "$JS.hub.API"}):
            reader = reader_of(stream, **way)
            start = reader.initialOffset()
            assert read(reader, start, latest(reader, start)) == [1, 2, 3]
        with pytest.raises(OutageTooLong, match="no responder for"):
            reader_of(stream, jsDomain="spoke", retryBudget="100ms").initialOffset()


def test_columns_that_are_not_asked_for_are_not_built(stream: Stream) -> None:
    stream.publish(3)
    schema = StructType([StructField("key", StringType())])
    options = SourceOptions.parse(stream.options(startingOffsets="earliest", keyTokens="2"), streaming=True)
    reader = JetStreamStreamReader(schema, options)
    start = reader.initialOffset()
    (part,) = reader.partitions(start, latest(reader, start))
    assert pa.Table.from_batches(reader.read(part)).to_pydict() == {"key": ["k1", "k2", "k3"]}
