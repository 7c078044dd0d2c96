"""One run of `parti prove group`: a server, processes as instances of members, published and handled messages."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from parti.errors import PartiError, UsageError
from parti.groups import ElasticGroups, GroupKind, PartitioningFilter, StaticGroups
from parti.subjects import partition_of
from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.child import spawn
from parti.testing.history import Effect, History, HistoryVerdict
from parti.wire.api import JetStreamApi, expectations
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti_lab.prove.group_member import EFFECTS, MemberJoin

STREAM, GROUP, PARTITIONS, KEYS = "orders", "proof", 6, 24
ACK_WAIT = 2.0  # also the time to live of a pin; the reference's tool uses the same value
_FINISH_WITHIN = 90


@dataclass(slots=True)
class Instance:
    """A process that is an instance of a member."""

    name: str
    member: str
    process: subprocess.Popen[bytes]


@dataclass(slots=True)
class GroupRun:
    """The state of one run."""

    url: str
    kind: GroupKind
    api: JetStreamApi
    groups: ElasticGroups | StaticGroups
    rng: random.Random
    in_flight: int = 1
    handler: float = 0.0
    pause: float = 0.004
    """Seconds between two publishes."""
    instances: list[Instance] = field(default_factory=list)
    history: History = field(default_factory=History)
    published: int = 0
    started: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    begun: list[tuple[int, str, float]] = field(default_factory=list)
    """Number of the message, instance, and when its effect was seen."""
    seen_from: dict[str, float] = field(default_factory=dict)
    """Instance -> when its last effect was seen."""
    frozen: Counter[str] = field(default_factory=Counter)
    """Member -> how many of its instances are frozen now."""
    longest_gap: dict[str, float] = field(default_factory=dict)
    """Member -> the longest time between two effects, since the last reset."""
    _seen_of: dict[str, float] = field(default_factory=dict)

    async def note(self, message: Any) -> None:
        """Record an effect on its way to the sink."""
        effect = json.loads(message.data)
        owner = effect["owner"]
        now, member = time.monotonic(), owner.split("#")[0]
        self.begun.append((effect["counter"], owner, now))
        self.seen_from[owner] = now
        gap = now - self._seen_of.get(member, now)
        self.longest_gap[member] = max(self.longest_gap.get(member, 0.0), gap)
        self._seen_of[member] = now

    def watch_gaps(self) -> None:
        """Measure the longest time between two effects of each member from now on."""
        now = time.monotonic()
        self.longest_gap.clear()
        self._seen_of = dict.fromkeys(self._seen_of, now)

    def gap(self, member: str) -> float:
        """The longest time without an effect of the member since `watch_gaps`, until now."""
        now = time.monotonic()
        return max(self.longest_gap.get(member, 0.0), now - self._seen_of.get(member, now))

    async def start(self, member: str) -> Instance:
        """Start a new instance; it has joined when this returns."""
        self.started += 1
        name = f"{member}#{self.started}"
        joining = MemberJoin(
            url=self.url,
            kind=self.kind,
            stream=STREAM,
            group=GROUP,
            member=member,
            instance=name,
            ack_wait=ACK_WAIT,
            in_flight=self.in_flight,
            handler=self.handler,
        )
        command = [sys.executable, "-m", "parti_lab.prove.group_member", joining.encode()]
        process = await asyncio.to_thread(spawn, command)
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if b"joined" not in line:
            raise UsageError(f"instance {name} did not join: {line.decode(errors='replace').strip()}")
        instance = Instance(name, member, process)
        self.instances.append(instance)
        return instance

    def check_alive(self) -> None:
        """Raise if an instance ended that the proof did not end."""
        for instance in self.instances:
            if instance.process.poll() is not None:
                assert instance.process.stdout is not None
                said = instance.process.stdout.read().decode(errors="replace").strip()
                raise UsageError(f"instance {instance.name} ended by itself: {said[-500:]}")

    def active(self, member: str) -> Instance | None:
        """The member's instance whose effect was seen last."""
        mine = [i for i in self.instances if i.member == member and i.name in self.seen_from]
        return max(mine, key=lambda i: self.seen_from[i.name], default=None)

    async def effect_of_another(self, member: str, but: str, since: float) -> float:
        """Seconds from `since` until another instance of the member has an effect."""
        return await self._effect(member, since, but)

    async def effect_since(self, member: str, since: float) -> float:
        """Seconds from `since` until any instance of the member has an effect."""
        return await self._effect(member, since, "")

    async def _effect(self, member: str, since: float, but: str) -> float:
        def seen() -> float:
            self.check_alive()
            times = [t for n, t in self.seen_from.items() if n.startswith(f"{member}#") and n != but and t > since]
            return min(times, default=0.0)

        try:
            return await eventually(seen, timeout=30, what=f"an effect of {member}, not of {but or 'nobody'}") - since
        except NeverHappened as error:
            raise UsageError(f"standstill: {error}; {await self.standing()}") from error

    async def stop(self, instance: Instance) -> float:
        """End the instance as a supervisor does, with SIGTERM; returns how long it took."""
        began = time.monotonic()
        self.instances.remove(instance)
        instance.process.terminate()
        await asyncio.to_thread(reap, instance.process)
        if instance.process.returncode:
            raise UsageError(f"instance {instance.name} ended with exit code {instance.process.returncode}")
        return time.monotonic() - began

    async def freeze(self, instance: Instance, seconds: float) -> None:
        """Freeze the process; it is no error if the process is ended meanwhile."""
        self.frozen[instance.member] += 1
        instance.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.frozen[instance.member] -= 1
            instance.process.send_signal(signal.SIGCONT)  # Popen knows whether this is still the same process

    # -- load ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Publish messages inside this context; when it exits, each of them has had its effect."""
        async with self.load_until(self._done):
            yield

    @contextlib.asynccontextmanager
    async def load_until(self, done: Callable[[], bool | Awaitable[bool]]) -> AsyncIterator[None]:
        """Publish messages inside this context, which exits when `done` returns True; a stall is an error."""
        stop = asyncio.Event()
        publishing = asyncio.create_task(self._publish(stop))
        try:
            yield
        finally:
            stop.set()
            await publishing
        deadline = time.monotonic() + _FINISH_WITHIN
        while not (await said if inspect.isawaitable(said := done()) else said):
            self.check_alive()
            if time.monotonic() > deadline:
                raise UsageError(f"standstill: {await self.standing()}")
            await asyncio.sleep(0.1)

    async def _publish(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.publish()
            await asyncio.sleep(self.pause)

    async def publish(self) -> None:
        """Publish one message, keys in turn; it counts as published when the server has acknowledged it."""
        number = next(self._numbers)
        key = f"k{number % KEYS}"
        subject = f"{STREAM}.{key}"
        if self.kind is GroupKind.STATIC:
            subject = f"{partition_of([key], PARTITIONS)}.{subject}"
        await self.api.publish(subject, f"p-{number}".encode(), headers=expectations(msg_id=str(number)))
        self.history.published(key, "p", number)
        self.published += 1

    async def _done(self) -> bool:
        info = await self.api.stream_info(EFFECTS)
        if info["state"]["messages"] < self.published:
            return False
        stream = f"{STREAM}-{GROUP}" if self.kind is GroupKind.ELASTIC else STREAM
        if self.kind is GroupKind.ELASTIC:
            return bool((await self.api.stream_info(stream))["state"]["messages"] == 0)
        consumers = await self.api.consumer_list(stream)
        return all(each["num_pending"] + each["num_ack_pending"] == 0 for each in consumers)

    async def standing(self) -> str:
        """The state of the group, for a person who looks for the cause of a failure."""
        stream = f"{STREAM}-{GROUP}" if self.kind is GroupKind.ELASTIC else STREAM
        effects, left = [(await self.api.stream_info(each))["state"]["messages"] for each in (EFFECTS, stream)]
        lines = [f"{self.published} published, {effects} effects, {left} messages in {stream}"]
        for each in await self.api.consumer_list(stream):
            pins = [group.get("pinned_client_id") for group in each.get("priority_groups") or ()]
            lines.append(
                f"{each['name']}: pending {each['num_pending']}, unacknowledged {each['num_ack_pending']}, "
                f"waiting {each['num_waiting']}, pinned {pins}"
            )
        return "; ".join([*lines, f"instances {[instance.name for instance in self.instances]}"])

    async def end(self) -> None:
        for instance in self.instances:
            instance.process.terminate()
        await asyncio.gather(*(asyncio.to_thread(reap, instance.process) for instance in self.instances))

    async def judge(self) -> HistoryVerdict:
        """Read the effects in the order in which the sink stored them."""
        last = int((await self.api.stream_info(EFFECTS))["state"]["last_seq"])
        following = 1
        while following <= last:
            batch = await self.api.direct_get_batch(EFFECTS, batch=500, seq=following)
            if not batch.messages:
                raise PartiError(f"the effects end at {following} of {last}")
            for message in batch.messages:
                self.history.effect(Effect(**json.loads(message.data)))
            following = batch.messages[-1].seq + 1
        return self.history.verdict()


@contextlib.asynccontextmanager
async def running(kind: GroupKind, rng: random.Random, members: list[str], **settings: Any) -> AsyncIterator[GroupRun]:
    """A fresh server with the group and no members yet; all processes have ended when the context exits."""
    with NatsServer() as server:
        async with await connect(ConnectOptions(servers=(server.url,))) as connection:
            groups = ElasticGroups(connection) if kind is GroupKind.ELASTIC else StaticGroups(connection)
            proof = GroupRun(server.url, kind, JetStreamApi(connection), groups, rng, **settings)
            await _create(proof.api, groups, members)
            await connection.subscribe(f"{EFFECTS}.>", cb=proof.note)
            try:
                yield proof
            finally:
                await proof.end()


async def _create(api: JetStreamApi, groups: ElasticGroups | StaticGroups, members: list[str]) -> None:
    subjects = [f"{STREAM}.*"]
    if isinstance(groups, StaticGroups):
        subjects = [f"{partition}.{STREAM}.*" for partition in range(PARTITIONS)]
    await api.stream_create({"name": STREAM, "subjects": subjects, "allow_direct": True})
    await api.stream_create({"name": EFFECTS, "subjects": [f"{EFFECTS}.>"], "storage": "memory", "allow_direct": True})
    if isinstance(groups, StaticGroups):
        await groups.create(STREAM, GROUP, max_members=PARTITIONS, members=members)
    else:
        filters = [PartitioningFilter(f"{STREAM}.*", (1,))]
        await groups.create(STREAM, GROUP, max_members=PARTITIONS, filters=filters)
        await groups.add_members(STREAM, GROUP, members)


def reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process to end; kill it if that takes too long."""
    try:
        process.communicate(timeout=25)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
