"""Members of elastic groups on a real server: every weakness of the reference is absent.

See docs/evidence/groups.md#g12.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    ElasticMember,
    EventKind,
    GroupMessage,
    HandlerOptions,
    MemberMapping,
    MemberOptions,
    MemberState,
    Order,
    PartitioningFilter,
    elastic_consume,
    errors,
    predict,
)
from parti.outcomes import Ack, Reject, Retry, RetryPolicy
from parti.testing import FaultProxy, NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.errors import ApiError, ConsumerNotFound
from parti.wire.kv import KeyValue
from parti.wire.live import ReaderBroke
from parti.wire.options import ConnectOptions

GROUP = "g"
TEMPLATE = ConsumerTemplate(ack_wait=20)


class Log:
    """A handler that remembers; each instance of a member gets one."""

    def __init__(self) -> None:
        self.seen: list[GroupMessage] = []
        self.act: Callable[[GroupMessage], Awaitable[Any]] | None = None

    async def __call__(self, message: GroupMessage) -> Any:
        result = await self.act(message) if self.act is not None else None
        self.seen.append(message)
        return result

    @property
    def sequences(self) -> list[int]:
        return [message.sequence for message in self.seen]


class Bench:
    """A stream with an elastic group, and the members that a test joined; all are stopped at its end."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self.connection = connection
        self.api = JetStreamApi(connection)
        self.groups = ElasticGroups(connection)
        self.stream = stream
        self.queue = f"{stream}-{GROUP}"
        self.joined: list[ElasticMember] = []
        self.published = 0

    async def create(self, partitions: int = 4, members: list[str] | None = None) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"], "storage": "memory"})
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.groups.create(self.stream, GROUP, max_members=partitions, filters=filters)
        if members:
            await self.groups.add_members(self.stream, GROUP, members)

    async def join(self, member: str, log: Log, template: ConsumerTemplate = TEMPLATE, **options: Any) -> ElasticMember:
        settings = MemberOptions(template=template, **options)
        joined = await elastic_consume(self.connection, self.stream, GROUP, member, log, settings)
        self.joined.append(joined)
        return joined

    async def publish(self, count: int, keys: int = 8) -> None:
        for _ in range(count):
            await self.api.publish(f"{self.stream}.{self.published % keys}", b"%d" % self.published)
            self.published += 1

    async def created(self, member: str) -> str:
        return str((await self.api.consumer_info(self.queue, member))["created"])


@pytest.fixture
async def bench(server: NatsServer, name: str) -> AsyncIterator[Bench]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        made = Bench(connection, name)
        yield made
        await asyncio.gather(*(member.stop(timeout=2) for member in made.joined))


def kinds(member: ElasticMember) -> list[EventKind]:
    return [event.kind for event in member.events.recent]


async def got(count: int, *logs: Log) -> None:
    await eventually(lambda: sum(len(log.seen) for log in logs) >= count, what=f"{count} messages")
    assert sum(len(log.seen) for log in logs) == count


async def test_a_message_comes_without_its_partition_and_with_its_first_place_in_the_stream(bench: Bench) -> None:
    await bench.create(members=["m1"])
    log = Log()
    await bench.publish(3)
    member = await bench.join("m1", log)
    await got(3, log)
    record = member.record
    for place, message in enumerate(log.seen, start=1):
        assert message.subject == f"{bench.stream}.{place - 1}"
        assert (message.sequence, message.data) == (place, b"%d" % (place - 1))
        assert message.queue_subject == f"{message.number}.{message.subject}"
        assert message.number == predict(record, message.subject)
        assert message.lease.epoch > 1_700_000_000_000_000_000
        assert "Nats-Stream-Source" in message.headers
    assert (member.state, member.partitions, member.in_flight) == (MemberState.ACTIVE, (0, 1, 2, 3), 0)
    assert f"{bench.stream}/g/m1 active" in repr(member)
    assert (await bench.api.stream_info(bench.queue))["state"]["messages"] == 0


