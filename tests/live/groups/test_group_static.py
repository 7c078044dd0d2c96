"""Members of static groups on a real server: a position belongs to the member, and survives changes to its durable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    EventKind,
    GroupMessage,
    MemberMapping,
    MemberOptions,
    MemberState,
    StaticGroups,
    StaticMember,
    describe,
    errors,
    static_consume,
)
from parti.observe import group_metrics as m
from parti.observe.prometheus import PrometheusMetrics
from parti.outcomes import Reject
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.errors import ConsumerNotFound, MessageNotFound, StreamNotFound
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

GROUP = "g"
TEMPLATE = ConsumerTemplate(ack_wait=20)


class Bench:
    """A stream whose subjects begin with the partition, and the members that a test joined."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self.connection = connection
        self.api = JetStreamApi(connection)
        self.groups = StaticGroups(connection)
        self.stream = stream
        self.joined: list[StaticMember] = []

    async def create(self, partitions: int = 4, **membership: Any) -> None:
        subjects = [f"{partition}.{self.stream}.>" for partition in range(8)]
        await self.api.stream_create({"name": self.stream, "subjects": subjects, "storage": "memory"})
        await self.groups.create(self.stream, GROUP, max_members=partitions, **membership)

    async def join(self, member: str, seen: list[GroupMessage], **options: Any) -> StaticMember:
        async def handler(message: GroupMessage) -> None:
            seen.append(message)

        settings = MemberOptions(**{"template": TEMPLATE} | options)
        joined = await static_consume(self.connection, self.stream, GROUP, member, handler, settings)
        self.joined.append(joined)
        return joined

    async def publish(self, count: int, partitions: int = 4, kind: str = "a") -> None:
        for n in range(count):
            await self.api.publish(f"{n % partitions}.{self.stream}.{kind}.{n}", b"%d" % n)


@pytest.fixture
async def bench(server: NatsServer, name: str) -> AsyncIterator[Bench]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        made = Bench(connection, name)
        yield made
        await asyncio.gather(*(member.stop(timeout=2) for member in made.joined))


def sequences(seen: list[GroupMessage]) -> list[int]:
    return [message.sequence for message in seen]


async def got(count: int, *logs: list[GroupMessage]) -> None:
    await eventually(lambda: sum(map(len, logs)) >= count, what=f"{count} messages")
    assert sum(map(len, logs)) == count


async def test_members_share_the_partitions_of_the_filtered_subjects(bench: Bench) -> None:
    await bench.create(2, members=["m1", "m2"], filters=[f"{bench.stream}.a.>", f"{bench.stream}.b.>"])
    for kind in "abc":
        await bench.publish(10, partitions=2, kind=kind)
    one: list[GroupMessage] = []
    two: list[GroupMessage] = []
    first = await bench.join("m1", one)
    await bench.join("m2", two)
    await got(20, one, two)
    assert {(message.number, message.subject.split(".")[1]) for message in one} == {(0, "a"), (0, "b")}
    assert {message.number for message in two} == {1}
    assert one[0].subject == f"{bench.stream}.a.0"
    assert (one[0].sequence, one[0].queue_sequence) == (1, 1)
    assert first.partitions == (0,)


async def test_a_mapped_group_with_two_filters_works(bench: Bench) -> None:
    mappings = [MemberMapping("m1", (1, 0)), MemberMapping("m2", (2, 3))]
    await bench.create(4, mappings=mappings)
    bucket, key = KeyValue(bench.api, "static-consumer-groups"), f"{bench.stream}.{GROUP}"
    raw = (await bucket.get(key)).value  # as the reference writes it; it ignores the filters then
    filters = b'"max_members":4,"filters":["%s.a.>","%s.b.>"]' % ((bench.stream.encode(),) * 2)
    await bucket.put(key, raw.replace(b'"max_members":4', filters))
    with pytest.raises(errors.BadFilter, match="every subject of its partitions"):
        await bench.groups.create(
            bench.stream, "other", max_members=4, mappings=mappings, filters=[f"{bench.stream}.a.>"]
        )
    seen: list[GroupMessage] = []
    await bench.join("m1", seen)
    await bench.publish(8)
    await got(4, seen)
    assert {message.number for message in seen} == {0, 1}


async def test_the_position_survives_leaving_and_coming_back(bench: Bench) -> None:
    await bench.create(members=["m1"])
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen)
    await bench.publish(4)
    await got(4, seen)
    await member.stop()
    await member.stop()  # calling it again is fine
    assert (await bench.api.consumer_info(bench.stream, "g-m1"))["ack_floor"]["stream_seq"] == 4
    await bench.publish(4)
    await bench.join("m1", seen)
    await got(8, seen)
    assert sequences(seen) == list(range(1, 9))


