"""`spark.read.format("jetstream")`: complete, typed and pruned batches of a real stream in a real Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.functions import spark_partition_id

from parti.subjects import partition_of
from parti.testing import NatsServer
from support.spark_streams import Stream

pytestmark = pytest.mark.spark


def load(spark: Any, stream: Stream, schema: Any = None, **options: Any) -> Any:
    reader = spark.read.format("jetstream").options(**stream.options(**options))
    return (reader.schema(schema) if schema else reader).load()


def sequences(frame: Any) -> list[int]:
    return sorted(row.sequence for row in frame.select("sequence").collect())


def test_a_batch_read_needs_no_registration_and_yields_every_message_once(spark: Any, stream: Stream) -> None:
    stream.publish(1000)
    frame = load(spark, stream)
    assert frame.dtypes == [
        ("key", "string"),
        ("value", "binary"),
        ("subject", "string"),
        ("partition", "int"),
        ("sequence", "bigint"),
        ("timestamp", "timestamp"),
        ("stream", "string"),
    ]
    rows = frame.orderBy("sequence").collect()
    assert [row.sequence for row in rows] == list(range(1, 1001))
    assert [bytes(row.value) for row in rows] == [f"m{n}".encode() for n in range(1, 1001)]
    first, name = rows[0], f"{stream.name}.k1"
    assert (first.key, first.subject, first.partition, first.stream) == (name, name, 0, stream.name)
    stored = stream.connection.api(f"STREAM.MSG.GET.{stream.name}", {"seq": 1})["message"]["time"]
    assert stored.startswith(first.timestamp.isoformat()[:26])


def test_ranges_are_half_open_and_may_be_given_by_time(spark: Any, stream: Stream) -> None:
    stream.publish(10)
    times = {
        sequence: stream.connection.api(f"STREAM.MSG.GET.{stream.name}", {"seq": sequence})["message"]["time"]
        for sequence in (3, 8)
    }
    assert sequences(load(spark, stream, startingOffsets=3, endingOffsets=8)) == [3, 4, 5, 6, 7]
    by_time = load(spark, stream, startingTimestamp=times[3], endingTimestamp=times[8])
    assert sequences(by_time) == [3, 4, 5, 6, 7]
    assert sequences(load(spark, stream, startingOffsets="latest")) == []


def test_a_large_batch_is_split_and_a_small_one_is_one_task(spark: Any, stream: Stream) -> None:
    stream.publish(100)
    small = load(spark, stream, minPartitions=2).withColumn("task", spark_partition_id())
    assert {row.task for row in small.select("task").collect()} == {0}
    split = load(spark, stream, minPartitions=2, minRecordsPerPartition=10).withColumn("task", spark_partition_id())
    rows = split.select("task", "sequence").collect()
    assert sorted(row.sequence for row in rows) == list(range(1, 101))
    assert {row.task: row.sequence > 50 for row in rows} == {0: False, 1: True}
    assert load(spark, stream, maxRecordsPerPartition=30).rdd.getNumPartitions() == 4


def test_headers_empty_payloads_and_unusual_tokens_come_through(spark: Any, stream: Stream) -> None:
    stream.publish(2, subject="€.a-b_c$.日本.{0}", payload="", headers={"Content-Type": "text/plain", "x": "1: 2"})
    stream.publish(1, subject="plain.x")
    rows = load(spark, stream, includeHeaders="true").orderBy("sequence").collect()
    assert [(h.key, bytes(h.value)) for h in rows[0].headers] == [("Content-Type", b"text/plain"), ("x", b"1: 2")]
    assert (bytes(rows[0].value), rows[0].subject) == (b"", f"{stream.name}.€.a-b_c$.日本.1")
    assert rows[2].headers == []


def test_keys_and_partitions_come_from_subject_tokens(spark: Any, stream: Stream) -> None:
    stream.publish(50, subject="order{0}.eu")
    rows = load(spark, stream, keyTokens=f"{stream.name}.*.eu", numPartitions=8).collect()
    assert {row.key for row in rows} == {f"order{n}" for n in range(1, 51)}
    assert all(row.partition == partition_of([row.key], 8) for row in rows)
    stream.publish(1, subject="7.x")
    (held,) = load(spark, stream, partitionBy="token:2", startingOffsets=51).collect()
    assert held.partition == 7


def test_a_schema_of_the_user_prunes_and_orders_the_columns(spark: Any, stream: Stream) -> None:
    stream.publish(5)
    frame = load(spark, stream, schema="sequence long, value binary")
    assert frame.columns == ["sequence", "value"]
    assert sequences(frame) == [1, 2, 3, 4, 5]
    with pytest.raises(AnalysisException, match="value is of type binary, not string: cast it after reading"):
        load(spark, stream, schema="value string").collect()


@pytest.mark.parametrize("many", [False, True])
def test_subjects_are_filtered(spark: Any, stream: Stream, many: Any) -> None:
    for name in "abc":
        stream.publish(3, subject=name + ".{0}")
    wanted = [f"{stream.name}.a.*"] + ([f"{stream.name}.c.>"] if many else [])
    assert sequences(load(spark, stream, subjects=",".join(wanted))) == [1, 2, 3] + ([7, 8, 9] if many else [])


def test_deleted_messages_are_left_out_and_lost_ones_fail_unless_allowed(spark: Any, stream: Stream) -> None:
    stream.publish(10)
    stream.connection.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": 7})
    stream.connection.api(f"STREAM.PURGE.{stream.name}", {"seq": 4})
    assert sequences(load(spark, stream)) == [4, 5, 6, 8, 9, 10]
    with pytest.raises(AnalysisException, match=r"sequences 1 to 3 .* are gone"):
        load(spark, stream, startingOffsets=1).collect()
    assert sequences(load(spark, stream, startingOffsets=1, failOnDataLoss="false")) == [4, 5, 6, 8, 9, 10]


@pytest.mark.parametrize("config", [{"retention": "workqueue"}, {"storage": "memory"}, {"retention": "interest"}])
def test_streams_of_every_kind_are_read(spark: Any, make_stream: Callable[..., Stream], config: Any) -> None:
    stream = make_stream(**config)
    consumer = {"durable_name": "other", "ack_policy": "explicit"}  # without one an interest stream keeps nothing
    stream.connection.api(f"CONSUMER.CREATE.{stream.name}.other", {"stream_name": stream.name, "config": consumer})
    stream.publish(20)
    assert sequences(load(spark, stream)) == list(range(1, 21))


def test_wrong_options_are_refused_when_the_frame_is_made(spark: Any, stream: Stream) -> None:
    with pytest.raises(AnalysisException, match="did you mean 'maxOffsetsPerTrigger'"):
        load(spark, stream, maxOffsetPerTrigger=1)
    with pytest.raises(AnalysisException, match="endingOffsets 99 lies beyond the last sequence"):
        load(spark, stream, endingOffsets=99).collect()


def test_credentials_come_from_the_options_and_are_needed(spark: Any, stream_on: Callable[..., Stream]) -> None:
    with NatsServer(config='authorization { user: "u", password: "p" }') as server:
        stream = stream_on(server, user="u", password="p")
        stream.publish(3)
        allowed = {"servers": server.url, "nats.user": "u", "nats.password": "p"}
        assert sequences(load(spark, stream, **allowed)) == [1, 2, 3]
        with pytest.raises(AnalysisException, match="refused"):
            load(spark, stream, servers=server.url).collect()
