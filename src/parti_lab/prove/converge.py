"""`parti prove converge`: ten workers get 900 new partitions. How long until they are spread evenly and consumed?

Then ten more workers join. How long until every worker has its share of the partitions in use?

Kafka's own figures for this case: 103 s with the classic protocol, 5 s with KIP-848.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import process_time

from parti.clock import Clock, SystemClock
from parti.manager import StaticSource
from parti.testing import eventually
from parti.wire.api import JetStreamApi
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.fleet import STREAM, Fleet, open_stream
from parti_lab.prove.sink import Sink
from parti_lab.prove.traffic import PRODUCER


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Add the partitions, each with one waiting message; stop the clock when all are owned, evenly spread, consumed."""
    workers, count = int(ctx.options["workers"]), int(ctx.options["partitions"])
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        _, settings, js = await open_stream(stack)
        sink = await stack.enter_async_context(Sink())
        first, names = [f"a{n}" for n in range(workers)], [f"p{n}" for n in range(count)]
        control = {
            "namespace": "prove",
            "layout": str(ctx.options["layout"]),
            "cold_start_window": 0.5,
            "planned_scale_window": 0.2,
            "rebalance_cooldown": 0.0,
            "heartbeat_ttl": 30.0,
            "heartbeat_interval": 5.0,
            "prepare_timeout": 10.0,
            "commit_timeout": 10.0,
        }
        source = StaticSource(first)
        fleet = Fleet(settings, first, sink, ctx.random(), control=control, source=source)
        stack.push_async_callback(fleet.close)
        await fleet.start(workers)
        await fleet.moved_evenly()
        for start in range(0, count, 100):
            await asyncio.gather(*(_publish(js, sink, name) for name in names[start : start + 100]))
        fleet.partitions = [*first, *names]
        began, before, used = clock.now(), fleet.claim_writes(), process_time()
        source.update(fleet.partitions)
        await eventually(lambda: sum(1 for p in names if p in sink.last) == count, 120.0, "every partition consumed")
        consumed = clock.now() - began
        await fleet.moved_evenly(120.0)
        balanced = clock.now() - began
        writes, used = fleet.claim_writes() - before, process_time() - used
        shares = [len(m.owned()) for m in fleet.managers]
        joined = await _join(fleet, int(ctx.options["joining"]), clock)
        verdict = await sink.complete(30.0)
        return {
            "workers": workers,
            "partitions": count,
            "consuming_s": round(consumed, 2),
            "converged_s": round(balanced, 2),
            "cpu_s": round(used, 2),
            "claim_writes_each": round(writes / count, 2),
            "peak_over_mean": round(max(shares) * workers / sum(shares), 3),
            "joined_s": round(joined, 2),
            "lost": verdict.lost,
            "duplicates": verdict.duplicated,
        }


async def _join(fleet: Fleet, count: int, clock: Clock) -> float:
    """Seconds from the start of `count` more workers until all workers have their share."""
    if not count:
        return 0.0
    began = clock.now()
    await fleet.start(count)
    await fleet.moved_evenly(120.0)
    return clock.now() - began


async def _publish(js: JetStreamApi, sink: Sink, name: str) -> None:
    await js.publish(f"{STREAM}.{name}", f'["{name}.k0","{PRODUCER}",0]'.encode())
    sink.history.published(f"{name}.k0", PRODUCER, 0)


PROOF = Proof(
    name="converge",
    help="Ten workers get 900 new partitions: how long until they are even and consumed.",
    run=run,
    goals={"lost": "== 0", "duplicates": "== 0", "converged_s": "<= 5.0", "peak_over_mean": "<= 1.1"},
    options=(
        ExperimentOption("workers", 10, "workers"),
        ExperimentOption("partitions", 900, "new partitions"),
        ExperimentOption("joining", 10, "workers that join the running fleet afterwards"),
        ExperimentOption("layout", "per-worker", "per-worker or per-partition"),
    ),
)
