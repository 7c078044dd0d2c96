"""Workers of a proof inside one process, each with its own connections, and an assignment that a script sets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from parti.clock import Clock, SystemClock
from parti.control.assign import Owners, Sticky
from parti.control.assign.base import Shares
from parti.errors import PartiError
from parti.manager import ControlConfig, Hooks, Manager, PartitionSource
from parti.model import Lease, Partition, PartitionId, WorkerId
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import eventually
from parti.testing.history import Effect
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, WorkerConfig, WorkerConsumer
from parti_lab.prove.cluster_faults import Servers
from parti_lab.prove.sink import Sink
from parti_lab.prove.traffic import make_stream, value_of

STREAM = "PROVE"
_STARTS_WITHIN = 240.0  # seconds; all workers share one process, and maybe one core with ten other processes


async def open_stream(
    stack: AsyncExitStack, replicas: int = 1, retention: str = "limits", timeout: float = 5.0
) -> tuple[Servers, ConnectOptions, JetStreamApi]:
    """Servers with the proof's stream, the options to connect to them, and a connection; all end with the stack."""
    servers = await Servers.open(stack, replicas)
    options = ConnectOptions(servers=servers.urls, request_timeout=timeout)
    connection = await connect(options)
    stack.push_async_callback(connection.close)
    js = JetStreamApi(connection)
    await make_stream(js, STREAM, retention, replicas)
    return servers, options, js


class Scripted:
    """Gives each partition to the worker that the script names; the other partitions are spread evenly."""

    def __init__(self) -> None:
        self.owners: dict[PartitionId, WorkerId] = {}
        self._even = Sticky()

    @property
    def name(self) -> str:
        return "scripted"

    def assign(self, workers: Sequence[WorkerId], partitions: Sequence[Partition], previous: Owners) -> Shares:
        known = {p: w for p, w in {**previous, **self.owners}.items() if w in workers}
        shares = {worker: list(own) for worker, own in self._even.assign(workers, partitions, known).items()}
        for partition in partitions:
            wanted = self.owners.get(partition.id)
            if wanted in shares:
                for own in shares.values():
                    if partition in own:
                        own.remove(partition)
                shares[wanted].append(partition)
        return {worker: tuple(own) for worker, own in shares.items()}


@dataclass
class Fleet:
    """Managers on one server or cluster."""

    options: ConnectOptions
    partitions: list[str]
    sink: Sink
    rng: random.Random
    control: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)
    handle_seconds: float = 0.0
    managers: list[Manager] = field(default_factory=list)
    metrics: PrometheusMetrics = field(default_factory=PrometheusMetrics)
    script: Scripted = field(default_factory=Scripted)
    errors: list[str] = field(default_factory=list)
    clock: Callable[[], Clock] = SystemClock
    grants: int = 0
    source: PartitionSource | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self, count: int) -> None:
        """Start `count` more workers; all are live when this returns."""
        await asyncio.gather(*(self._start() for _ in range(count)))

    async def _start(self) -> Manager:
        connection = await connect(self.options)
        config = WorkerConfig(
            stream=STREAM, subject_template=f"{STREAM}.{{partition}}", **{"pull_timeout": 2.0, **self.worker}
        )
        owner = f"m{len(self.managers)}-{self.rng.randrange(1 << 30):x}"
        consumer = WorkerConsumer(JetStreamApi(connection), config, metrics=self.metrics)

        @consumer.handler
        async def handle(message: Message) -> None:
            await self._handle(owner, message)

        manager = Manager(
            ControlConfig(**self.control),
            connection,
            self.source or self.partitions,
            self.script,
            consumer=consumer,
            hooks=Hooks(
                on_error=lambda error: self.errors.append(f"{type(error).__name__}: {error}"),
                on_partition_granted=self._granted,
            ),
            clock=self.clock(),
            metrics=self.metrics,
        )
        self.managers.append(manager)
        self._stack.push_async_callback(_end, manager, connection)
        await manager.start(_STARTS_WITHIN)
        return manager

    async def _handle(self, owner: str, message: Message) -> None:
        if self.handle_seconds:
            await asyncio.sleep(self.rng.uniform(0.0, 2 * self.handle_seconds))
        key, producer, counter = value_of(message)
        self.sink.effect(Effect(message.partition.id, key, producer, counter, owner, message.lease.epoch))

    def _granted(self, lease: Lease) -> None:  # noqa: ARG002 - the hook's signature
        self.grants += 1

    async def moved_evenly(self, timeout: float = 60.0) -> None:
        """Return when the partitions are spread over all workers and none is moving."""
        least = len(self.partitions) // len(self.managers)
        await eventually(lambda: all(len(m.owned()) >= least for m in self.managers), timeout, "an even spread")
        await self.settle(timeout)

    async def close(self) -> None:
        await self._stack.aclose()

    def leader(self) -> Manager | None:
        return next((m for m in self.managers if m.is_leader), None)

    async def move(self, count: int, timeout: float = 60.0) -> int:
        """Move `count` partitions to other workers at once, and wait until they arrive; returns how many moved."""
        workers = [m.worker_id for m in self.managers if m.worker_id is not None]
        before = {p: m.worker_id for m in self.managers for p in m.owned()}
        chosen = self.rng.sample(sorted(before), min(count, len(before)))
        for partition in chosen:
            others = sorted(w for w in workers if w != before[partition])
            if others:
                self.script.owners[partition] = self.rng.choice(others)
        wanted = {p: self.script.owners[p] for p in chosen}
        await self._refresh()
        await eventually(
            lambda: all(self._owner(p) == w for p, w in wanted.items()) and self._converged(), timeout, "all moved"
        )
        return sum(1 for p in chosen if before[p] != wanted[p])

    async def settle(self, timeout: float = 120.0) -> None:
        """Return when every partition has its owner and nothing moves."""
        await eventually(
            lambda: self._converged() and sum(len(m.owned()) for m in self.managers) == len(self.partitions),
            timeout,
            "the fleet converged",
        )

    async def _refresh(self) -> None:
        while True:
            leader = self.leader()
            try:
                if leader is not None:
                    await leader.refresh_partitions()
                    return
            except PartiError as error:
                self.errors.append(str(error))
            await asyncio.sleep(0.05)

    def _owner(self, partition: PartitionId) -> WorkerId | None:
        return next((m.worker_id for m in self.managers if partition in m.owned()), None)

    def _converged(self) -> bool:
        leader = self.leader()
        return leader is not None and leader.converged()

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels or None) or 0.0

    def conflicts(self) -> float:
        """The share of claim writes that lost their CAS to another writer."""
        return self.counted("parti_claim_cas_total", result="conflict") / max(1.0, self.claim_writes())

    def claim_writes(self) -> float:
        """Claim writes so far, with any result."""
        return sum(self.counted("parti_claim_cas_total", result=r) for r in ("success", "conflict", "unknown"))


async def _end(manager: Manager, connection: Connection) -> None:
    try:
        await manager.stop(returning=True)  # the proof is over: no worker has to take over
    finally:
        await connection.close()
