"""A case of `parti prove group`: consumers are deleted, alone or together with a fault of their instances."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from functools import partial

from parti.groups import GroupKind
from parti.progress import Advance
from parti.testing import eventually
from parti.wire.errors import ConsumerNotFound
from parti_lab.bench.goals import Figure
from parti_lab.prove.group_run import ACK_WAIT, GROUP, STREAM, GroupRun, Instance, reap

BESIDE = ("nothing", "kill", "freeze", "step_down")
"""The fault of the member at the same moment; all are equally frequent."""
REPEATED_WITHIN = 1.0
"""Seconds: messages done this shortly before may be repeated. A standby stores the position four times per second."""


async def deleted(proof: GroupRun, rounds: int, advance: Advance) -> dict[str, Figure]:
    """A consumer deleted under load is recreated at its position: nothing is lost, out of order or replayed."""
    await asyncio.gather(*(proof.start(member) for member in ("m1", "m1", "m2", "m2")))
    deletions: list[float] = []
    recoveries: list[float] = []
    plan = [BESIDE[number % len(BESIDE)] for number in range(rounds)]
    proof.rng.shuffle(plan)
    async with proof.load():
        for beside in plan:
            member = proof.rng.choice(["m1", "m2"])
            active = await eventually(partial(proof.active, member), timeout=30, what=f"work of {member}")
            assert active is not None
            # Long enough for an instance to store the position since the last deletion.
            await asyncio.sleep(proof.rng.uniform(0.5, 1.5))
            began = time.monotonic()
            await _strike(proof, beside, active)
            await _delete(proof, member)
            deletions.append(time.monotonic())
            await proof.effect_since(member, deletions[-1])
            recoveries.append(time.monotonic() - began)
            if beside == "kill":
                await asyncio.to_thread(reap, active.process)
                await proof.start(member)
            elif beside == "freeze":
                active.process.send_signal(signal.SIGCONT)
            advance(1)
    verdict = await proof.judge()
    return {
        "deleted_rounds": rounds,
        "deleted_published": verdict.published,
        "deleted_lost": verdict.lost,
        "deleted_inversions": verdict.inversions,
        "deleted_two_owners": verdict.two_owners,
        "deleted_examples": "; ".join(f"{name}: {found[0]}" for name, found in verdict.examples.items()) or "none",
        "deleted_repeats": verdict.duplicated,
        "deleted_repeat_age_max_s": round(oldest_repeat([(at, n) for n, _, at in proof.begun], deletions), 3),
        "deleted_recovery_max_s": round(max(recoveries), 3),
    }


async def _strike(proof: GroupRun, beside: str, active: Instance) -> None:
    if beside == "kill":
        proof.instances.remove(active)
        os.kill(active.process.pid, signal.SIGKILL)
    elif beside == "freeze":
        active.process.send_signal(signal.SIGSTOP)
    elif beside == "step_down":
        await proof.groups.step_down(STREAM, GROUP, active.member)


async def _delete(proof: GroupRun, member: str) -> None:
    place = (STREAM, f"{GROUP}-{member}") if proof.kind is GroupKind.STATIC else (f"{STREAM}-{GROUP}", member)
    with contextlib.suppress(ConsumerNotFound):
        await proof.api.consumer_delete(*place)


def oldest_repeat(begun: Iterable[tuple[float, int]], deletions: Sequence[float]) -> float:
    """The longest time before a deletion at which a message began that began again after it; 0 if there is none.

    A message that first began after the deletion and began twice is no replay: two instances held it for a moment.
    """
    first: dict[int, float] = {}
    oldest = 0.0
    for at, counter in sorted(begun):
        if counter not in first:
            first[counter] = at
        elif before := bisect.bisect(deletions, at):
            oldest = max(oldest, deletions[before - 1] - first[counter])
    return oldest


GOALS = {
    "deleted_lost": "<= 0",
    "deleted_inversions": "<= 0",
    "deleted_two_owners": "<= 0",
    "deleted_repeat_age_max_s": f"<= {REPEATED_WITHIN}",
    "deleted_recovery_max_s": f"<= {2 * ACK_WAIT}",
}
