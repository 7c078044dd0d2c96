"""`parti bench deliver`: deliveries per CPU-second beside a bare aiohttp loop, and what one dead host costs others.

Both clients post bodies of the same size to the same endpoint in another process, 64 at a time, read the answer, and
take turns in one run. The bare loop is a plain `ClientSession`. parti uses aiohttp's pool and parser without it, and
also pulls, decodes, keeps the order of a thousand documents, signs, and acknowledges. The engine spark counts all its
processes, including the JVM, and is compared with as many concurrent bare loops as it has tasks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from parti.cli.tune_gc import tune_gc
from parti.delivery import AddressGuard, DeliverSection, TaskConsumer
from parti.delivery.guard import AddrInfo
from parti.delivery.transport import HttpTransport
from parti.errors import UsageError
from parti.observe import delivery_metrics as m
from parti.observe.catalog import Metric
from parti.observe.metrics import NoMetrics
from parti.progress import Advance
from parti.testing import NatsServer
from parti.waiting import first_of
from parti.wire.api import JetStreamApi, Outgoing
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti_lab.bench.deliver_bare import BODY, IN_FLIGHT, bare
from parti_lab.bench.deliver_spark import measure
from parti_lab.bench.deliver_waiting import GOALS as OF_WAITING
from parti_lab.bench.deliver_waiting import waiting
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_HOSTS = 50
_DOCUMENTS = 1_000
_SECRET = "whsec_" + base64.b64encode(b"parti-bench-parti-bench-").decode()
_WITHIN = 120.0
_HANGING = 4
_BULK = 8  # times the number of tasks of a round


class _Counter(NoMetrics):
    """Signals when a number of tasks of healthy hosts are delivered."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        self.done = asyncio.Event()

    def count(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        if metric is m.CONSUME_COUNT and labels["success"] == "true":
            self.left -= int(amount)
            if self.left <= 0:
                self.done.set()


def run(ctx: RunContext) -> dict[str, Figure]:
    """Interleaved rounds of each client; the best round of each counts, because disturbances only slow a round down."""
    return asyncio.run(_run(ctx))


async def _run(ctx: RunContext) -> dict[str, Figure]:
    parts = _parts(ctx.options)
    figures: dict[str, Figure] = {}
    if parts & {"speed", "names", "spark"}:
        figures |= await _speed(ctx, parts)
    return figures | (await waiting(ctx) if "waiting" in parts else {})


async def _speed(ctx: RunContext, parts: frozenset[str]) -> dict[str, Figure]:
    count = int(ctx.options["tasks"]) // (4 if ctx.quick else 1)
    rounds = 2 if ctx.quick else 4
    os.environ["PARTI_WEBHOOK_SECRET_BENCH"] = _SECRET  # Spark's workers read it there
    with NatsServer() as server, _sink() as ports:
        options = ConnectOptions(servers=(server.url,))
        healthy, dead = ports[1:], ports[0]
        best: dict[str, float] = dict.fromkeys(("bare", "ours", "all_well", "one_dead"), 0.0)
        # The first batch imports and compiles code for all later ones.
        await bare(500, healthy[0])
        await _ours(options, 500, healthy[:1], 500)
        tune_gc()  # as `parti deliver run` does; it helps the bare loop as well
        with ctx.progress("deliver", total=4 * rounds) as advance:
            for _ in range(rounds if parts & {"speed", "spark"} else 0):
                await _round(options, count, healthy, dead, best, advance)
        figures: dict[str, Figure] = {"tasks": count, "hosts": _HOSTS}
        figures |= _beside_bare(best) if best["bare"] else {}
        if "names" in parts:
            figures |= await _names(ctx, options, count, healthy[: _HOSTS - 1])
        if "spark" in parts:
            figures |= await _spark(ctx, options, count, healthy[0], best["bare"])
    return figures


def _beside_bare(best: dict[str, float]) -> dict[str, Figure]:
    return {
        "bare_per_cpu_s": round(best["bare"]),
        "ours_per_cpu_s": round(best["ours"]),
        "of_bare": round(best["ours"] / best["bare"], 3),
        "others_per_s_all_well": round(best["all_well"]),
        "others_per_s_one_dead": round(best["one_dead"]),
        "cost_of_a_dead_host": round(max(0.0, 1 - best["one_dead"] / best["all_well"]), 3),
    }


async def _spark(ctx: RunContext, options: ConnectOptions, count: int, port: int, alone: float) -> dict[str, Figure]:
    """An engine for bulk: starting a query costs as much as ten thousand deliveries, so it gets more tasks."""
    stream = f"BENCH{uuid4().hex[:8]}"
    config = _config(stream, [port])
    async with _filled(options, stream, _BULK * count, [f"127.0.0.1:{port}"]):
        with ctx.progress("deliver on Spark"):
            figures = await asyncio.to_thread(
                measure, config, options, port, _BULK * count, bare=count, turns=1 if ctx.quick else 3
            )
    return figures | {"spark_of_one_bare": round(float(figures["spark_per_cpu_s"]) / alone, 3)}


async def _round(
    options: ConnectOptions, count: int, healthy: list[int], dead: int, best: dict[str, float], advance: Advance
) -> None:
    best["bare"] = max(best["bare"], await bare(count, healthy[0]))
    advance(1)
    rate, _ = await _ours(options, count, healthy[:1], count)
    best["ours"] = max(best["ours"], rate)
    advance(1)
    others = count * (_HOSTS - 1) // _HOSTS
    for name, first in (("all_well", healthy[0]), ("one_dead", dead)):
        hosts = [first, *healthy[: _HOSTS - 1]]
        _, rate = await _ours(options, count, hosts, others)
        best[name] = max(best[name], rate)
        advance(1)


async def _names(ctx: RunContext, options: ConnectOptions, count: int, ports: list[int]) -> dict[str, Figure]:
    """The cost of hanging DNS names for other hosts: paired rounds with and without them; the median counts.

    Both rounds of a pair run within seconds, so that other load on the machine affects both alike.
    """
    pairs, shares = 3 if ctx.quick else 11, []
    count = min(count, 2_000)
    well = [f"h{number}.test:{port}" for number, port in enumerate(ports)] * 2
    ill = [f"hangs{number}.test:{ports[0]}" for number in range(_HANGING)]  # 4 % of the tasks, and all their slots
    with ctx.progress("names that hang", total=2 * pairs) as advance:
        for pair in range(pairs):
            rates: dict[bool, float] = {}
            for hanging in (pair % 2 == 0, pair % 2 == 1):
                names = well + ill * hanging
                _, rates[hanging] = await _ours(options, count * len(names) // len(well), ports, count, names)
                advance(1)
            shares.append(rates[True] / rates[False])
    return {"hanging_names": _HANGING, "cost_of_hanging_names": round(max(0.0, 1 - statistics.median(shares)), 3)}


async def _ours(
    options: ConnectOptions, count: int, ports: list[int], wanted: int, names: list[str] | None = None
) -> tuple[float, float]:
    """Deliveries per CPU-second and per second, up to the `wanted`th success.

    `names`: host names of the tasks, with ports; by default the addresses.
    """
    stream = f"BENCH{uuid4().hex[:8]}"
    config = _config(stream, ports)
    hosts = names or [f"127.0.0.1:{port}" for port in ports]
    let_go = threading.Event()

    def look_up(host: str) -> list[AddrInfo]:
        if host.startswith("hangs"):
            let_go.wait(_WITHIN)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    async with _filled(options, stream, count, hosts):
        counter = _Counter(wanted)
        guard = AddressGuard(config.allow_addresses)
        consumer = TaskConsumer(
            config,
            nats=options,
            metrics=counter,
            guard=guard,
            transport=HttpTransport(config, guard, lookup=look_up),
            environ={"PARTI_WEBHOOK_SECRET_BENCH": _SECRET},
        )
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter() - _queued()
        running = asyncio.create_task(consumer.start())
        try:
            await first_of(running, counter.done.wait(), timeout=_WITHIN)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - _queued() - wall
        finally:
            let_go.set()
            await consumer.stop()
            await running
        if counter.left > 0:
            raise UsageError(f"{counter.left} of {wanted} tasks were not delivered within {_WITHIN:g} s")
    return wanted / cpu, wanted / wall


def _queued() -> float:
    """Seconds in which this thread was runnable but had no CPU; the figures exclude them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0  # not Linux


def _config(stream: str, ports: list[int]) -> DeliverSection:
    return msgspec.structs.replace(
        DeliverSection(),
        stream=stream,
        storage="memory",
        host_concurrency=IN_FLIGHT if len(ports) == 1 else 32,
        allow_addresses=tuple(f"127.0.0.1/32@{port}" for port in ports),
        shutdown=0.1,
    )


@contextlib.asynccontextmanager
async def _filled(options: ConnectOptions, stream: str, count: int, hosts: list[str]) -> AsyncIterator[None]:
    connection = await connect(options)
    js = JetStreamApi(connection)
    config = {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory", "allow_atomic": True}
    try:
        await js.stream_create(config)
        for first in range(0, count, 500):
            numbers = range(first, min(first + 500, count))
            await js.publish_atomic([_task(stream, number, hosts) for number in numbers])
        yield
        for name in await js.stream_names():
            if name.removeprefix("KV_").startswith(stream):
                await js.stream_delete(name)
    finally:
        await connection.close()


def _task(stream: str, number: int, hosts: list[str]) -> Outgoing:
    document = f"{number % len(hosts)}-{number % _DOCUMENTS}"  # one document, one host
    task: dict[str, Any] = {
        "triggerId": "bench",
        "database": "db",
        "collection": "orders",
        "documentId": document,
        "event": "update",
        "url": f"http://{hosts[number % len(hosts)]}/hook",
        "secretsRef": "bench",
        "payload": {"text": "x" * (BODY - 12)},
    }
    return Outgoing(f"{stream}.db.orders.{number % _DOCUMENTS}", json.dumps(task).encode())


@contextlib.contextmanager
def _sink() -> Iterator[list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "parti_lab.bench.deliver_sink", str(_HOSTS + 1)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


_OF_PARTS: Mapping[str, Mapping[str, str]] = {
    "speed": {"of_bare": ">= 0.5", "cost_of_a_dead_host": "< 0.1"},
    "names": {"cost_of_hanging_names": "< 0.1"},
    "spark": {"spark_of_bare": ">= 0.5"},
    "waiting": OF_WAITING,
}


def _parts(options: Mapping[str, Any]) -> frozenset[str]:
    parts = frozenset(str(options["parts"]).split(","))
    if unknown := parts - _OF_PARTS.keys():
        raise UsageError(f"parts {sorted(unknown)}: there are {', '.join(_OF_PARTS)}")
    return parts


def _goals(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: goal for part in sorted(_parts(options)) for name, goal in _OF_PARTS[part].items()}


BENCH = Benchmark(
    name="deliver",
    help="Deliveries per CPU-second of both engines beside aiohttp; what dead hosts, hanging names and waiting cost.",
    run=run,
    goals=_goals({"parts": ",".join(_OF_PARTS)}),
    goals_of=_goals,
    options=(
        ExperimentOption("tasks", 20_000, "tasks of a round"),
        ExperimentOption("parts", ",".join(_OF_PARTS), "what to measure, by commas"),
    ),
)
