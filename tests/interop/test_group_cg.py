"""The reference's own `cg` and parti as instances of *one* member, and as members side by side.

Each test is a situation in which one side once harmed the other. `PARTI_CG` names the binary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    EventKind,
    GroupConsumer,
    GroupMessage,
    MemberMapping,
    MemberOptions,
    MemberState,
    PartitioningFilter,
    StaticGroups,
    elastic_consume,
    static_consume,
)
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import ConsumerNotFound
from parti.wire.kv import KeyValue
from parti_lab.prove.group_go import GoInstance, find_cg

CG = find_cg()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CG is None, reason="no binary of the reference at PARTI_CG"),
]
TEMPLATE = ConsumerTemplate(ack_wait=2)  # what `cg` uses: the same consumer, to the last field
MAPPED = [MemberMapping("m", (0, 1)), MemberMapping("n", (2, 3))]
MOVED = [MemberMapping("m", (0,)), MemberMapping("n", (1, 2, 3))]


class Bench:
    """A stream with a group of one kind, and the instances that a test started; all are ended with it."""

    def __init__(self, connection: Connection, url: str, stream: str) -> None:
        self.connection, self.url, self.stream = connection, url, stream
        self.api = JetStreamApi(connection)
        self.elastic, self.static = ElasticGroups(connection), StaticGroups(connection)
        self.joined: list[GroupConsumer[Any]] = []
        self.going: list[GoInstance] = []
        self.published = 0
        self.starts: list[int] = []
        """Queue sequences that our handlers began."""
        self.work: Callable[[], Any] = lambda: asyncio.sleep(0)

    async def create_elastic(self, mappings: list[MemberMapping]) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"]})
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.elastic.create(self.stream, "g", max_members=4, filters=filters)
        await self.elastic.set_mappings(self.stream, "g", mappings)

    async def create_static(self) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{n}.{self.stream}.*" for n in range(4)]})
        await self.static.create(self.stream, "g", max_members=4, members=["m"])

    async def join(self, member: str = "m", *, static: bool = False, **options: Any) -> GroupConsumer[Any]:
        async def handler(message: GroupMessage) -> None:
            self.starts.append(message.queue_sequence)
            await self.work()

        settings = MemberOptions(template=TEMPLATE, **options)
        consume: Any = static_consume if static else elastic_consume
        joined: GroupConsumer[Any] = await consume(self.connection, self.stream, "g", member, handler, settings)
        self.joined.append(joined)
        return joined

    def go(self, member: str = "m", *, kind: str = "elastic", sleep: float = 0.002) -> GoInstance:
        assert CG is not None
        made = GoInstance(CG, self.url, kind, (self.stream, "g", member), sleep=sleep)
        self.going.append(made)
        return made

    async def publish(self, count: int, *, partitioned: bool = False) -> None:
        for _ in range(count):
            prefix = f"{self.published % 4}." if partitioned else ""
            await self.api.publish(f"{prefix}{self.stream}.{self.published}", b"")
            self.published += 1

    async def waiting(self, count: int, consumer: str = "m", stream: str = "") -> None:
        """So many pulls wait at the member's consumer."""

        async def there() -> bool:
            try:
                info = await self.api.consumer_info(stream or f"{self.stream}-g", consumer)
            except ConsumerNotFound:
                return False
            return bool(info["num_waiting"] >= count)

        await eventually(there, timeout=60, what=f"{count} waiting pulls")

    async def drained(self) -> None:
        async def empty() -> bool:
            state = (await self.api.stream_info(f"{self.stream}-g"))["state"]
            return bool(state["messages"] == 0 and state["last_seq"] >= self.published)

        await eventually(empty, timeout=90, what="an empty work queue")


@pytest.fixture
async def bench(connection: Connection, server: NatsServer, name: str) -> AsyncIterator[Bench]:
    made = Bench(connection, server.url, name)
    yield made
    await asyncio.gather(*(member.stop(timeout=2) for member in made.joined))
    for go in made.going:
        await asyncio.to_thread(go.end)


@pytest.mark.parametrize("sleep", [0.3, 3.0])
async def test_a_standby_that_stops_leaves_the_active_go_instance_alone(bench: Bench, sleep: float) -> None:
    """The reference has no pull open while its handler runs, and never makes a deleted consumer anew."""
    await bench.create_elastic([MemberMapping("m", (0, 1, 2, 3))])
    go = bench.go(sleep=sleep)
    await bench.waiting(1)
    await bench.publish(8 if sleep < 1 else 3)
    await eventually(lambda: go.begun, timeout=60, what="the first message of Go")
    created = (await bench.api.consumer_info(f"{bench.stream}-g", "m"))["created"]
    for _ in range(3):
        standby = await bench.join()
        await standby.stop()
    assert (await bench.api.consumer_info(f"{bench.stream}-g", "m"))["created"] == created
    await bench.drained()
    assert bench.starts == []


