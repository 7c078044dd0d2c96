"""`parti prove clock`: wall clocks jump by ten minutes, forwards and backwards. No partition changes its owner."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from parti.clock import SystemClock
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.fleet import STREAM, Fleet, open_stream
from parti_lab.prove.sink import Sink
from parti_lab.prove.traffic import Traffic


class JumpingClock(SystemClock):
    """The real clock, with a wall time that the proof can set, as an operator or NTP would."""

    def __init__(self) -> None:
        self.offset = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Let the clock of one worker after the other jump, and count the partitions that each one lost."""
    jumps = 8 if ctx.quick else int(ctx.options["jumps"])
    rng = ctx.random()
    async with AsyncExitStack() as stack:
        _, settings, js = await open_stream(stack)
        sink = await stack.enter_async_context(Sink())
        names = [f"p{n}" for n in range(12)]
        clocks: list[JumpingClock] = []

        def new_clock() -> JumpingClock:
            clocks.append(JumpingClock())
            return clocks[-1]

        control = {"namespace": "prove", "heartbeat_ttl": 15.0, "heartbeat_interval": 1.0, "cold_start_window": 0.5}
        fleet = Fleet(settings, names, sink, rng, control=control, clock=new_clock)
        stack.push_async_callback(fleet.close)
        await fleet.start(3)
        await fleet.settle()
        await fleet.moved_evenly()
        traffic = Traffic(js, STREAM, names, sink.history, rate=100.0, rng=rng)
        traffic.start()
        before = _owners(fleet)
        granted = fleet.grants
        with ctx.progress("jumps", total=jumps) as advance:
            for _ in range(jumps):
                rng.choice(clocks).offset += rng.choice((-600.0, 600.0))
                await asyncio.sleep(float(ctx.options["pause"]))
                advance(1)
        after = _owners(fleet)
        await traffic.stop()
        verdict = await sink.complete(60.0)
        return {
            "jumps": jumps,
            "ownership_changes": fleet.grants - granted,
            "owners_differ": sum(1 for p in names if before.get(p) != after.get(p)),
            "lost": verdict.lost,
            "duplicates": verdict.duplicated,
            "inversions": verdict.inversions,
            "fenced": fleet.counted("parti_fenced_total"),
        }


def _owners(fleet: Fleet) -> dict[str, str | None]:
    return {str(p): m.worker_id for m in fleet.managers for p in m.owned()}


PROOF = Proof(
    name="clock",
    help="Wall clock jumps of ten minutes: no ownership changes.",
    run=run,
    goals={"ownership_changes": "== 0", "owners_differ": "== 0", "lost": "== 0", "duplicates": "== 0"},
    options=(
        ExperimentOption("jumps", 60, "jumps of a worker's wall clock"),
        ExperimentOption("pause", 0.5, "seconds between two jumps"),
    ),
)
