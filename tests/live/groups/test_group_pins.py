"""Pins without a holder: the server pins a waiting pull before it checks whether a client still listens there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    GroupKind,
    GroupMessage,
    MemberMapping,
    MemberOptions,
    PartitioningFilter,
    StaticGroups,
    elastic_consume,
    static_consume,
)
from parti.groups.common import stray_pin
from parti.groups.distribution import partition_filters
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions

TEMPLATE = ConsumerTemplate(ack_wait=60)  # a pin lives longer than the test


async def _create(connection: Connection, stream: str, kind: GroupKind) -> str:
    """A group with one member; returns the subject of a message for it."""
    api = JetStreamApi(connection)
    if kind is GroupKind.STATIC:
        await api.stream_create({"name": stream, "subjects": [f"0.{stream}.*"], "storage": "memory"})
        await StaticGroups(connection).create(stream, "g", max_members=1, members=["m"])
        return f"0.{stream}.1"
    await api.stream_create({"name": stream, "subjects": [f"{stream}.*"], "storage": "memory"})
    groups = ElasticGroups(connection)
    await groups.create(stream, "g", max_members=1, filters=[PartitioningFilter(f"{stream}.*", (1,))])
    await groups.set_mappings(stream, "g", [MemberMapping("m", (0,))])
    return f"{stream}.1"


@pytest.mark.parametrize("kind", [GroupKind.STATIC, GroupKind.ELASTIC])
async def test_an_instance_that_ended_with_a_pull_at_the_server_shuts_nobody_out(
    server: NatsServer, name: str, kind: GroupKind
) -> None:
    static = kind is GroupKind.STATIC
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        api, subject = JetStreamApi(connection), await _create(connection, name, kind)
        record = (await (StaticGroups if static else ElasticGroups)(connection).get(name, "g")).record
        stream, consumer = (name, "g-m") if static else (f"{name}-g", "m")
        filters = partition_filters(record, "m")
        await api.consumer_create(stream, TEMPLATE.config(kind, consumer, filters), action="create")
        inbox = connection.new_inbox()
        other = await connection.subscribe(inbox)
        body = json.dumps({"batch": 1, "expires": 30_000_000_000, "group": "PCG"}).encode()
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", body, reply=inbox)

        async def waiting() -> bool:
            return bool((await api.consumer_info(stream, consumer))["num_waiting"])

        await eventually(waiting, what="the other's pull")
        pinned = await connection.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.PINNED.{stream}.{consumer}")
        await other.unsubscribe()
        await connection.flush()
        await api.publish(subject, b"")
        await pinned.next_msg(timeout=30)  # not the consumer's info, which would make the server forget the pull
        assert stray_pin(await api.consumer_info(stream, consumer)) is not None
        handled = asyncio.Event()

        async def handler(message: GroupMessage) -> None:
            handled.set()

        consume: Any = static_consume if static else elastic_consume
        async with await consume(connection, name, "g", "m", handler, MemberOptions(template=TEMPLATE)):
            await eventually(handled.is_set, timeout=30, what="the message")