async def test_a_change_during_a_long_handler_deletes_nothing_of_gos(bench: Bench) -> None:
    """Go re-creates the consumer 0.4 s after the change; whatever we finish later must leave that one alone."""
    await bench.create_elastic([MemberMapping("m", (0, 1, 2, 3))])
    ours = await bench.join()
    started, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await may_end.wait()

    bench.work = work
    await bench.publish(1)
    await started.wait()
    go = bench.go()
    await bench.waiting(2)
    created = (await bench.api.consumer_info(f"{bench.stream}-g", "m"))["created"]
    await bench.elastic.set_mappings(bench.stream, "g", MAPPED)

    async def replaced() -> str:
        try:
            info = await bench.api.consumer_info(f"{bench.stream}-g", "m")
        except ConsumerNotFound:
            return ""
        return "" if info["created"] == created else str(info["created"])

    by_go = await eventually(replaced, timeout=60, what="the consumer that Go made")
    may_end.set()
    await eventually(lambda: ours.partitions == (0, 1) and ours.state is not MemberState.JOINING, what="our new share")
    assert await replaced() == by_go
    bench.work = lambda: asyncio.sleep(0)
    await bench.join("n")
    await bench.publish(20)
    await bench.drained()
    await ours.stop()
    before = len(go.begun)
    await bench.publish(20)
    await bench.drained()
    assert len(go.begun) > before  # it lives


async def test_a_standby_does_not_race_gos_new_consumer(bench: Bench) -> None:
    """Another member's consumer goes at the same moment; that must not shorten what we leave to Go."""
    await bench.create_elastic(MAPPED)
    go = bench.go()
    await bench.waiting(1)
    await bench.publish(10)
    await eventually(lambda: go.begun, timeout=60, what="the pin of Go")
    await bench.join()
    await bench.join("n")
    for change in range(8):
        await bench.elastic.set_mappings(bench.stream, "g", MOVED if change % 2 == 0 else MAPPED)
        await bench.publish(10)
        await bench.drained()
    assert [line for line in go.said if "10012" in line or "500" in line] == []


async def test_the_durable_of_a_group_made_anew_is_not_deleted_by_members_of_the_old_one(bench: Bench) -> None:
    await bench.create_static()
    member = await bench.join(static=True)
    started, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await may_end.wait()

    bench.work = work
    await bench.publish(4, partitioned=True)
    await started.wait()
    await bench.static.delete(bench.stream, "g")
    await eventually(
        lambda: EventKind.GROUP_DELETED in [event.kind for event in member.events.recent], what="the deletion"
    )
    await bench.static.create(bench.stream, "g", max_members=4, members=["m"])
    go = bench.go(kind="static")
    await bench.waiting(1, "g-m", bench.stream)
    may_end.set()
    await member.wait()
    await eventually(lambda: set(go.sequences) >= {1, 2, 3, 4}, timeout=60, what="the replay by the new group")
    await bench.publish(4, partitioned=True)
    await eventually(lambda: set(go.sequences) >= set(range(1, 9)), timeout=60, what="what came since")


async def test_a_standby_heals_a_durable_behind_what_go_has_done(bench: Bench) -> None:
    await bench.create_static()
    go = bench.go(kind="static")
    await bench.waiting(1, "g-m", bench.stream)
    await bench.publish(4, partitioned=True)
    await eventually(lambda: len(go.begun) == 4, timeout=60, what="the pin of Go")
    standby: Any = await bench.join(static=True)
    await bench.publish(200, partitioned=True)
    await eventually(lambda: len(go.begun) == 204, timeout=60, what="the work of Go")
    await eventually(lambda: standby._floor == 204, what="the standby's note")
    await bench.api.consumer_delete(bench.stream, "g-m")
    await bench.publish(20, partitioned=True)
    await eventually(lambda: len(bench.starts) >= 20, timeout=60, what="the messages since")
    assert bench.starts == list(range(205, 225))


async def test_go_accepts_what_we_create_and_we_what_go_creates(bench: Bench) -> None:
    assert CG is not None
    await bench.create_static()
    await bench.static.create(bench.stream, "order", max_members=2, members=["z", "a"])
    raw = (await KeyValue(bench.api, "static-consumer-groups").get(f"{bench.stream}.order")).value
    assert raw == b'{"max_members":2,"members":["z","a"]}'
    with_whole = [PartitioningFilter("nothing.>")]
    await bench.elastic.create(bench.stream, "whole", max_members=2, filters=with_whole)
    raw = (await KeyValue(bench.api, "elastic-consumer-groups").get(f"{bench.stream}.whole")).value
    assert b'"partitioning_wildcards":null' in raw


@pytest.mark.parametrize("group", ["a.b", "a/b"])
async def test_groups_that_go_named_oddly_can_be_looked_at_and_removed(
    bench: Bench, tmp_path: Path, group: str
) -> None:
    await bench.create_static()
    raw = b'{"max_members":2,"members":["m"]}'
    await KeyValue(bench.api, "static-consumer-groups").put(f"{bench.stream}.{group}", raw)
    assert group in await bench.static.names(bench.stream)
    (member,) = await bench.static.members(bench.stream, group)
    assert (member.member, member.active) == ("m", False)
    await bench.static.delete(bench.stream, group)
    assert group not in await bench.static.names(bench.stream)
