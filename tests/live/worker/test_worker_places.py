"""Inbox places are never held across an await: a partition that leaves frees its places; on its return it is new."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parti.model import PartitionId
from parti.testing import NatsServer, eventually
from parti.worker import Lease, Message, WorkerConsumer
from support.worker import Bench, bench_on, parts

SMALL: dict[str, Any] = {"max_ack_pending": 10, "drain_timeout": 0.05, "concurrency": 4}


class Gated:
    """Handlers wait at a gate, which the tests open."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.gate = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        await self.gate.wait()
        self.seen.append(message)


async def full(worker: WorkerConsumer, places: int = 8) -> None:
    await eventually(
        lambda: worker.info().in_hand >= places, what="the inbox is full, and the range read waits for room"
    )


async def test_a_partition_that_goes_while_its_range_read_waits_leaves_no_place_taken(bench: Bench) -> None:
    handler = Gated()
    await bench.publish("a", 60)
    await bench.publish("b", 1)
    worker = bench.worker(handler, **SMALL)
    await worker.update_worker_consumer("w1", parts("b"))
    for _ in range(4):
        await worker.update_worker_consumer("w1", parts("a", "b"), positions={"a": 0})
        await full(worker)
        await worker.update_worker_consumer("w1", parts("b"))
        await eventually(lambda: worker.info().in_hand == 1, what="only the other partition's message is in hand")
    handler.gate.set()
    await bench.publish("b", 40)
    await eventually(lambda: sum(m.partition.id == "b" for m in handler.seen) == 41, what="the worker still pulls")
    assert worker.info().in_hand == 0


@pytest.mark.parametrize("done_elsewhere", [0, 5, 30])
async def test_a_partition_that_goes_and_returns_during_its_backlog_begins_where_the_other_ended(
    bench: Bench, done_elsewhere: int
) -> None:
    handler = Gated()
    await bench.publish("a", 60)
    worker = bench.worker(handler, **SMALL)
    await worker.update_worker_consumer("w1", [])
    await worker.update_worker_consumer("w1", parts("a"), hold=["a"])
    worker.take_over("a", after=0, lease=Lease(PartitionId("a"), 1))
    await full(worker)
    await worker.stop_partition("a")
    await worker.hold_partition("a")
    worker.take_over("a", after=done_elsewhere, lease=Lease(PartitionId("a"), 3))
    handler.gate.set()
    wanted = list(range(done_elsewhere + 1, 61))
    await eventually(lambda: len(handler.seen) >= len(wanted), what=f"{len(wanted)} handled, have {len(handler.seen)}")
    await eventually(lambda: worker.info().in_hand == 0, what="nothing is left in hand")
    assert [m.sequence for m in handler.seen] == wanted
    assert {m.lease.epoch for m in handler.seen} == {3}


async def test_places_that_nobody_has_are_noticed(bench: Bench) -> None:
    """The watchdog behind the tests above: should a place ever leak again, the health says so."""
    worker = bench.worker(Gated(), stall_limit=1.0)
    await worker.update_worker_consumer("w1", parts("a"))
    worker._engine.ledger.in_hand += 3
    await eventually(lambda: not worker.is_healthy, what="the leak shows")
    assert "3 places of the inbox" in worker.health().stalls[0]
    worker._engine.ledger.in_hand -= 3
    await eventually(lambda: worker.is_healthy, what="it is over")


MOVES = st.lists(st.tuples(st.sampled_from(["return", "remove", "wait"]), st.integers(0, 9)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(moves=MOVES, keyed=st.booleans())
def test_any_sequence_of_goings_and_comings_loses_and_repeats_nothing(
    server: NatsServer, moves: list[tuple[str, int]], keyed: bool
) -> None:
    asyncio.run(_play(server, moves, keyed=keyed))


async def _play(server: NatsServer, moves: list[tuple[str, int]], *, keyed: bool) -> None:
    """Two partitions with a backlog; one goes and comes back at whatever was done of it, in the middle of its read."""
    name = f"m{abs(hash((*moves, keyed, asyncio.get_running_loop().time())))}"
    seen: list[Message] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.001)
        seen.append(message)

    async with bench_on(server, name) as bench:
        await bench.create()
        for number in range(120):
            await bench.publish(f"{'ab'[number % 2]}.k{number % 3}")
        template = f"{name}.{{partition}}.*"
        worker = bench.worker(
            handle, max_ack_pending=10, subject_template=template, lanes="key" if keyed else "partition"
        )
        await worker.update_worker_consumer("w1", parts("b"), positions={"b": 0})
        await worker.update_worker_consumer("w1", parts("a", "b"), hold=["a"])
        worker.take_over("a", after=0, lease=Lease(PartitionId("a"), 1))
        epoch = 1
        for kind, pause in moves:
            await asyncio.sleep(pause / 200)
            if kind == "wait":
                continue
            cursor = await worker.stop_partition("a")
            if kind == "return":
                await worker.hold_partition("a")
            else:
                await worker.update_worker_consumer("w1", parts("b"))
                await worker.update_worker_consumer("w1", parts("a", "b"), hold=["a"])
            epoch += 2
            worker.take_over("a", after=cursor, lease=Lease(PartitionId("a"), epoch))
        await eventually(lambda: len(seen) >= 120, what=f"all handled, have {len(seen)}")
        await eventually(lambda: worker.info().in_hand == 0, what="nothing is left in hand")
        for partition in "ab":
            of_one = [m.sequence for m in seen if m.partition.id == partition]
            wanted = [n for n in range(1, 121) if "ba"[n % 2] == partition]
            assert sorted(of_one) == wanted, (partition, moves)
            for key in {m.key for m in seen} if keyed else [None]:
                lane = [m.sequence for m in seen if m.partition.id == partition and (key is None or m.key == key)]
                assert lane == sorted(lane), (partition, key, moves)
        await bench.js.stream_delete(name)
