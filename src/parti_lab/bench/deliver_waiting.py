"""The cost of waiting: rate limits of triggers across processes, ten thousand documents of a dead host, large tasks of
a hanging one. Real processes deliver (`parti deliver run`). The figures come from the server's counters, the endpoints,
and the kernel's statistics of the process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.child import spawn, waited_for_cpu
from parti.testing.http_server import Answer, FaultHttpServer, ReceivedRequest, Reply
from parti.testing.monitor import ask
from parti.wire.api import JetStreamApi, Outgoing
from parti.wire.connect import connect
from parti.wire.errors import ConsumerNotFound
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import RunContext

GOALS = {
    "burst_of_rate": "<= 1.2",
    "messages_per_delivery": "<= 3",
    "dead_messages_per_s": "< 10",
    "dead_cpu": "< 0.01",
    "dead_restart_s": "<= 5",
    "hanging_peak_mb": "< 200",
}
_RATE = 100
_RULES = (f"rate={_RATE}", "order=park concurrency=4", f"order=park rate={_RATE} concurrency=4", "concurrency=4")
_LARGE = 200_000  # bytes of a large task
_WITHIN = 180.0
_TICK = os.sysconf("SC_CLK_TCK")


class _Process:
    """`parti deliver run`, and the kernel's statistics of it."""

    def __init__(self, server: NatsServer, stream: str, **settings: object) -> None:
        values = {"stream": stream, **settings}
        words = [word for name, value in values.items() for word in ("--set", f"deliver.{name}={value}")]
        command = [sys.executable, "-m", "parti.cli", "deliver", "run", "--json", "-s", server.url]
        self._process = spawn([*command, "--set", "observe.log_level=error", *words])

    async def ready(self) -> None:
        """Return when the process has joined."""
        assert self._process.stdout is not None
        while b'"ready"' not in (line := await asyncio.to_thread(self._process.stdout.readline)):
            assert line, "the process has ended"

    @property
    def cpu(self) -> float:
        """CPU-seconds so far."""
        words = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICK

    @property
    def queued(self) -> float:
        """Seconds in which its main thread was runnable but had no CPU; the figures exclude them."""
        return waited_for_cpu(self._process.pid)

    @property
    def peak_mb(self) -> float:
        """Peak memory."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
        return 0.0

    async def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait, 60)


class _Place:
    """A server with one stream at a time."""

    def __init__(self, server: NatsServer, js: JetStreamApi) -> None:
        self.server = server
        self.js = js
        self.stream = ""
        self._numbers = 0

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        self.stream = f"WAITS{uuid4().hex[:8]}"
        config = {"name": self.stream, "subjects": [f"{self.stream}.>"], "storage": "file", "allow_atomic": True}
        await self.js.stream_create(config)
        try:
            yield
        finally:
            for name in await self.js.stream_names():
                if name.removeprefix("KV_").startswith(self.stream):
                    await self.js.stream_delete(name)

    async def publish(self, count: int, url: str, *, documents: int, size: int = 0, trigger: str = "t") -> None:
        """Publish a number of tasks, for a number of documents in turn."""
        step = 500 if size < 10_000 else 20
        for first in range(0, count, step):
            numbers = range(first, min(first + step, count))
            tasks = [self._task(f"{trigger}-{number % documents}", url, size, trigger) for number in numbers]
            await self.js.publish_atomic(tasks)

    def _task(self, document: str, url: str, size: int, trigger: str) -> Outgoing:
        self._numbers += 1
        task: dict[str, Any] = {"triggerId": trigger, "database": "db", "collection": "docs", "documentId": document}
        task |= {"event": "update", "url": url, "seq": self._numbers, "payload": "x" * size}
        encoded = base64.urlsafe_b64encode(document.encode()).decode()
        return Outgoing(f"{self.stream}.db.docs.{encoded}", json.dumps(task).encode())

    def messages(self) -> int:
        """Messages sent to the server, without the benchmark's own."""
        return int(ask(f"{self.server.monitor_url}/varz")["in_msgs"]) - int(self.js.connection.stats["out_msgs"])

    async def all_taken(self) -> bool:
        """Whether the process holds no task: each is delivered or parked."""
        try:
            info = await self.js.consumer_info(self.stream, "TriggerDeliveryWorker")
        except ConsumerNotFound:
            return False  # the process has only started
        return not (info["num_pending"] or info["num_ack_pending"])


async def waiting(ctx: RunContext) -> dict[str, Figure]:
    """The figures of `GOALS`."""
    with NatsServer() as server:
        connection = await connect(ConnectOptions(servers=(server.url,)))
        try:
            place = _Place(server, JetStreamApi(connection))
            figures = await _limits(ctx, place)
            figures |= await _dead(ctx, place, 2_000 if ctx.quick else 10_000)
            return figures | await _hanging(ctx, place, 250 if ctx.quick else 2_500)
        finally:
            await connection.close()


