"""Draining a partition: several callers may wait at once, while partitions stop, continue and stop again."""

from __future__ import annotations

import asyncio
import random

import pytest

from parti.model import Lease, Partition
from parti.worker.lanes import LanePool, Runner
from parti.worker.ledger import PartitionState
from parti.worker.message import Message, make_message


@pytest.mark.parametrize("seed", range(25))
async def test_any_number_of_waiters_get_their_answer_and_nothing_runs_then(seed: int) -> None:
    rng = random.Random(seed)

    async def serve(message: Message, runner: Runner) -> float | None:
        await asyncio.sleep(rng.choice([0, 0.001, 0.004]))
        if rng.random() < 0.2:
            return 0.05
        state.open.pop(message.sequence, None)
        state.highest_done = max(state.highest_done, message.sequence)
        return None

    pool = LanePool(serve, concurrency=4, strict=True)
    partition = Partition(("p",))
    lease = Lease(partition.id, 1)
    state = PartitionState(partition, lease)
    for sequence in range(1, 60):
        message = make_message("p", partition, f"k{sequence % 5}", sequence, b"", lease=lease)
        message._lane = state.lane(message.key)
        state.open[sequence] = message
        pool.push(message)
    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            state.stop(pool.running_of(state))
            group.create_task(pool.drained(state, rng.choice([0.004, 0.02, 0.2])))
            await asyncio.sleep(rng.choice([0, 0.002, 0.01]))
            if rng.random() < 0.4:
                state.stopped = False
                pool.resume(state)
    state.stop(pool.running_of(state))
    await pool.drained(state, 0.2)
    assert not state.running
    await pool.halt()


async def test_a_wait_goes_on_when_a_shorter_one_has_given_up() -> None:
    """It forgot since when the partition was draining, and the longer one ended the worker with a TypeError."""

    async def serve(message: Message, runner: Runner) -> float | None:
        return 60.0

    pool = LanePool(serve, concurrency=4, strict=True)
    partition = Partition(("p",))
    state = PartitionState(partition, Lease(partition.id, 1))
    message = make_message("p", partition, "k", 1, b"", lease=state.lease)
    message._lane = state.lane("k")
    state.open[1], state.highest_done = message, 5
    pool.push(message)
    await asyncio.sleep(0)
    state.stop(pool.running_of(state))
    await asyncio.wait_for(asyncio.gather(pool.drained(state, 0.2), pool.drained(state, 0.02)), 60)
    assert not state.running
    await pool.halt()


@pytest.mark.parametrize("seed", range(25))
async def test_a_drain_ends_when_the_pool_is_halted_before_or_meanwhile(seed: int) -> None:
    """The member was fenced while it handed over: its stop waited for `drain_timeout`, with nothing left to run."""
    rng = random.Random(seed)

    async def serve(message: Message, runner: Runner) -> float | None:
        if rng.random() < 0.5:
            return 60.0
        await asyncio.sleep(3600)
        return None

    pool = LanePool(serve, concurrency=4, strict=True)
    states = []
    for name in ("p", "q", "r"):
        partition = Partition((name,))
        state = PartitionState(partition, Lease(partition.id, 1))
        states.append(state)
        for sequence in range(1, rng.choice([1, 2, 9])):
            message = make_message(name, partition, f"k{sequence % 3}", sequence, b"", lease=state.lease)
            message._lane = state.lane(message.key)
            state.open[sequence] = message
            pool.push(message)
        state.highest_done = rng.choice([0, 5])
    await asyncio.sleep(0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for state in rng.sample(states, rng.randrange(4)):
            state.stop(pool.running_of(state))
            group.create_task(pool.drained(state, 3600))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        await pool.halt()
        for state in states:
            state.stop(pool.running_of(state))
            await pool.drained(state, 3600)
    assert not any(state.running for state in states)
