"""Simulates whole clusters of the shipped code in virtual time, from seeds; promises are checked after every effect.

It reports which lines of the shipped modules it ran, and breaks their rules one by one: each must be detected.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter

from parti.testing.sim import SimOutcome, simulate
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.sim_broken import BROKEN
from parti_lab.prove.sim_coverage import coverage

_TRACED = 24  # seeds: four of each shape; tracing every line takes three times as long
_QUICK_RULES = 4


def run(ctx: RunContext) -> dict[str, Figure]:
    """Simulate seed, seed + 1, ...; print the history of the first that breaks a promise."""
    count = min(100, int(ctx.options["seeds"])) if ctx.quick else int(ctx.options["seeds"])
    failed: list[SimOutcome] = []
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
    rules = BROKEN[:_QUICK_RULES] if ctx.quick else BROKEN
    unnoticed = [rule.name for rule in rules if rule.found() is None] if ctx.options["broken"] else []
    if unnoticed:
        sys.stderr.write("".join(f"broken, and not noticed: {name}\n" for name in unnoticed))
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
        "broken_rules": len(rules) if ctx.options["broken"] else 0,
        "broken_unnoticed": len(unnoticed),
        **_executed(ctx.seed),
        "digest": digest.hexdigest(),
    }


def _executed(seed: int) -> dict[str, Figure]:
    """The share of the lines of each shipped module that some seeds ran, and of all of them together."""
    found = coverage(lambda: [simulate(each) for each in range(seed, seed + _TRACED)])
    ran, lines = (sum(counts[i] for counts in found.values()) for i in (0, 1))
    modules: dict[str, Figure] = {f"lines {name}": round(had / of, 2) for name, (had, of) in found.items()}
    return {"shipped_modules": len(found), "shipped_lines": lines, "shipped_share": round(ran / lines, 3), **modules}


def _figures(outcome: SimOutcome) -> dict[str, int]:
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
        "broken_unnoticed": "<= 0",
        "shipped_share": ">= 0.78",
    },
    options=(
        ExperimentOption("seeds", 500, "how many seeds to run, from --seed upwards"),
        ExperimentOption(
            "broken", 1, "break the rules of the shipped code one by one, to see that it is noticed; 0: do not"
        ),
    ),
)
