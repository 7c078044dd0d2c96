"""The reader of a query that is a member of a group, driven as Spark drives it, beside Python members on a real server.

The tests play Spark, so that a membership change happens exactly within a batch or between two batches.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from parti.errors import ConfigError
from parti.groups import ConsumerTemplate, errors, predict
from parti.spark.member.offsets import read_partitions, write_partitions
from parti.spark.source.options import SourceOptions
from parti.spark.source.stream_reader import JetStreamStreamReader
from parti.testing import eventually_blocking
from support.group_rig import ACK_WAIT, WITHIN, Group, Rig

SCHEMA = StructType(
    [
        StructField("sequence", LongType()),
        StructField("subject", StringType()),
        StructField("partition", IntegerType()),
        StructField("value", BinaryType()),
    ]
)


class Spark:
    """Spark's side of one query: offsets, batches, and a checkpoint that a later one may begin with."""

    def __init__(self, group: Group, member: str, checkpoint: list[Any] | None = None, **more: Any) -> None:
        given = group.stream.options(group="g", member=member, groupAckWait=f"{ACK_WAIT:g}s", **more)
        self.group = group
        self.reader = JetStreamStreamReader(SCHEMA, SourceOptions.parse(given, streaming=True))
        self.checkpoint = checkpoint if checkpoint is not None else [self.reader.initialOffset()]
        """Offsets of the batches planned so far; what is handled is in the group's list."""

    def plan(self) -> bool:
        """Ask for the next batch; whether there is one. This also tells the reader that the last one is done."""
        start = self.checkpoint[-1]
        end = json.loads(json.dumps(self.reader.latestOffset(start, self.reader.getDefaultReadLimit())))
        if end != start:
            self.checkpoint.append(end)
        return bool(end != start)

    def run(self) -> int:
        """Read and handle the last planned batch, as the first time or again."""
        start, end = self.checkpoint[-2:]
        remote = pickle.loads(pickle.dumps(JetStreamStreamReader(SCHEMA, self.reader._options)))
        count = 0
        for part in self.reader.partitions(start, end):
            for batch in remote.read(pickle.loads(pickle.dumps(part))):
                self.group.spark += [(row["subject"], int(row["value"])) for row in batch.to_pylist()]
                self.group.spark_rows += batch.to_pylist()
                count += batch.num_rows
        return count

    def until(self, what: str, condition: Any) -> None:
        """Batch after batch until the condition holds between two."""

        def turn() -> bool:
            if self.plan():
                self.run()
            return bool(condition())

        eventually_blocking(turn, WITHIN, what)

    def drain(self) -> None:
        """What is there, then the end, as with AvailableNow."""
        self.reader.prepareForTriggerAvailableNow()
        while self.plan():
            self.run()

    def close(self) -> None:
        self.reader.stop()


@pytest.fixture
def elastic(rig: Rig, stream: Any) -> Group:
    """An elastic group of 8 partitions with the member m1."""
    return Group.elastic(rig, stream, "m1")


@pytest.fixture
def static(rig: Rig, make_stream: Any, name: str) -> Group:
    """A static group of 4 partitions and the members m1 (0 and 1) and m2."""
    return Group.static(rig, make_stream(subjects=[f"{number}.{name}.>" for number in range(4)]))


@contextmanager
def joined(group: Group, member: str = "m1", checkpoint: list[Any] | None = None, **more: Any) -> Iterator[Spark]:
    query = Spark(group, member, checkpoint, **more)
    try:
        yield query
    finally:
        query.close()


def test_rows_are_as_other_members_see_them_and_what_is_done_leaves_the_queue(elastic: Group) -> None:
    elastic.publish(200)
    with joined(elastic, maxOffsetsPerTrigger=60) as query:
        query.drain()
    elastic.check()
    record = elastic.rig.do(elastic.groups.get(elastic.stream.name, "g")).record
    for row in elastic.spark_rows:
        assert row["sequence"] == int(row["value"])
        assert row["partition"] == predict(record, row["subject"])
    assert elastic.messages_left() == 0
    assert len(query.checkpoint) == 5
    assert read_partitions(query.checkpoint[-1]["partitions"]) == tuple(range(8))


def test_a_change_during_a_batch_counts_when_the_batch_is_committed_and_not_before(elastic: Group) -> None:
    name = elastic.stream.name
    elastic.publish(80)
    with joined(elastic, maxOffsetsPerTrigger=40) as query, elastic.member("m2") as other:
        query.until("the pin is held", lambda: len(query.checkpoint) > 1)
        elastic.publish(40)
        eventually_blocking(query.plan, WITHIN, "another batch")
        elastic.rig.do(elastic.groups.add_members(name, "g", ["m2"]))
        eventually_blocking(lambda: other.record.members == ("m1", "m2"), WITHIN, "the other knows of it")
        assert query.run() > 0
        assert other.partitions == ()  # the batch is read and not committed: its partitions stay
        assert not elastic.python
        query.until("the other has its half", lambda: len(other.partitions) == 4)
        query.until("all is handled", elastic.all_handled)
        elastic.rig.do(elastic.groups.drop_members(name, "g", ["m2"]))
        elastic.publish(80)
        query.until("all is handled by the query again", elastic.all_handled)
        query.until("the queue is empty", lambda: elastic.messages_left() == 0)
    elastic.check()


def test_a_query_that_crashed_replays_its_batch_also_when_its_partitions_have_moved(elastic: Group) -> None:
    name = elastic.stream.name
    elastic.publish(100)
    crashed = Spark(elastic, "m1", maxOffsetsPerTrigger=50)
    eventually_blocking(crashed.plan, WITHIN, "the first batch is planned")
    crashed.close()  # nothing of the batch was handled
    elastic.rig.do(elastic.groups.add_members(name, "g", ["m2"]))
    with elastic.member("m2"), joined(elastic, checkpoint=crashed.checkpoint) as query:
        query.run()
        query.until("all is handled", elastic.all_handled)
        query.until("the queue is empty", lambda: elastic.messages_left() == 0)
    elastic.check()
    assert elastic.python, "the other member has handled its half of the planned batch"


