"""`parti prove crash`: workers are killed under load. Nothing is lost or reordered, and little is repeated.

Real processes, SIGKILL. For each crash the proof measures the time from the kill to the first effect of each of the
victim's partitions at another worker, and counts repeated messages. Each victim is replaced: the fleet keeps its size.
"""

from __future__ import annotations

import asyncio

from parti.testing import eventually
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged, sizes
from parti_lab.prove.sink import percentile

_IN_HAND = 500  # max_ack_pending: messages in flight at one worker, plus one position interval at the rates used here


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Kill, wait for the takeover, replace the victim; repeat."""
    options = ctx.options
    crashes = min(int(options["crashes"]), 3) if ctx.quick else int(options["crashes"])
    shape = HerdShape.of(options)
    took: list[float] = []
    async with herd(shape, ctx.random()) as group:
        await group.begin()
        with ctx.progress("crashes", total=crashes) as advance:
            for _ in range(crashes):
                took += await _crash(group)
                advance(1)
        verdict = await group.finish()
        sink = group.sink
    return {
        **judged(verdict, sink),
        "crashes": crashes,
        "duplicates_per_crash": round(verdict.duplicated / crashes, 1),
        "takeover_p50_s": round(percentile(took, 0.5), 2),
        "takeover_p99_s": round(percentile(took, 0.99), 2),
        "beyond_ttl_p99_s": round(percentile(took, 0.99) - shape.ttl, 2),
    }


async def _crash(group: Herd) -> list[float]:
    victim = group.rng.choice([w for w in group.running() if w.owned])
    orphans = sorted(victim.owned)
    await asyncio.sleep(group.rng.uniform(0.0, 0.5))
    at = group.clock.now()
    victim.kill()
    await victim.ended()

    def covered() -> bool:
        return all(group.sink.last.get(p, (0.0, victim.owner))[1] != victim.owner for p in orphans)

    await eventually(covered, 60.0, "all partitions of the victim have effects elsewhere")
    took = [group.sink.first_since[p] - at for p in orphans if group.sink.first_since.get(p, 0.0) >= at]
    await group.add(1)
    await group.settled()
    return took


PROOF = Proof(
    name="crash",
    help="SIGKILL of workers under load: nothing lost, order kept, covered within TTL + 1 s.",
    run=run,
    goals={
        "lost": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "stale_accepted": "== 0",
        "duplicates_per_crash": f"<= {_IN_HAND}",
        "beyond_ttl_p99_s": "<= 1.0",
    },
    options=(ExperimentOption("crashes", 20, "workers killed"), *sizes(4, 16, 300.0)),
)
