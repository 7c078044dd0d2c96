"""The fence is checked before every pull and every start; a refused start leaves the message where it was."""

from __future__ import annotations

import asyncio
import threading

import pytest

from parti.model import PartitionId
from parti.testing import eventually
from parti.worker import Lease, Message
from support.worker import Bench, Effects, parts


class Gate:
    """A fence that a test opens and closes."""

    def __init__(self) -> None:
        self.pull = self.start = True
        self.asked: list[Lease] = []

    def may_pull(self) -> bool:
        return self.pull

    def may_start(self, lease: Lease) -> bool:
        self.asked.append(lease)
        return self.start


async def test_nothing_is_pulled_while_the_fence_is_closed(bench: Bench) -> None:
    gate, effects = Gate(), Effects()
    gate.pull = False
    worker = bench.worker(effects, fence=gate)
    await bench.publish("a", 3)
    await worker.update_worker_consumer("w1", parts("a"))
    await eventually(lambda: worker.info().pulling)
    info = await bench.info()
    assert (info["num_waiting"], info["num_ack_pending"], effects.seen) == (0, 0, [])
    gate.pull = True
    worker.kick()
    await effects.count(3)


async def test_a_refused_start_keeps_the_message_and_the_partition_goes_on_when_it_is_resumed(bench: Bench) -> None:
    gate, effects = Gate(), Effects()
    worker = bench.worker(effects, fence=gate)
    await worker.update_worker_consumer("w1", parts("a"), leases={"a": Lease(PartitionId("a"), 4)})
    gate.start = False
    await bench.publish("a", 3)
    await eventually(lambda: worker.position("a").stopped)
    assert gate.asked[-1] == Lease(PartitionId("a"), 4)
    assert effects.seen == []
    assert worker.position("a").cursor == 0
    gate.start = True
    worker.resume_partition("a", Lease(PartitionId("a"), 5))
    await effects.count(3)
    assert [(m.sequence, m.attempt, m.lease.epoch) for m in effects.seen] == [(1, 1, 5), (2, 1, 5), (3, 1, 5)]
    await bench.settled()


@pytest.mark.parametrize("kind", ["ends in time", "hangs"])
async def test_a_handler_in_a_thread_is_waited_for_but_no_longer_than_drain_timeout(bench: Bench, kind: str) -> None:
    release, started = threading.Event(), threading.Event()
    done: list[int] = []

    def handle(message: Message) -> None:
        started.set()
        release.wait(60)
        done.append(message.sequence)

    worker = bench.worker(handle, drain_timeout=60 if kind == "ends in time" else 0.05)
    await bench.publish("a", 2)
    await worker.update_worker_consumer("w1", parts("a"))
    await asyncio.to_thread(started.wait, 60)
    stopping = asyncio.create_task(worker.stop_partition("a"))
    if kind == "ends in time":
        release.set()
        assert await stopping == 1
        assert done == [1]
    else:
        assert await asyncio.wait_for(stopping, 30) == 0, "the next owner begins with what hangs here"
        await eventually(lambda: not worker.is_healthy, what="health says so")
        assert "did not end" in worker.health().stalls[0]
        release.set()
        await eventually(lambda: worker.is_healthy, what="the thread came back")
        assert worker.position("a").cursor == 0, "what it did after that counts for nothing"


async def test_a_worker_that_is_abandoned_says_whether_it_was_in_the_middle_of_something(bench: Bench) -> None:
    entered, gate = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        entered.set()
        await gate.wait()

    worker = bench.worker(handle)
    await worker.update_worker_consumer("w1", parts("a"))
    assert await worker.abandon()
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 1)
    await entered.wait()
    assert not await worker.abandon()
