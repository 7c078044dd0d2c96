"""Inbox places in the per-partition layout: bounded in total, and no partition takes those of all others."""

from __future__ import annotations

import random

import pytest

from parti.config.worker import WorkerConfig
from parti.manager.layouts.per_partition.inbox import SlotInbox
from parti.worker.message import Message
from support.inbox import bare_runtime


def message() -> Message:
    made = Message()
    made.data, made._head = b"x", b""
    return made


@pytest.mark.parametrize("seed", range(20))
async def test_partitions_that_hang_never_take_the_places_of_all_others(seed: int) -> None:
    """Some partitions let nothing go: each of the others goes on, and the whole stays bounded."""
    rng = random.Random(seed)
    config = WorkerConfig(stream="S", max_ack_pending=rng.choice([20, 100, 1000]))
    inbox = SlotInbox(bare_runtime(config))
    inbox.flows = rng.randint(2, 10)
    own, asked, done = [0] * inbox.flows, [0] * inbox.flows, [0] * inbox.flows
    hung = set(rng.sample(range(inbox.flows), rng.randint(1, inbox.flows - 1)))
    for _ in range(3_000):
        flow = rng.randrange(inbox.flows)
        may = inbox.room(str(flow), asked[flow], own=own[flow], kick=lambda: None)
        inbox.asked += max(0, may - asked[flow])
        asked[flow] = max(asked[flow], may)
        for _ in range(rng.randint(0, asked[flow])):
            inbox.asked -= 1
            asked[flow] -= 1
            inbox.took(1, 1)
            own[flow] += 1
        assert inbox.in_hand <= config.capacity + inbox.flows
        if flow not in hung:
            for _ in range(rng.randint(0, own[flow])):
                inbox.let_go(message())
                own[flow] -= 1
                done[flow] += 1
    assert all(done[flow] > 60 for flow in range(inbox.flows) if flow not in hung)
