"""The TaskConsumer and the engine spark: only one delivers at a time, and neither skips tasks that the other holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from parti.clock import SystemClock
from parti.delivery import TaskConsumer
from parti.delivery.engine_lock import KEY, SparkClaim, spark_claim
from parti.delivery.names import DeliveryNames
from parti.delivery.storage import ensure_streams
from parti.errors import UsageError
from parti.spark.delivery.job import _prepare
from parti.spark.pipeline.driver.lease import DriverLease, Standby
from parti.testing import NatsServer, eventually
from parti.testing.eventually import PATIENCE
from parti.testing.http_server import Answer
from parti.wire.kv import KeyValue
from parti.wire.kv_model import KeyNotFound
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def said(stage: Scene, parked: int, ttl: float = PATIENCE) -> KeyValue:
    bucket = await ensure_streams(stage.js, stage.config())
    word = SparkClaim("/data/hooks", parked, drivers(stage).bucket, f"deliver-{stage.stream}.leader", ttl)
    await word.put(bucket)
    return bucket


def drivers(stage: Scene) -> Standby:
    return Standby(bucket=f"{stage.stream}-drivers", ttl=PATIENCE, renew_every=0.2, margin=0.1)


def lease(stage: Scene, lost: threading.Event) -> DriverLease:
    name = f"deliver-{stage.stream}"
    return DriverLease(stage.options, name, drivers(stage), owner="driver", on_lost=lost.set)


async def test_nobody_passes_what_waits_in_the_checkpoint_of_the_engine_spark(stage: Scene) -> None:
    bucket = await said(stage, parked=7)
    await stage.publish(stage.task())
    with pytest.raises(UsageError, match=r"7 tasks .* /data/hooks.*--engine spark --available-now"):
        async with stage.delivering():
            pass
    assert not stage.endpoint.received
    assert await bucket.keys("slot.*") == []
    await bucket.delete(KEY)  # the way out when the folder is lost
    async with stage.delivering():
        await stage.endpoint.wait_for(1)


async def test_a_driver_that_lives_is_not_delivered_beside_and_one_that_has_ended_in_order_is_followed_at_once(
    stage: Scene,
) -> None:
    bucket = await said(stage, parked=0)
    await stage.publish(stage.task())
    with lease(stage, threading.Event()) as held:
        assert await asyncio.to_thread(held.acquire, PATIENCE) is not None
        with pytest.raises(UsageError, match="stop it first"):
            async with stage.delivering():
                pass
    assert not stage.endpoint.received
    async with stage.delivering():
        await stage.endpoint.wait_for(1)
    assert await spark_claim(bucket) is None


async def test_a_driver_that_died_is_followed_when_its_lease_has_run_out(stage: Scene) -> None:
    await said(stage, parked=0, ttl=1.0)
    await stage.publish(stage.task())
    with lease(stage, threading.Event()) as held:
        assert await asyncio.to_thread(held.acquire, PATIENCE) is not None
        record = await (await KeyValue.open(stage.js, drivers(stage).bucket)).get(f"deliver-{stage.stream}.leader")
    # What a driver leaves that has no time to resign.
    await (await KeyValue.open(stage.js, drivers(stage).bucket)).put(record.key, record.value)
    async with stage.delivering():
        await stage.endpoint.wait_for(1)


async def test_one_that_stands_by_looks_again_when_its_turn_comes(stage: Scene) -> None:
    async with stage.delivering():
        second = TaskConsumer(stage.config(), nats=stage.options)
        waiting = asyncio.create_task(second.start())
        await second.wait_ready(0, timeout=PATIENCE)
        members = await KeyValue.open(stage.js, DeliveryNames(stage.stream).bucket)

        async def joined() -> bool:
            return len(await members.keys("member.*")) == 2

        await eventually(joined)
        bucket = await said(stage, parked=1)
    with pytest.raises(UsageError, match="1 tasks"):
        await waiting
    with pytest.raises(KeyNotFound):
        await bucket.get("slot.0")


async def test_a_word_that_is_not_ours_is_told(stage: Scene) -> None:
    bucket = await ensure_streams(stage.js, stage.config())
    await bucket.put(KEY, b"hello")
    with pytest.raises(UsageError, match=rf"{KEY}.*not ours"):
        async with stage.delivering():
            pass


async def test_the_engine_spark_knows_what_was_tried_before_it_and_until_when_to_wait(stage: Scene) -> None:
    stage.endpoint.on("/busy", Answer(429, {"Retry-After": "30"}))
    sequence = await stage.publish(stage.task("a", "/busy"))
    await stage.publish(stage.task("b"))
    started = SystemClock().wall()
    async with stage.delivering(stage.config()):
        await stage.endpoint.wait_for(2)
    _, _, _, before = await _prepare(stage.config(), stage.options, "/nowhere")
    assert sequence not in before
    assert sequence + 1 in before
    tried = before.tries[sequence]
    assert tried.attempts == 1
    assert tried.due >= started + 30
