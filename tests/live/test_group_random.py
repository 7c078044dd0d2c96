"""Random lives of a group's instances in one process: planned changes only, so that nothing may begin twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    ElasticMember,
    GroupMessage,
    HandlerOptions,
    MemberOptions,
    Order,
    PartitioningFilter,
    elastic_consume,
    errors,
)
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions

KEYS = 12
MEMBERS = ("a", "b", "c")


class World:
    """A group, instances that come and go, and a log of what began."""

    def __init__(self, connection: Connection, stream: str, rng: random.Random) -> None:
        self.connection, self.stream, self.rng = connection, stream, rng
        self.api, self.groups = JetStreamApi(connection), ElasticGroups(connection)
        self.in_flight = rng.choice([1, 1, 20, 200])
        self.instances: list[ElasticMember] = []
        self.begun: list[int] = []
        self.listed = {"a", "b"}
        self.published = 0

    async def create(self) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"], "storage": "memory"})
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.groups.create(self.stream, "g", max_members=4, filters=filters)
        await self.groups.add_members(self.stream, "g", sorted(self.listed))
        for member in MEMBERS:
            await self.start(member)

    async def handle(self, message: GroupMessage) -> None:
        self.begun.append(message.sequence)
        await asyncio.sleep(self.rng.choice([0, 0, 0.002, 0.01, 0.3 if self.rng.random() < 0.02 else 0]))

    async def start(self, member: str) -> None:
        order = Order.STRICT if self.in_flight == 1 else Order.KEY
        options = MemberOptions(
            # What an instance leaves behind lapses after this: no stall may be longer.
            template=ConsumerTemplate(ack_wait=300, max_ack_pending=self.in_flight),
            handlers=HandlerOptions(order=order),
        )
        self.instances.append(await elastic_consume(self.connection, self.stream, "g", member, self.handle, options))

    async def publish(self) -> None:
        for _ in range(self.rng.randrange(1, 30)):
            await self.api.publish(f"{self.stream}.{self.published % KEYS}", b"")
            self.published += 1

    async def stop(self) -> None:
        stopping = self.rng.choice(self.instances)
        self.instances.remove(stopping)
        if self.rng.random() < 0.5:
            await asyncio.gather(stopping.stop(), self.start(stopping.member))
        else:
            await stopping.stop()
            await self.start(stopping.member)

    async def another(self) -> None:
        if len(self.instances) < 7:
            await self.start(self.rng.choice(MEMBERS))

    async def leave(self) -> None:
        several = [i for i in self.instances if [j.member for j in self.instances].count(i.member) > 1]
        if several:
            leaving = self.rng.choice(several)
            self.instances.remove(leaving)
            await leaving.stop()

    async def step_down(self) -> None:
        with contextlib.suppress(errors.NoActiveInstance):
            await self.groups.step_down(self.stream, "g", self.rng.choice(MEMBERS))

    async def change(self) -> None:
        gone = self.rng.choice(MEMBERS)
        if gone in self.listed and len(self.listed) > 1:
            self.listed.discard(gone)
            await self.groups.drop_members(self.stream, "g", [gone])
        else:
            self.listed.add(gone)
            await self.groups.add_members(self.stream, "g", [gone])

    async def finished(self) -> None:
        async def done() -> bool:
            state = (await self.api.stream_info(f"{self.stream}-g"))["state"]
            return bool(state["messages"] == 0 and state["last_seq"] >= self.published)

        try:
            await eventually(done, timeout=90, what="an empty work queue")
        except Exception as error:
            infos: list[Any] = await self.api.consumer_list(f"{self.stream}-g")
            error.add_note(f"{self.instances} {[(i['name'], i['num_pending'], i['num_ack_pending']) for i in infos]}")
            raise


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(6))
async def test_planned_changes_at_random_lose_nothing_begin_nothing_twice_and_never_stand_still(
    server: NatsServer, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        world = World(connection, name, rng)
        await world.create()
        steps = (world.stop, world.stop, world.another, world.leave, world.step_down, world.change, world.change)
        try:
            for _ in range(25):
                await world.publish()
                await rng.choice(steps)()
                await asyncio.sleep(rng.choice([0, 0.005, 0.05]))
            await world.finished()
        finally:
            await asyncio.gather(*(instance.stop(timeout=2) for instance in world.instances))
        assert sorted(world.begun) == list(range(1, world.published + 1))
        for key in range(KEYS):
            mine = [sequence for sequence in world.begun if (sequence - 1) % KEYS == key]
            assert mine == sorted(mine)
