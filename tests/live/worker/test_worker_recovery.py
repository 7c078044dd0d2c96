"""Every failure under a worker, with real faults: it recovers, loses nothing and repeats nothing."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from parti.backoff import Backoff
from parti.clock import SystemClock
from parti.config import LogFormat, ObserveSection
from parti.errors import PartiError
from parti.model import PartitionId, Retention
from parti.observe.logs import configure_logging
from parti.observe.metrics import NO_METRICS
from parti.testing import Direction, FaultProxy, NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Retry, WorkerConfig
from parti.worker.durable import Durable, Memory
from parti.worker.health import HealthTracker, Part
from parti.worker.info import Unfenced
from parti.worker.recorder import Recorder
from parti.worker.runtime import Runtime
from support.worker import Bench, Effects, bench_on, parts

QUICK = Backoff(base=0.02, cap=0.2)


async def test_a_deleted_consumer_is_made_anew_at_the_position_and_nothing_done_comes_again(bench: Bench) -> None:
    names = [f"p{i}" for i in range(8)]
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts(*names))
    for number in range(1, 4):
        await bench.publish_many(names, 10)
        await bench.js.consumer_delete(bench.stream, "parti-w1")
        await effects.count(80 * number)
        await bench.publish_many(names[:1], 1)
        await effects.count(80 * number + number)
    assert sorted(effects.sequences) == list(range(1, 244))
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))
    recreated = bench.metric("parti_worker_consumer_recreations_total", result="success", reason="not_found")
    assert recreated >= 3
    assert bench.metric("parti_worker_consumer_recreation_attempts_total", reason="not_found") >= 3
    assert worker.is_healthy
    await bench.settled()


async def test_a_message_in_hand_when_the_consumer_is_deleted_is_done_once_and_acknowledged(bench: Bench) -> None:
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        starts.append(message.sequence)
        await gate.wait()
        effects.seen.append(message)

    starts: list[int] = []
    effects = Effects()
    worker = bench.worker(handle)
    await bench.publish("a", 3)
    await bench.publish("b", 1)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await eventually(lambda: len(starts) == 2)
    await bench.js.consumer_delete(bench.stream, "parti-w1")

    async def recreated() -> bool:
        return "parti-w1" in await bench.js.consumer_names(bench.stream)

    await eventually(recreated)
    gate.set()
    await effects.count(4)
    await bench.settled()
    assert sorted(starts) == [1, 2, 3, 4]


async def test_a_deleted_stream_makes_the_worker_unhealthy_until_it_is_back(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects, backoff=QUICK)
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 1)
    await effects.count(1)
    await bench.js.stream_delete(bench.stream)
    await eventually(lambda: not worker.is_healthy, what="unhealthy")
    assert worker.health().last_error
    assert bench.metric("parti_worker_consumer_health_status", status="unhealthy") == 1
    await bench.create()
    await bench.publish("a", 3)
    await eventually(lambda: worker.is_healthy, what="healthy again")
    assert bench.metric("parti_worker_consumer_health_status", status="healthy") == 1
    await bench.publish("a", 1)
    await effects.count(5)
    assert effects.sequences == [1, 1, 2, 3, 4], "the new stream counts from 1 again, and nothing of it is skipped"


async def test_a_cut_connection_loses_nothing_and_repeats_nothing(server: NatsServer, name: str) -> None:
    names = [f"p{i}" for i in range(8)]
    async with FaultProxy(server.port) as proxy, bench_on(server, name) as bench:
        await bench.create()
        options = ConnectOptions(servers=(proxy.url,), connect_timeout=5.0, request_timeout=1.0, reconnect_wait=0.05)
        connection = await connect(options)
        try:
            effects = Effects()
            worker = bench.worker(effects, js=JetStreamApi(connection), backoff=QUICK)
            await worker.update_worker_consumer("w1", parts(*names))
            for _ in range(4):
                await bench.publish_many(names, 25)
                proxy.cut()
            await effects.count(800)
            assert sorted(effects.sequences) == list(range(1, 801))
            for each in names:
                assert effects.of(each) == sorted(effects.of(each))
            await bench.settled()
            await worker.close()
        finally:
            await connection.close()


@pytest.mark.slow
async def test_missed_heartbeats_are_noticed_and_counted_and_a_stall_escalates_once(
    server: NatsServer, name: str
) -> None:
    """A half-open connection: nothing breaks, nothing comes. The heartbeats tell."""
    async with FaultProxy(server.port) as proxy, bench_on(server, name) as bench:
        await bench.create()
        options = ConnectOptions(servers=(proxy.url,), connect_timeout=5.0, request_timeout=0.5, reconnect_wait=0.05)
        connection = await connect(options)
        try:
            effects = Effects()
            worker = bench.worker(effects, js=JetStreamApi(connection), backoff=QUICK)
            await worker.update_worker_consumer("w1", parts("a"))
            await bench.publish("a", 1)
            await effects.count(1)
            proxy.half_open(Direction.TO_CLIENT)
            heartbeat = "parti_worker_consumer_iterator_restarts_total"
            await eventually(lambda: bench.metric(heartbeat, reason="heartbeat") >= 1)
            await eventually(lambda: not worker.is_healthy, what="unhealthy after three failures")
            escalations = "parti_worker_consumer_iterator_escalations_total"
            await eventually(lambda: bench.metric(escalations, reason="consecutive_failures") == 1)
            proxy.heal()
            proxy.cut()
            await bench.publish("a", 2)
            await effects.count(3)
            await eventually(lambda: worker.is_healthy)
            assert effects.sequences == [1, 2, 3]
            assert bench.metric(escalations, reason="consecutive_failures") == 1
            assert bench.metric("parti_worker_consumer_consecutive_iterator_failures") == 0
            await worker.close()
        finally:
            await connection.close()


async def test_the_first_update_after_a_restart_is_kept_although_the_server_answers_it_with_what_was_before(
    own_server: NatsServer, name: str
) -> None:
    async with bench_on(own_server, name) as bench:
        await bench.create(storage="file")
        recorder = Recorder(NO_METRICS, HealthTracker())
        config = WorkerConfig(stream=bench.stream, subject_template=f"{bench.stream}.{{partition}}")
        durable = Durable(Runtime(bench.js, config, print, recorder, Unfenced(), QUICK, SystemClock()))
        durable.name = "d"
        await durable.create([f"{bench.stream}.a"], Memory(), after=0, retention=Retention.LIMITS)
        await asyncio.to_thread(own_server.restart)
        await eventually(lambda: bench.js.connection.is_connected, 60, "the connection is back")
        both, memory = (f"{bench.stream}.a", f"{bench.stream}.b"), Memory({PartitionId("b"): 7})
        await durable.update(both, memory)
        assert durable.filters == both
        assert durable.memory() == memory
        await durable.update(durable.filters, Memory())
        found = await bench.js.consumer_info(bench.stream, "d")
        assert sorted(found["config"]["filter_subjects"]) == list(both)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False])
async def test_a_server_restarted_under_load_loses_nothing_and_repeats_nothing(
    own_server: NatsServer, name: str, kill: bool
) -> None:
    names = [f"p{i}" for i in range(8)]
    async with bench_on(own_server, name) as bench:
        await bench.create(storage="file")
        effects = Effects()
        worker = bench.worker(effects, backoff=QUICK)
        await worker.update_worker_consumer("w1", parts(*names))
        published = 0

        async def load() -> None:
            nonlocal published
            for number in range(120):
                for each in names:
                    while True:
                        try:
                            msg_id = {"Nats-Msg-Id": f"{each}-{number}"}
                            await bench.js.publish(f"{bench.stream}.{each}", b"x", headers=msg_id, timeout=1.0)
                            published += 1
                            break
                        except PartiError:
                            await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            group.create_task(load())
            await eventually(lambda: published > 200, 60)
            await asyncio.to_thread(own_server.kill if kill else own_server.terminate)
            await asyncio.to_thread(own_server.start)
        last = (await bench.js.stream_info(bench.stream))["state"]["last_seq"]
        await effects.count(last, 60)
        assert sorted(effects.sequences) == list(range(1, last + 1))
        for each in names:
            assert effects.of(each) == sorted(effects.of(each))
        await eventually(lambda: worker.is_healthy)


async def test_a_lacking_permission_makes_the_worker_unhealthy_and_is_named(name: str) -> None:
    """The user may not pull: the server says so on the connection, and nothing comes."""
    config = """
