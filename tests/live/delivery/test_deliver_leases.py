"""Leases: a process that lost its partition stops at once, then rejoins; nothing is lost, order is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


@pytest.mark.slow
async def test_a_lease_taken_by_somebody_else_ends_the_work_at_once_and_it_is_taken_again(stage: Scene) -> None:
    stage.endpoint.otherwise(lambda _request: Answer(200, delay=0.05))
    stage.endpoint.on("/bad", Answer(503))
    await stage.publish_many(200, documents=20)
    await stage.publish(stage.task("parked", "/bad", retryPolicy={"maxAttempts": 3, "initialBackoff": "200ms"}))
    async with stage.delivering(stage.config(host_concurrency=4, lease=5)) as consumer:
        await stage.endpoint.wait_for(10)
        key = f"$KV.{stage.stream}_DELIVER.slot.0"
        await stage.js.publish(key, b'{"member":"thief","nonce":"x"}', headers={"Nats-TTL": "2s"})
        await eventually(lambda: consumer.partitions == ())
        sent = len(stage.endpoint.received)
        await consumer.wait_ready(1)
        assert len(stage.endpoint.received) <= sent + 4
        await eventually(stage.settled, 60)
    for numbers in stage.order().values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers))
        assert set(numbers) == set(range(1, 11))
    epochs = [int(request.headers["x-parti-epoch"]) for request in stage.endpoint.received]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) >= 2


@pytest.mark.slow
async def test_an_event_loop_that_stood_still_past_its_lease_delivers_nothing_more_in_that_epoch(stage: Scene) -> None:
    import time

    stage.endpoint.otherwise(lambda _request: Answer(200, delay=0.02))
    await stage.publish_many(100, documents=10)
    async with stage.delivering(stage.config(host_concurrency=2, lease=2)):
        await stage.endpoint.wait_for(5)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
        await eventually(stage.settled, 60)
        await asyncio.sleep(0)
    for numbers in stage.order().values():
        assert list(dict.fromkeys(numbers)) == list(range(1, 11))
