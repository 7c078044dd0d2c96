"""Delivery under faults: endpoints that misbehave, servers that restart, processes that start and stop."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator

import pytest

from parti.dead_letters import DeadLetterReader
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer, Drip, Garbage, Hang, Huge, Reply, ResetConnection, redirect
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def reasons(stage: Scene) -> list[str]:
    return [letter.reason async for letter in DeadLetterReader(stage.js, stage.stream).walk()]


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Answer(500), "server_error"),
        (Answer(503, {"Retry-After": "0"}), "server_error"),
        (Answer(429, {"Retry-After": "0"}), "throttled"),
        (Answer(408), "throttled"),
        (Hang(), "timeout"),
        (ResetConnection(), "network"),
        (Drip(size=200, interval=0.05, status=503), "server_error"),
        (Garbage(), "network"),
        (Answer(200, {"X-Long": "y" * 20_000}), "network"),
    ],
)
async def test_a_passing_failure_is_tried_again_until_it_works(stage: Scene, reply: Reply, outcome: str) -> None:
    stage.endpoint.on("/hook", reply, Answer(204))
    metrics = PrometheusMetrics()
    await stage.publish(stage.task("a", timeout="400ms"))
    await stage.publish(stage.task("a", timeout="400ms"))
    async with stage.delivering(metrics=metrics):
        await stage.endpoint.wait_for(3)
        await eventually(stage.settled)
    assert stage.order() == {"a": [1, 1, 2]}
    assert metrics.registry.get_sample_value("parti_delivery_attempts_total", {"outcome": outcome}) == 1


async def test_retry_after_is_waited_for(stage: Scene) -> None:
    stage.endpoint.on("/hook", Answer(429, {"Retry-After": "1"}), Answer(200))
    await stage.publish(stage.task("a"))
    loop = asyncio.get_running_loop()
    async with stage.delivering():
        await stage.endpoint.wait_for(1)
        first = loop.time()
        await stage.endpoint.wait_for(2)
    assert loop.time() - first >= 0.9  # the schedule alone would have come back after 50 ms


async def test_a_huge_answer_is_cut_off_and_a_redirect_is_not_followed(stage: Scene) -> None:
    stage.endpoint.on("/huge", Huge(size=200 << 20))
    stage.endpoint.on("/away", redirect("http://169.254.169.254/latest/meta-data/"))
    await stage.publish(stage.task("a", "/huge"))
    await stage.publish(stage.task("b", "/away"))
    async with stage.delivering() as consumer:
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
        assert consumer.guard.blocked == 0
    assert await reasons(stage) == ["rejected"]


async def test_broken_tls_is_tried_again_and_ends_in_the_dead_letters(stage: Scene) -> None:
    metrics = PrometheusMetrics()
    task = stage.task("a", url=stage.endpoint.url.replace("http:", "https:") + "/x")
    await stage.publish(task | {"retryPolicy": {"maxAttempts": 2, "initialBackoff": "10ms"}})
    async with stage.delivering(metrics=metrics):
        await eventually(stage.settled)
    assert await reasons(stage) == ["exhausted"]
    assert metrics.registry.get_sample_value("parti_delivery_attempts_total", {"outcome": "tls"}) == 2


async def test_requests_are_signed_as_the_scheme_says(stage: Scene) -> None:
    keys = [b"0" * 24, b"1" * 32]
    texts = " ".join("whsec_" + base64.b64encode(key).decode() for key in keys)
    await stage.publish(stage.task("a", secretsRef="hook"), headers={"Nats-Msg-Id": "evt-9"})
    async with stage.delivering(stage.config(legacy_signature=True), environ={"PARTI_WEBHOOK_SECRET_HOOK": texts}):
        (request,) = await stage.endpoint.wait_for(1)
    assert request.headers["webhook-id"] == "evt-9"
    content = b"evt-9." + request.headers["webhook-timestamp"].encode() + b"." + request.body
    signatures = request.headers["webhook-signature"].split(" ")
    assert signatures == [
        "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode() for key in keys
    ]
    assert request.headers["x-syntrix-signature"].startswith(f"t={request.headers['webhook-timestamp']},v1=")


async def test_a_host_that_is_down_parks_its_documents_and_spends_no_attempts(stage: Scene) -> None:
    stage.endpoint.on("/bad", lambda request: Answer(503 if request.number <= 6 else 200))
    config = stage.config(
        breaker_calls=6, breaker_open=1.5, host_concurrency=1, schedule=("2s",) * 9, order="park", attempt_log="all"
    )
    for number in range(10):
        await stage.publish(stage.task(f"x{number}", "/bad"))
        await stage.publish(stage.task(f"x{number}", "/bad"))
    async with stage.delivering(config):
        await eventually(stage.settled)
        assert len(stage.endpoint.received) <= 7
        await stage.endpoint.wait_for(6 + 20, timeout=60)
    attempts: dict[str, list[str]] = {}
    for request in stage.endpoint.received:
        attempts.setdefault(request.headers["webhook-id"], []).append(request.headers["x-parti-attempt"])
    assert all(found in (["1"], ["1", "2"]) for found in attempts.values())
    assert all(numbers in ([1, 2], [1, 1, 2]) for numbers in stage.order("/bad").values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_server_that_goes_away_and_comes_back_costs_nothing(
    own_server: NatsServer, name: str, how: str
) -> None:
    async with scene(own_server, name, storage="file") as stage:
        stage.endpoint.otherwise(lambda _request: Answer(200, delay=0.02))
        async with stage.delivering(stage.config(storage="file", lease=60, ack_wait=5.0)):
            await stage.publish_many(200, documents=10)
            await stage.endpoint.wait_for(60)
            if how == "kill":
                await asyncio.to_thread(own_server.kill)
                await asyncio.to_thread(own_server.start)
            else:
                await asyncio.to_thread(own_server.restart)
            await stage.settles_after_outage()
        for numbers in stage.order().values():
            assert list(dict.fromkeys(numbers)) == list(range(1, 21))
            assert numbers == sorted(numbers)
        assert len(stage.endpoint.received) == 200  # the process remembers what it had done


async def test_two_processes_on_one_partition_are_one_and_a_standby(stage: Scene) -> None:
    async with stage.delivering() as first, stage.delivering(ready=0) as second:
        await stage.publish_many(10, documents=2)
        await stage.endpoint.wait_for(10)
        assert (first.partitions, second.partitions) == ((0,), ())
        await first.stop()
        await second.wait_ready(1)
        await stage.publish_many(10, documents=2)
        await stage.endpoint.wait_for(20)
        await eventually(stage.settled)
    assert stage.order() == {"d0": list(range(1, 11)), "d1": list(range(1, 11))}
    epochs = [int(request.headers["x-parti-epoch"]) for request in stage.endpoint.received]
    assert epochs == sorted(epochs)


async def test_several_processes_share_the_partitions_and_keep_the_order(stage: Scene) -> None:
    config = stage.config(partitions=8)
    async with stage.delivering(config):
        for _ in range(4):
            await stage.publish_many(20, documents=20)
        async with stage.delivering(config, ready=4) as second:
            for _ in range(4):
                await stage.publish_many(20, documents=20)
            await stage.endpoint.wait_for(160)
            assert len(second.partitions) == 4
        for _ in range(2):
            await stage.publish_many(20, documents=20)
        await stage.endpoint.wait_for(200)
    assert stage.order() == {f"d{n}": list(range(1, 11)) for n in range(20)}


async def test_a_change_to_several_partitions_repeats_nothing(stage: Scene) -> None:
    await stage.publish_many(10, documents=5)
    async with stage.delivering():
        await stage.endpoint.wait_for(10)
        await eventually(stage.settled)
    await stage.publish_many(5, documents=5)
    async with stage.delivering(stage.config(partitions=2)):
        await stage.endpoint.wait_for(15)
    assert stage.order() == {f"d{number}": [1, 2, 3] for number in range(5)}


async def test_a_document_whose_subject_lies_is_still_one_document(stage: Scene) -> None:
    metrics = PrometheusMetrics()
    stage.endpoint.on("/hook", Answer(503), Answer(200))
    for number in range(3):
        await stage.publish(stage.task("a"), subject=f"{stage.stream}.other.place.{number}")
    async with stage.delivering(metrics=metrics):
        await stage.endpoint.wait_for(4)
        await eventually(stage.settled)
    assert stage.order() == {"a": [1, 1, 2, 3]}
    assert metrics.registry.get_sample_value("parti_delivery_odd_input_total", {"what": "subject_mismatch"}) == 3


async def test_a_deleted_durable_is_made_again_where_it_stood(stage: Scene) -> None:
    async with stage.delivering():
        await stage.publish_many(10, documents=2)
        await stage.endpoint.wait_for(10)
        await eventually(stage.settled)
        await stage.js.consumer_delete(stage.stream, "TriggerDeliveryWorker")
        await stage.publish_many(10, documents=2)
        await stage.endpoint.wait_for(20)
        await eventually(stage.settled)
    assert stage.order() == {"d0": list(range(1, 11)), "d1": list(range(1, 11))}


async def test_failed_attempts_are_written_to_the_attempt_log(stage: Scene) -> None:
    stage.endpoint.on("/hook", Answer(503), Answer(200))
    await stage.publish(stage.task("a"))
    async with stage.delivering():
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
    record = json.loads((await stage.js.msg_get(f"{stage.stream}_ATTEMPTS", seq=1)).data)
    assert (record["outcome"], record["status"], record["attempt"], record["document"]) == ("server_error", 503, 1, "a")
    assert "url" not in record


async def test_a_start_while_the_server_restarts_waits_for_it(own_server: NatsServer, name: str) -> None:
    async with scene(own_server, name, storage="file") as stage:
        await stage.publish(stage.task("a"))
        await asyncio.to_thread(own_server.kill)
        starting = asyncio.create_task(_deliver_one(stage))
        await asyncio.sleep(0)  # it finds nobody
        await asyncio.to_thread(own_server.start)
        await starting


async def _deliver_one(stage: Scene) -> None:
    async with stage.delivering(stage.config(storage="file")):
        await stage.endpoint.wait_for(1)
