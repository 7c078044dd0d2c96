"""`parti bench fleet`: many workers with many subjects each, at rising rates; then recovery from a backlog.

Latency counts from when a publisher in another process sends a message until its handler runs. A rate is held when the
publisher reached it and everything it sent was handled within a second of its end. The backlog is filled while no
worker runs; the fleet is then started on it twice, with and without catch-up by range reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from parti.errors import ConfigError, ConnectionFailed, UsageError
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Partition, WorkerConfig, WorkerConsumer
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import create_stream, delete_stream, fill
from parti_lab.bench.paced import TIME_BYTES
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_SIZE = 128
_GRACE = 1.0  # seconds after the publisher's end in which all messages must be handled
_PLAIN_SECONDS = 8.0  # how long the fleet without catch-up runs; enough to measure its rate
_LONGEST_RECOVERY = 120.0


@dataclass(slots=True)
class FleetTally:
    """The counts and latencies of all handlers of the fleet."""

    handled: int = 0
    latencies: list[float] = field(default_factory=list)
    wanted: int = sys.maxsize
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def reach(self, wanted: int, within: float) -> None:
        """Return when that many messages were handled, or at the timeout."""
        self.wanted = wanted
        if self.handled < wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self.reached.wait()

    async def handle(self, message: Message) -> None:
        await self.count(message)
        sent = int(message.data[:TIME_BYTES], 16)
        self.latencies.append(time.monotonic() - sent / 1e9)  # one clock for the whole machine, and it is never set

    async def count(self, message: Message) -> None:  # noqa: ARG002 - it only counts
        self.handled += 1
        if self.handled >= self.wanted:
            self.reached.set()


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Each storage type and rate on its own stream, then the backlog."""
    workers, subjects = int(ctx.options["workers"]), int(ctx.options["subjects"])
    seconds = float(ctx.options["seconds"]) * (0.3 if ctx.quick else 1.0)
    backlog = int(ctx.options["backlog"]) // (5 if ctx.quick else 1)
    try:
        rates = [int(rate) for rate in str(ctx.options["rate"]).split(",")]
    except ValueError:
        raise UsageError(f"--rate takes numbers separated by commas, not {ctx.options['rate']!r}") from None
    figures: dict[str, Figure] = {"workers": workers, "subjects_per_worker": subjects, "seconds_per_rate": seconds}
    held: dict[str, list[int]] = {"memory": [], "file": []}
    worst = 0.0
    async with NatsServer() as server:
        with ctx.progress("fleet", total=2 * len(rates) + 2) as advance:
            for storage in held:
                for rate in rates:
                    found = await _at_rate(server, storage, workers, subjects, rate, seconds, ctx.seed)
                    figures |= {f"{storage}_{rate}_{key}": value for key, value in found.items()}
                    worst = max(worst, float(found["redelivery_ratio"]))
                    if found["held"]:
                        held[storage].append(rate)
                    advance(1)
            for label, mode in (("backlog", "auto"), ("plain", "never")):
                figures |= await _recover(server, workers, subjects, backlog, label, mode)
                advance(1)
    figures["memory_share_held"] = len(held["memory"]) / len(rates)
    figures["memory_rates_held"] = ",".join(map(str, held["memory"])) or "none"
    figures["file_rates_held"] = ",".join(map(str, held["file"])) or "none"
    figures["worst_redelivery_ratio"] = worst
    figures["backlog_speedup"] = round(float(figures["backlog_per_s"]) / max(float(figures["plain_per_s"]), 1), 1)
    return figures


@asynccontextmanager
async def _fleet(
    server: NatsServer,
    stream: str,
    workers: int,
    subjects: int,
    tally: FleetTally,
    *,
    timed: bool,
    catch_up: str = "auto",
) -> AsyncIterator[PrometheusMetrics]:
    if catch_up not in ("auto", "never"):
        raise ConfigError(f"catch_up is auto or never, not {catch_up!r}")
    config = WorkerConfig(
        stream=stream,
        subject_template=f"{stream}.{{partition}}",
        update_coalescing_window=0.0,
        catch_up="auto" if catch_up == "auto" else "never",
    )
    metrics = PrometheusMetrics()
    handle = tally.handle if timed else tally.count
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        fleet = [WorkerConsumer(JetStreamApi(connection), config, handle, metrics=metrics) for _ in range(workers)]
        try:
            for number, worker in enumerate(fleet):
                mine = range(number * subjects, (number + 1) * subjects)
                await worker.update_worker_consumer(f"w{number}", [Partition((str(n),)) for n in mine])
            yield metrics
        finally:
            async with asyncio.TaskGroup() as group:
                for worker in fleet:
                    group.create_task(worker.close())


