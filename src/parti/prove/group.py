"""`parti prove group`: members are added, dropped, killed, frozen and stepped down at random, under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parti.bench.goals import Figure
from parti.bench.report import Advance, Option, Proof, RunContext
from parti.errors import PartiError, UsageError
from parti.groups import ElasticGroups, GroupKind, PartitioningFilter, StaticGroups
from parti.prove.group_member import EFFECTS
from parti.subjects import partition_of
from parti.testing import NatsServer, eventually
from parti.testing.child import spawn
from parti.testing.history import Effect, History
from parti.wire.api import JetStreamApi, expectations
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

_STREAM, _GROUP, _PARTITIONS, _KEYS = "orders", "proof", 6, 24
_ACK_WAIT = 2.0  # the pin's time to live is the same; the reference's tool uses it too
_FROZEN_FOR = 2.5 * _ACK_WAIT
_PAUSE = 0.004  # between two publishes: a load that each member can carry alone
_DISRUPTIVE = ("kill", "freeze")  # these may repeat what was in flight


@dataclass(slots=True)
class Instance:
    """A process that is an instance of a member."""

    name: str
    member: str
    process: subprocess.Popen[bytes]


@dataclass(slots=True)
class Run:
    """Everything of one run."""

    url: str
    kind: GroupKind
    api: JetStreamApi
    rng: random.Random
    in_flight: int = 1
    instances: list[Instance] = field(default_factory=list)
    history: History = field(default_factory=History)
    published: int = 0
    started: int = 0
    seen_from: dict[str, float] = field(default_factory=dict)
    """Instance -> when its last effect was seen."""
    takeovers: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "step_down": []})
    events: dict[str, int] = field(default_factory=dict)

    async def note(self, message: Any) -> None:
        """An effect was seen on its way to the sink."""
        self.seen_from[json.loads(message.data)["owner"]] = time.monotonic()

    async def start(self, member: str) -> Instance:
        """A new instance, joined when this returns."""
        self.started += 1
        name = f"{member}#{self.started}"
        arguments = [self.url, self.kind.value, _STREAM, _GROUP, member, name, str(_ACK_WAIT), str(self.in_flight)]
        process = await asyncio.to_thread(spawn, [sys.executable, "-m", "parti.prove.group_member", *arguments])
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if b"joined" not in line:
            raise UsageError(f"instance {name} did not join: {line.decode(errors='replace').strip()}")
        instance = Instance(name, member, process)
        self.instances.append(instance)
        return instance

    def check_alive(self) -> None:
        """Raise when an instance ended although nobody ended it."""
        for instance in self.instances:
            if instance.process.poll() is not None:
                assert instance.process.stdout is not None
                said = instance.process.stdout.read().decode(errors="replace").strip()
                raise UsageError(f"instance {instance.name} ended by itself: {said[-500:]}")

    def active(self, member: str) -> Instance | None:
        """The member's instance whose effect was seen last."""
        mine = [i for i in self.instances if i.member == member and i.name in self.seen_from]
        return max(mine, key=lambda i: self.seen_from[i.name], default=None)

    async def effect_of_another(self, member: str, but: str, since: float, within: float) -> float:
        """Seconds from `since` until another instance of the member has an effect."""

        def seen() -> float:
            self.check_alive()
            times = [t for n, t in self.seen_from.items() if n.startswith(f"{member}#") and n != but and t > since]
            return min(times, default=0.0)

        return await eventually(seen, timeout=within, what=f"an effect of another instance of {member}") - since


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Publish and disturb, then judge by what was published and what took effect."""
    kind = GroupKind(ctx.options["kind"])
    events = int(ctx.options["events"]) // (4 if ctx.quick else 1)
    members = ["m1", "m2"] if ctx.quick else ["m1", "m2", "m3"]
    with NatsServer() as server:
        async with await connect(ConnectOptions(servers=(server.url,))) as connection:
            proof = Run(server.url, kind, JetStreamApi(connection), ctx.random(), int(ctx.options["in_flight"]))
            groups = ElasticGroups(connection) if kind is GroupKind.ELASTIC else StaticGroups(connection)
            await _create(proof, groups, members)
            await connection.subscribe(f"{EFFECTS}.>", cb=proof.note)
            try:
                spare = ["m9"] if kind is GroupKind.ELASTIC else []
                await asyncio.gather(*(proof.start(member) for member in [*members, *spare] for _ in range(2)))
                stop = asyncio.Event()
                publishing = asyncio.create_task(_publish(proof, stop))
                try:
                    with ctx.progress("disturbing the group", total=events) as advance:
                        await _disturb(proof, groups, members, events, advance)
                finally:
                    stop.set()
                    await publishing
                await _finished(proof)
            finally:
                await _end(proof)
            await _judge(proof)
    return _figures(proof)


async def _create(proof: Run, groups: ElasticGroups | StaticGroups, members: list[str]) -> None:
    api = proof.api
    subjects = [f"{_STREAM}.*"]
    if isinstance(groups, StaticGroups):
        subjects = [f"{partition}.{_STREAM}.*" for partition in range(_PARTITIONS)]
    await api.stream_create({"name": _STREAM, "subjects": subjects, "allow_direct": True})
    await api.stream_create({"name": EFFECTS, "subjects": [f"{EFFECTS}.>"], "storage": "memory", "allow_direct": True})
    if isinstance(groups, StaticGroups):
        await groups.create(_STREAM, _GROUP, max_members=_PARTITIONS, members=members)
    else:
        filters = [PartitioningFilter(f"{_STREAM}.*", (1,))]
        await groups.create(_STREAM, _GROUP, max_members=_PARTITIONS, filters=filters)
        await groups.add_members(_STREAM, _GROUP, members)


async def _publish(proof: Run, stop: asyncio.Event) -> None:
    """One message after the other, keys in turn; a message counts as published when the server has acknowledged it."""
    while not stop.is_set():
        number = proof.published
        key = f"k{number % _KEYS}"
        subject = f"{_STREAM}.{key}"
        if proof.kind is GroupKind.STATIC:
            subject = f"{partition_of([key], _PARTITIONS)}.{subject}"
        await proof.api.publish(subject, f"p-{number}".encode(), headers=expectations(msg_id=str(number)))
        proof.history.published(key, "p", number)
        proof.published += 1
        await asyncio.sleep(_PAUSE)


async def _disturb(
    proof: Run, groups: ElasticGroups | StaticGroups, members: list[str], events: int, advance: Advance
) -> None:
    listed = list(members)
    kinds = ["kill", "freeze", "step_down"]
    if isinstance(groups, ElasticGroups):
        kinds += ["add", "drop"]
    # Every kind comes as often as the others, in an order that the seed decides.
    plan = [kinds[n % len(kinds)] for n in range(events)]
    proof.rng.shuffle(plan)
    for kind in plan:
        member = proof.rng.choice(listed)
        await eventually(partial(proof.active, member), timeout=30, what=f"work of {member}")
        proof.events[kind] = proof.events.get(kind, 0) + 1
        if kind in ("add", "drop") and isinstance(groups, ElasticGroups):
            await _change_membership(proof, groups, listed)
        else:
            await _strike(proof, groups, kind, member)
        await asyncio.sleep(proof.rng.uniform(0.3, 0.8))
        advance(1)


async def _change_membership(proof: Run, groups: ElasticGroups, listed: list[str]) -> None:
    """Let the spare member in, or out again, or take another one out and in."""
    if "m9" not in listed:
        listed.append("m9")
        await groups.add_members(_STREAM, _GROUP, ["m9"])
    else:
        gone = proof.rng.choice(listed)
        listed.remove(gone)
        await groups.drop_members(_STREAM, _GROUP, [gone])
        proof.seen_from = {name: at for name, at in proof.seen_from.items() if not name.startswith(f"{gone}#")}
        if gone != "m9":
            await asyncio.sleep(0.5)
            listed.append(gone)
            await groups.add_members(_STREAM, _GROUP, [gone])


async def _strike(proof: Run, groups: ElasticGroups | StaticGroups, kind: str, member: str) -> None:
    active = proof.active(member)
    assert active is not None
    now = time.monotonic()
    if kind == "kill":
        os.kill(active.process.pid, signal.SIGKILL)
        proof.instances.remove(active)
        taken = await proof.effect_of_another(member, active.name, now, within=20)
        proof.takeovers["kill"].append(taken)
        await asyncio.to_thread(active.process.wait)
        await proof.start(member)
    elif kind == "freeze":
        os.kill(active.process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_FROZEN_FOR)
        finally:
            os.kill(active.process.pid, signal.SIGCONT)
    else:
        await groups.step_down(_STREAM, _GROUP, member)
        now = time.monotonic()
        taken = await proof.effect_of_another(member, active.name, now, within=20)
        proof.takeovers["step_down"].append(taken)


async def _finished(proof: Run) -> None:
    """Return when every message had its effect and nothing is left to deliver."""

    async def done() -> bool:
        return await _done(proof)

    finished: bool = await eventually(done, timeout=60, what="an effect for every message")
    assert finished


async def _done(proof: Run) -> bool:
    info = await proof.api.stream_info(EFFECTS)
    if info["state"]["messages"] < proof.published:
        return False
    stream = f"{_STREAM}-{_GROUP}" if proof.kind is GroupKind.ELASTIC else _STREAM
    if proof.kind is GroupKind.ELASTIC:
        return bool((await proof.api.stream_info(stream))["state"]["messages"] == 0)
    consumers = await proof.api.consumer_list(stream)
    return all(each["num_pending"] + each["num_ack_pending"] == 0 for each in consumers)


async def _end(proof: Run) -> None:
    for instance in proof.instances:
        instance.process.terminate()
    await asyncio.gather(*(asyncio.to_thread(_reap, instance.process) for instance in proof.instances))


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


async def _judge(proof: Run) -> None:
    """Read the effects in the order in which the sink stored them."""
    last = int((await proof.api.stream_info(EFFECTS))["state"]["last_seq"])
    following = 1
    while following <= last:
        batch = await proof.api.direct_get_batch(EFFECTS, batch=500, seq=following)
        if not batch.messages:
            raise PartiError(f"the effects end at {following} of {last}")
        for message in batch.messages:
            proof.history.effect(Effect(**json.loads(message.data)))
        following = batch.messages[-1].seq + 1


def _figures(proof: Run) -> dict[str, Figure]:
    verdict = proof.history.verdict()
    disruptive = sum(proof.events.get(kind, 0) for kind in _DISRUPTIVE)
    kills, downs = proof.takeovers["kill"], proof.takeovers["step_down"]
    return {
        "kind": proof.kind.value,
        "published": verdict.published,
        "effects": verdict.effects,
        "lost": verdict.lost,
        "inversions": verdict.inversions,
        "phantom": verdict.phantom,
        "duplicates": verdict.duplicated,
        "in_flight": proof.in_flight,
        "duplicates_of_in_flight": round(verdict.duplicated / max(1, disruptive * proof.in_flight), 3),
        "stale_effects": verdict.stale_accepted,
        "two_owners": verdict.two_owners,
        **{f"events_{kind}": count for kind, count in sorted(proof.events.items())},
        "takeover_kill_max_s": round(max(kills, default=float("nan")), 3),
        "takeover_step_down_max_s": round(max(downs, default=float("nan")), 3),
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
        "takeover_kill_max_s": f"<= {_ACK_WAIT + 0.5}",
        "takeover_step_down_max_s": "< 0.3",
    },
    options=(
        Option("kind", "elastic", "static or elastic"),
        Option("in_flight", 1, "messages a member may have in flight; 1 is strictly in order, more is lanes by key"),
        Option("events", 40, "disturbances, spread evenly over their kinds"),
    ),
)
