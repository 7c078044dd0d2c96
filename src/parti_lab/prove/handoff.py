"""`parti prove handoff`: planned moves under load; nothing is lost, repeated or reordered, other partitions continue.

Real servers, real connections. Every few moments some partitions move to other workers; the load never stops. With
`--faults`, a 3-node cluster has its leaders moved, a node killed, or all nodes restarted one after the other; then a
worker may be fenced and repeat what it had in flight, but nothing is lost and nothing is out of order.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from parti.errors import UsageError
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.cluster_faults import FAULTS, ClusterFaults
from parti_lab.prove.fleet import STREAM, Fleet, open_stream
from parti_lab.prove.sink import Sink, percentile
from parti_lab.prove.traffic import Traffic

_COMPLETE_WITHIN = 60.0
_QUICK_MOVES = 200


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Move partitions until the number is reached, then wait for all messages and judge."""
    options = ctx.options
    moves = min(int(options["moves"]), _QUICK_MOVES) if ctx.quick else int(options["moves"])
    replicas, faults = int(options["replicas"]), str(options["faults"])
    if faults not in FAULTS:
        raise UsageError(f"--faults {faults!r}: choose one of {', '.join(FAULTS)}")
    if faults != "none" and replicas == 1:
        raise UsageError("--faults needs --replicas 3: one server has no replica to take over")
    rng = ctx.random()
    async with AsyncExitStack() as stack:
        servers, settings, js = await open_stream(stack, replicas, str(options["retention"]))
        sink = await stack.enter_async_context(Sink())
        names = [f"p{n}" for n in range(int(options["partitions"]))]
        fleet = Fleet(
            settings,
            names,
            sink,
            rng,
            control=_control(str(options["layout"]), replicas),
            handle_seconds=0.001,
        )
        stack.push_async_callback(fleet.close)
        await fleet.start(int(options["workers"]))
        await fleet.settle()
        traffic = Traffic(js, STREAM, names, sink.history, rate=float(options["rate"]), rng=rng)
        traffic.start()
        trouble = ClusterFaults(faults, servers, js, [STREAM, "KV_parti-prove"], rng)
        trouble.start()
        done = 0
        with ctx.progress("moves", total=moves) as advance:
            while done < moves:
                moved = await fleet.move(min(int(options["at_once"]), moves - done), timeout=120.0)
                done += moved
                advance(moved)
                await asyncio.sleep(rng.uniform(0.0, 0.1))
        await trouble.stop()
        await traffic.stop()
        verdict = await sink.complete(_COMPLETE_WITHIN)
        return _figures(done, verdict, sink, fleet, traffic, faults)


def _control(layout: str, replicas: int) -> dict[str, Any]:
    return {
        "namespace": "prove",
        "layout": layout,
        "bucket_replicas": replicas,
        "cold_start_window": 0.5,
        "planned_scale_window": 0.2,
        "rebalance_cooldown": 0.0,
        # A busy test machine starves a process for seconds: that must not count as a crash here.
        "heartbeat_ttl": 15.0,
        "heartbeat_interval": 3.0,
        "prepare_timeout": 5.0,
    }


def _figures(done: int, verdict: Any, sink: Sink, fleet: Fleet, traffic: Traffic, faults: str) -> dict[str, Figure]:
    moved, steady = list(sink.moved), list(sink.steady)
    return {
        "moves": done,
        "lost": verdict.lost,
        "duplicates": verdict.duplicated if faults == "none" else 0,
        "repeated": verdict.duplicated,
        "inversions": verdict.inversions,
        "two_owners": verdict.two_owners,
        "stale_accepted": verdict.stale_accepted,
        "messages": verdict.published,
        "pause_p50_ms": round(1000 * percentile(moved, 0.5), 1),
        "pause_p99_ms": round(1000 * percentile(moved, 0.99), 1),
        "undisturbed_p99_ms": round(1000 * percentile(steady, 0.99), 1),
        "cas_conflicts_percent": round(100 * fleet.conflicts(), 3),
        "longest_publish_pause_ms": round(1000 * traffic.longest_pause, 1),
        "fenced": fleet.counted("parti_fenced_total"),
        "aborted": fleet.counted("parti_handoff_total", result="abort")
        + fleet.counted("parti_handoff_total", result="timeout"),
        "errors": len(fleet.errors),
        "examples": "; ".join(f"{k}: {v[0]}" for k, v in verdict.examples.items() if getattr(verdict, k)),
    }


GOALS = {
    "lost": "== 0",
    "duplicates": "== 0",
    "inversions": "== 0",
    "two_owners": "== 0",
    "stale_accepted": "== 0",
    "cas_conflicts_percent": "< 0.5",
}

PROOF = Proof(
    name="handoff",
    help="Planned moves under load: nothing lost, repeated or out of order.",
    run=run,
    goals=GOALS,
    options=(
        ExperimentOption("moves", 1_000, "partitions that change hands"),
        ExperimentOption("layout", "per-worker", "per-worker or per-partition"),
        ExperimentOption("retention", "limits", "limits, interest or workqueue"),
        ExperimentOption("replicas", 1, "1, or 3 on a cluster of three nodes"),
        ExperimentOption("faults", "none", "none, stepdown, kill or roll (with --replicas 3)"),
        ExperimentOption("workers", 4, "workers"),
        ExperimentOption("partitions", 32, "partitions"),
        ExperimentOption("rate", 600.0, "messages published a second"),
        ExperimentOption("at_once", 4, "partitions that move at the same time"),
    ),
)