async def test_a_durable_that_somebody_deletes_is_put_back_where_it_was(bench: Bench) -> None:
    await bench.create(members=["m1"])
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen, template=ConsumerTemplate(ack_wait=1))
    await bench.publish(20)
    await got(20, seen)
    await eventually(lambda: member._floor == 20, what="the noted position")
    await bench.api.consumer_delete(bench.stream, "g-m1")
    await bench.publish(4)
    await eventually(lambda: len(seen) >= 24, what="the new messages")
    assert sequences(seen) == list(range(1, 25))
    assert EventKind.CONSUMER_LOST in [event.kind for event in member.events.recent]
    config = (await bench.api.consumer_info(bench.stream, "g-m1"))["config"]
    assert config["deliver_policy"] == "all"  # as another instance would ask for it


@pytest.mark.parametrize("seed", range(12))
async def test_a_deleted_durable_passes_over_nothing_wherever_it_had_started(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    await bench.create(members=["m1"])
    before, during, after, handled = (rng.randrange(6) for _ in range(4))
    await bench.publish(before)
    beginnings: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"new_only": True}, before + 1),
        ({"start_sequence": 3}, 3),
        ({"start_time": datetime.now(UTC)}, before + 1),
        ({"extra": {"deliver_policy": "last"}}, max(1, before)),
    ]
    start, first = beginnings[seed % len(beginnings)]
    begun: list[int] = []
    deleted = asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        begun.append(message.sequence)
        if len(begun) > handled:
            await deleted.wait()

    options = MemberOptions(template=ConsumerTemplate(ack_wait=1, **start))
    for _ in range(rng.choice([1, 2])):
        bench.joined.append(await static_consume(bench.connection, bench.stream, GROUP, "m1", handler, options))
    await bench.publish(during)
    expected = list(range(first, before + during + 1))
    await eventually(lambda: len(begun) >= min(handled + 1, len(expected)), what="the message that waits")
    await bench.api.consumer_delete(bench.stream, "g-m1")
    deleted.set()
    await bench.publish(after)
    expected = list(range(first, before + during + after + 1))
    await eventually(lambda: set(begun) >= set(expected), what=f"{expected} with {start}, of {begun}")
    assert list(dict.fromkeys(begun)) == expected


async def test_a_standby_knows_the_position_that_it_would_put_back(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one: list[GroupMessage] = []
    two: list[GroupMessage] = []
    active = await bench.join("m1", one)
    await bench.publish(2)
    await got(2, one)
    standby = await bench.join("m1", two)
    await bench.publish(20)
    await got(22, one)
    await eventually(lambda: standby._floor == 22, what="the standby's note")
    active._puller.stop()  # as when its process is gone without a word
    active._later(600)
    await bench.api.consumer_delete(bench.stream, "g-m1")
    await bench.publish(4)
    await eventually(lambda: len(two) >= 4, what="the messages at the standby")
    assert sequences(two) == [23, 24, 25, 26]


async def test_a_member_that_slept_while_its_group_was_made_anew_starts_as_the_new_group_does(bench: Bench) -> None:
    await bench.create(members=["m1"])
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen)
    await bench.publish(20)
    await got(20, seen)
    await eventually(lambda: member._floor == 20, what="the noted position")
    bucket, key = KeyValue(bench.api, "static-consumer-groups"), f"{bench.stream}.{GROUP}"
    raw = (await bucket.get(key)).value
    # What a process that stood still sees of a deletion and a creation: another revision, and a durable that is gone.
    await bucket.put(key, raw)
    await bench.api.consumer_delete(bench.stream, "g-m1")
    await eventually(lambda: len(seen) >= 40, what="the replay for the new group")
    assert sequences(seen)[20:] == list(range(1, 21))


async def test_a_durable_of_go_without_acks_is_joined_as_it_is(bench: Bench) -> None:
    """Go leaves out what it does not set; with AckNone the server leaves out `max_ack_pending` and `ack_wait` too."""
    await bench.create(members=["m1"])
    config = TEMPLATE.config(bench.groups.kind, "g-m1", ("0.>", "1.>", "2.>", "3.>"))
    config = {name: value for name, value in config.items() if name not in ("ack_wait", "max_ack_pending")}
    made = await bench.api.consumer_create(bench.stream, config | {"ack_policy": "none"}, action="create")
    assert "max_ack_pending" not in made["config"]
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen)
    await bench.publish(5)
    await got(5, seen)
    await member.stop()


