"""More cases of `parti prove group`: freezes with many messages in flight, handlers longer than `ack_wait`, and Go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path

from parti.errors import UsageError
from parti.groups import ElasticGroups
from parti.progress import Advance
from parti.testing import NeverHappened, eventually
from parti_lab.bench.goals import Figure
from parti_lab.prove.group_go import GoInstance
from parti_lab.prove.group_run import ACK_WAIT, GROUP, KEYS, STREAM, GroupRun

_BURST = 400  # twice what a member may have in flight
_SHORT, _LONG = 0.6 * ACK_WAIT, 2.5 * ACK_WAIT  # the pin outlives the first, and not the second
_WATCH = 2 * ACK_WAIT  # harm that a resumed instance does shows within this time
LONG_HANDLER = 1.25 * ACK_WAIT


async def frozen(proof: GroupRun, rounds: int, advance: Advance) -> dict[str, Figure]:
    """An instance with many messages in flight freezes and returns: order is kept, and no other instance waits for it.

    Short and long freezes alternate: after a short one it is still pinned, during a long one another one takes over.
    """
    await asyncio.gather(*(proof.start(member) for member in ("m1", "m1", "m2", "m2")))
    stalls: list[float] = []
    async with proof.load():
        for number in range(rounds):
            await eventually(partial(proof.active, "m1"), timeout=30, what="work of m1")
            for _ in range(_BURST):
                await proof.publish()
            active = proof.active("m1")
            assert active is not None
            await proof.freeze(active, _SHORT if number % 2 == 0 else _LONG)
            proof.watch_gaps()
            await asyncio.sleep(_WATCH)
            stalls += [proof.gap(member) for member in ("m1", "m2")]
            advance(1)
    verdict = await proof.judge()
    return {
        "frozen_rounds": rounds,
        "frozen_lost": verdict.lost,
        "frozen_inversions": verdict.inversions,
        "frozen_two_owners": verdict.two_owners,
        # Each key has at most one message inside a handler when its instance freezes.
        "frozen_repeats_of_running": round(verdict.duplicated / (rounds * KEYS), 3),
        "frozen_stall_max_s": round(max(stalls), 3),
    }


async def long_handlers(proof: GroupRun, changes: int, advance: Advance) -> dict[str, Figure]:
    """Members join and leave, and instances are stopped, while every handler takes longer than `ack_wait`.

    All changes are planned: no message may begin twice.
    """
    groups = proof.groups
    members = ["m1", "m2"]
    spare = ["m9"] if isinstance(groups, ElasticGroups) else []
    await asyncio.gather(*(proof.start(member) for member in [*members, *spare] for _ in range(2)))
    listed, slowest = False, 0.0
    async with proof.load():
        for number in range(changes):
            await eventually(lambda: proof.seen_from, timeout=60, what="the first effect")
            await asyncio.sleep(proof.rng.uniform(0.2, LONG_HANDLER))
            if number % 2 or not isinstance(groups, ElasticGroups):
                stopping = proof.rng.choice(proof.instances)
                slowest = max(slowest, await proof.stop(stopping))
                await proof.start(stopping.member)
            elif listed := not listed:
                await groups.add_members(STREAM, GROUP, ["m9"])
            else:
                await groups.drop_members(STREAM, GROUP, ["m9"])
            advance(1)
    verdict = await proof.judge()
    return {
        "long_changes": changes,
        "long_published": verdict.published,
        "long_lost": verdict.lost,
        "long_inversions": verdict.inversions,
        "long_begun_twice": verdict.duplicated,
        "long_stop_max_s": round(slowest, 3),
    }


async def beside_go(proof: GroupRun, cg: Path, rounds: int, advance: Advance) -> dict[str, Figure]:
    """A member of the Go reference beside ours: first as another member, then as an instance of the same member.

    The judge checks ours: nothing is lost between the two, ours keep the order, and Go's instance is alive at the end.
    """
    kind = proof.kind.value
    ours = ["m1", "m9"] if isinstance(proof.groups, ElasticGroups) else ["m1"]
    await asyncio.gather(*(proof.start(member) for member in ours))
    seats = [GoInstance(cg, proof.url, kind, (STREAM, GROUP, "m2"))]
    try:
        async with proof.load_until(lambda: _all_begun(proof, seats)):
            for number in range(rounds):
                await eventually(lambda: seats[0].begun, timeout=60, what="work of Go")
                await _disturb(proof, number)
                advance(1)
            seats.append(GoInstance(cg, proof.url, kind, (STREAM, GROUP, "m1"), sleep=0.05))
            for number in range(rounds):
                await proof.start("m2")
                await asyncio.sleep(proof.rng.uniform(0.2, 1.0))
                await _disturb(proof, number)
                await proof.stop(next(each for each in proof.instances if each.member == "m2"))
                advance(1)
            # Our last instance of m1 leaves; from then on only Go serves m1.
            await proof.stop(next(each for each in proof.instances if each.member == "m1"))
            left = time.monotonic()
            alive = await _began_since(seats, left)
        return {
            "go_begun": sum(len(seat.begun) for seat in seats),
            "go_lost": proof.published - len(_begun(proof, seats)),
            "go_inversions_of_ours": _inversions(proof, seats),
            "go_dead": len(seats) - alive,
        }
    except UsageError as error:
        missing = sorted(set(range(proof.published)) - _begun(proof, seats))
        said = [line for seat in seats for line in seat.said if "consuming" not in line]
        raise UsageError(f"{error}; never begun: {missing[:20]} of {len(missing)}; Go said {said[-5:]}") from error
    finally:
        for seat in seats:
            await asyncio.to_thread(seat.end)


async def _disturb(proof: GroupRun, number: int) -> None:
    if isinstance(proof.groups, ElasticGroups):
        change = proof.groups.add_members if number % 2 == 0 else proof.groups.drop_members
        await change(STREAM, GROUP, ["m9"])
    else:
        await proof.groups.step_down(STREAM, GROUP, "m1")
    await asyncio.sleep(proof.rng.uniform(0.6, 1.2))


def _begun(proof: GroupRun, seats: list[GoInstance]) -> set[int]:
    """The numbers of all messages that any instance began. There is one publisher: message n has sequence n + 1."""
    return {counter for counter, _, _ in proof.begun} | {sequence - 1 for seat in seats for sequence in seat.sequences}


def _all_begun(proof: GroupRun, seats: list[GoInstance]) -> bool:
    return len(_begun(proof, seats)) >= proof.published


async def _began_since(seats: list[GoInstance], since: float) -> int:
    """How many of Go's instances begin a message after this moment, within a time limit."""

    def alive() -> int:
        return sum(any(at > since for _, _, at in seat.begun) for seat in seats)

    with contextlib.suppress(NeverHappened):
        await eventually(lambda: alive() == len(seats), timeout=10 * ACK_WAIT, what="work of every Go instance")
    return alive()


def _inversions(proof: GroupRun, seats: list[GoInstance]) -> int:
    """First starts of ours that came after a later message of the same key was started, by any instance.

    Starts in Go are seen late, because they are read from its output: that can hide an inversion, never invent one.
    """
    events = [(at, counter, True) for counter, _, at in proof.begun]
    events += [(at, sequence - 1, False) for seat in seats for sequence, _, at in seat.begun]
    seen: set[int] = set()
    highest: dict[int, int] = {}
    found = 0
    for _, counter, ours in sorted(events):
        key = counter % KEYS
        found += ours and counter not in seen and counter < highest.get(key, -1)
        seen.add(counter)
        highest[key] = max(highest.get(key, -1), counter)
    return found
