"""Catch-up by range reads, after a takeover or with a backlog: no gap, no repeat, no reordering."""

from __future__ import annotations

import asyncio

import pytest

from parti.errors import UsageError
from parti.model import PartitionId
from parti.testing import eventually
from parti.wire.options import ConnectOptions
from parti.worker import Lease, Message
from support.worker import Bench, Effects, parts


async def test_a_partition_that_comes_with_a_position_is_read_from_there_and_goes_on_live(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects)
    await bench.publish("a", 1)
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(1)
    await bench.publish("s", 50)
    await bench.publish("a", 1)
    await effects.count(2)
    await worker.update_worker_consumer(
        "w1", parts("a", "s"), positions={"s": 21}, leases={"s": Lease(PartitionId("s"), 3)}
    )
    await bench.publish("s", 10)
    await effects.count(2 + 30 + 10)
    assert effects.of("s") == [*range(22, 52), *range(53, 63)]
    assert all(message.lease.epoch == 3 for message in effects.seen if message.partition.id == "s")
    assert bench.metric("parti_consumer_catchup_messages_total") == 30
    await eventually(lambda: worker.position("s").target is None)
    assert worker.position("s").cursor == 62
    await bench.settled()


@pytest.mark.parametrize(("start", "expected"), [("all", [1, 2, 3, 5]), ("new", [5])])
async def test_a_partition_of_unknown_position_begins_as_configured(
    bench: Bench, start: str, expected: list[int]
) -> None:
    effects = Effects()
    await bench.publish("s", 3)
    await bench.publish("a", 1)
    worker = bench.worker(effects, start=start)
    await worker.update_worker_consumer("w1", parts("a"))
    await worker.update_worker_consumer("w1", parts("a", "s"))
    await bench.publish("s", 1)
    await eventually(lambda: effects.of("s") == expected, what=f"{expected}")


async def test_a_move_between_two_workers_under_load_loses_repeats_and_reorders_nothing(bench: Bench) -> None:
    """The handoff of docs/evidence/handoff.md#h1 by hand: hold at B, stop at A, take over at B, drop at A."""
    a_effects, b_effects = Effects(), Effects()
    a, b = bench.worker(a_effects), bench.worker(b_effects)
    names = ["m0", "m1", "m2"]
    await a.update_worker_consumer("a", parts("mine", *names))
    await b.update_worker_consumer("b", parts("other"))
    stop = asyncio.Event()

    async def load() -> None:
        while not stop.is_set():
            await bench.publish_many(["mine", "other", *names], 1)

    async def move(source: str, name: str, epoch: int) -> None:
        giver, taker = (a, b) if source == "a" else (b, a)
        ids = ("a", "b") if source == "a" else ("b", "a")
        keep, own = list(giver.info().partitions), list(taker.info().partitions)
        await taker.update_worker_consumer(ids[1], [p.partition for p in own] + parts(name), hold=[name])
        cursor = await giver.stop_partition(name)
        taker.take_over(name, after=cursor, lease=Lease(PartitionId(name), epoch))
        await giver.update_worker_consumer(ids[0], [p.partition for p in keep if p.partition.id != name])

    async with asyncio.TaskGroup() as group:
        group.create_task(load())
        for epoch in range(1, 9):
            for name in names:
                await move("a" if epoch % 2 else "b", name, epoch)
        stop.set()
    last = (await bench.js.stream_info(bench.stream))["state"]["last_seq"]
    await eventually(lambda: len(a_effects.seen) + len(b_effects.seen) >= last, what="everything is done")
    both = a_effects.sequences + b_effects.sequences
    assert sorted(both) == list(range(1, last + 1)), "each exactly once"
    for name in names:
        joined = [m for m in a_effects.seen + b_effects.seen if m.partition.id == name]
        in_time = sorted(joined, key=lambda m: (m.lease.epoch, m.sequence))
        assert [m.sequence for m in in_time] == sorted(m.sequence for m in joined), "epochs follow the stream"


async def test_a_stopped_partition_can_be_resumed_even_after_its_share_of_the_desk_was_exceeded(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects, max_ack_pending=50)
    await worker.update_worker_consumer("w1", parts("s", "t"))
    await bench.publish("s", 2)
    await effects.count(2)
    assert await worker.stop_partition("s") == 2
    await bench.publish("s", 60)
    await bench.publish("t", 5)
    await effects.count(7)
    assert len(effects.of("s")) == 2
    assert worker.position("s").cursor == 2
    worker.resume_partition("s", Lease(PartitionId("s"), 9))
    await effects.count(67)
    assert effects.of("s") == list(range(1, 63))
    await bench.settled()


