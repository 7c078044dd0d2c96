"""The churn of `parti prove group`: members added and dropped, instances killed, frozen, stopped and stepped down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parti.groups import ElasticGroups
from parti.progress import Advance
from parti.testing import eventually
from parti_lab.prove.group_run import ACK_WAIT, GROUP, STREAM, GroupRun, reap

SPARE = "m9"
DISRUPTIVE = ("kill", "freeze", "freeze_any")  # these may repeat what was in flight
_FROZEN_FOR = (0.1 * ACK_WAIT, 3 * ACK_WAIT)  # from too short to be noticed to long after the takeover


@dataclass(slots=True)
class Churn:
    """The events that were applied, and how long the other instances needed to continue."""

    events: Counter[str] = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)
    step_downs: list[float] = field(default_factory=list)


async def churn(proof: GroupRun, members: list[str], events: int, advance: Advance) -> Churn:
    """Disturb the group under load; every kind of event is equally frequent, in an order that the seed decides."""
    done = Churn()
    spare = [SPARE] if isinstance(proof.groups, ElasticGroups) else []
    await asyncio.gather(*(proof.start(member) for member in [*members, *spare] for _ in range(2)))
    kinds = ["kill", "freeze", "freeze_any", "step_down", "stop", "stop_any"] + ["add", "drop"] * len(spare)
    plan = [kinds[n % len(kinds)] for n in range(events)]
    proof.rng.shuffle(plan)
    listed = list(members)
    async with proof.load():
        async with _beside() as beside:
            for kind in plan:
                member = proof.rng.choice(listed)
                await eventually(partial(proof.active, member), timeout=30, what=f"work of {member}")
                done.events[kind] += 1
                if kind in ("add", "drop"):
                    await _change_membership(proof, listed)
                elif kind == "freeze_any":
                    # In parallel with the next events: a frozen instance may be stopped, or its member may be removed.
                    frozen = proof.rng.choice(proof.instances)
                    beside(proof.freeze(frozen, proof.rng.uniform(*_FROZEN_FOR)))
                else:
                    await _strike(proof, done, kind, member)
                await asyncio.sleep(proof.rng.uniform(0.3, 0.8))
                advance(1)
        await _measure_the_rest(proof, done, listed)
    return done


async def _measure_the_rest(proof: GroupRun, done: Churn, listed: list[str]) -> None:
    """Measure each kind not measured yet (times during a freeze did not count): a goal without a figure cannot fail."""
    for kind, times in (("kill", done.kills), ("step_down", done.step_downs)):
        if not times:
            member = proof.rng.choice(listed)
            await eventually(partial(proof.active, member), timeout=30, what=f"work of {member}")
            done.events[kind] += 1
            await _strike(proof, done, kind, member)


@contextlib.asynccontextmanager
async def _beside() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Start coroutines in the background; all have ended when the context exits. Errors are raised unchanged."""
    tasks: list[asyncio.Task[None]] = []
    try:
        yield lambda act: tasks.append(asyncio.create_task(act))
    finally:
        await asyncio.gather(*tasks)


async def _change_membership(proof: GroupRun, listed: list[str]) -> None:
    """Add or remove the spare member, or remove another member and add it again."""
    groups = proof.groups
    assert isinstance(groups, ElasticGroups)
    if SPARE not in listed:
        listed.append(SPARE)
        await groups.add_members(STREAM, GROUP, [SPARE])
        return
    gone = proof.rng.choice(listed)
    listed.remove(gone)
    await groups.drop_members(STREAM, GROUP, [gone])
    proof.seen_from = {name: at for name, at in proof.seen_from.items() if not name.startswith(f"{gone}#")}
    if gone != SPARE:
        await asyncio.sleep(0.5)
        listed.append(gone)
        await groups.add_members(STREAM, GROUP, [gone])


async def _strike(proof: GroupRun, done: Churn, kind: str, member: str) -> None:
    active = proof.active(member)
    assert active is not None
    alone = proof.frozen[member] > 0  # with a frozen instance the time means nothing
    now = time.monotonic()
    if kind == "kill":
        os.kill(active.process.pid, signal.SIGKILL)
        proof.instances.remove(active)
        taken = await proof.effect_of_another(member, active.name, now)
        done.kills += [] if alone else [taken]
        await asyncio.to_thread(reap, active.process)
        await proof.start(member)
    elif kind == "freeze":
        await proof.freeze(active, proof.rng.uniform(*_FROZEN_FOR))
    elif kind == "stop":
        await proof.stop(active)
        await proof.start(member)
    elif kind == "stop_any":
        # Any instance, also a standby; its successor starts while it leaves.
        stopping = proof.rng.choice(proof.instances)
        await asyncio.gather(proof.stop(stopping), proof.start(stopping.member))
    else:
        await _step_down(proof, done, member, active.name, alone=alone)


async def _step_down(proof: GroupRun, done: Churn, member: str, active: str, *, alone: bool) -> None:
    """Step down. The server pins the next waiting pull; if the other instance has none, that is the same instance's."""
    for _ in range(5):
        await proof.groups.step_down(STREAM, GROUP, member)
        now = time.monotonic()
        taken = await proof.effect_since(member, now)
        if alone:
            return
        if proof.seen_from.get(active, 0.0) <= now:
            done.step_downs.append(taken)
            return
