"""Random histories of a group's instances in one process: all changes are planned, so no message may begin twice.

Messages arrive at all times, also while an instance cancels its pulls or drains. `ack_wait` is five minutes, so each
message left behind, and each pin without a holder, shows as a stall.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    GroupConsumer,
    GroupMessage,
    HandlerOptions,
    MemberOptions,
    Order,
    PartitioningFilter,
    StaticGroups,
    elastic_consume,
    errors,
    static_consume,
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
        self.api = JetStreamApi(connection)
        self.groups: Any = ElasticGroups(connection)
        self.consume: Any = elastic_consume
        self.in_flight = rng.choice([1, 1, 20, 200])
        self.instances: list[GroupConsumer[Any]] = []
        self.begun: list[int] = []
        self.listed = {"a", "b"}
        self.published = 0

    async def create(self) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"], "storage": "memory"})
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.groups.create(self.stream, "g", max_members=4, filters=filters)
        await self.groups.add_members(self.stream, "g", sorted(self.listed))

    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        return [self.stop, self.stop, self.another, self.leave, self.step_down, self.change, self.change]

    def subject(self) -> str:
        return f"{self.stream}.{self.published % KEYS}"

    async def left(self) -> int:
        """How many messages are not done."""
        state = (await self.api.stream_info(f"{self.stream}-g"))["state"]
        return int(state["messages"]) + max(0, self.published - int(state["last_seq"]))

    async def consumers(self) -> list[Any]:
        return await self.api.consumer_list(f"{self.stream}-g")

    async def handle(self, message: GroupMessage) -> None:
        self.begun.append(message.sequence)
        await asyncio.sleep(self.rng.choice([0, 0, 0.002, 0.01, 0.3 if self.rng.random() < 0.02 else 0]))

    async def start(self, member: str) -> None:
        order = Order.STRICT if self.in_flight == 1 else Order.KEY
        options = MemberOptions(
            # What an instance leaves behind lapses after this; nothing may be left behind.
            template=ConsumerTemplate(ack_wait=300, max_ack_pending=self.in_flight),
            handlers=HandlerOptions(order=order),
        )
        self.instances.append(await self.consume(self.connection, self.stream, "g", member, self.handle, options))

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Messages come while this is entered."""
        ending = asyncio.Event()

        async def publish() -> None:
            while not ending.is_set():
                await self.api.publish(self.subject(), b"")
                self.published += 1
                await asyncio.sleep(0.002)

        publishing = asyncio.create_task(publish())
        try:
            yield
        finally:
            ending.set()
            await publishing

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
            return await self.left() == 0

        try:
            await eventually(done, timeout=60, what="the end of all work")
        except Exception as error:
            infos = [(i["name"], i["num_pending"], i["num_ack_pending"]) for i in await self.consumers()]
            error.add_note(f"{self.instances} {infos}")
            raise


class StaticWorld(World):
    """The same for a static group, whose members never change: instances come, go and step down."""

    def __init__(self, connection: Connection, stream: str, rng: random.Random) -> None:
        super().__init__(connection, stream, rng)
        self.groups, self.consume = StaticGroups(connection), static_consume

    async def create(self) -> None:
        subjects = [f"{number}.{self.stream}.*" for number in range(4)]
        await self.api.stream_create({"name": self.stream, "subjects": subjects, "storage": "memory"})
        await self.groups.create(self.stream, "g", max_members=4, members=MEMBERS)

    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        return [self.stop, self.stop, self.another, self.leave, self.step_down]

    def subject(self) -> str:
        return f"{self.published % KEYS % 4}.{super().subject()}"

    async def left(self) -> int:
        return sum(int(i["num_pending"]) + int(i["num_ack_pending"]) for i in await self.consumers())

    async def consumers(self) -> list[Any]:
        return await self.api.consumer_list(self.stream)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("kind", "seed"), [*((World, seed) for seed in range(8)), (StaticWorld, 8), (StaticWorld, 9)])
async def test_planned_changes_at_random_lose_nothing_begin_nothing_twice_and_never_stand_still(
    server: NatsServer, name: str, kind: type[World], seed: int
) -> None:
    rng = random.Random(seed)
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        world = kind(connection, name, rng)
        await world.create()
        for member in MEMBERS:
            await world.start(member)
        try:
            async with world.load():
                for _ in range(25):
                    await rng.choice(world.steps())()
                    await asyncio.sleep(rng.choice([0, 0.005, 0.05]))
            await world.finished()
        finally:
            await asyncio.gather(*(instance.stop(timeout=2) for instance in world.instances))
        assert sorted(world.begun) == list(range(1, world.published + 1))
        for key in range(KEYS):
            mine = [sequence for sequence in world.begun if (sequence - 1) % KEYS == key]
            assert mine == sorted(mine)
