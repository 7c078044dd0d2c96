"""Releasing messages: planned changes, stops, lost pins and freezes, with handlers longer than `ack_wait`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    ElasticMember,
    EventKind,
    GroupKind,
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
from parti.groups.freeze_detector import Frozen
from parti.observe import group_metrics as m
from parti.observe.metric import Metric
from parti.observe.prometheus import PrometheusMetrics
from parti.outcomes import RetryPolicy
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.errors import ConsumerAlreadyExists, StreamNotFound
from parti.wire.options import ConnectOptions

ALL_M1 = [MemberMapping("m1", (0, 1)), MemberMapping("m2", ())]
ALL_M2 = [MemberMapping("m1", ()), MemberMapping("m2", (0, 1))]
BRIEF = ConsumerTemplate(ack_wait=1)
LONG = ConsumerTemplate(ack_wait=60)  # whatever lapses by itself would lapse after the test


class Bench:
    """An elastic group of two partitions, mapped, and a log of what began where."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self.connection, self.stream, self.queue = connection, stream, f"{stream}-g"
        self.api, self.groups = JetStreamApi(connection), ElasticGroups(connection)
        self.begun: list[tuple[str, int]] = []
        self.seen: list[GroupMessage] = []
        self.work: Callable[[GroupMessage], Awaitable[Any]] | None = None
        self.joined: list[ElasticMember] = []
        self.published = 0

    async def create(self, mappings: list[MemberMapping] | None = None) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"], "storage": "memory"})
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.groups.create(self.stream, "g", max_members=2, filters=filters)
        await self.map_to(mappings or ALL_M1)

    async def map_to(self, mappings: list[MemberMapping]) -> None:
        await self.groups.set_mappings(self.stream, "g", mappings)

    async def join(self, member: str, template: ConsumerTemplate = LONG, **options: Any) -> ElasticMember:
        name = f"{member}#{len(self.joined)}"

        async def handler(message: GroupMessage) -> Any:
            self.begun.append((name, message.sequence))
            self.seen.append(message)
            return await self.work(message) if self.work is not None else None

        settings = MemberOptions(template=template, **options)
        joined = await elastic_consume(self.connection, self.stream, "g", member, handler, settings)
        self.joined.append(joined)
        return joined

    async def publish(self, count: int, keys: int = 8) -> None:
        for _ in range(count):
            await self.api.publish(f"{self.stream}.{self.published % keys}", b"%d" % self.published)
            self.published += 1

    async def empty(self) -> None:
        async def done() -> bool:
            return bool((await self.api.stream_info(self.queue))["state"]["messages"] == 0)

        await eventually(done, what="an empty work queue")

    @property
    def sequences(self) -> list[int]:
        return [sequence for _, sequence in self.begun]


class Gate:
    """Work that waits to be let go."""

    def __init__(self) -> None:
        self.begun, self.opened = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    async def __call__(self, message: GroupMessage) -> None:
        self.begun.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture
async def bench(server: NatsServer, name: str) -> AsyncIterator[Bench]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        made = Bench(connection, name)
        yield made
        await asyncio.gather(*(member.stop(timeout=1) for member in made.joined))


def kinds(member: ElasticMember) -> list[EventKind]:
    return [event.kind for event in member.events.recent]


@pytest.mark.slow
async def test_a_planned_change_waits_for_a_handler_longer_than_ack_wait_and_begins_nothing_twice(bench: Bench) -> None:
    await bench.create()
    gate = bench.work = Gate()
    await bench.join("m1", BRIEF)
    second = await bench.join("m2", BRIEF)
    await bench.publish(4)
    await gate.begun.wait()
    created = (await bench.api.consumer_info(bench.queue, "m1"))["created"]
    await bench.map_to(ALL_M2)
    await eventually(lambda: EventKind.BLOCKED in kinds(second), what="the next owner, which waits")
    for _ in range(4):  # much longer than `ack_wait`: consumer, pin and message stay
        await asyncio.sleep(0.8)
        info = await bench.api.consumer_info(bench.queue, "m1")
        assert (info["created"], info["num_ack_pending"]) == (created, 1)
    assert bench.begun == [("m1#0", 1)]
    gate.opened.set()
    await bench.empty()
    assert bench.begun[1:] == [("m2#1", n) for n in (2, 3, 4)]
    assert [message.delivered for message in bench.seen] == [1, 1, 1, 1]


async def test_a_handler_that_outlasts_the_drain_is_cancelled_and_its_message_goes_to_the_next_owner(
    bench: Bench,
) -> None:
    await bench.create()
    gate = bench.work = Gate()
    await bench.join("m1", drain_timeout=0.2)
    await bench.join("m2")
    await bench.publish(2)
    await gate.begun.wait()
    bench.work = None
    await bench.map_to(ALL_M2)
    await bench.empty()
    assert gate.cancelled == 1
    assert bench.begun == [("m1#0", 1), ("m2#1", 1), ("m2#1", 2)]


