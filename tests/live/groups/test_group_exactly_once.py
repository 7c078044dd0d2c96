"""Exactly once: effects are committed only after the server has accepted the acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    GroupMessage,
    HandlerOptions,
    MemberOptions,
    elastic_consume,
    errors,
    exactly_once,
)
from parti.outcomes import RetryPolicy
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions


class Store:
    """A system of record with two phases."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.rolled_back: list[int] = []
        self.refuse: set[int] = set()
        self.prepared = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def process(self, message: GroupMessage) -> Booking:
        return Booking(self, message.sequence)


class Booking:
    def __init__(self, store: Store, value: int) -> None:
        self.store, self.value = store, value

    async def prepare(self) -> None:
        if self.value in self.store.refuse:
            self.store.refuse.discard(self.value)
            raise ValueError("a constraint")
        self.store.prepared.set()
        await self.store.go_on.wait()

    async def commit(self) -> None:
        self.store.committed.append(self.value)

    async def rollback(self) -> None:
        self.store.rolled_back.append(self.value)


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[Connection]:
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        yield opened


async def group(connection: Connection, stream: str) -> JetStreamApi:
    api = JetStreamApi(connection)
    await api.stream_create({"name": stream, "subjects": [f"{stream}.*"], "storage": "memory"})
    groups = ElasticGroups(connection)
    await groups.create(stream, "g", max_members=2)
    await groups.add_members(stream, "g", ["m"])
    return api


async def test_each_message_is_committed_once_and_a_failed_prepare_is_tried_again(
    connection: Connection, name: str
) -> None:
    api = await group(connection, name)
    store = Store()
    store.refuse.add(2)
    options = MemberOptions(handlers=HandlerOptions(retry=RetryPolicy(delays=(0.01,))))
    async with await elastic_consume(connection, name, "g", "m", exactly_once(store.process), options):
        for n in range(4):
            await api.publish(f"{name}.{n}", b"")
        await eventually(lambda: store.committed == [1, 2, 3, 4], what="the commits")
        assert store.rolled_back == [2]
    assert (await api.stream_info(f"{name}-g"))["state"]["messages"] == 0


async def test_what_was_prepared_is_undone_when_the_message_went_to_somebody_else(
    connection: Connection, name: str
) -> None:
    api = await group(connection, name)
    store = Store()
    store.go_on.clear()
    options = MemberOptions(template=ConsumerTemplate(ack_wait=60))
    async with await elastic_consume(connection, name, "g", "m", exactly_once(store.process), options) as member:
        await api.publish(f"{name}.1", b"")
        await store.prepared.wait()
        (message,) = member._in_flight.in_hand.values()
        message.doubtful = True  # as after a freeze of the process
        store.go_on.set()
        await eventually(lambda: store.rolled_back == [1], what="the rollback")
        assert store.committed == []
        with pytest.raises(errors.OwnershipLost):
            await message.double_ack()
    assert (await api.stream_info(f"{name}-g"))["state"]["messages"] == 1
