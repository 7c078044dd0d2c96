"""`parti prove leader`: the leader is killed in every phase of a handoff. The next leader resumes or aborts it.

A new worker joins, so that partitions begin to move; as soon as a claim is seen in the wanted phase, the leader's
process gets SIGKILL. No partition may be without effects for longer than two lease times, and none may have two owners.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from parti.manager.kv_store import AssignmentChange, ClaimChange, Complete, Store, Told
from parti.model import ClaimState
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged, sizes


def _claim(test: Callable[[ClaimChange], bool]) -> Callable[[Told], bool]:
    return lambda change: isinstance(change, ClaimChange) and test(change)


PHASES: Final[dict[str, Callable[[Told], bool]]] = {
    "assigned": lambda change: isinstance(change, AssignmentChange),
    "prepare": _claim(lambda t: t.claim.state is ClaimState.PREPARE and t.claim.target is None),
    "ready": _claim(lambda t: t.claim.state is ClaimState.PREPARE and t.claim.target is not None),
    "commit": _claim(lambda t: t.claim.state is ClaimState.COMMIT and not t.claim.accepted),
    "catch_up": _claim(lambda t: t.claim.state is ClaimState.COMMIT and t.claim.accepted),
    "stable": _claim(lambda t: t.claim.state is ClaimState.STABLE),
}


async def run(ctx: RunContext) -> dict[str, Figure]:
    """One kill per phase, in every round."""
    options = ctx.options
    rounds = 1 if ctx.quick else int(options["rounds"])
    phases = list(PHASES)[1:4:2] if ctx.quick else list(PHASES)
    shape = HerdShape.of(options)
    kills = 0
    async with herd(shape, ctx.random()) as group:
        await group.begin()
        with ctx.progress("kills", total=rounds * len(phases)) as advance:
            for _ in range(rounds):
                for phase in phases:
                    kills += await _kill_in(group, phase)
                    advance(1)
        verdict = await group.finish()
        longest = max([*group.sink.moved, *group.sink.steady], default=0.0)
        return {
            **judged(verdict, group.sink),
            "leaders_killed": kills,
            "phases": len(phases),
            "longest_without_effect_s": round(longest, 2),
            "longest_in_ttl": round(longest / shape.ttl, 2),
        }


async def _kill_in(group: Herd, phase: str) -> int:
    """Kill the leader in this phase; returns 1 if there was a leader to kill."""
    store = await Store.open(group.js, "prove")
    reached, watching = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        async with aclosing(store.changes()) as changes:
            async for change in changes:
                if isinstance(change, Complete):
                    watching.set()
                elif watching.is_set() and PHASES[phase](change):
                    reached.set()
                    return

    leader = await group.leader()
    task = asyncio.create_task(watch(), name="parti-phase")
    try:
        await watching.wait()
        (joined,) = await group.add(1, live=False)
        async with asyncio.timeout(60.0):
            await reached.wait()
        killed = leader is not None and leader.running
        if leader is not None and leader.running:
            leader.kill()
            await leader.ended()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await joined.live()
    await group.settled()
    return int(killed)


PROOF = Proof(
    name="leader",
    help="The leader killed in every phase of a handoff: resumed or aborted, nothing unowned for long or doubly owned.",
    run=run,
    goals={
        "lost": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "stale_accepted": "== 0",
        "longest_in_ttl": "<= 2.0",
    },
    options=(ExperimentOption("rounds", 3, "kills in each phase"), *sizes(4, 24, 300.0)),
)
