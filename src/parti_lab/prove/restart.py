"""`parti prove restart`: a whole fleet is stopped cleanly and restarted. How long until all partitions have effects?

It uses the default windows and TTL. The clock starts when the last worker is up, and stops when every partition has
had an effect since then. Messages wait meanwhile: nothing is lost, repeated or reordered.
"""

from __future__ import annotations

import asyncio

from parti.testing import eventually
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged, sizes

_DEFAULTS = {"cold_start_window": 10.0, "planned_scale_window": 2.0, "rebalance_cooldown": 2.0}


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Stop all at once, start all at once, a few times; every other time the workers announce that they will return."""
    options = ctx.options
    rounds = min(int(options["rounds"]), 2) if ctx.quick else int(options["rounds"])
    shape = HerdShape.of(options, control=_DEFAULTS)
    stops: list[float] = []
    ups: list[float] = []
    works: list[float] = []
    async with herd(shape, ctx.random()) as group:
        await group.begin()
        with ctx.progress("restarts", total=rounds) as advance:
            for number in range(rounds):
                stopped, up, work = await _restart(group, returning=number % 2 == 1)
                stops.append(stopped)
                ups.append(up)
                works.append(work)
                advance(1)
        verdict = await group.finish()
        return {
            **judged(verdict, group.sink),
            "restarts": rounds,
            "stop_max_s": round(max(stops), 2),
            "up_max_s": round(max(ups), 2),
            "at_work_max_s": round(max(works), 2),
            "at_work_mean_s": round(sum(works) / len(works), 2),
        }


async def _restart(group: Herd, *, returning: bool) -> tuple[float, float, float]:
    """Seconds until all have stopped, until all are up, and from then until every partition has effects."""
    clock = group.clock
    began = clock.now()
    workers = group.running()
    for worker in workers:
        worker.terminate()
    await asyncio.gather(*(worker.ended(60.0) for worker in workers))
    stopped = clock.now() - began
    began = clock.now()
    before = {owner for _, owner in group.sink.last.values()}
    await group.add(len(workers), returning=returning)
    up = clock.now()
    await eventually(
        lambda: all(owner not in before for _, owner in group.sink.last.values()), 120.0, "every partition is at work"
    )
    work = clock.now() - up
    await group.settled()
    return stopped, up - began, work


PROOF = Proof(
    name="restart",
    help="A whole fleet is stopped cleanly and started again: how long until every partition is at work.",
    run=run,
    goals={
        "lost": "== 0",
        "duplicates": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "at_work_max_s": "<= 3.0",
    },
    options=(ExperimentOption("rounds", 6, "times the fleet is restarted"), *sizes(4, 32, 200.0)),
)