async def test_only_a_held_partition_can_be_taken_over(bench: Bench) -> None:
    worker = bench.worker(Effects())
    await worker.update_worker_consumer("w1", parts("a"))
    with pytest.raises(UsageError, match="not held"):
        worker.take_over("a", after=0, lease=Lease(PartitionId("a"), 1))
    with pytest.raises(UsageError, match="not assigned"):
        await worker.stop_partition("zzz")


async def test_live_messages_held_beyond_their_share_move_the_target_instead_of_filling_the_desk(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects, max_ack_pending=50)
    await worker.update_worker_consumer("w1", parts("t"))
    await worker.update_worker_consumer("w1", parts("s", "t"), hold=["s"])
    await bench.publish("s", 200)
    await bench.publish("t", 3)
    await effects.count(3)
    assert effects.of("s") == []
    worker.take_over("s", after=0, lease=Lease(PartitionId("s"), 1))
    await bench.publish("s", 50)
    await effects.count(253)
    assert effects.of("s") == [*range(1, 201), *range(204, 254)]


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_partitions_added_on_other_retentions_bring_their_backlog(bench: Bench, retention: str) -> None:
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention=retention)
    if retention == "interest":
        keeper = {"durable_name": "keeper", "ack_policy": "explicit", "filter_subjects": [f"{bench.stream}.>"]}
        await bench.js.consumer_create(bench.stream, keeper)
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("s", 20)
    await bench.publish("a", 5)
    await effects.count(5)
    await worker.update_worker_consumer("w1", parts("a", "s"))
    await bench.publish("s", 5)
    await effects.count(30)
    assert effects.of("s") == [*range(1, 21), *range(26, 31)]
    assert effects.of("a") == list(range(21, 26))
    await bench.settled()
    if retention == "workqueue":

        async def empty() -> bool:
            return bool((await bench.js.stream_info(bench.stream))["state"]["messages"] == 0)

        await eventually(empty, what="what is done has left the queue")


async def test_an_unfinished_catch_up_is_repeated_by_the_next_process_from_where_it_was(bench: Bench) -> None:
    gate = asyncio.Event()

    async def slow(message: Message) -> None:
        if message.partition.id == "s" and message.sequence > 5:
            await gate.wait()
        effects.seen.append(message)

    effects = Effects()
    first = bench.worker(slow, drain_timeout=0.1)
    await bench.publish("s", 30)
    await bench.publish("a", 1)
    await first.update_worker_consumer("w1", parts("a"), positions={"a": 0})
    await first.update_worker_consumer("w1", parts("a", "s"), positions={"s": 2})
    await effects.count(1 + 3)
    await first.close()
    again = Effects()
    await bench.worker(again).update_worker_consumer("w1", parts("a", "s"))
    await again.count(25)
    assert again.of("s") == list(range(6, 31))


@pytest.mark.slow
async def test_a_worker_that_fell_behind_on_a_file_stream_catches_up_exactly_while_messages_flow(bench: Bench) -> None:
    from parti_lab.bench.load import fill

    await bench.js.stream_delete(bench.stream)
    await bench.create(storage="file")
    options = ConnectOptions(servers=(bench.server.url,))
    await asyncio.to_thread(fill, options, bench.stream, 30_000, 64, 600)
    names = [str(n) for n in range(100)]
    effects = Effects()
    worker = bench.worker(effects, catch_up_lag=5_000)
    await worker.update_worker_consumer("w1", parts(*names))
    live = 0
    while len(effects.seen) < 5_000 + live:
        await bench.publish_many(names[:20], 1)
        live += 20
    await effects.count(5_000 + live, 60)
    assert bench.metric("parti_consumer_catchup_messages_total") > 3_000
    assert len(effects.sequences) == len(set(effects.sequences)) == 5_000 + live
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))
    await bench.settled(timeout=60)
    await worker.close()
    again = Effects()
    await bench.worker(again).update_worker_consumer("w1", parts(*names))
    await bench.publish("7", 1)
    await again.count(1)
    assert len(again.seen) == 1, "the position was stored"
