"""Automatic membership: starting and stopping processes is enough to scale a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from parti.groups import (
    AutomaticMembership,
    ConsumerTemplate,
    ElasticGroups,
    ElasticMember,
    EventKind,
    GroupMessage,
    MemberOptions,
    PartitioningFilter,
    assignment,
    elastic_consume,
    errors,
)
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

PATIENT = AutomaticMembership(lease=60, settle=0.02)  # longer than a loaded machine starves a process
QUICK = AutomaticMembership(lease=2, settle=0.02)


class Bench:
    def __init__(self, connection: Connection, stream: str) -> None:
        self.connection = connection
        self.api = JetStreamApi(connection)
        self.groups = ElasticGroups(connection)
        self.stream = stream
        self.seen: list[tuple[str, int]] = []
        self.joined: list[ElasticMember] = []

    async def create(self, partitions: int = 6) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"], "storage": "memory"})
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.groups.create(self.stream, "g", max_members=partitions, filters=filters)

    async def join(self, member: str, *, automatic: AutomaticMembership | None = PATIENT) -> ElasticMember:
        async def handler(message: GroupMessage) -> None:
            self.seen.append((member, message.sequence))

        options = MemberOptions(template=ConsumerTemplate(ack_wait=30))
        joined = await elastic_consume(self.connection, self.stream, "g", member, handler, options, automatic=automatic)
        self.joined.append(joined)
        return joined

    async def owners(self) -> dict[str, tuple[int, ...]]:
        record = (await self.groups.get(self.stream, "g")).record
        return assignment(record)

    async def shared_by(self, *members: str) -> dict[str, tuple[int, ...]]:
        async def done() -> bool:
            return set(await self.owners()) == set(members)

        await eventually(done, what=f"a record with {members}")
        return await self.owners()


@pytest.fixture
async def bench(server: NatsServer, name: str) -> AsyncIterator[Bench]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        made = Bench(connection, name)
        yield made
        await asyncio.gather(*(member.stop(timeout=2) for member in made.joined))


async def test_members_that_start_share_the_group_and_those_that_leave_give_their_part_back(bench: Bench) -> None:
    await bench.create()
    one = await bench.join("a")
    assert await bench.shared_by("a") == {"a": (0, 1, 2, 3, 4, 5)}
    await eventually(lambda: one.partitions == (0, 1, 2, 3, 4, 5), what="all partitions")
    two = await bench.join("b")
    shared = await bench.shared_by("a", "b")
    assert [len(owned) for owned in shared.values()] == [3, 3]
    await eventually(lambda: two.partitions == shared["b"] and one.partitions == shared["a"], what="the shares")
    for n in range(40):
        await bench.api.publish(f"{bench.stream}.{n}", b"")
    await eventually(lambda: len(bench.seen) == 40, what="the messages")
    await two.stop()
    await bench.shared_by("a")
    await eventually(lambda: one.partitions == (0, 1, 2, 3, 4, 5), what="what b had")
    for n in range(20):
        await bench.api.publish(f"{bench.stream}.{n}", b"")
    await eventually(lambda: len(bench.seen) == 60, what="the messages")
    assert len({sequence for _, sequence in bench.seen}) == 60


async def test_a_third_member_takes_two_of_six_and_the_others_keep_the_rest(bench: Bench) -> None:
    await bench.create()
    await bench.join("a")
    await bench.join("b")
    before = await bench.shared_by("a", "b")
    await bench.join("c")
    after = await bench.shared_by("a", "b", "c")
    assert [len(owned) for owned in after.values()] == [2, 2, 2]
    assert set(after["a"]) < set(before["a"])
    assert set(after["b"]) < set(before["b"])


async def test_when_the_leader_leaves_or_dies_another_leads(bench: Bench) -> None:
    await bench.create()
    members = [await bench.join(name, automatic=QUICK) for name in "abc"]
    await bench.shared_by("a", "b", "c")
    leader = next(member for member in members if member.registrar and member.registrar.leads)
    rest = [member for member in members if member is not leader]
    await leader.stop()
    await bench.shared_by(*(member.member for member in rest))
    await eventually(lambda: any(m.registrar and m.registrar.leads for m in rest), what="another leader")
    # A crash: nothing is said, the leases run out.
    dead = next(member for member in rest if member.registrar and member.registrar.leads)
    assert dead.registrar is not None
    for task in dead.registrar._tasks:
        task.cancel()
    survivor = next(member for member in rest if member is not dead)
    await bench.shared_by(survivor.member)


async def test_a_leader_of_an_earlier_version_is_waited_for(bench: Bench) -> None:
    await bench.create()
    kv = await KeyValue.ensure(bench.api, "parti-group-members")
    key = f"l.{bench.stream}.g"
    held = await kv.put(key, b"a1b2c3d4e5f6", ttl=60)  # as 0.1 wrote it: the instance, and nothing else
    joined = await bench.join("a", automatic=QUICK)
    assert joined.registrar is not None
    for _ in range(3):  # it renews
        held = await kv.update(key, b"a1b2c3d4e5f6", held, ttl=60)
        await asyncio.sleep(0.5)
        assert not joined.registrar.leads
    await kv.delete(key, revision=held)  # and ends
    await eventually(lambda: joined.registrar is not None and joined.registrar.leads, what="the lead")
    assert await bench.shared_by("a") == {"a": (0, 1, 2, 3, 4, 5)}


async def test_members_of_other_languages_are_kept(bench: Bench) -> None:
    await bench.create()
    await bench.groups.add_members(bench.stream, "g", ["go-1"])
    joined = await bench.join("a")
    shared = await bench.shared_by("a", "go-1")
    assert [len(owned) for owned in shared.values()] == [3, 3]
    assert set(shared["go-1"]) <= {0, 1, 2, 3, 4, 5}
    await bench.groups.add_members(bench.stream, "g", ["go-2"])  # what is a list stays one: others can be added
    await bench.shared_by("a", "go-1", "go-2")
    await joined.stop()
    assert await bench.shared_by("go-1", "go-2") == {"go-1": (0, 1, 2), "go-2": (3, 4, 5)}


async def test_a_listed_group_can_be_added_to_from_the_start(bench: Bench) -> None:
    await bench.create()
    await bench.join("a", automatic=replace(PATIENT, listed=True))
    await bench.shared_by("a")
    await bench.groups.add_members(bench.stream, "g", ["go"])
    assert await bench.shared_by("a", "go") == {"a": (0, 1, 2), "go": (3, 4, 5)}


async def test_a_second_instance_of_a_member_keeps_it_in_the_record(bench: Bench) -> None:
    await bench.create()
    one = await bench.join("a")
    two = await bench.join("a")
    await bench.shared_by("a")
    await eventually(lambda: two.partitions == (0, 1, 2, 3, 4, 5), what="the standby")
    await one.stop()
    await bench.api.publish(f"{bench.stream}.1", b"")
    await eventually(lambda: len(bench.seen) == 1, what="the message at the standby")
    assert EventKind.REVOKED not in [event.kind for event in two.events.recent]


async def test_a_name_that_cannot_be_part_of_a_key_is_refused(bench: Bench) -> None:
    await bench.create()
    with pytest.raises(errors.BadName):
        await bench.join("ä")
    with pytest.raises(errors.BadTemplate):
        AutomaticMembership(lease=0)
