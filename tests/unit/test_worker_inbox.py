"""Room at the inbox: whoever waits for it is told, whatever made it."""

from __future__ import annotations

import asyncio

from parti.config.worker import WorkerConfig
from parti.model import Lease, Partition, Retention
from parti.observe.metrics import NO_METRICS
from parti.worker.health import HealthTracker
from parti.worker.inbox import Inbox
from parti.worker.lanes import Runner
from parti.worker.ledger import PartitionState
from parti.worker.message import Message, make_message
from parti.worker.recorder import Recorder


async def never(message: Message, runner: Runner) -> float | None:
    raise AssertionError(f"{runner} was given {message}")


def full_desk(*, held: bool) -> tuple[Inbox, PartitionState]:
    """A inbox with as many messages as it may have, all of one partition: held until it has caught up, or at work."""
    config = WorkerConfig(stream="S", subject_template="s.{partition}", max_ack_pending=500)
    inbox = Inbox(config, Recorder(NO_METRICS, HealthTracker()), never)
    partition = Partition(("a",))
    state = PartitionState(partition, Lease(partition.id, 1))
    inbox.ledger.states[state.id] = state
    state.target = 10
    for sequence in range(11, 11 + config.capacity):
        message = make_message("s.a", partition, "a", sequence, b"", lease=state.lease)
        message._lane, message._reply = state.main, b"reply"
        state.open[sequence] = message
        if held:
            state.held.append(message)
        inbox.ledger.in_hand += 1
    return inbox, state


async def test_a_range_read_has_room_when_only_messages_that_wait_for_it_fill_the_desk() -> None:
    """Four partitions held a quarter of the inbox each, and their catch-up waited for room: for ever (prove broker)."""
    inbox, _ = full_desk(held=True)
    await asyncio.wait_for(inbox.room(), 60)


async def test_a_range_read_waits_while_work_fills_the_desk() -> None:
    inbox, state = full_desk(held=False)
    read = asyncio.ensure_future(inbox.room())
    await asyncio.sleep(0)
    assert not read.done()
    inbox.drop(state)
    await asyncio.wait_for(read, 60)


async def test_a_range_read_that_waits_is_told_of_room_also_after_a_pull_looked() -> None:
    """Only while room was short were reads told; a pull that saw much of it again ended that."""
    inbox, state = full_desk(held=False)
    read = asyncio.ensure_future(inbox.room())
    await asyncio.sleep(0)
    inbox.ledger.in_hand -= 300
    assert inbox.capacity() > 0
    inbox.let_go(state.open[11])
    await asyncio.wait_for(read, 60)


async def test_a_range_read_that_waits_is_told_when_a_target_moves() -> None:
    inbox, state = full_desk(held=False)
    read = asyncio.ensure_future(inbox.room())
    await asyncio.sleep(0)
    state.held.extend(state.open.values())
    inbox.extend(state, 300)
    await asyncio.wait_for(read, 60)


async def test_deliveries_that_only_another_owner_may_acknowledge_are_told_before_they_fill_the_consumer() -> None:
    """They stay pending while any durable keeps them: with as many as the server allows nothing came any more."""
    config = WorkerConfig(stream="S", subject_template="s.{partition}", max_ack_pending=10)
    inbox = Inbox(config, Recorder(NO_METRICS, HealthTracker()), never)
    inbox.retention = Retention.INTEREST
    told: list[int] = []
    inbox.on_clogged = lambda: told.append(1)
    for sequence in (1, 2, 2, 1):
        inbox.take([(b"s.gone", b"reply", b"", b"", 1, sequence, 0)], 0)
    assert told == [], "there is room for two"
    inbox.take([(b"s.gone", b"reply", b"", b"", 1, 3, 0)], 0)
    assert told == [1]
