"""A group in the compact layout works like any elastic group."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from parti.groups import (
    AutomaticMembership,
    ElasticGroups,
    GroupMessage,
    PartitioningFilter,
    describe,
    elastic_consume,
    errors,
    predict,
)
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[Connection]:
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        yield opened


async def test_members_of_a_compact_group_share_its_messages(connection: Connection, name: str) -> None:
    api = JetStreamApi(connection)
    await api.stream_create({"name": name, "subjects": [f"{name}.*"], "storage": "memory"})
    groups = ElasticGroups(connection, compact=True)
    stored = await groups.create(name, "g", max_members=8, filters=[PartitioningFilter(f"{name}.*", (1,))])
    assert await groups.names(name) == ["g"]
    assert await ElasticGroups(connection).names(name) == []  # others must not see it: they would misread its subjects
    with pytest.raises(errors.NameCollision):
        await ElasticGroups(connection).create(name, "g", max_members=8)
    seen: list[GroupMessage] = []

    async def handler(message: GroupMessage) -> None:
        seen.append(message)

    automatic = AutomaticMembership(lease=60, settle=0.02)
    for n in range(40):
        await api.publish(f"{name}.{n}", b"")
    one = await elastic_consume(connection, name, "g", "a", handler, automatic=automatic, compact=True)
    two = await elastic_consume(connection, name, "g", "b", handler, automatic=automatic, compact=True)
    await eventually(lambda: len(one.partitions) == len(two.partitions) == 4, what="the shares")
    config = (await api.consumer_info(f"{name}-g", "a"))["config"]
    assert config["filter_subjects"] == ["1.*.*.>"] or config["filter_subjects"] == ["0.*.*.>"]
    await eventually(lambda: len(seen) == 40, what="the messages")
    assert sorted(message.sequence for message in seen) == list(range(1, 41))
    for message in seen:
        assert message.subject == f"{name}.{message.sequence - 1}"
        assert message.number == predict(stored.record, message.subject)
    rows = await describe(groups, name, "g")
    assert [row.owner for row in rows].count("a") == 4
    assert [row.lag for row in rows] == [0] * 8
    await one.stop()
    await two.stop()
    await groups.delete(name, "g")
