"""Load of a proof: unique values, one publish in flight per key, each acknowledged by the server before the next."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from parti.errors import PartiError
from parti.testing import insist
from parti.testing.history import History
from parti.wire.api import JetStreamApi
from parti.worker import Message

PRODUCER = "pub"
_AGAIN = 0.05


class Traffic:
    """Publishes to all partitions in turn, two keys each, at `rate` messages per second, until stopped."""

    def __init__(
        self, js: JetStreamApi, stream: str, partitions: list[str], history: History, *, rate: float, rng: random.Random
    ) -> None:
        self._js = js
        self._stream = stream
        self._keys = [(partition, f"{partition}.k{n}") for partition in partitions for n in range(2)]
        self._counters = dict.fromkeys((key for _, key in self._keys), 0)
        self._history = history
        self._rate = rate
        self._rng = rng
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.published = 0
        self.longest_pause = 0.0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="parti-traffic")

    async def stop(self) -> None:
        """Stop the load; when this returns every publish has been acknowledged."""
        self._stopped.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        batch = max(1, min(len(self._keys), int(self._rate / 50)))
        due = loop.time()
        at = 0
        while not self._stopped.is_set():
            chosen = [self._keys[(at + i) % len(self._keys)] for i in range(batch)]
            at = (at + batch) % len(self._keys)
            started = loop.time()
            await asyncio.gather(*(self._publish(partition, key) for partition, key in chosen))
            self.longest_pause = max(self.longest_pause, loop.time() - started)
            due = max(due + batch / self._rate, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def _publish(self, partition: str, key: str) -> None:
        counter = self._counters[key]
        self._counters[key] += 1
        body = json.dumps([key, PRODUCER, counter]).encode()
        headers = {"Nats-Msg-Id": f"{key}-{counter}"}
        while True:
            try:
                # The same message id: stored once, however often it is sent (docs/evidence/cluster.md#c10).
                await self._js.publish(f"{self._stream}.{partition}", body, headers=headers)
                break
            except PartiError:
                await asyncio.sleep(_AGAIN)
        self._history.published(key, PRODUCER, counter)
        self.published += 1


def value_of(message: Message) -> tuple[str, str, int]:
    """Key, producer and counter of a message."""
    key, producer, counter = json.loads(message.data)
    return key, producer, counter


async def make_stream(js: JetStreamApi, stream: str, retention: str, replicas: int, storage: str = "file") -> None:
    config: dict[str, Any] = {
        "name": stream,
        "subjects": [f"{stream}.>"],
        "retention": retention,
        "storage": storage,
        "num_replicas": replicas,
        "allow_direct": True,
        "duplicate_window": int(120e9),
    }
    await insist(lambda: js.stream_create(config), what=f"stream {config['name']}")
