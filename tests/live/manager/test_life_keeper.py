"""Random lives of partition owners with one message that kills each process that starts it: every death is counted.

Claims change by their own rules, and notes are real records in a real bucket; only time is simulated. Processes join
without knowing others, partitions return to earlier owners, many lanes run while suspect messages wait their turn.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from parti.clock import SimulatedClock
from parti.config.control import ControlConfig
from parti.control import claims, membership, records
from parti.control.identity import LeaseRecord
from parti.control.membership import Membership
from parti.manager.kv_store import Store
from parti.manager.lease_keeper import terms_of
from parti.manager.life_keeper import LifeKeeper
from parti.manager.predecessors import Predecessors
from parti.model import Claim, Lease, Member, Partition, PartitionId, Tried, WorkerId
from parti.outcomes import Bury, Done
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker.ledger import PartitionState
from parti.worker.message import make_message

_LANES, _MESSAGES, _MAX_DELIVER = 4, 24, 3
POISON = (PartitionId("p0"), 11)


@dataclass
class Host:
    """What a keeper needs of its member."""

    store: Store
    clock: SimulatedClock
    config: ControlConfig
    stream_created: str = "2026-01-01T00:00:00Z"

    def may_act(self) -> bool:
        return True

    def failed(self, error: Exception) -> None:
        raise error


@dataclass
class Process:
    member: Member
    keeper: LifeKeeper
    members: Membership
    states: dict[PartitionId, PartitionState] = field(default_factory=dict)
    """Kept while a partition is elsewhere, as the per-partition layout does."""
    running: dict[tuple[PartitionId, int], Any] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class World:
    """Three places for processes, and who has which partition."""

    def __init__(self, store: Store, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = SimulatedClock()
        self.host: Any = Host(store, self.clock, ControlConfig(namespace=store.namespace))
        self.claims = {p: Claim(p) for p in (PartitionId("p0"), PartitionId("p1"), PartitionId("p2"))}
        self.done: dict[PartitionId, set[int]] = {p: set() for p in self.claims}
        self.processes: list[Process] = []
        self.nonces, self.revisions = itertools.count(), itertools.count(1)
        self.deaths = 0
        self.buried: list[tuple[PartitionId, int]] = []

    async def join(self, place: int) -> Process:
        """A process that has just joined: as far as it can tell everybody whose id is taken is alive."""
        member = Member(WorkerId(f"w-{place}"), f"n{next(self.nonces)}")
        members = Membership(terms_of(self.host.config), self.clock.now())
        keeper = LifeKeeper(self.host, member, Predecessors(), _MAX_DELIVER)
        for claim in self.claims.values():
            keeper.heard(claim)
        await keeper.begin()
        process = Process(member, keeper, members)
        self.renew([process], of=self.processes)
        process.task = asyncio.create_task(keeper.run())
        return process

    def renew(self, seen_by: list[Process], of: list[Process]) -> None:
        """These renew their leases, and those see it."""
        for other in of:
            seen = membership.LeaseSeen(
                self.clock.now(), other.member.worker, LeaseRecord(other.member), next(self.revisions)
            )
            for process in seen_by:
                process.members, _ = membership.step(process.members, seen)

    def tell(self, claim: Claim) -> None:
        self.claims[claim.partition] = claim
        for process in self.processes:
            process.keeper.heard(claim)

    def grant(self, process: Process, claim: Claim) -> None:
        claim = claims.accept(claim, process.member, target=claim.cursor)
        self.tell(claim)
        keys = (str(claim.partition),)
        state = process.states.setdefault(
            claim.partition, PartitionState(Partition(keys), Lease(claim.partition, claim.epoch))
        )
        state.stopped = False
        process.keeper.granted(Lease(claim.partition, claim.epoch), state, claim.previous, process.members)

    async def start(self) -> None:
        self.processes = [await self.join(place) for place in range(3)]
        self.renew(self.processes, of=self.processes)
        for number, claim in enumerate(list(self.claims.values())):
            to = self.processes[number % 2]
            self.grant(to, claims.assign(claim, to.member, term=1))

    def owned(self, process: Process) -> list[PartitionId]:
        return [p for p, claim in self.claims.items() if claim.owner == process.member]

    async def move(self) -> None:
        """A planned move: what runs of the partition ends first, and five answers of the bucket are waited for.

        Meanwhile a note that was begun with the grant is through.
        """
        partition = self.rng.choice(list(self.claims))
        giver = next(p for p in self.processes if p.member == self.claims[partition].owner)
        taker = self.rng.choice([p for p in self.processes if p is not giver])
        for trial in [each for each in giver.running if each[0] == partition]:
            self.end(giver, trial)
        await eventually(lambda: self.knows(taker, giver), what="what it noted is known")
        prepared = claims.prepare(self.claims[partition], taker.member, term=1)
        self.tell(prepared)
        self.grant(taker, claims.release(prepared, giver.member, cursor=0))

    @staticmethod
    def knows(process: Process, other: Process) -> bool:
        worker = other.member.worker
        told = records.decode_lives(records.encode_lives(worker, (other.keeper._life,)))
        return process.keeper._known.get(worker, ())[:1] == told

    def end(self, process: Process, trial: tuple[PartitionId, int]) -> None:
        wary, message = process.running.pop(trial)
        if wary is not None:
            wary.leave(message)
        self.finish(process, trial)

    def finish(self, process: Process, trial: tuple[PartitionId, int]) -> None:
        self.done[trial[0]].add(trial[1])
        process.states[trial[0]].done += 1

    async def work(self, process: Process) -> bool:
        """Every lane goes on with its first message; False when that ended the process."""
        heads = []
        for partition in self.owned(process):
            for lane in range(_LANES):
                left = [n for n in range(lane + 1, _MESSAGES, _LANES) if n not in self.done[partition]]
                if left and (partition, left[0]) not in process.running:
                    heads.append((partition, left[0]))
        self.rng.shuffle(heads)
        for partition, sequence in heads:
            state = process.states[partition]
            message = make_message("s", state.partition, "k", sequence, b"", lease=state.lease)
            wary = state.wary
            answer = await wary.enter(message) if wary is not None else None
            if isinstance(answer, Bury):
                assert wary is not None
                self.buried.append((partition, sequence))
                await wary.buried(message)
            if isinstance(answer, Bury | Done):
                self.finish(process, (partition, sequence))
            elif answer is None:
                process.running[partition, sequence] = (wary, message)
                if (partition, sequence) == POISON:
                    return False
        for trial in list(process.running):
            if self.rng.random() < 0.4:
                self.end(process, trial)
        return True

    async def die(self, process: Process) -> None:
        """Killed: a new process takes its place, maybe before its partitions are taken, and may get them."""
        self.deaths += 1
        assert process.task is not None
        process.task.cancel()
        left = self.owned(process)
        place = self.processes.index(process)
        others = [p for p in self.processes if p is not process]
        joined = await self.join(3 + next(self.nonces))
        self.processes[place] = joined
        self.clock.advance(self.rng.choice((0.5, 7.0)))  # who joined last has not seen the silence of the dead one
        self.renew(self.processes, of=self.processes)
        await asyncio.gather(process.task, return_exceptions=True)
        worker = process.member.worker
        told = records.decode_lives((await self.host.store.kv.get(f"lives.{worker}")).value)
        await eventually(lambda: all(p.keeper._known.get(worker) == told for p in self.processes), what="its last word")
        for partition in left:
            to = self.rng.choice([joined, *others])
            self.grant(to, claims.take_over(self.claims[partition], to.member, start=0, term=1))

    async def run(self) -> None:
        await self.start()
        for _ in range(400):
            if all(len(done) == _MESSAGES - 1 for done in self.done.values()):
                return
            for process in list(self.processes):
                if not await self.work(process):
                    await self.die(process)
            if self.rng.random() < 0.15:
                await self.move()
            self.clock.advance(self.rng.uniform(0.02, 0.2))
            self.renew(self.processes, of=self.processes)
            for process in self.processes:
                process.keeper.tick(self.clock.now())
        raise AssertionError(f"not all is handled: {self.done}")

    def close(self) -> None:
        for process in self.processes:
            assert process.task is not None
            process.task.cancel()


@pytest.mark.parametrize("seed", range(12))
async def test_a_message_that_ends_its_process_does_so_max_deliver_times(
    server: NatsServer, name: str, seed: int
) -> None:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        world = World(await Store.open(JetStreamApi(connection), name, storage="memory"), seed)
        try:
            await world.run()
        finally:
            world.close()
    assert world.buried == [POISON]
    assert world.deaths == _MAX_DELIVER


async def test_a_fenced_process_that_returns_tells_what_it_had_counted_and_which_message_blocked_it(
    server: NatsServer, name: str
) -> None:
    """It lost its lease before it could store either of them; who has the partition now hears of both."""
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        world = World(await Store.open(JetStreamApi(connection), name, storage="memory"), 0)
        fenced, heir = await world.join(0), await world.join(1)
        world.processes = [fenced, heir]
        claim = claims.assign(world.claims[POISON[0]], fenced.member, term=1)
        world.grant(fenced, claim)
        fenced.states[POISON[0]].tries.count(POISON[1])
        assert fenced.task is not None
        fenced.task.cancel()  # nothing of it is stored
        world.grant(heir, claims.take_over(world.claims[POISON[0]], heir.member, start=0, term=1))
        tries = heir.states[POISON[0]].tries
        assert tries.failed == {}
        former = Predecessors().and_then({fenced.member: 0.0}, fenced.member.worker, {}, fenced.keeper.last_words())
        returned = LifeKeeper(
            world.host, Member(fenced.member.worker, "again"), former, _MAX_DELIVER, blocked=(POISON[0], POISON[1] + 1)
        )
        await returned.begin()
        try:
            await eventually(lambda: len(tries.failed) == 2, what="what it had counted")
        finally:
            world.close()
    assert tries.failed == {
        POISON[1]: Tried(POISON[1], 1),
        POISON[1] + 1: Tried(POISON[1] + 1, 1, ended=True),
    }
