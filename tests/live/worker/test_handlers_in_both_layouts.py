"""Handlers that hang, ignore cancellation or raise, in both layouts: the same timeouts, limits and metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from parti.model import PartitionId
from parti.testing import NatsServer, eventually
from parti.worker import Message
from support.fleet import Fleet, fleet_on
from support.layouts import FAST, LAYOUTS, consumer_of


def metric(fleet: Fleet, name: str, **labels: str) -> float:
    return fleet.metrics.registry.get_sample_value(name, labels or None) or 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_hanging_handler_is_cancelled_and_its_lane_goes_on(server: NatsServer, name: str, layout: str) -> None:
    seen: list[tuple[int, int, str]] = []

    async def handle(message: Message) -> None:
        if message.sequence == 2 and message.attempt < 3:
            await asyncio.Event().wait()
        seen.append((message.sequence, message.attempt, message.last_error))

    async with fleet_on(server, name, count=2) as fleet:
        consumer = await consumer_of(fleet, handle, handler_timeout=0.2, **FAST)
        await fleet.worker(consumer=consumer, layout=layout)
        await fleet.publish(20)
        await eventually(lambda: len(seen) == 20, what=f"all are handled, have {len(seen)}")
        assert sorted(s for s, _, _ in seen) == list(range(1, 21))
        ((_, attempt, error),) = [each for each in seen if each[0] == 2]
        assert attempt == 3
        assert error.startswith("HandlerTimeout")
        assert metric(fleet, "parti_handler_retries_total") == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["hangs", "deaf", "thread"])
@pytest.mark.parametrize("ends", ["stop", "move"])
async def test_a_partition_whose_handler_hangs_goes_to_the_next_owner_within_the_bound(
    server: NatsServer, name: str, layout: str, kind: str, ends: str
) -> None:
    """No handler_timeout: stopping the worker, or moving the partition, ends the wait after drain_timeout."""
    release, threads = asyncio.Event(), threading.Event()
    seen: list[tuple[str, int]] = []
    hung: list[int] = []

    def of(worker: str) -> Callable[[Message], Any]:
        async def handle(message: Message) -> None:
            if worker == "one" and message.sequence == 1:
                hung.append(1)
                while not release.is_set():
                    try:
                        await release.wait()
                    except asyncio.CancelledError:
                        if kind == "hangs":
                            raise
                return
            seen.append((worker, message.sequence))

        def plain(message: Message) -> None:
            if worker == "one" and message.sequence == 1:
                hung.append(1)
                threads.wait(120)
                return
            seen.append((worker, message.sequence))

        return plain if kind == "thread" else handle

    try:
        async with fleet_on(server, name, count=4) as fleet:
            short = {"drain_timeout": 0.5, **FAST}
            one = await fleet.worker(
                consumer=await consumer_of(fleet, of("one"), **short), layout=layout, shutdown_timeout=2.0
            )
            await one.wait_for("converged", 60)
            await fleet.publish(40)
            await eventually(lambda: hung and len(seen) == 30, what="the other three lanes are through")
            two = await fleet.worker(consumer=await consumer_of(fleet, of("two"), **short), layout=layout)
            if ends == "stop":
                async with asyncio.timeout(30):
                    await one.stop()
            await eventually(lambda: len(set(seen)) >= 30, what="still there")
            if ends == "move":
                # Half of the partitions move; whichever the hung one is, stopping it must not take for ever.
                await eventually(lambda: len(two.owned()) == 2 and len(one.owned()) == 2, what="two moved")
                async with asyncio.timeout(30):
                    await one.stop()
            await eventually(lambda: {s for _, s in seen} == set(range(1, 41)), what=f"all handled: {len(seen)}")
            assert len(seen) == 40, "only the one that hung is repeated"
            lane = [s for _, s in seen if s % 4 == 1]
            assert lane == sorted(lane)
    finally:
        release.set()
        threads.set()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_metrics_health_and_info_are_the_same_in_both_layouts(server: NatsServer, name: str, layout: str) -> None:
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        await gate.wait()

    async with fleet_on(server, name, count=4) as fleet:
        consumer = await consumer_of(fleet, handle)
        manager = await fleet.worker(consumer=consumer, layout=layout)
        await manager.wait_for("converged", 60)
        await fleet.publish(40)
        await eventually(lambda: consumer.info().in_hand == 40, what="all in hand")
        info = consumer.info()
        assert info.worker_id == manager.worker_id
        assert info.pulling
        assert info.consumer.startswith("parti-")
        assert list(info.subjects) == [f"{name}.p{n}" for n in range(4)]
        assert sorted((p.partition.id, p.in_hand, p.cursor < 40, p.stopped) for p in info.partitions) == [
            (f"p{n}", 10, True, False) for n in range(4)
        ]
        assert metric(fleet, "parti_consumer_inflight") == 40
        assert metric(fleet, "parti_consumer_messages_total") == 40
        assert metric(fleet, "parti_worker_consumer_subjects_current") == 4
        gate.set()
        await eventually(lambda: consumer.info().in_hand == 0, what="all done")
        assert consumer.position(PartitionId("p1")).done == 10
        await eventually(lambda: metric(fleet, "parti_consumer_inflight") == 0, what="the gauge follows")
        await eventually(lambda: metric(fleet, "parti_handler_latency_seconds_count") == 40, what="latencies")
        assert consumer.is_healthy
        await fleet.js.stream_delete(name)
        await eventually(lambda: not consumer.is_healthy, what="a stream that is gone shows in the health")
        assert metric(fleet, "parti_worker_consumer_health_status", status="unhealthy") == 1


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_waits_behind_a_worker_that_stands_still_is_counted(
    server: NatsServer, name: str, layout: str
) -> None:
    """It had read 400 of 1,500 when its handlers hung: those were all that the metric told, for as long as it took."""
    async with fleet_on(server, name) as fleet:
        await fleet.worker(layout=layout, worker={"max_ack_pending": 20})
        await fleet.publish(6)
        await fleet.handled(6)
        fleet.gate.clear()
        await fleet.publish(120)
        await eventually(lambda: metric(fleet, "parti_consumer_inflight") >= 110, 60, "pending and ack pending")
        fleet.gate.set()
        await fleet.handled(126)
        await eventually(lambda: metric(fleet, "parti_consumer_inflight") == 0, 60, "nothing is left")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, BaseException])
async def test_whatever_is_raised_on_the_last_message_of_a_partition_it_is_tried_again(
    server: NatsServer, name: str, layout: str, raised: type[BaseException]
) -> None:
    seen: list[int] = []

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise raised
        seen.append(message.sequence)

    async with fleet_on(server, name, count=3) as fleet:
        await fleet.worker(consumer=await consumer_of(fleet, handle, **FAST), layout=layout)
        await fleet.publish(3)
        await eventually(lambda: sorted(seen) == [1, 2, 3], what="each was tried again")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_large_messages_are_bounded_in_bytes(server: NatsServer, name: str, layout: str) -> None:
    gate, most, done = asyncio.Event(), 0, 0

    async def handle(message: Message) -> None:
        nonlocal most, done
        most = max(most, sum(p.in_hand for p in consumer.info().partitions))
        await gate.wait()
        done += 1

    async with fleet_on(server, name, count=4) as fleet:
        for n in range(60):
            await fleet.js.publish(f"{name}.p{n % 4}", b"x" * 500_000)
        consumer = await consumer_of(fleet, handle, max_bytes=4_000_000)
        await fleet.worker(consumer=consumer, layout=layout)
        await eventually(lambda: consumer.info().in_hand >= 4, what="some are in hand")
        await asyncio.sleep(0.5)  # more would come now, if more came
        assert consumer.info().in_hand <= 8, "4 MB, what is on its way included"
        gate.set()
        await eventually(lambda: done == 60, what=f"all handled, have {done}")
        assert most <= 8


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_message_larger_than_the_bound_comes_alone(server: NatsServer, name: str, layout: str) -> None:
    seen: list[int] = []

    async def handle(message: Message) -> None:
        seen.append(len(message.data))

    async with fleet_on(server, name, count=2) as fleet:
        for size in (10, 400_000, 10, 10, 400_000, 400_000, 10, 10):
            await fleet.js.publish(f"{name}.p0", b"x" * size)
        consumer = await consumer_of(fleet, handle, max_bytes=100_000)
        await fleet.worker(consumer=consumer, layout=layout)
        await eventually(lambda: len(seen) == 8, what=f"all came: {seen}")
        assert seen == [10, 400_000, 10, 10, 400_000, 400_000, 10, 10]