async def test_a_stop_cancels_what_outlasts_it_and_the_successor_gets_the_message_at_once(bench: Bench) -> None:
    await bench.create()
    gate = bench.work = Gate()
    first = await bench.join("m1")
    await bench.publish(2)
    await gate.begun.wait()
    await bench.join("m1")
    bench.work = None
    await first.stop(timeout=0.2)
    await bench.empty()
    assert gate.cancelled == 1
    assert bench.begun == [("m1#0", 1), ("m1#1", 1), ("m1#1", 2)]


@pytest.mark.slow
async def test_a_stop_keeps_a_message_that_takes_longer_than_ack_wait(bench: Bench) -> None:
    await bench.create()
    gate = bench.work = Gate()
    first = await bench.join("m1", BRIEF)
    await bench.publish(2)
    await gate.begun.wait()
    await bench.join("m1", BRIEF)
    stopping = asyncio.create_task(first.stop(timeout=30))
    await asyncio.sleep(3)
    assert bench.begun == [("m1#0", 1)]
    gate.opened.set()
    await stopping
    await bench.empty()
    assert bench.begun == [("m1#0", 1), ("m1#1", 2)]


async def test_a_stop_is_as_quick_as_it_says_also_while_a_change_waits_for_a_handler(bench: Bench) -> None:
    await bench.create()
    gate = bench.work = Gate()
    first = await bench.join("m1", drain_timeout=300)
    await bench.publish(1)
    await gate.begun.wait()
    await bench.map_to(ALL_M2)
    await eventually(lambda: first.record.mappings == tuple(ALL_M2), what="the change")
    async with asyncio.timeout(20):
        await first.stop(timeout=0.2)
    assert gate.cancelled == 1


async def test_after_a_lost_pin_a_handler_has_the_same_limit(bench: Bench) -> None:
    """The next instance waits for what the last one has in hand, and must not wait for ever."""
    await bench.create()
    gate = Gate()

    async def hang(message: GroupMessage) -> None:
        if message.sequence == 1 and not gate.begun.is_set():
            await gate(message)

    bench.work = hang
    lanes: dict[str, Any] = {
        "template": ConsumerTemplate(ack_wait=3, max_ack_pending=10),
        "handlers": HandlerOptions(order=Order.KEY),
    }
    first = await bench.join("m1", **lanes, drain_timeout=0.2)
    await bench.publish(8)
    await eventually(lambda: len(bench.begun) == 8, what="the first messages")
    await bench.join("m1", **lanes)
    await bench.groups.step_down(bench.stream, "g", "m1")
    await bench.publish(16)
    await bench.empty()
    assert gate.cancelled == 1
    assert [sequence for name, sequence in bench.begun if name == "m1#1"][:1] == [1]  # before what is behind it
    assert sorted(set(bench.sequences)) == list(range(1, 25))
    assert first.state is MemberState.STANDBY


async def test_a_member_that_stood_still_and_is_still_pinned_goes_on_with_what_it_has_in_hand(bench: Bench) -> None:
    await bench.create()
    gate = bench.work = Gate()
    lanes = ConsumerTemplate(ack_wait=60, max_ack_pending=100)
    member = await bench.join("m1", lanes, handlers=HandlerOptions(order=Order.KEY))
    await bench.publish(80)
    await eventually(
        lambda: member.in_flight == 80 and len(bench.begun) == 8, what="all in hand, one of each key begun"
    )
    member._thaw(Frozen("as after SIGCONT"))
    await eventually(lambda: kinds(member).count(EventKind.JOINED) == 2, what="the new pull")
    await eventually(lambda: member.state is MemberState.ACTIVE, what="the same pin")
    gate.opened.set()
    await bench.empty()
    assert sorted(bench.sequences) == list(range(1, 81))
    assert {message.delivered for message in bench.seen} == {1}  # nobody had to wait for a redelivery
    for key in range(8):
        mine = [sequence for sequence in bench.sequences if (sequence - 1) % 8 == key]
        assert mine == sorted(mine)


