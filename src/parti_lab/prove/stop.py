"""`parti prove stop`: SIGTERM under load. The worker hands over and exits with 0 in time; nothing is repeated."""

from __future__ import annotations

from parti.testing import eventually
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged, sizes
from parti_lab.prove.sink import percentile


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Stop one worker after the other, and replace each by a new one."""
    options = ctx.options
    trials = min(int(options["trials"]), 4) if ctx.quick else int(options["trials"])
    shape = HerdShape.of(options)
    exits: list[int] = []
    took: list[float] = []
    gaps: list[float] = []
    async with herd(shape, ctx.random()) as group:
        await group.begin()
        with ctx.progress("stops", total=trials) as advance:
            for _ in range(trials):
                code, seconds, handed = await _stop(group)
                exits.append(code)
                took.append(seconds)
                gaps += handed
                advance(1)
        verdict = await group.finish()
        return {
            **judged(verdict, group.sink),
            "stops": trials,
            "bad_exits": sum(1 for code in exits if code != 0),
            "exit_max_s": round(max(took), 2),
            "successor_p50_ms": round(1000 * percentile(gaps, 0.5), 1),
            "successor_p95_ms": round(1000 * percentile(gaps, 0.95), 1),
        }


async def _stop(group: Herd) -> tuple[int, float, list[float]]:
    victim = group.rng.choice([w for w in group.running() if w.owned])
    handed = sorted(victim.owned)
    last: dict[str, float] = {}
    at = group.clock.now()
    victim.terminate()

    def taken() -> bool:
        for partition in handed:
            when, owner = group.sink.last[partition]
            if owner == victim.owner:
                last[partition] = when
        return all(group.sink.last[p][1] != victim.owner for p in handed)

    await eventually(taken, 60.0, "all partitions of the stopped worker have effects elsewhere")
    code = await victim.ended(30.0)
    seconds = (victim.ended_at or group.clock.now()) - at
    gaps = [max(0.0, group.sink.first_since[p] - last[p]) for p in handed if p in last]
    await group.add(1)
    await group.settled()
    return code, seconds, gaps


PROOF = Proof(
    name="stop",
    help="SIGTERM under load: exit 0 in time, the successor goes on at once, nothing repeated.",
    run=run,
    goals={
        "lost": "== 0",
        "duplicates": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "bad_exits": "== 0",
        "exit_max_s": "<= 10.0",
        "successor_p95_ms": "<= 500",
    },
    options=(ExperimentOption("trials", 20, "workers stopped"), *sizes(4, 16, 300.0)),
)
