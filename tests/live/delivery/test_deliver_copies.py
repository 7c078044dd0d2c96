"""A task with `order=skip` is sent once, even if its owner parked or delivered it before the server recorded that."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from parti.clock import SystemClock
from parti.delivery.document import alone_key
from parti.delivery.feed import Feed
from parti.delivery.names import DeliveryNames
from parti.delivery.order import RuleBook
from parti.delivery.park import Park
from parti.delivery.pending import Pending, TaskReader
from parti.delivery.storage import ensure_consumer, ensure_streams
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer
from parti.wire.acks import ACK
from parti.wire.live import LiveConnection
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def taken(stage: Scene, stream: str, durable: str, filters: list[str]) -> None:
    """One message of the consumer is in the hands of a process that died."""
    await ensure_consumer(stage.js, stream, durable, filters, stage.config())
    dead = await LiveConnection.open(stage.options)
    dead.subscribe("_INBOX.dead", lambda _frames: None)
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
    dead.publish(pull, json.dumps({"batch": 1, "expires": 10_000_000_000}).encode(), "_INBOX.dead")

    async def delivered() -> bool:
        return bool((await stage.js.consumer_info(stream, durable))["num_ack_pending"] == 1)

    await eventually(delivered)
    dead.abort()


async def held_task(stage: Scene, sequence: int) -> Pending:
    """The task as its owner had it, after one attempt."""
    config = stage.config(order="skip")
    stored = await stage.js.msg_get(stage.stream, seq=sequence)
    held = TaskReader(config, RuleBook(config.triggers, config.order)).read(
        stored.data, {}, stream=stage.stream, subject=stored.subject, sequence=sequence, time=stored.time_ns / 1e9
    )
    held.attempts = 1
    return held


@pytest.mark.parametrize("where", ["scheduled", "come due", "put aside", "scheduled again"])
async def test_a_task_that_waits_alone_and_came_again_is_sent_once(stage: Scene, where: str) -> None:
    names, clock = DeliveryNames(stage.stream), SystemClock()
    sequence = await stage.publish(stage.task("a"))
    await ensure_streams(stage.js, stage.config())
    await taken(stage, stage.stream, "TriggerDeliveryWorker", [f"{stage.stream}.>"])
    park, held = Park(stage.js, names, 0, clock), await held_task(stage, sequence)
    await park.claim(1)

    async def has_come() -> bool:
        pages = stage.js.stream_subjects(names.park, names.alone(0, "*"))
        return bool([page async for page in pages if page])

    if where == "put aside":
        await park.append(held, alone_key(held))
    else:
        await park.alone(held, 0.5 if where == "scheduled" else 0.0)
    if where in ("come due", "scheduled again"):
        await eventually(has_come)
    if where == "scheduled again":  # the acknowledgement that is missing is the one of the wake-up
        filters = [names.wake(0, "*"), names.alone(0, "*")]
        await taken(stage, names.park, "TriggerDeliveryWorker-wake-0", filters)
        held.attempts = 2
        await park.alone(held, 0.5)
        await stage.js.stream_purge(stage.stream)
    async with stage.delivering(stage.config(order="skip")):
        await stage.publish(stage.task("b"))
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)

        async def empty() -> bool:
            pages = [page async for page in stage.js.stream_subjects(names.park)]
            return not [subject for page in pages for subject in page if subject.split(".")[1] in "qst"]

        await eventually(empty)
    attempts: dict[str, list[int]] = {body["documentId"]: [] for body in stage.endpoint.bodies("/hook")}
    for request in stage.endpoint.received:
        attempts[request.json()["documentId"]].append(int(request.headers["x-parti-attempt"]))
    assert attempts == {"a": [3 if where == "scheduled again" else 2], "b": [1]}


async def test_a_planned_stop_repeats_no_task_that_had_waited_alone_when_the_server_is_slow_to_take_its_word(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server answers others before it has dealt with an acknowledgement: here it has none of them yet."""
    names, said = DeliveryNames(stage.stream), Feed._write

    def lost(feed: Feed, reply: bytes, verb: bytes) -> None:
        if "-wake-" not in feed.source.durable or verb != ACK:
            said(feed, reply, verb)

    stage.endpoint.on("/hook", Answer(503), Answer(200))
    await stage.publish(stage.task("a"))
    config = stage.config(order="skip")
    with monkeypatch.context() as patched:
        patched.setattr(Feed, "_write", lost)
        async with stage.delivering(config):
            await stage.endpoint.wait_for(2)
            await eventually(stage.settled)
    async with stage.delivering(config):
        await stage.publish(stage.task("b"))
        await eventually(lambda: "b" in [body["documentId"] for body in stage.endpoint.bodies("/hook")])

        async def nothing_left() -> bool:
            info = await stage.js.consumer_info(names.park, "TriggerDeliveryWorker-wake-0")
            return not info["num_pending"] and not info["num_ack_pending"]

        await eventually(nothing_left)
    assert [body["documentId"] for body in stage.endpoint.bodies("/hook")] == ["a", "a", "b"]
