"""`parti prove broker`: the server is killed and restarted, the network is cut, slowed and made lossy. Nothing is lost.

One server, and real worker processes whose connections all go through a fault proxy: SIGKILL and restart of the
server, cuts of one to thirty seconds, then a slow line and a lossy one. After each fault the proof measures the time
until every partition has effects again. For a rolling restart: `parti prove handoff --replicas 3 --faults roll`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from parti.testing import FaultProxy, NeverHappened, eventually
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.herd import Herd, HerdShape, herd, judged
from parti_lab.prove.sink import percentile

_GIVE_UP = 90.0
Fault = Callable[[], Awaitable[None]]


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Apply one fault after the other, with a pause in between."""
    options = ctx.options
    shape = HerdShape(
        workers=int(options["workers"]),
        partitions=int(options["partitions"]),
        rate=float(options["rate"]),
        layout=str(options["layout"]),
        retention=str(options["retention"]),
        ttl=float(options["ttl"]),
    )
    cuts = [1.0, 3.0] if ctx.quick else [1.0, 2.0, 5.0, 10.0, 20.0, 30.0]
    kills = 1 if ctx.quick else int(options["kills"])
    async with herd(shape, ctx.random()) as group:
        assert group.servers.server is not None
        async with FaultProxy(group.servers.server.port, seed=ctx.seed) as proxy:
            group.urls = (proxy.url,)
            await group.begin()
            faults: list[tuple[str, Fault]] = [("kill", lambda: _killed(group))] * kills
            faults += [(f"cut of {seconds:g} s", _cut(proxy, seconds)) for seconds in cuts]
            faults += [
                ("slow", _slow(proxy, 1.0 if ctx.quick else 5.0)),
                ("loss", _lossy(proxy, 1.0 if ctx.quick else 5.0)),
            ]
            took: list[float] = []
            with ctx.progress("faults", total=len(faults)) as advance:
                for _, fault in faults:
                    took.append(await _recovered(group, fault))
                    advance(1)
            slowest = took.index(max(took))
            verdict = await group.finish(_GIVE_UP)
            return {
                **judged(verdict, group.sink),
                "faults": len(faults),
                "recovery_p50_s": round(percentile(took, 0.5), 2),
                "recovery_max_s": round(max(took), 2),
                "slowest_after": faults[slowest][0],
                "longest_publish_pause_s": round(group.traffic.longest_pause, 2),
            }


async def _recovered(group: Herd, fault: Fault) -> float:
    """Seconds from the end of the fault until every partition had an effect again."""
    await fault()
    over = group.clock.now()
    try:
        await eventually(
            lambda: all(when >= over for when, _ in group.sink.last.values()), _GIVE_UP, "effects of every partition"
        )
    except NeverHappened:
        return _GIVE_UP
    took = max(when for when, _ in group.sink.last.values()) - over
    await group.settled()
    return max(0.0, min(took, group.clock.now() - over))


async def _killed(group: Herd) -> None:
    server = group.servers.server
    assert server is not None
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(group.rng.uniform(0.0, 1.5))
    await asyncio.to_thread(server.restart)


def _cut(proxy: FaultProxy, seconds: float) -> Fault:
    async def cut() -> None:
        await asyncio.to_thread(proxy.cut, refuse=True)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(proxy.heal)

    return cut


def _slow(proxy: FaultProxy, seconds: float) -> Fault:
    async def slow() -> None:
        await asyncio.to_thread(proxy.delay, 0.1)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(proxy.heal)

    return slow


def _lossy(proxy: FaultProxy, seconds: float) -> Fault:
    """Drop bytes from the TCP streams; both ends notice and close the connection, repeatedly."""

    async def lossy() -> None:
        await asyncio.to_thread(proxy.drop, 0.02)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(proxy.heal)
        await asyncio.to_thread(proxy.cut)

    return lossy


PROOF = Proof(
    name="broker",
    help="Server killed and restarted, connections cut and slowed: nothing lost or out of order, back within 10 s.",
    run=run,
    goals={
        "lost": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "stale_accepted": "== 0",
        "recovery_max_s": "<= 10.0",
    },
    options=(
        ExperimentOption("workers", 3, "workers"),
        ExperimentOption("partitions", 12, "partitions"),
        ExperimentOption("rate", 200.0, "messages published a second"),
        ExperimentOption("kills", 5, "times the server is killed"),
        ExperimentOption("ttl", 6.0, "lease TTL in seconds"),
        ExperimentOption("layout", "per-worker", "per-worker or per-partition"),
        ExperimentOption("retention", "limits", "limits, interest or workqueue"),
    ),
)
