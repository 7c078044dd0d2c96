"""A work queue that takes nothing more from its stream shows as event, health, metric and lag, with the cause."""

from __future__ import annotations

import asyncio

import pytest

from parti.groups import GroupMessage, MemberOptions, elastic, elastic_consume, sourcing
from parti.groups.describe import describe
from parti.groups.elastic_groups import ElasticGroups
from parti.groups.records import PartitioningFilter
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

SERVERS_LIMIT = 65_535  # bytes of headers of a stored message


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(sourcing, "STUCK_AFTER", 1.0)


async def test_a_message_that_the_server_cannot_source_is_named_and_its_removal_ends_the_standstill(
    server: NatsServer, name: str
) -> None:
    connection = await connect(ConnectOptions(servers=(server.url,)))
    api, groups, metrics = JetStreamApi(connection), ElasticGroups(connection), PrometheusMetrics()
    await api.stream_create({"name": name, "subjects": [f"{name}.*"], "storage": "memory", "allow_direct": True})
    await groups.create(name, "g", max_members=2, filters=[PartitioningFilter(f"{name}.*", (1,))])
    await groups.add_members(name, "g", ["m"])
    seen: list[int] = []

    def value() -> float | None:
        return metrics.registry.get_sample_value("parti_group_source_stuck")

    async def handle(message: GroupMessage) -> None:
        seen.append(message.sequence)

    async with await elastic_consume(connection, name, "g", "m", handle, MemberOptions(metrics=metrics)) as member:
        await api.publish(f"{name}.1", b"")
        await eventually(lambda: len(seen) == 1, 60, "the first is handled")
        await api.publish(f"{name}.2", b"", headers={"large": "x" * (SERVERS_LIMIT - 30)})
        await eventually(lambda: member.health_check().probe() is not None, 60, "health reports it")
        cause = str(member.health_check().probe())
        assert f"does not take message 2 ({name}.2) and those after it from {name!r}: its 655" in cause
        await eventually(lambda: member.events.recent[-1].kind.value == "source_stuck", 60, "the event")
        await eventually(lambda: value() == 1, 60, "the metric")
        assert {row.next_to_source for row in await describe(groups, name, "g")} == {2}
        for n in range(3):
            await api.publish(f"{name}.{n}", b"")
        await api.request(f"STREAM.MSG.DELETE.{name}", {"seq": 2})
        await eventually(lambda: len(seen) == 4, 60, "the others are handled")
        await eventually(lambda: member.health_check().probe() is None, 60, "all is well")
        await eventually(lambda: member.events.recent[-1].kind.value == "source_resumed", 60, "the event")
        await eventually(lambda: value() == 0, 60, "the metric")
        assert {row.next_to_source for row in await describe(groups, name, "g")} == {None}
    await connection.close()


async def test_a_full_work_queue_says_that_it_waits_for_its_members(server: NatsServer, name: str) -> None:
    connection = await connect(ConnectOptions(servers=(server.url,)))
    api, groups = JetStreamApi(connection), ElasticGroups(connection)
    await api.stream_create({"name": name, "subjects": [f"{name}.*"], "storage": "memory", "allow_direct": True})
    partitioned = [PartitioningFilter(f"{name}.*", (1,))]
    await groups.create(name, "g", max_members=2, filters=partitioned, max_buffered_msgs=3)
    await groups.add_members(name, "g", ["m"])
    gate = asyncio.Event()
    seen: list[int] = []

    async def handle(message: GroupMessage) -> None:
        await gate.wait()
        seen.append(message.sequence)

    async with await elastic_consume(connection, name, "g", "m", handle) as member:
        for n in range(9):
            await api.publish(f"{name}.{n}", b"")
        await eventually(lambda: member.health_check().probe() is not None, 60, "health reports it")
        assert "it is full (max_msgs=3) until its members acknowledge messages" in str(member.health_check().probe())
        gate.set()
        await eventually(lambda: len(seen) == 9, 60, "all are handled")
        await eventually(lambda: member.health_check().probe() is None, 60, "all is well")
    await connection.close()