async def _limits(ctx: RunContext, place: _Place) -> dict[str, Figure]:
    """The busiest second of a rate shared by two processes, and the cost of each delivery, by rule."""
    bursts, costs = [0.0], [0.0]
    with ctx.progress("limits of triggers", total=len(_RULES)) as advance:
        for rules in _RULES:
            burst, cost = await _limit(place, rules, 200 if ctx.quick else 500)
            bursts.append(burst if "rate" in rules else 0.0)
            costs.append(cost)
            advance(1)
    return {"burst_of_rate": round(max(bursts), 2), "messages_per_delivery": round(max(costs), 2)}


async def _limit(place: _Place, rules: str, count: int) -> tuple[float, float]:
    """The busiest second relative to the rate, and messages sent to the server per delivery."""
    times: list[float] = []

    async def arrived(wanted: int) -> None:
        async def all_here() -> bool:
            return len(times) >= wanted

        await eventually(all_here, _WITHIN)

    async with place.streaming(), FaultHttpServer() as endpoint:
        endpoint.otherwise(_noting(times))
        await place.publish(count, f"{endpoint.url}/hook", documents=100)
        settings = {"allow_addresses": endpoint.allowed, "partitions": 4, "triggers": f"t: {rules}"}
        processes = [_Process(place.server, place.stream, **settings) for _ in range(2)]
        try:
            for process in processes:
                await process.ready()
            await arrived(count)
            # A second round: the first one included the start of both.
            before, began = place.messages(), time.monotonic()
            await place.publish(count, f"{endpoint.url}/hook", documents=100)
            await arrived(2 * count)
            sent, took = place.messages() - before, time.monotonic() - began
            before = place.messages()
            await asyncio.sleep(2)
            idle = (place.messages() - before) / 2
        finally:
            for process in processes:
                await process.stop()
    return _burst(times) / _RATE, (sent - idle * took) / count


def _noting(times: list[float]) -> Callable[[ReceivedRequest], Reply]:
    def reply(_request: ReceivedRequest) -> Reply:
        times.append(time.monotonic())
        return Answer(200)

    return reply


def _burst(times: list[float]) -> int:
    """The maximum number of requests within any second."""
    most = first = 0
    for last, at in enumerate(times):
        while times[first] <= at - 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most


async def _dead(ctx: RunContext, place: _Place, documents: int) -> dict[str, Figure]:
    """A host that refuses every connection, with many documents; then a restart with them."""
    async with place.streaming(), FaultHttpServer() as endpoint, FaultHttpServer() as dead:
        url, allowed = f"{dead.url}/hook", f"{endpoint.allowed},{dead.allowed}"
        await dead.stop()
        await place.publish(documents, url, documents=documents)
        process = _Process(place.server, place.stream, allow_addresses=allowed)
        try:
            await process.ready()
            with ctx.progress("documents of a dead host"):
                await eventually(place.all_taken, _WITHIN)
                await asyncio.sleep(5)  # documents tried before the host counted as down finish their attempts
                seconds = 10 if ctx.quick else 30
                messages, cpu, began = place.messages(), process.cpu, time.monotonic()
                await asyncio.sleep(seconds)
                took = time.monotonic() - began
                rate, share = (place.messages() - messages) / took, (process.cpu - cpu) / took
                await process.stop()
                began = time.monotonic()
                process = _Process(place.server, place.stream, allow_addresses=allowed)
                await place.publish(1, f"{endpoint.url}/hook", documents=1, trigger="well")
                await endpoint.wait_for(1, timeout=_WITHIN)
                restart = time.monotonic() - began - process.queued
        finally:
            await process.stop()
    return {
        "dead_documents": documents,
        "dead_messages_per_s": round(rate, 1),
        "dead_cpu": round(share, 4),
        "dead_restart_s": round(restart, 2),
    }


async def _hanging(ctx: RunContext, place: _Place, count: int) -> dict[str, Figure]:
    """A host that never answers, with large tasks: the peak memory of the process."""
    async with place.streaming(), FaultHttpServer() as endpoint:
        endpoint.otherwise(Answer(200, gate=asyncio.Event()))
        await place.publish(count, f"{endpoint.url}/hook", documents=count // 2, size=_LARGE)
        process = _Process(place.server, place.stream, allow_addresses=endpoint.allowed)
        try:
            await process.ready()
            with ctx.progress("large tasks of a host that hangs"):
                with contextlib.suppress(NeverHappened):
                    await eventually(place.all_taken, 60 if ctx.quick else 120)
                await asyncio.sleep(15)  # some requests reach their timeouts
                peak = process.peak_mb
        finally:
            await process.stop()
    return {"hanging_mb": round(count * _LARGE / 1e6), "hanging_peak_mb": round(peak)}