accounts: {{
  A: {{ jetstream: enabled, users: [
    {{ user: admin, password: p }},
    {{ user: worker, password: p, permissions: {{ publish: {{ deny: {deny} }} }} }}
  ] }}
}}
"""
    with NatsServer(config=config.format(deny='["$JS.API.CONSUMER.MSG.NEXT.>"]')) as server:
        admin = await connect(ConnectOptions(servers=(server.client_url(user="admin", password="p"),)))
        user = await connect(ConnectOptions(servers=(server.client_url(user="worker", password="p"),)))
        try:
            bench = Bench(server, JetStreamApi(admin), name)
            await bench.create()
            effects = Effects()
            worker = bench.worker(effects, js=JetStreamApi(user), backoff=QUICK)
            await worker.update_worker_consumer("w1", parts("a"))
            await bench.publish("a", 1)
            await eventually(lambda: not worker.is_healthy, what="unhealthy without the permission")
            assert "MSG.NEXT" in worker.health().last_error
            assert effects.seen == []
            await worker.close()
        finally:
            await user.close()
            await admin.close()


async def test_an_update_of_a_consumer_that_was_deleted_makes_it_anew_with_the_new_subjects(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 2)
    await effects.count(2)
    await bench.js.consumer_delete(bench.stream, "parti-w1")
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await bench.publish("b", 1)
    await bench.publish("a", 1)
    await effects.count(4)
    assert sorted(effects.sequences) == [1, 2, 3, 4]


async def test_every_transition_is_logged_with_the_same_fields(bench: Bench) -> None:
    out = io.StringIO()
    configure_logging(ObserveSection(log_format=LogFormat.JSON), stream=out)
    effects = Effects(answer=lambda m: Retry(after=0.01) if m.attempt == 1 else None)
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 1)
    await effects.count(1)
    await bench.js.consumer_delete(bench.stream, "parti-w1")
    await bench.publish("a", 1)
    await effects.count(2)
    await worker.close()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    ours = [event for event in events if event.get("component") == "worker"]
    assert {"worker.update", "message.retry", "worker.recreated", "worker.closed"} <= {e["event"] for e in ours}
    for event in ours:
        assert {"worker_id", "consumer_name", "subject_count", "op", "result"} <= event.keys(), event
    update = next(event for event in ours if event["event"] == "worker.update")
    assert (update["worker_id"], update["consumer_name"], update["subject_count"]) == ("w1", "parti-w1", 1)
    assert (update["op"], update["result"]) == ("update", "success")
    retry = next(event for event in ours if event["event"] == "message.retry")
    assert (retry["partition"], retry["sequence"]) == ("a", 1)


# -- health, pure ------------------------------------------------------------------------------------------------------


def test_three_failures_within_a_minute_are_unhealthy_and_one_success_heals() -> None:
    health = HealthTracker()
    for number in range(2):
        health.failed(Part.ITERATOR, number, "x")
        assert health.healthy
    health.failed(Part.ITERATOR, 2, "third")
    assert not health.healthy
    snapshot = health.snapshot()
    assert (snapshot.consecutive_iterator_failures, snapshot.last_error, snapshot.last_updated) == (3, "third", 2)
    health.worked(Part.ITERATOR, 3)
    assert health.healthy
    assert health.snapshot().consecutive_iterator_failures == 0


def test_failures_that_are_far_apart_do_not_add_up() -> None:
    health = HealthTracker()
    for number in range(10):
        health.failed(Part.RECREATION, number * 31.0, "x")
    assert health.healthy


def test_escalation_comes_exactly_once_per_window() -> None:
    health = HealthTracker()
    escalated = []
    for number in range(130):
        health.failed(Part.ITERATOR, float(number), "x")
        if health.escalate(float(number)):
            escalated.append(number)
    assert escalated == [2, 62, 122]