async def _at_rate(
    server: NatsServer, storage: str, workers: int, subjects: int, rate: int, seconds: float, seed: int
) -> dict[str, Figure]:
    stream = f"bench-{uuid4().hex[:8]}"
    options = ConnectOptions(servers=(server.url,))
    await asyncio.to_thread(create_stream, options, stream, storage)
    tally = FleetTally()
    gc.collect()
    async with _fleet(server, stream, workers, subjects, tally, timed=True) as metrics:
        arguments = [server.url, stream, workers * subjects, rate, seconds, _SIZE, seed]
        cpu = time.process_time()
        publisher = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "parti_lab.bench.paced", *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await publisher.communicate()
        if publisher.returncode:
            raise ConnectionFailed(f"the publisher ended with {publisher.returncode}: what it wrote is above")
        published = json.loads(answer)
        await tally.reach(int(published["sent"]), _GRACE)
        cpu = time.process_time() - cpu
        in_time = tally.handled >= published["sent"]
        received = metrics.registry.get_sample_value("parti_consumer_messages_total") or 0.0
        again = metrics.registry.get_sample_value("parti_consumer_redeliveries_total") or 0.0
    await asyncio.to_thread(delete_stream, options, stream)
    achieved = published["sent"] / published["seconds"]
    ordered = sorted(tally.latencies) or [float("nan")]
    return {
        "held": bool(in_time and achieved >= 0.97 * rate),
        "achieved_per_s": round(achieved),
        "handled": tally.handled,
        "p50_ms": round(1e3 * ordered[len(ordered) // 2], 2),
        "p99_ms": round(1e3 * ordered[len(ordered) * 99 // 100], 2),
        "redelivery_ratio": round(again / max(received, 1.0), 5),
        "client_us_per_message": round(1e6 * cpu / max(tally.handled, 1), 1),
    }


async def _recover(
    server: NatsServer, workers: int, subjects: int, backlog: int, label: str, mode: str
) -> dict[str, Figure]:
    """Start the fleet on a pre-filled file stream, and measure how it drains."""
    stream = f"bench-{uuid4().hex[:8]}"
    options = ConnectOptions(servers=(server.url,))
    await asyncio.to_thread(create_stream, options, stream, "file")
    await asyncio.to_thread(fill, options, stream, backlog, _SIZE, workers * subjects)
    tally = FleetTally()
    started = time.monotonic()
    limit = _LONGEST_RECOVERY if mode == "auto" else _PLAIN_SECONDS
    async with _fleet(server, stream, workers, subjects, tally, timed=False, catch_up=mode):
        await tally.reach(backlog, limit)
        took = time.monotonic() - started
        handled = tally.handled
    await asyncio.to_thread(delete_stream, options, stream)
    return {
        f"{label}_messages": backlog,
        f"{label}_handled": handled,
        f"{label}_seconds": round(took, 2),
        f"{label}_per_s": round(handled / took),
    }


BENCH = Benchmark(
    name="fleet",
    help="Many workers with many filters at rising rates, memory and file storage, and the way back from a backlog.",
    run=run,
    goals={"memory_share_held": ">= 1", "worst_redelivery_ratio": "< 0.03", "backlog_speedup": ">= 3"},
    options=(
        ExperimentOption("workers", 25, "workers, each with its own durable and connection"),
        ExperimentOption("subjects", 80, "filter subjects of each worker"),
        ExperimentOption("rate", "10000,30000,50000", "messages a second, one run each"),
        ExperimentOption("seconds", 10.0, "length of each run"),
        ExperimentOption("backlog", 200_000, "messages that wait when the fleet starts"),
    ),
)
