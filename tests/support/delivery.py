"""A running TaskConsumer on a real server with a real endpoint, and tasks to publish."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from parti.delivery import DeliverSection, TaskConsumer
from parti.errors import PartiError
from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.http_server import FaultHttpServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

FAST = ("50ms", "100ms", "100ms")


class Scene:
    """One task stream, one endpoint, any number of consumers."""

    def __init__(self, server: NatsServer, stream: str, endpoint: FaultHttpServer, js: JetStreamApi) -> None:
        self.server = server
        self.stream = stream
        self.endpoint = endpoint
        self.js = js
        self.options = ConnectOptions(servers=(server.url,))
        self._counts: dict[str, int] = {}

    def config(self, **changes: Any) -> DeliverSection:
        values: dict[str, Any] = {
            "stream": self.stream,
            "allow_addresses": (self.endpoint.allowed,),
            "storage": "memory",
            "schedule": FAST,
            "jitter": 0.0,
            "lease": 30,  # longer than a loaded machine may starve a process
        }
        return msgspec.structs.replace(DeliverSection(), **(values | changes))

    @contextlib.asynccontextmanager
    async def delivering(
        self, config: DeliverSection | None = None, *, ready: int | None = None, **parts: Any
    ) -> AsyncIterator[TaskConsumer]:
        """A consumer that delivers while the block runs, and is stopped gracefully afterwards."""
        consumer = TaskConsumer(config or self.config(), nats=self.options, **parts)
        running = asyncio.create_task(consumer.start())
        waiting = asyncio.create_task(consumer.wait_ready(ready))
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await waiting
            yield consumer
        finally:
            waiting.cancel()
            await consumer.stop()
            await running

    def task(self, document: str = "d1", path: str = "/hook", **changes: Any) -> dict[str, Any]:
        number = self._counts[document] = self._counts.get(document, 0) + 1
        return {
            "triggerId": "t1",
            "database": "shop",
            "collection": "orders",
            "documentId": document,
            "event": "update",
            "url": self.endpoint.url + path,
            "payload": {"n": number},
        } | changes

    async def publish(
        self, task: dict[str, Any] | bytes, *, subject: str | None = None, headers: dict[str, str] | None = None
    ) -> int:
        if isinstance(task, bytes):
            data, place = task, subject or f"{self.stream}.shop.orders.x"
        else:
            data = json.dumps(task).encode()
            encoded = base64.urlsafe_b64encode(task["documentId"].encode()).decode()
            place = subject or f"{self.stream}.{task['database']}.{task['collection']}.{encoded}"
        return (await self.js.publish(place, data, headers=headers)).seq

    async def publish_many(self, count: int, documents: int = 1, path: str = "/hook", **changes: Any) -> None:
        for number in range(count):
            await self.publish(self.task(f"d{number % documents}", path, **changes))

    def order(self, path: str = "/hook") -> dict[str, list[int]]:
        """The numbers that arrived, per document, in the order of arrival."""
        found: dict[str, list[int]] = {}
        for body in self.endpoint.bodies(path):
            found.setdefault(body["documentId"], []).append(body["payload"]["n"])
        return found

    async def settled(self, durable: str = "TriggerDeliveryWorker") -> bool:
        """Whether every task is acknowledged; right after a publish the server may not count it as pending yet."""
        last = (await self.js.stream_info(self.stream))["state"]["last_seq"]
        info = await self.js.consumer_info(self.stream, durable)
        reached = info["ack_floor"]["stream_seq"] >= last
        return bool(reached and info["num_pending"] == 0 and info["num_ack_pending"] == 0)

    async def settles_after_outage(self) -> None:
        """Wait until `settled`, where no answer counts as False; on timeout the error has the last answer."""
        last = ""

        async def settled() -> bool:
            nonlocal last
            try:
                last = str(await self.js.consumer_info(self.stream, "TriggerDeliveryWorker"))
                return await self.settled()
            except PartiError as error:
                last = str(error)
                return False

        try:
            await eventually(settled)
        except NeverHappened as never:
            never.add_note(f"{last}; {len(self.endpoint.received)} requests")
            raise


@contextlib.asynccontextmanager
async def scene(server: NatsServer, stream: str, storage: str = "memory") -> AsyncIterator[Scene]:
    """The stream exists while the block runs."""
    connection = await connect(ConnectOptions(servers=(server.url,)))
    js = JetStreamApi(connection)
    try:
        await js.stream_create({"name": stream, "subjects": [f"{stream}.>"], "storage": storage})
        async with FaultHttpServer() as endpoint:
            yield Scene(server, stream, endpoint, js)
        await eventually(lambda: connection.is_connected)  # a test may have restarted the server
        for name in await js.stream_names():
            if name.removeprefix("KV_").startswith(stream):
                await js.stream_delete(name)
    finally:
        await connection.close()
