"""`parti prove fencing`: an owner is frozen for three lease times and then resumed. Its later effects are refused.

SIGSTOP and SIGCONT of real processes. While the owner is frozen the others take over. When it resumes, its own clock
shows that its lease has expired, before it starts anything. The sink compares epochs, as any sink must that may never
accept an old effect after a new one: it refuses at most the one effect that was in flight.
"""

from __future__ import annotations

import asyncio

from parti.testing import eventually
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged, sizes


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Freeze, wait for the takeover, resume, wait until nothing moves; repeat."""
    options = ctx.options
    trials = min(int(options["trials"]), 2) if ctx.quick else int(options["trials"])
    shape = HerdShape.of(options, takes=0.004)
    async with herd(shape, ctx.random(), fenced_sink=True) as group:
        await group.begin()
        partitions = 0
        with ctx.progress("freezes", total=trials) as advance:
            for _ in range(trials):
                partitions += await _freeze(group)
                advance(1)
        verdict = await group.finish(90.0)
        return {
            **judged(verdict, group.sink),
            "freezes": trials,
            "partitions_taken": partitions,
            "hidden": verdict.lost,
        }


async def _freeze(group: Herd) -> int:
    victim = group.rng.choice([w for w in group.running() if w.owned])
    orphans = sorted(victim.owned)
    at = group.clock.now()
    victim.freeze()
    try:
        await eventually(
            lambda: all(group.sink.last.get(p, (0.0, victim.owner))[1] != victim.owner for p in orphans),
            60.0,
            "all partitions of the frozen worker have effects elsewhere",
        )
        await asyncio.sleep(max(0.0, 3 * group.shape.ttl - (group.clock.now() - at)))
    finally:
        victim.thaw()
    victim.owned.clear()  # from now on it reports new partitions; reports of earlier revocations may still arrive
    await eventually(
        lambda: victim.state == "stable" or not victim.running, 60.0, "the thawed worker is a member again"
    )
    await group.settled()
    return len(orphans)


PROOF = Proof(
    name="fencing",
    help="An owner frozen for 3 x TTL and continued: no stale effect is accepted, no message stays hidden.",
    run=run,
    goals={
        "stale_accepted": "== 0",
        "hidden": "== 0",
        "lost": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
    },
    options=(ExperimentOption("trials", 12, "freezes"), *sizes(3, 12, 200.0)),
)
