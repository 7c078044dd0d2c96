"""A worker from its first update to its close, on a real server."""

from __future__ import annotations

import asyncio

import pytest

from parti.errors import ConfigError, UsageError
from parti.model import PartitionId
from parti.worker import (
    Ack,
    Lease,
    MaxSubjectsExceeded,
    Message,
    WorkerClosed,
    WorkerConsumer,
    WorkerIdMutation,
)
from support.worker import Bench, Effects, parts


async def test_a_handler_gets_the_messages_of_its_partitions_and_they_are_acknowledged(bench: Bench) -> None:
    await bench.publish("a", 3, b"hello", Kind="test")
    await bench.publish("other", 2)
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a", "b"), leases={"a": Lease(PartitionId("a"), 7)})
    await effects.count(3)
    await bench.publish("b", 2)
    await effects.count(5)
    message = effects.seen[0]
    assert (message.subject, message.partition.id, message.key) == (f"{bench.stream}.a", "a", "a")
    assert (message.sequence, message.delivered, message.attempt, message.data) == (1, 1, 1, b"hello")
    assert dict(message.headers) == {"Kind": "test"}
    assert message.lease == Lease(PartitionId("a"), 7)
    assert message.worker_id == "w1"
    assert message.received_at >= message.timestamp > 0
    await bench.settled()
    info = await bench.info()
    assert info["config"]["durable_name"] == info["config"]["name"] == "parti-w1"
    assert info["config"]["filter_subjects"] == [f"{bench.stream}.a", f"{bench.stream}.b"]
    assert info["config"]["max_deliver"] == -1
    assert worker.subjects == (f"{bench.stream}.a", f"{bench.stream}.b")
    assert worker.is_healthy


async def test_one_lane_runs_one_message_at_a_time_and_many_lanes_run_at_once(bench: Bench) -> None:
    running: dict[str, int] = {}
    most: dict[str, int] = {"lanes": 0, "lane": 0}

    async def handle(message: Message) -> Ack:
        key = message.partition.id
        running[key] = running.get(key, 0) + 1
        most["lane"] = max(most["lane"], running[key])
        most["lanes"] = max(most["lanes"], sum(1 for value in running.values() if value))
        await asyncio.sleep(0.002)
        running[key] -= 1
        effects.seen.append(message)
        return Ack()

    effects = Effects()
    names = [f"p{i}" for i in range(10)]
    await bench.publish_many(names, 20)
    await bench.worker(handle).update_worker_consumer("w1", parts(*names))
    await effects.count(200)
    assert most == {"lanes": 10, "lane": 1}
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))


async def test_a_plain_function_runs_in_a_thread_and_does_not_stop_the_loop(bench: Bench) -> None:
    import threading

    release, threads = threading.Event(), set()

    def handle(message: Message) -> None:
        threads.add(threading.current_thread().name[:13])
        if message.partition.id == "slow":
            release.wait(60)
        effects.seen.append(message)

    effects = Effects()
    await bench.publish("slow", 1)
    await bench.publish("fast", 3)
    await bench.worker(handle).update_worker_consumer("w1", parts("slow", "fast"))
    await effects.count(3)
    assert effects.of("slow") == []
    release.set()
    await effects.count(4)
    assert threads == {"parti-handler"}


async def test_the_decorator_form(bench: Bench) -> None:
    worker: WorkerConsumer = bench.worker(None)
    with pytest.raises(UsageError, match="no handler"):
        await worker.update_worker_consumer("w1", parts("a"))
    effects = Effects()

    @worker.handler
    async def handle(message: Message) -> None:
        effects.seen.append(message)

    with pytest.raises(UsageError, match="handler already"):
        worker.handler(handle)
    await bench.publish("a", 2)
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(2)


async def test_lanes_by_key_let_the_keys_of_one_partition_run_beside_each_other(bench: Bench) -> None:
    blocked = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.key == "k1":
            await blocked.wait()
        effects.seen.append(message)

    effects = Effects()
    await bench.publish("a.k1", 2)
    await bench.publish("a.k2", 2)
    worker = bench.worker(handle, subject_template=f"{bench.stream}.{{partition}}.*", lanes="key")
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(2)
    assert [message.key for message in effects.seen] == ["k2", "k2"]
    assert worker.position("a").cursor == 0
    blocked.set()
    await effects.count(4)
    await bench.settled()
    assert worker.position("a").cursor == 4


async def test_a_second_worker_object_of_the_same_id_goes_on_where_the_first_stopped(bench: Bench) -> None:
    effects = Effects()
    first = bench.worker(effects)
    await bench.publish("a", 5)
    await first.update_worker_consumer("w1", parts("a"))
    await effects.count(5)
    await first.close()
    await bench.publish("a", 5)
    await bench.worker(effects).update_worker_consumer("w1", parts("a"))
    await effects.count(10)
    assert effects.sequences == list(range(1, 11))


# -- guard rails -------------------------------------------------------------------------------------------------------


async def test_too_many_subjects_are_refused_before_any_call_and_nearly_too_many_are_warned_of(bench: Bench) -> None:
    worker = bench.worker(Effects(), max_subjects=10)
    with pytest.raises(MaxSubjectsExceeded, match="11 subjects"):
        await worker.update_worker_consumer("w1", parts(*(f"p{i}" for i in range(11))))
    assert await bench.js.consumer_names(bench.stream) == []
    assert bench.metric("parti_worker_consumer_guardrail_violations_total", type="max_subjects") == 1
    await worker.update_worker_consumer("w1", parts(*(f"p{i}" for i in range(8))))
    assert bench.metric("parti_worker_consumer_subjects_threshold_warnings_total") == 0
    await worker.update_worker_consumer("w1", parts(*(f"p{i}" for i in range(9))))
    assert bench.metric("parti_worker_consumer_subjects_threshold_warnings_total") == 1


async def test_the_worker_id_cannot_change(bench: Bench) -> None:
    worker = bench.worker(Effects())
    await worker.update_worker_consumer("w1", parts("a"))
    with pytest.raises(WorkerIdMutation, match="'w1'"):
        await worker.update_worker_consumer("w2", parts("a"))
    assert await bench.js.consumer_names(bench.stream) == ["parti-w1"]
    assert bench.metric("parti_worker_consumer_guardrail_violations_total", type="workerid_mutation") == 1


@pytest.mark.parametrize("worker_id", ["", "a.b", "a b", "a*", "a>", "a/b", "ä"])
async def test_a_worker_id_that_is_no_consumer_name_is_refused(bench: Bench, worker_id: str) -> None:
    with pytest.raises(ConfigError):
        await bench.worker(Effects()).update_worker_consumer(worker_id, parts("a"))
    assert await bench.js.consumer_names(bench.stream) == []


async def test_a_closed_worker_refuses_updates_and_can_be_closed_again(bench: Bench) -> None:
    worker = bench.worker(Effects())
    await worker.update_worker_consumer("w1", parts("a"))
    await worker.close()
    await worker.close()
    with pytest.raises(WorkerClosed):
        await worker.update_worker_consumer("w1", parts("a"))


async def test_a_stream_must_be_named(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"worker\.stream"):
        WorkerConsumer(bench.js, bench.config(stream=""))