async def test_a_member_that_stood_still_and_lost_its_pin_says_nothing_about_what_it_had_in_hand(bench: Bench) -> None:
    """A NAK counts by sequence: the server would deliver again what the next instance has in hand by then."""
    await bench.create()
    gate = bench.work = Gate()
    lanes = ConsumerTemplate(ack_wait=60, max_ack_pending=100)
    member = await bench.join("m1", lanes, handlers=HandlerOptions(order=Order.KEY))
    await bench.publish(40)
    await eventually(
        lambda: member.in_flight == 40 and len(bench.begun) == 8, what="all in hand, one of each key begun"
    )
    member._puller.stop()
    await bench.groups.step_down(bench.stream, "g", "m1")
    member._thaw(Frozen("as after SIGCONT"))
    await eventually(lambda: kinds(member).count(EventKind.JOINED) == 2, what="the new pull")
    await eventually(lambda: member.in_flight == 8, what="the end of what was not begun")
    info = await bench.api.consumer_info(bench.queue, "m1")
    assert (info["num_redelivered"], info["num_ack_pending"]) == (0, 40)
    assert all(message.doubtful for message in member._in_flight.in_hand.values())
    gate.opened.set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_an_ack_to_a_consumer_that_was_replaced_fails_soon_and_the_message_is_no_dead_letter(
    bench: Bench, seed: int
) -> None:
    """As an instance of the reference does it 0.4 s after a change; an older message then takes the only place.

    When the member had just created the deleted consumer again and then drained, the ack waited for `ack_wait`.
    """
    rng = random.Random(seed)
    await bench.create([MemberMapping("m1", (0,)), MemberMapping("m2", (1,))])
    record = (await bench.groups.get(bench.stream, "g")).record
    subjects = {predict(record, f"{bench.stream}.{n}"): f"{bench.stream}.{n}" for n in range(20)}
    await bench.api.publish(subjects[1], b"older")
    await bench.api.publish(subjects[0], b"newer")
    gate, failed = Gate(), asyncio.Event()

    async def acking(message: GroupMessage) -> None:
        await gate(message)
        try:
            await message.double_ack()
        except errors.OwnershipLost:
            failed.set()
            raise

    bench.work = acking
    await bench.join("m1")
    await gate.begun.wait()
    changing = asyncio.create_task(bench.map_to(ALL_M1))
    await asyncio.sleep(rng.uniform(0, 0.004))
    both = LONG.config(GroupKind.ELASTIC, "m1", (f"0.{bench.stream}.*", f"1.{bench.stream}.*"))

    async def replaced() -> bool:
        """Our member may create it first when it notices the deletion."""
        await bench.api.consumer_delete(bench.queue, "m1")
        try:
            await bench.api.consumer_create(bench.queue, both | {"filter_subjects": ["0.>", "1.>"]}, action="create")
        except ConsumerAlreadyExists:
            return False
        return True

    await asyncio.sleep(rng.choice([0, 0.002, 0.005, 0.02]))
    await eventually(replaced, 60, "the consumer is another instance's")
    await changing
    async with asyncio.timeout(20):  # `ack_wait` is 60 s
        gate.opened.set()
        await failed.wait()
        await bench.empty()
    assert bench.sequences == [2, 1, 2]
    with pytest.raises(StreamNotFound):
        await bench.api.stream_info(f"{bench.stream}_DLQ")


async def test_a_message_is_tried_until_it_succeeds_and_nothing_passes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.create()
    monkeypatch.setattr("parti.groups.in_flight._STUCK_AFTER", 0.0)
    fails = 8

    async def failing(message: GroupMessage) -> None:
        nonlocal fails
        if message.sequence == 1 and fails:
            fails -= 1
            raise BaseException("not even an Exception") if fails % 2 else ValueError("not yet")

    bench.work = failing
    default = HandlerOptions().retry
    handlers = HandlerOptions(retry=RetryPolicy(max_deliver=default.max_deliver, delays=(0.02,)))
    member = await bench.join("m1", handlers=handlers)
    await bench.publish(3)
    await eventually(lambda: fails < 6, what="some attempts")
    told = member.health_check().probe()
    assert told is None or (isinstance(told, str) and "message 1 fails" in told)
    await bench.empty()
    assert bench.sequences == [1] * 9 + [2, 3]
    assert member.health_check().probe() is None


async def test_a_plain_handler_may_acknowledge_from_its_thread(bench: Bench) -> None:
    await bench.create()
    seen: list[int] = []

    def plain(message: GroupMessage) -> None:
        message.in_progress()
        message.ack()
        seen.append(message.sequence)

    member = await elastic_consume(bench.connection, bench.stream, "g", "m1", plain, MemberOptions(template=LONG))
    bench.joined.append(member)
    await bench.publish(50)
    await bench.empty()
    await eventually(lambda: seen == list(range(1, 51)), what="all messages, once")
    assert member.in_flight == 0


async def test_gauges_of_several_members_of_one_process_add_up(bench: Bench) -> None:
    await bench.create([MemberMapping("m1", (0,)), MemberMapping("m2", (1,))])
    metrics = PrometheusMetrics()
    first = await bench.join("m1", metrics=metrics)
    second = await bench.join("m2", metrics=metrics)

    def value(metric: Metric) -> float | None:
        return metrics.registry.get_sample_value(metric.name)

    assert value(m.PARTITIONS) == 2
    await bench.publish(16)
    await eventually(lambda: value(m.PINNED) == 2, what="both pins")
    await first.stop()
    assert (value(m.PARTITIONS), value(m.PINNED)) == (1, 1)
    await second.stop()
    assert (value(m.PARTITIONS), value(m.PINNED)) == (0, 0)
