"""Managers on a real server for tests: short windows, and a handler that records its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from parti.manager import ControlConfig, Hooks, Manager
from parti.manager.layouts.per_partition.plane import PerPartitionPlane
from parti.model import ClaimState, Partition
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, WorkerConfig, WorkerConsumer

# A busy test machine starves a process for seconds: that must not count as a crash where a test is about
# something else.
PATIENT: dict[str, Any] = {
    "heartbeat_ttl": 20.0,
    "heartbeat_interval": 4.0,
    "cold_start_window": 0.2,
    "planned_scale_window": 0.1,
    "rebalance_cooldown": 0.0,
}
HASTY = PATIENT | {"heartbeat_ttl": 2.0, "heartbeat_interval": 0.4, "lease_margin": 0.2}


@dataclass
class Fleet:
    url: str
    js: JetStreamApi
    stream: str
    partitions: list[str]
    seen: list[tuple[str, Message]] = field(default_factory=list)
    managers: list[Manager] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    metrics: PrometheusMetrics = field(default_factory=PrometheusMetrics)
    entered: list[Message] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Handlers wait here before they end; open unless a test clears it."""

    def __post_init__(self) -> None:
        self.gate.set()

    async def connection(self, url: str | None = None) -> Connection:
        made = await connect(ConnectOptions(servers=(url or self.url,), request_timeout=5.0))
        self.connections.append(made)
        return made

    async def worker(
        self,
        *,
        hooks: Hooks | None = None,
        source: Any = None,
        consumer: Any = None,
        url: str | None = None,
        start: bool = True,
        worker: dict[str, Any] | None = None,
        **control: Any,
    ) -> Manager:
        connection = await self.connection(url)
        number = len(self.managers)
        if consumer is None:
            settings: dict[str, Any] = {
                "stream": self.stream,
                "subject_template": f"{self.stream}.{{partition}}",
                "pull_timeout": 1.0,
                "idle_heartbeat": 0.25,
                "min_update_interval": 0.05,
            }

            async def handle(message: Message) -> None:
                self.entered.append(message)
                await self.gate.wait()
                self.seen.append((f"m{number}", message))

            consumer = WorkerConsumer(
                JetStreamApi(connection), WorkerConfig(**settings | (worker or {})), handle, metrics=self.metrics
            )

        manager = Manager(
            ControlConfig(**({"namespace": self.stream} | PATIENT | control)),
            connection,
            source if source is not None else self.partitions,
            consumer=consumer,
            hooks=hooks,
            metrics=self.metrics,
        )
        self.managers.append(manager)
        if start:
            await manager.start(60.0)
        return manager

    async def crash(self, manager: Manager) -> None:
        """Crash as other members see it: the lease is no longer renewed, and nothing runs. Real kills: tests/chaos."""
        assert manager._main is not None
        manager._main.cancel()
        await asyncio.gather(manager._main, return_exceptions=True)
        plane = manager._agent.plane if manager._agent is not None else None
        await (plane if isinstance(plane, PerPartitionPlane) else manager._consumer).abandon()
        self.managers.remove(manager)

    async def publish(self, count: int, partitions: Iterable[str] | None = None) -> list[int]:
        names = list(partitions or self.partitions)
        acks = [await self.js.publish(f"{self.stream}.{names[n % len(names)]}", b"%d" % n) for n in range(count)]
        return [ack.seq for ack in acks]

    def sequences(self) -> list[int]:
        return [message.sequence for _, message in self.seen]

    async def handled(self, count: int, timeout: float = 60.0) -> None:
        await eventually(lambda: len(self.seen) >= count, timeout, f"{count} messages handled")

    async def spread(self, *managers: Manager, timeout: float = 60.0) -> None:
        """Return when these managers share the partitions evenly, and none is moving."""
        chosen = managers or tuple(self.managers)
        least = len(self.partitions) // len(chosen)
        await eventually(
            lambda: (
                all(len(m.owned()) >= least for m in chosen)
                and sorted(p for m in chosen for p in m.owned()) == sorted(self.partitions)
                and all(m.converged() for m in chosen)
            ),
            timeout,
            f"an even spread over {chosen}",
        )


def stopping(manager: Manager, *, overlap: bool) -> int:
    """How many partitions this owner must stop; with overlap, only after the next owner is ready."""
    assert manager._agent is not None
    asked = [c for c, _ in manager._agent.claims.values() if c.state is ClaimState.PREPARE]
    return sum(claim.target is not None or not overlap for claim in asked)


def parts(count: int) -> list[str]:
    return [f"p{n}" for n in range(count)]


def partition(name: str) -> Partition:
    return Partition(tuple(name.split(".")))


@asynccontextmanager
async def fleet_on(server: NatsServer, name: str, count: int = 6, **stream: Any) -> AsyncIterator[Fleet]:
    connection = await connect(ConnectOptions(servers=(server.url,), request_timeout=5.0))
    js = JetStreamApi(connection)
    body = {"name": name, "subjects": [f"{name}.>"], "storage": "memory", "allow_direct": True}
    await js.stream_create(body | stream)
    fleet = Fleet(server.url, js, name, parts(count))
    try:
        yield fleet
    finally:
        for manager in reversed(fleet.managers):
            await manager.stop()
        for each in fleet.connections:
            await each.close()
        await connection.close()