async def test_members_share_the_partitions_and_a_membership_change_repeats_and_loses_nothing(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = Log(), Log()
    first = await bench.join("m1", one)
    second = await bench.join("m2", two)
    assert second.state is MemberState.WAITING
    await bench.publish(20)
    await got(20, one)
    await bench.groups.add_members(bench.stream, GROUP, ["m2"])
    publishing = asyncio.create_task(bench.publish(40))
    await eventually(lambda: second.partitions == (2, 3), what="the share of m2")
    await publishing
    await got(60, one, two)
    assert {m.number for m in two.seen} <= {2, 3}
    assert first.partitions == (0, 1)
    await bench.groups.drop_members(bench.stream, GROUP, ["m1"])
    await eventually(lambda: second.partitions == (0, 1, 2, 3) and first.state is MemberState.WAITING, what="the drop")
    await bench.publish(20)
    await got(80, one, two)
    assert EventKind.REVOKED in kinds(first)
    assert len(set(one.sequences + two.sequences)) == 80


async def test_a_member_whose_consumer_is_deleted_makes_it_anew_and_goes_on(bench: Bench) -> None:
    await bench.create(members=["m1"])
    log = Log()
    member = await bench.join("m1", log)
    await bench.publish(5)
    await got(5, log)
    await bench.api.consumer_delete(bench.queue, "m1")
    await bench.publish(5)
    await got(10, log)
    assert EventKind.CONSUMER_LOST in kinds(member)
    assert member.state is MemberState.ACTIVE


async def test_a_message_whose_consumer_goes_while_its_handler_runs_is_not_handled_twice(bench: Bench) -> None:
    await bench.create(members=["m1"])
    log, may_end, started = Log(), asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        started.set()
        await may_end.wait()

    log.act = slow
    member = await bench.join("m1", log)
    await bench.publish(1)
    await started.wait()
    await bench.api.consumer_delete(bench.queue, "m1")
    await eventually(lambda: kinds(member).count(EventKind.JOINED) == 2, what="the new consumer")
    may_end.set()

    async def empty() -> bool:
        return bool((await bench.api.stream_info(bench.queue))["state"]["messages"] == 0)

    await eventually(empty, what="the acknowledgement")
    await bench.publish(1)
    await got(2, log)


@pytest.mark.slow
async def test_a_handler_longer_than_ack_wait_keeps_its_pin_and_its_message(bench: Bench) -> None:
    await bench.create(members=["m1"])
    template = ConsumerTemplate(ack_wait=1)
    one, two = Log(), Log()

    async def slow(message: GroupMessage) -> None:
        await asyncio.sleep(2.5)

    one.act = slow
    first = await bench.join("m1", one, template)
    await bench.publish(1)
    await eventually(lambda: first.state is MemberState.ACTIVE, what="the pin")
    await bench.join("m1", two, template)
    await bench.publish(1)
    await got(2, one)
    assert [message.delivered for message in one.seen] == [1, 1]
    assert two.seen == []
    assert EventKind.UNPINNED not in kinds(first)


async def test_leaving_finishes_the_message_in_hand_and_the_successor_starts_at_once(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = Log(), Log()
    started, leaving = asyncio.Event(), asyncio.Event()

    async def working(message: GroupMessage) -> None:
        started.set()
        await leaving.wait()
        await asyncio.sleep(0.2)

    one.act = working
    template = ConsumerTemplate(ack_wait=30)  # whatever lapses by itself would lapse after the test
    first = await bench.join("m1", one, template)
    await bench.publish(6)
    await started.wait()
    second = await bench.join("m1", two, template)
    stopping = asyncio.create_task(first.stop())
    asyncio.get_running_loop().call_later(0.05, leaving.set)
    await stopping
    assert first.state is MemberState.STOPPED
    assert one.sequences == [1]
    await got(6, one, two)
    assert two.sequences == [2, 3, 4, 5, 6]
    assert [message.delivered for message in two.seen] == [1] * 5
    await second.stop()
    with pytest.raises(ConsumerNotFound):
        await bench.api.consumer_info(bench.queue, "m1")


async def test_draining_takes_nothing_more_and_hands_the_pin_over(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = Log(), Log()
    first = await bench.join("m1", one, ConsumerTemplate(ack_wait=30))
    await bench.publish(2)
    await got(2, one)
    assert await first.drain()
    assert first.state is MemberState.DRAINING
    await bench.join("m1", two, ConsumerTemplate(ack_wait=30))
    await bench.publish(2)
    await got(2, two)


async def test_a_change_that_leaves_a_members_partitions_alone_leaves_its_consumer_alone(bench: Bench) -> None:
    await bench.create(partitions=4)
    before = [MemberMapping("m1", (0, 1)), MemberMapping("m2", (2, 3))]
    await bench.groups.set_mappings(bench.stream, GROUP, before)
    one, two, three = Log(), Log(), Log()
    first = await bench.join("m1", one)
    second = await bench.join("m2", two)
    third = await bench.join("m3", three)
    created = await bench.created("m1")
    after = [MemberMapping("m1", (0, 1)), MemberMapping("m2", (2,)), MemberMapping("m3", (3,))]
    await bench.groups.set_mappings(bench.stream, GROUP, after)
    await eventually(lambda: third.partitions == (3,) and second.partitions == (2,), what="the change")
    assert await bench.created("m1") == created
    assert kinds(first).count(EventKind.JOINED) == 1


async def test_rewriting_the_record_without_changing_what_it_means_disturbs_nobody(bench: Bench) -> None:
    await bench.create(members=["m1", "m2"])
    log = Log()
    member = await bench.join("m1", log)
    created = await bench.created("m1")
    bucket = KeyValue(bench.api, "elastic-consumer-groups")
    key = f"{bench.stream}.{GROUP}"
    raw = (await bucket.get(key)).value
    await bucket.put(key, raw.replace(b'["m1","m2"]', b'["m2","m1","m1"]'))
    await bucket.put(key, raw[:-1] + b',"unknown":1}')
    await bench.publish(4, keys=40)
    await eventually(lambda: member._revision > 0 and member.record.members == ("m1", "m2"), what="the last record")
    assert await bench.created("m1") == created
    assert member.state in (MemberState.STANDBY, MemberState.ACTIVE)


async def test_null_filters_rewritten_as_an_empty_list_end_nobody(bench: Bench) -> None:
    await bench.api.stream_create({"name": bench.stream, "subjects": [f"{bench.stream}.*"], "storage": "memory"})
    await bench.groups.create(bench.stream, GROUP, max_members=2)
    await bench.groups.add_members(bench.stream, GROUP, ["m1"])
    log = Log()
    member = await bench.join("m1", log)
    bucket, key = KeyValue(bench.api, "elastic-consumer-groups"), f"{bench.stream}.{GROUP}"
    raw = (await bucket.get(key)).value
    revision = await bucket.put(key, raw.replace(b"null", b"[]"))
    await eventually(lambda: member._revision == revision, what="the rewritten record")
    await bench.publish(2)
    await got(2, log)


async def test_an_unreadable_record_is_told_and_the_last_good_one_stays_in_force(bench: Bench) -> None:
    await bench.create(members=["m1"])
    log = Log()
    member = await bench.join("m1", log)
    bucket, key = KeyValue(bench.api, "elastic-consumer-groups"), f"{bench.stream}.{GROUP}"
    good = (await bucket.get(key)).value
    for told, bad in enumerate((b"{oops", b'{"max_members":0,"partitioning_filters":null}'), start=1):
        await bucket.put(key, bad)  # one after the other: a bucket keeps only the newest value of a key
        await eventually(
            partial(lambda count: kinds(member).count(EventKind.RECORD_INVALID) == count, told), what="the event"
        )
    await bench.publish(2)
    await got(2, log)
    await bucket.put(key, good)
    await bench.publish(2)
    await got(4, log)


async def test_changing_what_may_never_change_ends_the_member_with_a_typed_error(bench: Bench) -> None:
    await bench.create(members=["m1"])
    member = await bench.join("m1", Log())
    bucket, key = KeyValue(bench.api, "elastic-consumer-groups"), f"{bench.stream}.{GROUP}"
    await bucket.put(key, (await bucket.get(key)).value.replace(b'"max_members":4', b'"max_members":5'))
    with pytest.raises(errors.GroupChanged):
        await member.wait()
    assert member.state is MemberState.FAILED
    assert member.health_check().probe() is not None


async def test_deleting_the_group_ends_its_members_without_an_error(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = await bench.join("m1", Log()), await bench.join("m9", Log())
    await bench.groups.delete(bench.stream, GROUP)
    await one.wait()
    await two.wait()
    assert (one.state, two.state) == (MemberState.STOPPED, MemberState.STOPPED)
    assert EventKind.GROUP_DELETED in kinds(one)


async def test_joining_what_does_not_exist_or_cannot_work_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(errors.GroupNotFound):
        await bench.join("m1", Log())
    await bench.create(members=["m1"])
    with pytest.raises(errors.BadTemplate):
        await bench.join("m1", Log(), ConsumerTemplate(ack_policy="none"))
    with pytest.raises(errors.BadName):
        await bench.join("m 1", Log())
    await bench.api.stream_delete(bench.queue)
    with pytest.raises(errors.WorkQueueMissing, match="create the group again"):
        await bench.join("m1", Log())


async def test_stepping_down_hands_over_to_the_standby_and_back_without_repeating_anything(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = Log(), Log()
    template = ConsumerTemplate(ack_wait=30)
    first = await bench.join("m1", one, template)
    await bench.publish(4)
    await got(4, one)
    second = await bench.join("m1", two, template)
    await bench.groups.step_down(bench.stream, GROUP, "m1")
    await bench.publish(4)
    await got(4, two)
    await eventually(lambda: first.state is MemberState.STANDBY, what="the lost pin")
    await bench.groups.step_down(bench.stream, GROUP, "m1")
    await bench.publish(4)
    await got(8, one)
    await eventually(lambda: second.state is MemberState.STANDBY, what="the lost pin")
    assert sorted(one.sequences + two.sequences) == list(range(1, 13))
    epochs = [message.lease.epoch for message in (one.seen[0], two.seen[0], one.seen[-1])]
    assert epochs == sorted(set(epochs))


async def test_an_instance_with_another_template_follows_the_consumer_that_is_there(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = Log(), Log()
    await bench.join("m1", one, ConsumerTemplate(ack_wait=30))
    created = await bench.created("m1")
    second = await bench.join("m1", two, ConsumerTemplate(ack_wait=7, max_ack_pending=3))
    assert EventKind.TEMPLATE_DIFFERS in kinds(second)
    assert await bench.created("m1") == created
    await bench.publish(3)
    await got(3, one, two)


async def test_somebody_elses_consumer_under_the_members_name_is_refused(bench: Bench) -> None:
    await bench.create(members=["m1"])
    await bench.api.consumer_create(bench.queue, {"name": "m1", "ack_policy": "explicit", "filter_subject": "0.>"})
    with pytest.raises(errors.ForeignConsumer):
        await bench.join("m1", Log())


async def test_a_retried_message_stays_in_front_and_a_rejected_one_rests_with_its_first_sequence(bench: Bench) -> None:
    await bench.create(members=["m1"])
    log = Log()
    attempts: dict[bytes, int] = defaultdict(int)

    async def picky(message: GroupMessage) -> Any:
        attempts[message.data] += 1
        if message.data == b"1" and attempts[b"1"] < 3:
            return Retry(after=0.05, error="not yet")
        if message.data == b"2":
            raise ValueError("never")
        return Reject("no good") if message.data == b"3" else Ack()

    log.act = picky
    await bench.publish(2)
    handlers = HandlerOptions(retry=RetryPolicy(max_deliver=3, delays=(0.01,)))
    await bench.join("m1", log, handlers=handlers)
    await bench.publish(4)
    await eventually(lambda: 6 in log.sequences, what="the last message")
    assert [m.sequence for m in log.seen if m.data not in (b"2",)] == [1, 2, 2, 2, 4, 5, 6]
    assert (attempts[b"1"], attempts[b"2"]) == (3, 3)
    letters = [await bench.api.msg_get(f"{bench.stream}_DLQ", seq=n) for n in (1, 2)]
    assert [(letter.data, letter.headers["Parti-Sequence"], letter.headers["Parti-Reason"]) for letter in letters] == [
        (b"2", "3", "max_deliver"),
        (b"3", "4", "rejected"),
    ]
    assert letters[0].headers["Parti-Subject"] == f"{bench.stream}.2"
    assert "never" in letters[0].headers["Parti-Error"]
    assert (await bench.api.stream_info(bench.queue))["state"]["messages"] == 0


@pytest.mark.parametrize("order", [Order.KEY, Order.PARTITION])
async def test_lanes_work_side_by_side_and_keep_the_order_of_each_key(bench: Bench, order: Order) -> None:
    await bench.create(members=["m1"])
    log = Log()
    running: set[str] = set()
    most = 0

    async def slow(message: GroupMessage) -> None:
        nonlocal most
        assert message.key not in running
        running.add(message.key)
        most = max(most, len(running))
        await asyncio.sleep(0.005)
        running.discard(message.key)

    log.act = slow
    await bench.publish(80)
    template = ConsumerTemplate(ack_wait=20, max_ack_pending=100)
    await bench.join("m1", log, template, handlers=HandlerOptions(order=order))
    await got(80, log)
    assert most > 1
    for key in {message.subject for message in log.seen}:
        of_key = [message.sequence for message in log.seen if message.subject == key]
        assert of_key == sorted(of_key)


async def test_in_lanes_the_order_of_each_key_survives_a_step_down(bench: Bench) -> None:
    await bench.create(members=["m1"])
    both: list[tuple[str, int]] = []

    async def note(message: GroupMessage) -> None:
        await asyncio.sleep(0.002)
        both.append((message.subject, message.sequence))

    template = ConsumerTemplate(ack_wait=20, max_ack_pending=50)
    handlers = HandlerOptions(order=Order.KEY)
    one, two = Log(), Log()
    one.act = two.act = note
    await bench.join("m1", one, template, handlers=handlers)
    await bench.join("m1", two, template, handlers=handlers)
    total = 0
    while total < 400 or not (one.seen and two.seen):  # who is next the server decides, and it may be the same again
        publishing = asyncio.create_task(bench.publish(100))
        total += 100
        await eventually(partial(lambda least: len(set(both)) >= least, total - 50), what="progress")
        await bench.groups.step_down(bench.stream, GROUP, "m1")
        await publishing
    await eventually(partial(lambda all_of: len(set(both)) == all_of, total), what="all messages")
    for key in {subject for subject, _ in both}:
        firsts = list(dict.fromkeys(sequence for subject, sequence in both if subject == key))
        assert firsts == sorted(firsts)


async def test_a_handler_may_acknowledge_by_itself(bench: Bench) -> None:
    await bench.create(members=["m1"])
    log = Log()

    async def own(message: GroupMessage) -> Any:
        message.in_progress()
        if message.sequence % 2:
            message.ack()
        else:
            await message.double_ack()
        return Retry(error="has no meaning any more")

    log.act = own
    await bench.join("m1", log)
    await bench.publish(6)
    await got(6, log)
    assert (await bench.api.stream_info(bench.queue))["state"]["messages"] == 0


async def test_it_goes_on_after_a_restart_of_the_server(own_server: NatsServer) -> None:
    async with await connect(ConnectOptions(servers=(own_server.url,))) as connection:
        bench = Bench(connection, "orders")
        await bench.api.stream_create({"name": "orders", "subjects": ["orders.*"]})
        await bench.groups.create("orders", GROUP, max_members=2)
        await bench.groups.add_members("orders", GROUP, ["m1"])
        log = Log()
        member = await bench.join("m1", log)
        await bench.publish(3)
        await got(3, log)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.restart)
        await eventually(lambda: connection.is_connected, what="the connection")
        await bench.publish(3)
        await eventually(lambda: len(set(log.sequences)) == 6, timeout=60, what="the messages after the restart")
        assert member.state is MemberState.ACTIVE
        await member.stop()


async def test_a_consumer_whose_folder_the_server_lost_is_joined_as_it_is(own_server: NatsServer) -> None:
    """Two instances that make a consumer while it is deleted can leave one like this; every create then fails (500)."""
    async with await connect(ConnectOptions(servers=(own_server.url,))) as connection:
        bench = Bench(connection, "orders")
        await bench.api.stream_create({"name": "orders", "subjects": ["orders.*"]})
        await bench.groups.create("orders", GROUP, max_members=2)
        await bench.groups.add_members("orders", GROUP, ["m1"])
        first, second = Log(), Log()
        one = await bench.join("m1", first)
        await bench.publish(3)
        await got(3, first)
        (folder,) = own_server.store_dir.glob(f"jetstream/*/streams/{bench.queue}/obs/m1")
        shutil.rmtree(folder)
        config = (await bench.api.consumer_info(bench.queue, "m1"))["config"]
        with pytest.raises(ApiError, match="no such file"):
            await bench.api.consumer_create(bench.queue, config, action="create")
        two = await bench.join("m1", second)
        assert two.state is MemberState.STANDBY
        await one.stop()
        await bench.publish(3)
        await got(3, second)
        await two.stop()


async def test_nothing_of_a_member_is_left_behind_when_it_has_ended(own_server: NatsServer) -> None:
    async with await connect(ConnectOptions(servers=(own_server.url,))) as connection:
        bench = Bench(connection, "orders")
        await bench.create(members=["m1"])
        before = asyncio.all_tasks()
        for _ in range(3):
            member = await bench.join("m1", Log())
            await bench.publish(1)
            await member.stop()
        for stream in ("KV_elastic-consumer-groups", bench.queue):
            assert (await bench.api.stream_info(stream))["state"]["consumer_count"] == 0
        await eventually(lambda: asyncio.all_tasks() <= before, what="the end of all tasks")


async def test_a_bug_where_messages_are_read_ends_the_member_and_the_standby_goes_on(bench: Bench) -> None:
    await bench.create(members=["m1"])
    one, two = Log(), Log()
    sick = await bench.join("m1", one, template=ConsumerTemplate(ack_wait=1))
    await bench.publish(2)
    await eventually(lambda: len(one.seen) == 2, what="the first messages")
    await bench.join("m1", two, template=ConsumerTemplate(ack_wait=1))

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    live: Any = sick._puller._live
    live._dispatch = bug
    await bench.publish(4)
    with pytest.raises(ReaderBroke, match="a bug of ours"):
        await sick.wait()
    await eventually(lambda: len(two.seen) == 4, what="the rest at the standby")


async def test_stopping_does_not_hang_on_a_server_that_is_gone(own_server: NatsServer) -> None:
    async with await connect(ConnectOptions(servers=(own_server.url,), request_timeout=1)) as connection:
        bench = Bench(connection, "orders")
        await bench.create(members=["m1"])
        log = Log()
        member = await bench.join("m1", log)
        await bench.publish(1)
        await got(1, log)
        await asyncio.to_thread(own_server.kill)
        async with asyncio.timeout(60):
            await member.stop(timeout=1)
        assert member.state is MemberState.STOPPED


async def test_a_cut_connection_costs_neither_the_pin_nor_a_message(server: NatsServer, name: str) -> None:
    with FaultProxy(server.url) as proxy:
        async with await connect(ConnectOptions(servers=(proxy.url,))) as connection:
            bench = Bench(connection, name)
            await bench.create(members=["m1"])
            log = Log()
            # A pin that was lost would come back after this time only, when the test is long over.
            member = await bench.join("m1", log, ConsumerTemplate(ack_wait=60))
            await bench.publish(2)
            await got(2, log)
            proxy.cut()
            await eventually(lambda: kinds(member).count(EventKind.JOINED) == 2, what="the new connection")
            await eventually(lambda: connection.is_connected, what="the other connection")
            await bench.publish(2)
            await got(4, log)
            assert len({message.lease.epoch for message in log.seen}) == 1
            await member.stop()
