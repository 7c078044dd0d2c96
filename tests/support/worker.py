"""What every test of the worker plane needs: its own stream, and workers that are closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from parti.manager import ControlConfig, Manager
from parti.model import Partition
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Outcome, WorkerConfig, WorkerConsumer


def parts(*names: str) -> list[Partition]:
    return [Partition((name,)) for name in names]


@dataclass
class Effects:
    """A handler that records its messages."""

    seen: list[Message] = field(default_factory=list)
    answer: Callable[[Message], Outcome | Awaitable[Outcome]] | None = None

    async def __call__(self, message: Message) -> Outcome:
        if self.answer is not None:
            result = self.answer(message)
            outcome = await result if isinstance(result, Awaitable) else result
            if outcome is not None:
                return outcome
        self.seen.append(message)
        return None

    @property
    def sequences(self) -> list[int]:
        return [message.sequence for message in self.seen]

    def of(self, partition: str) -> list[int]:
        return [message.sequence for message in self.seen if message.partition.id == partition]

    async def count(self, wanted: int, timeout: float = 60.0) -> None:
        await eventually(lambda: len(self.seen) >= wanted, timeout, f"{wanted} effects (have {len(self.seen)})")


class ManagedWorker:
    """A worker in the per-partition layout, which only a manager can run; it has the interface of the other worker."""

    def __init__(self, consumer: WorkerConsumer, connection: Connection) -> None:
        self._consumer = consumer
        self._connection = connection
        self._manager: Manager | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    async def update_worker_consumer(self, worker_id: str, partitions: Iterable[Partition]) -> None:
        """Own these partitions as the only member of its own namespace; can be called once."""
        assert self._manager is None
        config = ControlConfig(
            namespace=self._consumer.config.stream,
            layout="per-partition",
            worker_id_prefix=worker_id,
            worker_id_max=0,
            heartbeat_ttl=20.0,  # a busy machine is no crash
            cold_start_window=0.05,
            planned_scale_window=0.05,
        )
        metrics = self._consumer._metrics
        self._manager = Manager(config, self._connection, list(partitions), consumer=self._consumer, metrics=metrics)
        await self._manager.start(60.0)
        await self._manager.wait_for("converged", 60.0)

    async def close(self) -> None:
        if self._manager is not None:
            await self._manager.stop()
            self._manager = None
        await self._consumer.close()


class Bench:
    """A stream, and workers on it."""

    def __init__(self, server: NatsServer, js: JetStreamApi, stream: str, layout: str = "per-worker") -> None:
        self.server = server
        self.js = js
        self.stream = stream
        self.layout = layout
        self.workers: list[Any] = []
        self.metrics = PrometheusMetrics()

    @property
    def worker_id(self) -> str:
        return "w1" if self.layout == "per-worker" else "w1-0"

    @property
    def consumer(self) -> str:
        """The consumer's name in letters; the name of a managed consumer contains its namespace."""
        return f"parti-{self.worker_id}" if self.layout == "per-worker" else f"parti-{self.stream}-{self.worker_id}"

    async def create(self, **config: Any) -> None:
        body = {"name": self.stream, "subjects": [f"{self.stream}.>"], "storage": "memory", "allow_direct": True}
        await self.js.stream_create(body | config)

    def config(self, **changes: Any) -> WorkerConfig:
        settings: dict[str, Any] = {
            "stream": self.stream,
            "subject_template": f"{self.stream}.{{partition}}",
            "update_coalescing_window": 0.0,
            "min_update_interval": 0.0,
            "pull_timeout": 1.0,
            "idle_heartbeat": 0.2,
        }
        return WorkerConfig(**(settings | changes))

    def worker(self, handler: Any, *, js: JetStreamApi | None = None, **changes: Any) -> Any:
        """A WorkerConsumer, or its equivalent in the other layout."""
        options = {key: changes.pop(key) for key in ("fence", "backoff", "clock") if key in changes}
        worker = WorkerConsumer(js or self.js, self.config(**changes), handler, metrics=self.metrics, **options)
        made = worker if self.layout == "per-worker" else ManagedWorker(worker, self.js.connection)
        self.workers.append(made)
        return made

    async def publish(self, partition: str, count: int = 1, data: bytes = b"x", **headers: str) -> list[int]:
        """Publish in order; returns the sequences."""
        subject = f"{self.stream}.{partition}"
        acks = [await self.js.publish(subject, data, headers=headers or None) for _ in range(count)]
        return [ack.seq for ack in acks]

    async def publish_many(self, names: Iterable[str], rounds: int) -> None:
        """Publish `rounds` messages to each, interleaved."""
        for number in range(rounds):
            await asyncio.gather(*(self.js.publish(f"{self.stream}.{name}", b"%d" % number) for name in names))

    async def info(self, worker: str = "w1", prefix: str = "parti") -> dict[str, Any]:
        """The server's info on the worker's durable, or on all its durables together."""
        if self.layout == "per-worker":
            return await self.js.consumer_info(self.stream, f"{prefix}-{worker}")
        found = [await self.js.consumer_info(self.stream, each) for each in await self.js.consumer_names(self.stream)]
        counted = ("num_pending", "num_ack_pending", "num_waiting")
        return {key: sum(info.get(key, 0) for info in found) for key in counted}

    async def settled(self, worker: str = "w1", timeout: float = 60.0) -> None:
        """Return when every message is delivered and acknowledged."""

        async def done() -> bool:
            info = await self.info(worker)
            return not info["num_pending"] and not info["num_ack_pending"]

        await eventually(done, timeout, "all messages acknowledged")

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels or None) or 0.0


class bench_on:
    def __init__(self, server: NatsServer, name: str, url: str | None = None, *, layout: str = "per-worker") -> None:
        self._server, self._name, self._url, self._layout = server, name, url, layout

    async def __aenter__(self) -> Bench:
        options = ConnectOptions(servers=(self._url or self._server.url,), connect_timeout=5.0, request_timeout=10.0)
        self._connection = await connect(options)
        self._bench = Bench(self._server, JetStreamApi(self._connection), self._name, self._layout)
        return self._bench

    async def __aexit__(self, *_: object) -> None:
        try:
            for worker in self._bench.workers:
                await worker.close()
        finally:
            await self._connection.close()