async def test_a_dead_letter_has_a_subject_that_its_stream_takes(bench: Bench) -> None:
    await bench.create(members=["m1"])

    async def refuse(message: GroupMessage) -> Reject:
        return Reject("no good")

    options = MemberOptions(template=TEMPLATE)
    bench.joined.append(await static_consume(bench.connection, bench.stream, GROUP, "m1", refuse, options))
    await bench.publish(1)

    async def letter() -> Any:
        try:
            return await bench.api.msg_get(f"{bench.stream}_DLQ", seq=1)
        except (StreamNotFound, MessageNotFound):
            return None

    found = await eventually(letter, what="the letter")
    assert found.headers["Parti-Subject"] == f"0.{bench.stream}.a.0"
    await bench.api.publish(found.headers["Parti-Subject"], found.data)  # as `parti dlq replay` does


async def test_any_other_field_of_a_consumer_passes_through(bench: Bench) -> None:
    await bench.create(members=["m1"])
    await bench.publish(10)
    extra = {"description": "mine", "metadata": {"team": "a"}, "sample_freq": "50", "max_waiting": 8, "max_batch": 3}
    extra |= {"max_expires": 2_000_000_000, "deliver_policy": "last_per_subject"}
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen, template=ConsumerTemplate(ack_wait=20, extra=extra))
    await got(10, seen)
    config = (await bench.api.consumer_info(bench.stream, "g-m1"))["config"]
    assert {name: config[name] for name in extra if name != "metadata"} == {
        name: value for name, value in extra.items() if name != "metadata"
    }
    assert config["metadata"]["team"] == "a"
    assert EventKind.CONSUMER_LOST not in [event.kind for event in member.events.recent]  # its pulls keep the limits


async def test_a_new_member_may_start_late_in_the_stream(bench: Bench) -> None:
    await bench.create(members=["m1"])
    await bench.publish(10)
    seen: list[GroupMessage] = []
    await bench.join("m1", seen, template=ConsumerTemplate(ack_wait=2, start_sequence=8))
    await got(3, seen)
    assert sequences(seen) == [8, 9, 10]


async def test_joining_is_refused_where_it_cannot_work(bench: Bench) -> None:
    with pytest.raises(StreamNotFound):
        await bench.join("m1", [])
    await bench.create(members=["m1"])
    with pytest.raises(errors.NotListed, match="it has m1"):
        await bench.join("m2", [])
    await bench.api.consumer_create(bench.stream, {"durable_name": "g-m1", "ack_policy": "explicit"})
    with pytest.raises(errors.ForeignConsumer):
        await bench.join("m1", [])
    await bench.api.consumer_delete(bench.stream, "g-m1")
    leftover = TEMPLATE.config(bench.groups.kind, "g-m1", ("7.>",))
    await bench.api.consumer_create(bench.stream, leftover)
    with pytest.raises(errors.ForeignConsumer, match="earlier group"):
        await bench.join("m1", [])


async def test_a_member_beyond_the_number_of_partitions_waits(bench: Bench) -> None:
    await bench.create(1, members=["m1", "m2"])
    member = await bench.join("m2", [])
    assert (member.state, member.partitions) == (MemberState.WAITING, ())


async def test_deleting_the_group_ends_the_members_and_takes_their_durables(bench: Bench) -> None:
    await bench.create(members=["m1"])
    member = await bench.join("m1", [])
    await bench.groups.delete(bench.stream, GROUP)
    await member.wait()
    with pytest.raises(ConsumerNotFound):
        await bench.api.consumer_info(bench.stream, "g-m1")


async def test_a_changed_record_ends_the_member_and_tells_its_position(bench: Bench) -> None:
    await bench.create(members=["m1", "m2"])
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen)
    await bench.publish(4)
    await got(2, seen)
    bucket, key = KeyValue(bench.api, "static-consumer-groups"), f"{bench.stream}.{GROUP}"
    raw = (await bucket.get(key)).value
    revision = await bucket.put(key, raw.replace(b'["m1","m2"]', b'["m2","m1"]'))
    await eventually(lambda: member._revision == revision, what="the reordered record")
    assert member.state is MemberState.ACTIVE  # the same partitions: nothing happened
    await bucket.put(key, raw.replace(b'["m1","m2"]', b'["m1"]'))
    with pytest.raises(errors.GroupChanged, match="up to sequence 2 was done: start_sequence=3"):
        await member.wait()
    with pytest.raises(ConsumerNotFound):  # with its old filters it would keep the new members out (10148)
        await bench.api.consumer_info(bench.stream, "g-m1")


