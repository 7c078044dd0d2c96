"""`parti prove group`: members are added, dropped, killed, frozen, stopped and stepped down at random, under load."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from parti.errors import UsageError
from parti.groups import GroupKind
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.group_cases import LONG_HANDLER, beside_go, frozen, long_handlers
from parti_lab.prove.group_churn import DISRUPTIVE, churn
from parti_lab.prove.group_deleted import GOALS as DELETED_GOALS
from parti_lab.prove.group_deleted import deleted
from parti_lab.prove.group_go import find_cg
from parti_lab.prove.group_run import ACK_WAIT, running

CASES = ("churn", "frozen", "long", "deleted", "go")


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Run each case on a fresh server: publish and disturb, then judge by what was published and what took effect."""
    cases = _cases(ctx.options)
    figures: dict[str, Figure] = {"kind": GroupKind(ctx.options["kind"]).value}
    for case in cases:
        figures |= await _RUN[case](ctx)
    return figures | {"not_run": ", ".join(_why_not(case) for case in CASES if case not in cases) or "none"}


def _cases(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The cases of a run with these options, on this machine; a case that is not run has neither figures nor goals."""
    asked = str(options["case"])
    if asked not in (*CASES, "all"):
        raise UsageError(f"there is no case {asked!r}: choose one of {', '.join(CASES)}, or all")
    if asked == "go" and find_cg() is None:
        raise UsageError("there is no binary of the reference: set PARTI_CG")
    return tuple(case for case in CASES if asked in (case, "all") and (case != "go" or find_cg() is not None))


def _why_not(case: str) -> str:
    return "go (no binary: set PARTI_CG)" if case == "go" and find_cg() is None else case


def _goals_of(options: Mapping[str, Any]) -> dict[str, str]:
    cases = _cases(options)
    return {name: goal for case in cases for name, goal in GOALS[case].items()}


async def _churn(ctx: RunContext) -> dict[str, Figure]:
    kind = GroupKind(ctx.options["kind"])
    events = int(ctx.options["events"]) // (4 if ctx.quick else 1)
    members = ["m1", "m2"] if ctx.quick else ["m1", "m2", "m3"]
    in_flight, handler = int(ctx.options["in_flight"]), float(ctx.options["handler"])
    pause = max(0.004, handler / min(in_flight, 8))  # a load that each member can carry alone
    async with running(kind, ctx.random(), members, in_flight=in_flight, handler=handler, pause=pause) as proof:
        with ctx.progress("disturbing the group", total=events) as advance:
            done = await churn(proof, members, events, advance)
        await proof.end()
        verdict = await proof.judge()
    disruptive = sum(done.events[each] for each in DISRUPTIVE)
    return {
        "published": verdict.published,
        "effects": verdict.effects,
        "lost": verdict.lost,
        "inversions": verdict.inversions,
        "phantom": verdict.phantom,
        "duplicates": verdict.duplicated,
        "in_flight": in_flight,
        "duplicates_of_in_flight": round(verdict.duplicated / max(1, disruptive * in_flight), 3),
        "stale_effects": verdict.stale_accepted,
        "two_owners": verdict.two_owners,
        **{f"events_{name}": count for name, count in sorted(done.events.items())},
        "takeover_kill_max_s": round(max(done.kills, default=float("nan")), 3),
        "takeover_step_down_p50_s": round(statistics.median(done.step_downs or [float("nan")]), 3),
        "takeover_step_down_max_s": round(max(done.step_downs, default=float("nan")), 3),
        "examples": "; ".join(f"{name}: {found[0]}" for name, found in verdict.examples.items()) or "none",
    }


async def _frozen(ctx: RunContext) -> dict[str, Figure]:
    rounds = 2 if ctx.quick else 8
    settings = {"in_flight": 200, "handler": 0.02, "pause": 0.006}
    async with running(GroupKind(ctx.options["kind"]), ctx.random(), ["m1", "m2"], **settings) as proof:
        with ctx.progress("freezing with many in hand", total=rounds) as advance:
            return await frozen(proof, rounds, advance)


async def _long(ctx: RunContext) -> dict[str, Figure]:
    changes = 4 if ctx.quick else 16
    settings = {"handler": LONG_HANDLER, "pause": LONG_HANDLER}
    async with running(GroupKind(ctx.options["kind"]), ctx.random(), ["m1", "m2"], **settings) as proof:
        with ctx.progress("changing under long handlers", total=changes) as advance:
            return await long_handlers(proof, changes, advance)


async def _deleted(ctx: RunContext) -> dict[str, Figure]:
    rounds = 4 if ctx.quick else 16
    async with running(GroupKind(ctx.options["kind"]), ctx.random(), ["m1", "m2"]) as proof:
        with ctx.progress("deleting consumers", total=rounds) as advance:
            return await deleted(proof, rounds, advance)


async def _go(ctx: RunContext) -> dict[str, Figure]:
    cg = find_cg()
    assert cg is not None  # without `cg` this case is not run
    rounds = 2 if ctx.quick else 12
    async with running(GroupKind(ctx.options["kind"]), ctx.random(), ["m1", "m2"], pause=0.01) as proof:
        with ctx.progress("beside the reference", total=2 * rounds) as advance:
            return await beside_go(proof, cg, rounds, advance)


_RUN = {"churn": _churn, "frozen": _frozen, "long": _long, "deleted": _deleted, "go": _go}
GOALS = {
    "churn": {
        "lost": "<= 0",
        "inversions": "<= 0",
        "phantom": "<= 0",
        "two_owners": "<= 0",
        "duplicates_of_in_flight": "<= 1",
        "takeover_kill_max_s": f"<= {ACK_WAIT + 0.5}",
        "takeover_step_down_max_s": "< 0.3",
    },
    "frozen": {
        "frozen_lost": "<= 0",
        "frozen_inversions": "<= 0",
        "frozen_two_owners": "<= 0",
        "frozen_repeats_of_running": "<= 1",
        "frozen_stall_max_s": f"<= {ACK_WAIT}",
    },
    "long": {"long_lost": "<= 0", "long_inversions": "<= 0", "long_begun_twice": "<= 0"},
    "deleted": DELETED_GOALS,
    "go": {"go_lost": "<= 0", "go_inversions_of_ours": "<= 0", "go_dead": "<= 0"},
}
PROOF = Proof(
    name="group",
    help="Members of a group added, dropped, killed, frozen and stepped down under load, two processes per member.",
    run=run,
    goals={name: goal for goals in GOALS.values() for name, goal in goals.items()},
    goals_of=_goals_of,
    options=(
        ExperimentOption("case", "all", f"{', '.join(CASES)}, or all of them"),
        ExperimentOption("kind", "elastic", "static or elastic"),
        ExperimentOption(
            "in_flight", 1, "messages a member may have in flight; 1 is strictly in order, more is lanes by key"
        ),
        ExperimentOption("events", 40, "disturbances of the churn, spread evenly over their kinds"),
        ExperimentOption("handler", 0.0, "seconds that a handler works after its effect, in the churn"),
    ),
)
