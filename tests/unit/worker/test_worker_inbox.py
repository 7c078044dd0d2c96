"""Room in the inbox: every waiter is notified, whatever freed the room."""

from __future__ import annotations

import asyncio

from parti.config.worker import WorkerConfig
from parti.model import Partition, Retention
from parti.worker.ledger import PartitionState
from parti.worker.message import make_message
from support.inbox import Bare, bare_inbox


def full_inbox(*, held: bool) -> tuple[Bare, PartitionState]:
    """An inbox with as many messages as it may have, all of one partition: held until it has caught up, or at work."""
    config = WorkerConfig(stream="S", subject_template="s.{partition}", max_ack_pending=500)
    partition = Partition(("a",))
    bare = bare_inbox(config, [partition])
    state = bare.ledger.states[partition.id]
    state.target = 10
    for sequence in range(11, 11 + config.capacity):
        message = make_message("s.a", partition, "a", sequence, b"", lease=state.lease)
        message._lane, message._reply = state.main, b"reply"
        state.open[sequence] = message
        if held:
            state.held.append(message)
        bare.ledger.in_hand += 1
    return bare, state


async def test_a_range_read_has_room_when_only_messages_that_wait_for_it_fill_the_inbox() -> None:
    """Four partitions held a quarter of the inbox each, and their catch-up waited for room: for ever (prove broker)."""
    bare, _ = full_inbox(held=True)
    await asyncio.wait_for(bare.room.wait(), 60)


async def test_a_range_read_waits_while_work_fills_the_inbox() -> None:
    bare, state = full_inbox(held=False)
    read = asyncio.ensure_future(bare.room.wait())
    await asyncio.sleep(0)
    assert not read.done()
    bare.inbox.drop(state)
    await asyncio.wait_for(read, 60)


async def test_a_range_read_that_waits_is_told_of_room_also_after_a_pull_looked() -> None:
    """Only while room was short were reads told; a pull that saw much of it again ended that."""
    bare, state = full_inbox(held=False)
    read = asyncio.ensure_future(bare.room.wait())
    await asyncio.sleep(0)
    bare.ledger.in_hand -= 300
    assert bare.room.capacity() > 0
    bare.room.let_go(state.open[11])
    await asyncio.wait_for(read, 60)


async def test_a_range_read_that_waits_is_told_when_a_target_moves() -> None:
    bare, state = full_inbox(held=False)
    read = asyncio.ensure_future(bare.room.wait())
    await asyncio.sleep(0)
    state.held.extend(state.open.values())
    bare.inbox.extend(state, 300)
    await asyncio.wait_for(read, 60)


async def test_deliveries_that_only_another_owner_may_acknowledge_are_told_before_they_fill_the_consumer() -> None:
    """They stay pending while any durable keeps them: with as many as the server allows nothing came any more."""
    config = WorkerConfig(stream="S", subject_template="s.{partition}", max_ack_pending=10)
    bare = bare_inbox(config)
    bare.ledger.retention, inbox = Retention.INTEREST, bare.inbox
    for sequence in (1, 2, 2, 1):
        inbox.take([(b"s.gone", b"reply", b"", b"", 1, sequence, 0)], 0)
    assert not inbox.clogged, "there is room for two"
    inbox.take([(b"s.gone", b"reply", b"", b"", 1, 3, 0)], 0)
    assert inbox.clogged
    inbox.restarted(())
    assert not inbox.clogged, "a reset leaves them out"