async def test_one_of_two_instances_gets_the_messages_and_a_step_down_changes_which(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one: list[GroupMessage] = []
    two: list[GroupMessage] = []
    template = ConsumerTemplate(ack_wait=30)
    first = await bench.join("m1", one, template=template)
    await bench.publish(4)
    await got(4, one)
    await bench.join("m1", two, template=template)
    await bench.groups.step_down(bench.stream, GROUP, "m1")
    await bench.publish(4)
    await got(4, two)
    info = await bench.groups.member_info(bench.stream, GROUP, "m1")
    assert info.active
    assert info.pinned
    await eventually(lambda: first.state is MemberState.STANDBY, what="the lost pin")


async def test_messages_without_acks_are_handled_once(bench: Bench) -> None:
    await bench.create(members=["m1"])
    await bench.publish(5)
    seen: list[GroupMessage] = []
    await bench.join("m1", seen, template=ConsumerTemplate(ack_policy="none"))
    await got(5, seen)
    assert sequences(seen) == [1, 2, 3, 4, 5]


async def test_events_metrics_and_health_tell_the_same_story(bench: Bench) -> None:
    await bench.create(members=["m1"])
    metrics = PrometheusMetrics()
    told: list[EventKind] = []

    def broken(event: Any) -> None:
        told.append(event.kind)
        raise ValueError("a listener's bug stops nobody")

    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen, metrics=metrics, on_event=broken)
    followed: list[EventKind] = []

    async def follow() -> None:
        followed.extend([event.kind async for event in member.events.follow()])

    following = asyncio.create_task(follow())
    await bench.publish(3)
    await got(3, seen)
    assert member.health_check().probe() is None

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    await eventually(lambda: value(m.MESSAGES.name, outcome="ack") == 3, what="the metric")
    assert (value(m.PINNED.name), value(m.PARTITIONS.name)) == (1, 4)
    await member.stop()
    await following
    assert value(m.PINNED.name) == 0
    assert told == [EventKind.ASSIGNED, EventKind.JOINED, EventKind.PINNED, EventKind.REVOKED, EventKind.STOPPED]
    assert followed[-1] is EventKind.STOPPED
    assert "stopped" in repr(member.events)


async def test_waiting_for_a_member_may_be_cancelled_without_ending_it(bench: Bench) -> None:
    await bench.create(members=["m1"])
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await member.wait()
    await bench.publish(2)
    await got(2, seen)


async def test_it_can_be_used_as_a_context(bench: Bench) -> None:
    await bench.create(members=["m1"])
    async with await bench.join("m1", []) as member:
        states = [member.state]
    states.append(member.state)
    assert states == [MemberState.STANDBY, MemberState.STOPPED]


async def test_lag_is_told_by_partition(bench: Bench) -> None:
    subjects = [f"{partition}.{bench.stream}.>" for partition in range(8)]
    await bench.api.stream_create({"name": bench.stream, "subjects": subjects, "allow_direct": True})
    filters = [f"{bench.stream}.a.>"]
    await bench.groups.create(bench.stream, GROUP, max_members=3, members=["m1", "m2"], filters=filters)
    await bench.publish(6, partitions=3)
    await bench.publish(6, partitions=3, kind="b")
    seen: list[GroupMessage] = []
    await bench.join("m1", seen)
    await got(4, seen)

    async def rows() -> list[Any]:
        return await describe(bench.groups, bench.stream, GROUP)

    async def settled() -> bool:
        return [row.lag for row in await rows()] == [0, 2, 0]

    await eventually(settled, what="the acknowledgements")
    found = await rows()
    assert [(row.partition, row.owner, row.state) for row in found] == [
        (0, "m1", "active"),
        (1, "m2", "absent"),
        (2, "m1", "active"),
    ]
    assert [row.last_seq for row in found] == [4, 5, 6]
    assert found[1].lag_seconds is not None
    assert found[1].lag_seconds > 0
    assert found[0].lag_seconds == 0
    assert (found[0].ack_floor, found[1].ack_floor) == (6, None)


async def test_a_record_with_the_names_of_an_earlier_version_is_followed_and_told(bench: Bench) -> None:
    await bench.create(members=["other"])
    old = b'{"max_members":2,"filter":"%s.a.>","members":["m1"]}' % bench.stream.encode()
    await KeyValue(bench.api, "static-consumer-groups").put(f"{bench.stream}.{GROUP}", old)
    seen: list[GroupMessage] = []
    member = await bench.join("m1", seen)
    (told,) = [event for event in member.events.recent if event.kind is EventKind.OLD_NAMES]
    assert "filter" in told.detail
    await bench.publish(4, partitions=2)
    await bench.publish(4, partitions=2, kind="b")
    await got(4, seen)