def test_a_batch_that_was_done_but_not_committed_to_the_group_is_not_repeated(elastic: Group) -> None:
    elastic.publish(50)
    crashed = Spark(elastic, "m1")
    eventually_blocking(crashed.plan, WITHIN, "the batch is planned")
    assert crashed.run() == 50
    crashed.close()  # Spark's checkpoint has the batch; the queue still holds its messages
    assert elastic.messages_left() == 50
    elastic.publish(10)
    with joined(elastic, checkpoint=crashed.checkpoint) as query:
        query.until("the rest is handled", elastic.all_handled)
        query.until("the queue is empty", lambda: elastic.messages_left() == 0)
    elastic.check()


def test_a_second_instance_of_the_member_waits_and_takes_over(elastic: Group) -> None:
    elastic.publish(40)
    with joined(elastic) as query:
        query.until("the query reads", elastic.all_handled)
        with elastic.member("m1") as standby:
            elastic.publish(40)
            query.until("the query has committed all", lambda: elastic.messages_left() == 0)
            assert (standby.state.value, elastic.python) == ("standby", [])
            query.close()
            elastic.publish(40)
            eventually_blocking(elastic.all_handled, WITHIN, "the Python instance goes on")
    elastic.check()
    assert len(elastic.python) == 40


def test_a_static_member_moves_between_a_query_and_a_python_instance(static: Group) -> None:
    static.publish(100)
    with joined(static, maxOffsetsPerTrigger=30) as query:
        query.drain()
    assert sorted(static.spark) == sorted(static.published)  # nothing of the partitions of m2
    with static.member("m1"):
        static.publish(100)
        eventually_blocking(static.all_handled, WITHIN, "the Python instance goes on behind the query")
    static.publish(100)
    with joined(static, checkpoint=query.checkpoint) as query:  # it has not seen what the other instance did
        query.drain()
    static.check()
    assert {row["partition"] for row in static.spark_rows} == {0, 1}


def test_a_static_member_does_not_move_the_position_of_another_instance_back(static: Group) -> None:
    static.publish(100)
    with joined(static) as query:
        eventually_blocking(query.plan, WITHIN, "a batch is planned")
        query.run()
    with static.member("m1"):  # its position is still the old one: the query died before it could tell
        eventually_blocking(lambda: len(static.python) == 50, WITHIN, "the Python instance repeats")
    with joined(static, checkpoint=query.checkpoint) as query:
        static.publish(20)
        query.until("the rest is handled", lambda: len(static.spark) == 60)
    assert sorted(static.spark) == sorted(static.published)


def refused(on: Group, error: type[Exception], match: str, **given: Any) -> None:
    options = on.stream.options(**({"group": "g", "member": "m1"} | given))
    with pytest.raises(error, match=match):
        JetStreamStreamReader(SCHEMA, SourceOptions.parse(options, streaming=True)).initialOffset()


def test_a_group_or_static_member_that_does_not_exist_is_told_by_name(static: Group) -> None:
    refused(static, errors.GroupNotFound, "no group 'x' on stream", group="x")
    refused(static, errors.GroupNotFound, "no elastic group 'g' on stream", groupKind="elastic")
    refused(static, errors.NotListed, "member 'm9' is not in static group 'g': it has m1, m2", member="m9")
    with pytest.raises(ConfigError, match="group and member belong together"):
        SourceOptions.parse(static.stream.options(group="g"), streaming=True)
    with pytest.raises(ConfigError, match="option group has no meaning for a batch query"):
        SourceOptions.parse(static.stream.options(group="g", member="m1"), streaming=False)


def test_options_that_the_group_decides_on_are_refused(elastic: Group) -> None:
    refused(elastic, ConfigError, "begins where its queue does", startingOffsets="latest")
    refused(elastic, ConfigError, "option subjects has no meaning with group", subjects="a.b")
    refused(elastic, ConfigError, "option commit has no meaning with group", commit="purge")


def test_a_consumer_that_another_instance_made_for_more_than_one_message_is_refused(elastic: Group) -> None:
    elastic.publish(1)
    template = ConsumerTemplate(ack_wait=ACK_WAIT, max_ack_pending=10)
    with elastic.member("m1", template):
        refused(elastic, errors.ForeignConsumer, "made with max_ack_pending 10", groupAckWait=f"{ACK_WAIT:g}s")


def test_a_group_that_is_deleted_ends_the_query_with_its_name(elastic: Group) -> None:
    elastic.publish(10)
    with joined(elastic) as query:
        query.until("the query reads", elastic.all_handled)
        elastic.rig.do(elastic.groups.delete(elastic.stream.name, "g"))
        with pytest.raises(errors.GroupError, match=r"group 'g' .*was deleted"):
            query.until("it ends", lambda: False)


def test_a_checkpoint_from_outside_of_the_group_is_refused(elastic: Group) -> None:
    elastic.publish(1)
    with joined(elastic) as query:
        foreign = {"stream": f"{elastic.stream.name}-g", "created": "x", "sequence": 1, "started": 0}
        with pytest.raises(ConfigError, match="read outside of any group"):
            query.reader.latestOffset(foreign, ReadAllAvailable())


def test_partitions_are_written_as_runs() -> None:
    assert write_partitions([8, 0, 1, 2, 3]) == "0-3,8"
    assert read_partitions("0-3,8") == (0, 1, 2, 3, 8)
    assert (write_partitions([]), read_partitions("")) == ("", ())
