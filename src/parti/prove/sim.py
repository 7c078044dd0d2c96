"""The control plane in virtual time: whole clusters from seeds, and the promises checked after every effect."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter

from parti.bench.goals import Figure
from parti.bench.report import Option, Proof, RunContext
from parti.testing.sim import Outcome, simulate


def run(ctx: RunContext) -> dict[str, Figure]:
    """Simulate seed, seed + 1, ...; tell the story of the first that breaks a promise."""
    count = min(100, int(ctx.options["seeds"])) if ctx.quick else int(ctx.options["seeds"])
    failed: list[Outcome] = []
    totals: Counter[str] = Counter()
    digest = hashlib.blake2b(digest_size=8)
    with ctx.progress("seeds", total=count) as advance:
        for seed in range(ctx.seed, ctx.seed + count):
            outcome = simulate(seed)
            digest.update(outcome.digest.encode())
            totals.update(_figures(outcome))
            if not outcome.ok:
                failed.append(outcome)
            advance(1)
    if failed:
        sys.stderr.write(f"{failed[0].story()}\nrepeat it: parti prove sim --seeds 1 --seed {failed[0].seed}\n")
    repeat = simulate(ctx.seed).digest == simulate(ctx.seed).digest
    names = ("messages", "steps", "lost", "inversions", "two_owners", "stale_accepted", "duplicates_after_crashes")
    return {
        "seeds": count,
        "failed": len(failed),
        **({"first_failed": failed[0].seed, "broken": failed[0].broken[0]} if failed else {}),
        **{name: totals[name] for name in names},
        "handoffs": totals["handoffs"],
        "cas_writes": totals["cas_writes"],
        "cas_conflicts": totals["cas_conflicts"],
        "reproducible": int(repeat),
        "digest": digest.hexdigest(),
    }


def _figures(outcome: Outcome) -> dict[str, int]:
    verdict = outcome.verdict
    return {
        "messages": verdict.published,
        "steps": outcome.steps,
        "lost": verdict.lost if not outcome.ok else 0,
        "inversions": verdict.inversions,
        "two_owners": verdict.two_owners,
        "stale_accepted": verdict.stale_accepted,
        "duplicates_after_crashes": verdict.duplicated,
        "handoffs": sum(outcome.handoffs.values()),
        "cas_writes": outcome.cas_writes,
        "cas_conflicts": outcome.cas_conflicts,
    }


PROOF = Proof(
    name="sim",
    help="Clusters in virtual time under drops, duplicates, reordering, delays, crashes, freezes and clock skew.",
    run=run,
    goals={
        "failed": "<= 0",
        "lost": "<= 0",
        "inversions": "<= 0",
        "two_owners": "<= 0",
        "stale_accepted": "<= 0",
        "reproducible": "== 1",
    },
    options=(Option("seeds", 500, "how many seeds to run, from --seed upwards"),),
)
