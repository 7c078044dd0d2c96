"""Delivery without process faults: blocked addresses get no socket, and a poison document blocks only itself."""

from __future__ import annotations

import asyncio
import json

import msgspec

from parti.dead_letters import DeadLetterReader
from parti.delivery import AddressGuard, DeliverSection, TaskConsumer
from parti.testing import eventually
from parti.testing.http_server import Answer, ReceivedRequest, Reply
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.prove.delivery_stage import WITHIN, DeliveryStage

_BLOCKED = (
    "http://127.0.0.2/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:127.0.0.1]/",
    "http://10.0.0.1/",
    "http://2130706433/",
    "http://user@127.0.0.1/",
)


async def quiet_phases(stage: DeliveryStage, options: ConnectOptions) -> dict[str, Figure]:
    """Without process faults: blocked addresses get no socket, and a poison document blocks only itself."""
    stream = "PROVEQUIET"
    await stage.js.stream_create({"name": stream, "subjects": [f"{stream}.>"], "storage": "memory"})
    config = msgspec.structs.replace(
        DeliverSection(), stream=stream, storage="memory", allow_addresses=(stage.endpoint.allowed,), jitter=0.0
    )
    guard = AddressGuard(config.allow_addresses)
    consumer = TaskConsumer(config, nats=options, guard=guard)
    running = asyncio.create_task(consumer.start())
    letters = DeadLetterReader(stage.js, stream)
    try:
        await consumer.wait_ready()
        for number, url in enumerate(_BLOCKED):
            await stage.js.publish(f"{stream}.x", stage.task(f"blocked-{number}", 1, url))

        async def refused() -> bool:
            return await letters.count() == len(_BLOCKED)

        await eventually(refused, WITHIN, "the blocked addresses in the dead letters")
        opened = guard.opened
        blocked_others = await _poison(stage, stream)
    finally:
        await consumer.stop()
        await running
    return {"blocked_urls": len(_BLOCKED), "sockets_to_blocked": opened, "poison_blocked_others": blocked_others}


async def _poison(stage: DeliveryStage, stream: str) -> int:
    """How many tasks of other documents had not arrived when delivery gave up the poison task."""
    arrived: set[str] = set()
    given_up = asyncio.Event()

    def hook(request: ReceivedRequest) -> Reply:
        arrived.add(request.headers["webhook-id"])
        return Answer(200)

    stage.endpoint.on("/quiet", hook)
    stage.endpoint.on("/dead", Answer(503))
    task = json.loads(stage.task("poison", 1, f"{stage.endpoint.url}/dead"))
    task["retryPolicy"] = {"maxAttempts": 4, "initialBackoff": "1s", "maxBackoff": "1s"}
    await stage.js.publish(f"{stream}.x", json.dumps(task).encode())
    others = 200
    for number in range(others):
        data = stage.task(f"other-{number % 20}", number, f"{stage.endpoint.url}/quiet")
        await stage.js.publish(f"{stream}.x", data)
    follower = stage.task("poison", 2, f"{stage.endpoint.url}/follower")
    stage.endpoint.on("/follower", lambda _request: given_up.set() or Answer(200))  # type: ignore[func-returns-value]
    await stage.js.publish(f"{stream}.x", follower)
    async with asyncio.timeout(WITHIN):
        await given_up.wait()
    return others - len(arrived)
