"""Delivery configures its durable by the properties of the stream, never by the name that a user gave it."""

from __future__ import annotations

import pytest

from parti.config.deliver import DeliverSection
from parti.delivery.storage import ensure_consumer
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions


@pytest.mark.parametrize("ending", ["", "_LANES", "_PARK", "_DLQ", "_ATTEMPTS", "_DELIVER"])
async def test_a_durable_that_is_made_again_goes_on_where_it_was_whatever_the_stream_is_called(
    server: NatsServer, name: str, ending: str
) -> None:
    stream = f"{name}{ending}"
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        js = JetStreamApi(connection)
        await js.stream_create({"name": stream, "subjects": [f"{stream}.>"], "storage": "memory"})
        for number in range(5):
            await js.publish(f"{stream}.{number}", b"")
        await ensure_consumer(js, stream, "d", [f"{stream}.>"], DeliverSection(stream=stream), start=4)
        made = await js.consumer_info(stream, "d")
        assert made["num_pending"] == 2
        assert made["config"]["opt_start_seq"] == 4


@pytest.mark.parametrize("ending", ["", "_LANES"])
async def test_the_durable_of_a_work_queue_has_no_start_whatever_the_stream_is_called(
    server: NatsServer, name: str, ending: str
) -> None:
    stream = f"{name}{ending}"
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        js = JetStreamApi(connection)
        await js.stream_create(
            {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory", "retention": "workqueue"}
        )
        await js.publish(f"{stream}.1", b"")
        await ensure_consumer(js, stream, "d", [f"{stream}.>"], DeliverSection(stream=stream), start=4)
        assert (await js.consumer_info(stream, "d"))["num_pending"] == 1
