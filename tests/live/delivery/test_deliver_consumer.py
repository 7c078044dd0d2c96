"""The TaskConsumer on a real server with a real endpoint: a task is delivered in order, once, or is a dead letter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parti.clock import SystemClock
from parti.dead_letters import DeadLetterReader
from parti.delivery import TaskConsumer
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer, Hang
from parti.wire.errors import StreamNotFound
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def letters(stage: Scene) -> list[tuple[str, str]]:
    return [(letter.reason, letter.extension.id) async for letter in DeadLetterReader(stage.js, stage.stream).walk()]


async def test_tasks_reach_their_endpoint_once_and_in_order(stage: Scene) -> None:
    await stage.publish_many(60, documents=7)
    async with stage.delivering():
        await stage.publish_many(60, documents=7)
        await stage.endpoint.wait_for(120)
        await eventually(stage.settled)
    assert len(stage.endpoint.received) == 120
    for numbers in stage.order().values():
        assert numbers == sorted(numbers)


async def test_a_failed_task_holds_back_its_own_document_alone(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(503), Answer(500), Answer(200))
    await stage.publish(stage.task("a", "/bad"))
    for _ in range(3):
        await stage.publish(stage.task("a", "/hook"))
        await stage.publish(stage.task("b", "/hook"))
    async with stage.delivering():
        await stage.endpoint.wait_for(9)
        await eventually(stage.settled)
    documents = [(r.json()["documentId"], r.json()["payload"]["n"]) for r in stage.endpoint.received]
    assert [n for d, n in documents if d == "a"] == [1, 1, 1, 2, 3, 4]
    assert [n for d, n in documents if d == "b"] == [1, 2, 3]
    assert documents.index(("b", 3)) < documents.index(("a", 2))


async def test_a_rejected_task_rests_in_the_dead_letters_with_its_answer(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(422, body=b"no such order" * 1000))
    sequence = await stage.publish(stage.task("a", "/bad"), headers={"Nats-Msg-Id": "evt-1", "X-Own": "kept"})
    await stage.publish(stage.task("a"))
    async with stage.delivering():
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
    (letter,) = [letter async for letter in DeadLetterReader(stage.js, stage.stream).walk()]
    assert (letter.extension.id, letter.reason, letter.extension.status, letter.attempts) == (
        "evt-1",
        "rejected",
        422,
        1,
    )
    assert letter.extension.response == (b"no such order" * 1000)[:4096]
    assert letter.origin == f"{stage.stream}:{sequence}"
    assert letter.headers["X-Own"] == "kept"
    assert b'"documentId": "a"' in letter.data


async def test_a_replayed_letter_is_delivered_with_the_id_it_had(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(400), Answer(400), Answer(200))
    await stage.publish(stage.task("a", "/bad"))
    dead = DeadLetterReader(stage.js, stage.stream)
    async with stage.delivering() as consumer:
        for _ in range(2):
            (found,) = await eventually(lambda: letters(stage))
            assert found[0] == "rejected"
            assert len([letter async for letter in dead.replay_all(clock=SystemClock())]) == 1
        await stage.endpoint.wait_for(3)
        await eventually(stage.settled)
        assert consumer.partitions == (0,)
    assert await letters(stage) == []
    assert len({request.headers["webhook-id"] for request in stage.endpoint.received}) == 1


@pytest.mark.parametrize(
    ("reason", "task"),
    [
        ("malformed", b"no json"),
        ("malformed", b'{"triggerId": "t"}'),
        ("too_large", b'{"a": "' + b"x" * 70_000 + b'"}'),
        ("bad_url", {"url": "ftp://127.0.0.1/"}),
        ("bad_header", {"headers": {"Host": "elsewhere"}}),
        ("ssrf_blocked", {"url": "http://127.0.0.1:1/"}),
        ("ssrf_blocked", {"url": "http://169.254.169.254/"}),
        ("no_secret", {"secretsRef": "unknown"}),
        ("too_large", {"payload": "y" * 40_000}),
    ],
)
async def test_what_can_never_be_delivered_goes_to_the_dead_letters_and_nothing_is_sent(
    stage: Scene, reason: str, task: bytes | dict[str, Any]
) -> None:
    message = task if isinstance(task, bytes) else stage.task("a", **task)
    await stage.publish(message)
    await stage.publish(stage.task("a"))
    async with stage.delivering(stage.config(max_task=60_000, max_body=30_000), environ={}):
        await stage.endpoint.wait_for(1)
        await eventually(stage.settled)
    assert [found for found, _ in await letters(stage)] == [reason]
    assert len(stage.endpoint.received) == 1


async def test_attempts_end_in_the_dead_letters_when_the_policy_says_so(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(503))
    await stage.publish(stage.task("a", "/bad", retryPolicy={"maxAttempts": 3, "initialBackoff": "10ms"}))
    await stage.publish(stage.task("a"))
    async with stage.delivering():
        await stage.endpoint.wait_for(4)
        await eventually(stage.settled)
    assert [reason for reason, _ in await letters(stage)] == ["exhausted"]
    attempts = [request.headers["x-parti-attempt"] for request in stage.endpoint.received]
    assert attempts == ["1", "2", "3", "1"]


async def test_a_gone_endpoint_is_called_no_more_by_any_process(stage: Scene) -> None:
    stage.endpoint.on("/gone", Answer(410))
    await stage.publish(stage.task("a", "/gone"))
    async with stage.delivering():
        await eventually(lambda: letters(stage))
    await stage.publish(stage.task("b", "/gone"))
    await stage.publish(stage.task("b", "/hook"))
    async with stage.delivering():
        await stage.endpoint.wait_for(1, path="/hook")
        await eventually(stage.settled)
    assert [reason for reason, _ in await letters(stage)] == ["gone", "disabled"]
    assert len([r for r in stage.endpoint.received if r.path == "/gone"]) == 1


async def test_a_document_that_waits_long_is_parked_and_comes_back_in_order(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(503), Answer(503), Answer(200))
    config = stage.config(order="park", schedule=("300ms", "300ms"))
    await stage.publish(stage.task("a", "/bad"))
    await stage.publish_many(5, documents=1)
    async with stage.delivering(config):
        await eventually(stage.settled)  # nothing is pending: the document waits in the park
        for _ in range(3):
            await stage.publish(stage.task("a", "/hook"))
        await stage.endpoint.wait_for(11, timeout=60)
        await eventually(stage.settled)
        await eventually(lambda: _empty(stage))
    seen = [body["payload"]["n"] for r in stage.endpoint.received if (body := r.json())["documentId"] == "a"]
    assert seen == [1, 1, 1, 2, 3, 4]
    attempts = [r.headers["x-parti-attempt"] for r in stage.endpoint.received if r.path == "/bad"]
    assert attempts == ["1", "2", "3"]


async def _empty(stage: Scene) -> bool:
    park = f"{stage.stream}_PARK"
    found = [subject async for page in stage.js.stream_subjects(park, ">") for subject in page]
    return found == [f"{park}.e.0"]  # the owner's marker alone


async def test_a_blocked_document_is_parked_when_too_much_queues_up_behind_it(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(503), Answer(200))
    config = stage.config(block_queue=5, schedule=("1s",))
    await stage.publish(stage.task("a", "/bad"))
    for _ in range(20):
        await stage.publish(stage.task("a"))
    async with stage.delivering(config):
        await eventually(stage.settled)
        assert len(stage.endpoint.received) == 1
        await stage.endpoint.wait_for(22)
        await eventually(lambda: _empty(stage))
    assert [r.json()["payload"]["n"] for r in stage.endpoint.received] == [1, *range(1, 22)]


async def test_skip_lets_later_tasks_pass_the_one_that_failed(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(503), Answer(200))
    config = stage.config(triggers=("t1: order=skip",), schedule=("300ms",))
    await stage.publish(stage.task("a", "/bad"))
    await stage.publish(stage.task("a"))
    async with stage.delivering(config):
        await stage.endpoint.wait_for(3)
        await eventually(lambda: _empty(stage))
    assert [(r.path, r.headers["x-parti-attempt"]) for r in stage.endpoint.received] == [
        ("/bad", "1"),
        ("/hook", "1"),
        ("/bad", "2"),
    ]


@pytest.mark.parametrize("block_for", [60.0, 0.0])
async def test_latest_delivers_the_newest_in_place_of_those_that_wait(stage: Scene, block_for: float) -> None:
    stage.endpoint.on("/hook", Answer(503), Answer(200))
    config = stage.config(order="latest", schedule=("500ms",), block_for=block_for)
    async with stage.delivering(config):
        await stage.publish(stage.task("a"))
        await stage.endpoint.wait_for(1)
        for _ in range(4):
            await stage.publish(stage.task("a"))
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
        await eventually(lambda: _empty(stage))
    assert [r.json()["payload"]["n"] for r in stage.endpoint.received] == [1, 5]


async def test_a_stop_finishes_what_is_in_flight_and_hands_back_the_rest(stage: Scene) -> None:
    answered = asyncio.Event()
    stage.endpoint.on("/slow", Answer(200, gate=answered))
    await stage.publish(stage.task("a", "/slow"))
    for _ in range(3):
        await stage.publish(stage.task("a", "/hook"))
    async with stage.delivering() as consumer:
        await stage.endpoint.wait_for(1)
        stopping = asyncio.create_task(consumer.stop())
        shares = consumer._shares
        assert shares is not None
        await eventually(lambda: bool(shares.slots[0].lanes and shares.slots[0].lanes._stopping))
        answered.set()
        await stopping
    assert [r.path for r in stage.endpoint.received] == ["/slow"]
    info = await stage.js.consumer_info(stage.stream, "TriggerDeliveryWorker")
    assert info["ack_floor"]["stream_seq"] == 1
    async with stage.delivering():
        await stage.endpoint.wait_for(4)
        await eventually(stage.settled)
    assert [r.headers["x-parti-attempt"] for r in stage.endpoint.received] == ["1"] * 4
    assert stage.order("/hook") == {"a": [2, 3, 4]}


async def test_a_stop_does_not_wait_for_ever(stage: Scene) -> None:
    stage.endpoint.on("/hang", Hang())
    await stage.publish(stage.task("a", "/hang"))
    async with stage.delivering(stage.config(shutdown=0.2)):
        await stage.endpoint.wait_for(1)
    stage.endpoint.on("/hang", Answer(200))
    async with stage.delivering():
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
    assert await letters(stage) == []


async def test_a_cancelled_start_ends_gracefully_too(stage: Scene) -> None:
    answered = asyncio.Event()
    stage.endpoint.on("/slow", Answer(200, gate=answered))
    await stage.publish(stage.task("a", "/slow"))
    consumer = TaskConsumer(stage.config(), nats=stage.options)
    running = asyncio.create_task(consumer.start())
    await stage.endpoint.wait_for(1)
    running.cancel()
    await asyncio.sleep(0)  # it has begun to stop
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await stage.settled()


async def test_a_stream_that_is_not_there_is_said_at_once(stage: Scene) -> None:
    with pytest.raises(StreamNotFound):
        async with stage.delivering(stage.config(stream=f"{stage.stream}x")):
            pass


async def test_the_durable_is_the_one_of_the_seed_and_is_not_changed_when_it_exists(stage: Scene) -> None:
    async with stage.delivering():
        info = (await stage.js.consumer_info(stage.stream, "TriggerDeliveryWorker"))["config"]
    assert info["filter_subject"] == f"{stage.stream}.>"
    assert (info["ack_policy"], info["max_deliver"], info["ack_wait"]) == ("explicit", -1, 30_000_000_000)
    await stage.js.consumer_create(stage.stream, info | {"max_ack_pending": 77}, action="update")
    async with stage.delivering():
        info = (await stage.js.consumer_info(stage.stream, "TriggerDeliveryWorker"))["config"]
    assert info["max_ack_pending"] == 77


async def test_the_seeds_metrics_count_what_happened(stage: Scene) -> None:
    metrics = PrometheusMetrics()
    stage.endpoint.on("/bad", Answer(400))
    await stage.publish(stage.task("a", "/bad"))
    await stage.publish_many(3)
    async with stage.delivering(metrics=metrics):
        await stage.endpoint.wait_for(4)
        await eventually(stage.settled)
    value = metrics.registry.get_sample_value
    assert value("trigger_consume_count_total", {"database": "shop", "success": "true"}) == 3
    assert value("trigger_consume_count_total", {"database": "shop", "success": "false"}) == 1
    assert value("trigger_consume_latency_seconds_count", {"database": "shop"}) == 4
    assert value("trigger_worker_active", {"worker_id": "0"}) is not None
    assert value("trigger_worker_queue_size", {"worker_id": "15"}) is not None
    assert value("parti_delivery_attempts_total", {"outcome": "rejected"}) == 1
    assert value("parti_delivery_dead_letters_total", {"reason": "rejected"}) == 1


async def test_a_wake_up_that_is_quicker_than_the_parking_is_not_missed(stage: Scene) -> None:
    stage.endpoint.on("/hook", lambda request: Answer(503 if request.number % 3 else 200))
    config = stage.config(order="park", schedule=("1ms",) * 40, breaker_calls=10_000)
    await stage.publish_many(60, documents=20)
    async with stage.delivering(config):
        await eventually(stage.settled)
        await eventually(lambda: _empty(stage), 60)
    assert {document: sorted(set(numbers)) for document, numbers in stage.order().items()} == {
        f"d{number}": [1, 2, 3] for number in range(20)
    }
    assert all(numbers == sorted(numbers) for numbers in stage.order().values())
    assert await letters(stage) == []


async def test_a_task_that_comes_again_does_not_go_behind_those_that_were_parked_after_it(stage: Scene) -> None:
    """Its acknowledgement got lost with the server's last writes, and the process that knew is gone."""
    stage.endpoint.on("/bad", Answer(503), Answer(200))
    await stage.publish(stage.task("a"))
    await stage.publish(stage.task("a", "/bad"))
    await stage.publish(stage.task("a"))
    config = stage.config(order="park", schedule=("1s",))
    async with stage.delivering(config):
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
    await stage.js.stream_purge(f"KV_{stage.stream}_DELIVER")
    await stage.js.consumer_reset(stage.stream, "TriggerDeliveryWorker", seq=1)
    async with stage.delivering(config):
        await stage.endpoint.wait_for(4)
        await eventually(stage.settled)
        await eventually(lambda: _empty(stage))
    numbers = [request.json()["payload"]["n"] for request in stage.endpoint.received]
    assert numbers == [1, 2, 2, 3]
