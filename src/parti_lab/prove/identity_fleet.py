"""Small fleets inside the process of `parti prove identity`, and how often each namespace handled which value."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parti.errors import PartiError
from parti.manager import ControlConfig, Hooks, Manager
from parti.testing import NatsServer, NeverHappened, eventually, insist
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Outcome, Reject, WorkerConfig, WorkerConsumer
from parti_lab.prove.traffic import make_stream

PARTITIONS = tuple(f"p{n}" for n in range(6))
WITHIN = 15.0  # seconds until all messages of a case are handled: five lease times and more


@dataclass
class Bench:
    """One server, and the settings of the case's stream."""

    server: NatsServer
    js: JetStreamApi
    layout: str
    retention: str
    sent: int = 0
    folder: Path = field(default_factory=Path)
    groups: list[Group] = field(default_factory=list)

    async def run(self, case: Callable[[Bench], Awaitable[list[str]]]) -> list[str]:
        """Run a case. All workers that it started have left when this returns."""
        try:
            return await case(self)
        finally:
            for group in reversed(self.groups):
                await group.leave()

    async def make(self, stream: str) -> None:
        await make_stream(self.js, stream, self.retention, 1)

    async def publish(self, stream: str, count: int, *, word: str = "") -> list[str]:
        """Publish `count` messages over all partitions; returns their values."""
        values = []
        for number in range(count):
            value = f"{word}{self.sent}"
            self.sent += 1
            subject = f"{stream}.{PARTITIONS[number % len(PARTITIONS)]}.k"
            await self._publish(subject, value)
            values.append(value)
        return values

    async def _publish(self, subject: str, value: str) -> None:
        """Retry with the same message id: the message is stored once, however often it is sent."""
        headers = {"Nats-Msg-Id": f"{subject}-{value}"}
        await insist(lambda: self.js.publish(subject, json.dumps(value).encode(), headers=headers), what="a publish")

    async def consumers(self, stream: str) -> list[dict[str, Any]]:
        """The durables of a stream, as the server describes them."""
        return [i for i in await self.js.consumer_list(stream) if i["config"].get("durable_name")]


@dataclass
class Group:
    """The workers of one namespace on one stream."""

    bench: Bench
    stream: str
    namespace: str = "identity"
    start: str = "all"
    prefix: str = "parti"
    handled: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    managers: list[tuple[Manager, Connection]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bench.groups.append(self)

    async def join(self, count: int = 2) -> None:
        """Start `count` more workers; every partition is owned when this returns."""
        for _ in range(count):
            await self._join()
        await eventually(
            lambda: {p for m, _ in self.managers for p in m.owned()} >= set(PARTITIONS), 30.0, "every partition owned"
        )

    async def leave(self, count: int | None = None) -> None:
        """The oldest workers hand over their partitions and leave."""
        going, self.managers = self.managers[:count], self.managers[len(self.managers[:count]) :]
        for manager, connection in going:
            with contextlib.suppress(PartiError, TimeoutError):
                await manager.stop()
            await connection.close()

    async def got(self, values: Collection[str], within: float = WITHIN) -> list[str]:
        """Wait until these values are handled; returns those that never were."""
        with contextlib.suppress(NeverHappened):
            await eventually(lambda: all(value in self.handled for value in values), within, "everything handled")
        return [value for value in values if value not in self.handled]

    def repeated(self) -> int:
        return sum(count - 1 for count in self.handled.values())

    async def _join(self) -> None:
        connection = await connect(ConnectOptions(servers=(self.bench.server.url,), request_timeout=5.0))
        config = WorkerConfig(
            stream=self.stream,
            subject_template=f"{self.stream}.{{partition}}.*",
            pull_timeout=0.7,
            idle_heartbeat=0.25,
            consumer_prefix=self.prefix,
            start="new" if self.start == "new" else "all",
        )
        consumer = WorkerConsumer(JetStreamApi(connection), config)

        @consumer.handler
        async def handle(message: Message) -> Outcome:
            value = json.loads(message.data)
            if value.startswith("reject"):
                return Reject("told to")
            self.handled[value] += 1
            return None

        control = ControlConfig(
            namespace=self.namespace,
            layout="per-worker" if self.bench.layout == "per-worker" else "per-partition",
            heartbeat_ttl=2.5,
            heartbeat_interval=0.8,
            lease_margin=0.25,
            cold_start_window=0.2,
            planned_scale_window=0.2,
            rebalance_cooldown=0.2,
        )
        hooks = Hooks(on_error=lambda error: self.errors.append(f"{type(error).__name__}: {error}"))
        manager = Manager(control, connection, PARTITIONS, consumer=consumer, hooks=hooks)
        try:
            await manager.start(30.0)
        except BaseException:
            await connection.close()
            raise
        self.managers.append((manager, connection))


async def settle() -> None:
    """Wait long enough for a repeat to show."""
    await asyncio.sleep(1.0)
