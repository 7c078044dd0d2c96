"""`parti prove fencing`: an owner is frozen for three lease times and then thawed. Nothing of it counts any more.

SIGSTOP and SIGCONT of real processes. While it is frozen the others take over; when it wakes up its own clock tells it
that its lease is over, before it starts anything. The sink compares epochs, as one that must never see an old effect
after a new one has to: at most the one effect that was on its way is refused there.
"""

from __future__ import annotations

import asyncio

from parti.testing import eventually
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged, sizes


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Freeze, wait for the takeover, thaw, wait until all is at rest; again and again."""
    options = ctx.options
    trials = min(int(options["trials"]), 2) if ctx.quick else int(options["trials"])
    shape = HerdShape.of(options, takes=0.004)
    async with herd(shape, ctx.random(), fenced_sink=True) as group:
        await group.add(shape.workers)
        await group.settled()
        await group.flow()
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
    victim.owned.clear()  # it tells what it gets from now on; its revocations of before come late
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
