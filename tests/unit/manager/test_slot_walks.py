"""Per-partition layout: the next owner learns exactly what was done above the cursor, however the old one stopped.

Owners follow each other on one partition with a lane per key. Messages wait for retries, drains time out, a stop
comes while the partition already drains for a move (torture seed 300077: 24 repeats), and an owner passes on what
its predecessor had done above the cursor if it did not reach it.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from parti.config.worker import WorkerConfig
from parti.control.signals import DeliveryVerdict
from parti.manager.layouts.per_partition.flow import SlotFlow
from parti.manager.layouts.per_partition.inbox import SlotInbox
from parti.model import Ahead, Lease, PartitionId, Retention
from parti.wire.pull import Item
from parti.worker.lanes import LanePool, Runner
from parti.worker.message import Message
from support.inbox import bare_runtime

P, KEYS = PartitionId("p"), ("k0", "k1", "k2", "k3")
WALKS, OWNERS, MESSAGES = 60, 8, 60


class Owner:
    """Decides as the slot does: once each."""

    flow: SlotFlow

    def __init__(self, done: list[int]) -> None:
        self._done = done

    def deliver(self, partition: PartitionId, sequence: int, consumer_sequence: int, inbox: int) -> DeliveryVerdict:
        del partition, consumer_sequence, inbox
        if sequence in self.flow.state.open:
            return DeliveryVerdict.ACK_WHEN_DONE
        return DeliveryVerdict.ACK if sequence in self._done else DeliveryVerdict.PROCESS

    def deliver_new(self, partition: PartitionId, sequences: list[int], consumer_sequence: int, inbox: int) -> bool:
        del partition, sequences, consumer_sequence, inbox
        return False

    def skipped(self, partition: PartitionId) -> None: ...

    def gap(self, partition: PartitionId) -> None: ...

    def may_pull(self) -> bool:
        return True


class World:
    """The stream of one partition, and everything that was done of it, in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.keys = {n: self.rng.choice(KEYS) for n in range(1, MESSAGES + 1)}
        self.done: list[int] = []
        self.cursor, self.ahead = 0, None

    cursor: int
    ahead: Ahead | None

    def item(self, sequence: int) -> Item:
        return (f"s.p.{self.keys[sequence]}".encode(), b"reply", b"", b"", 1, sequence, 0)

    async def own(self, *, last: bool) -> None:
        """One owner, from its grant to the end of its drain."""
        rng, ends = self.rng, dict[int, asyncio.Future[None]]()
        flow: SlotFlow | None = None

        async def serve(message: Message, runner: Runner) -> float | None:
            del runner
            if not last and rng.random() < 0.15:
                return 60.0  # its key waits
            ends[message.sequence] = asyncio.get_running_loop().create_future()
            try:
                await ends[message.sequence]
            finally:
                del ends[message.sequence]
            assert flow is not None
            if flow.done(message):
                self.done.append(message.sequence)
            return None

        config = WorkerConfig(stream="S", subject_template="s.{partition}.*", lanes="key", drain_timeout=0.005)
        owner = Owner(self.done)
        pool = LanePool(serve, concurrency=rng.choice((1, 3, 16)), strict=True)
        parts = bare_runtime(config)
        flow = SlotFlow(
            P,
            parts,
            pool,
            SlotInbox(parts),
            Retention.LIMITS,
            owner,
        )
        owner.flow = flow
        flow.go(Lease(P, 1), self.ahead)
        upto = MESSAGES if last else min(MESSAGES, self.cursor + rng.randint(0, 20))
        undone = [n for n in self.keys if n > self.cursor]
        for sequence in range(self.cursor + 1, upto + 1):
            flow._take([self.item(sequence)], 1)
            if rng.random() < 0.5:
                await self._work(ends, rng.randint(0, 3))
        if last:
            while flow.state.open:
                await self._work(ends, 5)
        else:
            drains: list[asyncio.Task[object]] = []
            for _ in range(rng.choice((0, 0, 1, 2))):  # moves that are aborted in the middle of their drain
                flow.stop()
                drains.append(asyncio.create_task(flow.drained()))
                await self._drain(drains, flow, ends, rng.randint(0, 40))
                flow.go(Lease(P, 1), self.ahead)
                flow.resetting()
                for sequence in range(self.cursor + 1, rng.randint(self.cursor, upto) + 1):
                    flow._take([self.item(sequence)], 1)
                    if rng.random() < 0.2:
                        await self._work(ends, 1)
            flow.stop()
            drains += [asyncio.create_task(flow.drained()) for _ in range(rng.randint(1, 3))]
            await self._drain(drains, flow, ends, 1_000_000)
            await asyncio.gather(*drains)
            if rng.random() < 0.3:
                flow.stop()
                await flow.drained()
        await pool.halt()
        left = [n for n in undone if n not in self.done and (self.ahead is None or not self.ahead.covers(n))]
        self.cursor, self.ahead = min(left, default=MESSAGES + 1) - 1, flow.state.ahead
        told = [n for n in self.keys if n > self.cursor and (self.ahead is None or not self.ahead.covers(n))]
        assert told == left, f"told {told}, left {left}, cursor {self.cursor}, {self.ahead}"

    async def _drain(
        self,
        drains: list[asyncio.Task[object]],
        flow: SlotFlow,
        ends: dict[int, asyncio.Future[None]],
        turns: int,
    ) -> None:
        again = self.rng.choice((0.0, 0.05, 0.5))
        while turns and not all(drain.done() for drain in drains):
            turns -= 1
            await self._work(ends, self.rng.randint(0, 1))
            await asyncio.sleep(self.rng.choice((0, 0, 0.0005)))
            if self.rng.random() < again:
                flow.stop()

    async def _work(self, ends: dict[int, asyncio.Future[None]], turns: int) -> None:
        await asyncio.sleep(0)
        for _ in range(turns):
            if waiting := [each for each in ends.values() if not each.done()]:
                self.rng.choice(waiting).set_result(None)
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(WALKS))
async def test_every_message_is_done_once_and_in_order_of_its_key_over_all_owners(seed: int) -> None:
    world = World(seed)
    for _ in range(OWNERS):
        await world.own(last=False)
    await world.own(last=True)
    assert sorted(world.done) == list(world.keys)
    for key in KEYS:
        of_key = [n for n in world.done if world.keys[n] == key]
        assert of_key == sorted(of_key)
