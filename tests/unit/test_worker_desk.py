"""Room at the desk: whoever waits for it is told, whatever made it."""

from __future__ import annotations

import asyncio

from parti.config.worker import WorkerConfig
from parti.model import Lease, Partition
from parti.observe.metrics import NO_METRICS
from parti.worker.desk import Desk
from parti.worker.health import HealthTracker
from parti.worker.lanes import Runner
from parti.worker.ledger import PartitionState
from parti.worker.message import Message, make_message
from parti.worker.recorder import Recorder


async def never(message: Message, runner: Runner) -> float | None:
    raise AssertionError(f"{runner} was given {message}")


def full_desk() -> tuple[Desk, PartitionState]:
    """A desk with as many messages as it may have, all of a partition that holds what comes live."""
    config = WorkerConfig(stream="S", subject_template="s.{partition}", max_ack_pending=500)
    desk = Desk(config, Recorder(NO_METRICS, HealthTracker()), never)
    partition = Partition(("a",))
    state = PartitionState(partition, Lease(partition.id, 1))
    desk.ledger.states[state.id] = state
    state.target = 10
    for sequence in range(11, 11 + config.capacity):
        message = make_message("s.a", partition, "a", sequence, b"", lease=state.lease)
        message._lane, message._reply = state.main, b"reply"
        state.open[sequence] = message
        state.held.append(message)
        desk.ledger.in_hand += 1
    return desk, state


async def test_a_range_read_that_waits_for_room_gets_what_a_moved_target_makes() -> None:
    """It stood still for ever: held messages were given up, pulls saw much room, and nobody told the read."""
    desk, state = full_desk()
    read = asyncio.ensure_future(desk.room())
    await asyncio.sleep(0)
    assert not read.done()
    desk.extend(state, 300)
    assert desk.capacity() > 0, "what a pull asks before it goes on"
    await asyncio.wait_for(read, 60)


async def test_a_range_read_that_waits_for_room_gets_that_of_a_message_let_go_after_a_pull_looked() -> None:
    desk, state = full_desk()
    read = asyncio.ensure_future(desk.room())
    await asyncio.sleep(0)
    state.target = None
    for sequence in list(state.open)[:300]:
        message = state.open[sequence]
        desk.let_go(message)
        desk.capacity()
    await asyncio.wait_for(read, 60)
