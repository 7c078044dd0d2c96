"""Worker processes under load, shared by the proofs that kill, freeze and stop them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from parti.clock import SystemClock
from parti.manager.kv_store import Store
from parti.model import ClaimState
from parti.testing import eventually
from parti.testing.history import HistoryVerdict
from parti.wire.api import JetStreamApi
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption
from parti_lab.prove.cluster_faults import Servers
from parti_lab.prove.fleet import STREAM, open_stream
from parti_lab.prove.sink import Record, Sink
from parti_lab.prove.traffic import Traffic
from parti_lab.prove.worker_process import WorkerProcess


@dataclass(frozen=True)
class HerdShape:
    """The size of a proof."""

    workers: int = 4
    partitions: int = 16
    rate: float = 300.0
    retention: str = "limits"
    layout: str = "per-worker"
    replicas: int = 1
    ttl: float = 6.0
    takes: float = 0.001
    log_level: str = "warning"
    metrics: str = ""
    """A folder where each worker saves its /metrics page; empty: none is saved."""
    control: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], **more: Any) -> HerdShape:
        """The shape from the `sizes` among a proof's options, and `more`."""
        return cls(**{option.name: options[option.name] for option in sizes(0, 0, 0.0)}, **more)


def sizes(workers: int, partitions: int, rate: float) -> tuple[ExperimentOption, ...]:
    """The options of a proof with a herd, with these default values."""
    return (
        ExperimentOption("workers", workers, "workers"),
        ExperimentOption("partitions", partitions, "partitions"),
        ExperimentOption("rate", rate, "messages published a second"),
        ExperimentOption("ttl", 6.0, "lease TTL in seconds"),
        ExperimentOption("retention", "limits", "limits, interest or workqueue"),
        ExperimentOption("layout", "per-worker", "per-worker or per-partition"),
    )


class Herd:
    """Processes, load and sink of one proof."""

    def __init__(self, shape: HerdShape, servers: Servers, js: JetStreamApi, sink: Sink, rng: random.Random) -> None:
        self.shape = shape
        self.servers = servers
        self.js = js
        self.sink = sink
        self.rng = rng
        self.clock = SystemClock()
        self.partitions = [f"p{n}" for n in range(shape.partitions)]
        self.workers: list[WorkerProcess] = []
        self.traffic = Traffic(js, STREAM, self.partitions, sink.history, rate=shape.rate, rng=rng)
        self.urls = servers.urls
        """Where workers connect; a proof may put a proxy in between."""

    @property
    def control(self) -> dict[str, Any]:
        ttl = self.shape.ttl
        return {
            "namespace": "prove",
            "layout": self.shape.layout,
            "bucket_replicas": self.shape.replicas,
            "heartbeat_ttl": ttl,
            "heartbeat_interval": ttl / 3,
            "lease_margin": min(0.3, ttl / 10),
            "cold_start_window": 1.0,
            "planned_scale_window": 0.3,
            "rebalance_cooldown": 0.3,
            **self.shape.control,
        }

    async def begin(self) -> None:
        """Start the workers of the shape, and messages once every partition is owned."""
        await self.add(self.shape.workers)
        await self.settled()
        await self.flow()

    async def add(self, count: int = 1, *, live: bool = True, returning: bool = False) -> list[WorkerProcess]:
        """Start worker processes; they are live when this returns, unless `live` is False."""
        settings = {
            "urls": list(self.urls),
            "sink": self.sink.port,
            "partitions": self.partitions,
            "control": self.control,
            "worker": {"pull_timeout": max(0.5, min(2.0, self.shape.ttl / 3)), "idle_heartbeat": 0.25}
            | dict(self.shape.worker),
            "takes": self.shape.takes,
            "returning": returning,
            "log_level": self.shape.log_level,
            "metrics": self.shape.metrics,
        }
        started = [await WorkerProcess.start(settings) for _ in range(count)]
        self.workers += started
        if live:
            await asyncio.gather(*(worker.live() for worker in started))
        return started

    def running(self) -> list[WorkerProcess]:
        return [w for w in self.workers if w.running and not w.frozen]

    def owner_of(self, partition: str) -> WorkerProcess | None:
        return next((w for w in self.running() if partition in w.owned), None)

    async def settled(self, timeout: float = 120.0, *, even: bool = False) -> None:
        """Return when every partition is owned by a running process, and no claim is moving."""

        async def rests() -> bool:
            owned = [p for w in self.running() for p in w.owned]
            if sorted(owned) != sorted(self.partitions):
                return False
            if even and max(len(w.owned) for w in self.running()) > -(-len(self.partitions) // len(self.running())) + 1:
                return False
            store = await Store.open(self.js, "prove", replicas=self.shape.replicas)
            claims = await store.claims()
            return all(claim.state is ClaimState.STABLE for claim, _ in claims.values())

        _: bool = await eventually(rests, timeout, "all partitions owned and at rest")

    async def flow(self) -> None:
        """Start the load; returns when every partition has had an effect."""
        self.traffic.start()
        await eventually(lambda: len(self.sink.last) == len(self.partitions), 60.0, "effects of every partition")

    async def leader(self) -> WorkerProcess | None:
        """The process of the leader, read from the bucket."""
        store = await Store.open(self.js, "prove", replicas=self.shape.replicas)
        record, _ = await store.leader()
        if record is None or record.leader is None:
            return None
        return next((w for w in self.workers if w.running and w.worker == record.leader.worker), None)

    async def finish(self, timeout: float = 60.0) -> HistoryVerdict:
        """Stop the load, wait for all messages, judge."""
        await self.traffic.stop()
        return await self.sink.complete(timeout)


def judged(verdict: HistoryVerdict, sink: Sink) -> dict[str, Figure]:
    """The figures every proof shows."""
    wrong = "; ".join(f"{k}: {v[0]}" for k, v in verdict.examples.items() if getattr(verdict, k))
    return {
        "messages": verdict.published,
        "lost": verdict.lost,
        "duplicates": verdict.duplicated,
        "inversions": verdict.inversions,
        "two_owners": verdict.two_owners,
        "stale_accepted": verdict.stale_accepted,
        "refused_by_sink": sink.refused,
        "examples": wrong,
    }


@asynccontextmanager
async def herd(
    shape: HerdShape, rng: random.Random, *, fenced_sink: bool = False, record: Record | None = None
) -> AsyncIterator[Herd]:
    """Servers, stream and sink, without workers; all of it ends with the context."""
    async with AsyncExitStack() as stack:
        servers, _, js = await open_stream(stack, shape.replicas, shape.retention)
        sink = await stack.enter_async_context(Sink(fenced=fenced_sink, record=record))
        group = Herd(shape, servers, js, sink, rng)
        try:
            yield group
        finally:
            await asyncio.gather(*(worker.close() for worker in group.workers))
            await group.traffic.stop()
