"""`parti prove group`: members are added, dropped, killed, frozen, stopped and stepped down at random, under load."""

from __future__ import annotations

from parti.bench.goals import Figure
from parti.bench.report import Option, Proof, RunContext
from parti.groups import GroupKind
from parti.prove.group_churn import DISRUPTIVE, churn
from parti.prove.group_run import ACK_WAIT, running


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Publish and disturb, then judge by what was published and what took effect."""
    kind = GroupKind(ctx.options["kind"])
    events = int(ctx.options["events"]) // (4 if ctx.quick else 1)
    members = ["m1", "m2"] if ctx.quick else ["m1", "m2", "m3"]
    in_flight = int(ctx.options["in_flight"])
    handler = float(ctx.options["handler"])
    async with running(kind, ctx.random(), members, in_flight=in_flight, handler=handler) as proof:
        with ctx.progress("disturbing the group", total=events) as advance:
            done = await churn(proof, members, events, advance)
        await proof.end()
        proof.instances.clear()
        verdict = await proof.judge()
    disruptive = sum(done.events[each] for each in DISRUPTIVE)
    return {
        "kind": kind.value,
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
        "takeover_step_down_max_s": round(max(done.step_downs, default=float("nan")), 3),
        "examples": "; ".join(f"{name}: {found[0]}" for name, found in verdict.examples.items()) or "none",
    }


PROOF = Proof(
    name="group",
    help="Members of a group added, dropped, killed, frozen and stepped down under load, two processes per member.",
    run=run,
    goals={
        "lost": "<= 0",
        "inversions": "<= 0",
        "phantom": "<= 0",
        "two_owners": "<= 0",
        "duplicates_of_in_flight": "<= 1",
        "takeover_kill_max_s": f"<= {ACK_WAIT + 0.5}",
        "takeover_step_down_max_s": "< 0.3",
    },
    options=(
        Option("kind", "elastic", "static or elastic"),
        Option("in_flight", 1, "messages a member may have in flight; 1 is strictly in order, more is lanes by key"),
        Option("events", 40, "disturbances, spread evenly over their kinds"),
        Option("handler", 0.0, "seconds that a handler works after its effect"),
    ),
)
