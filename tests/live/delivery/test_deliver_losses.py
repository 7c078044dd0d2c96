"""Ways in which a task could get lost, found by the proof or by code review, and all fixed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parti.clock import SystemClock
from parti.dead_letters import DeadLetterReader
from parti.delivery.errors import LeaseLost
from parti.delivery.feed import Feed, FeedCheckpoint
from parti.delivery.names import DeliveryNames
from parti.delivery.order import RuleBook
from parti.delivery.park import Park
from parti.delivery.pending import Pending, TaskReader, Wake
from parti.delivery.storage import ensure_streams
from parti.errors import RequestTimeout
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer
from parti.wire.api import JetStreamApi
from parti.wire.live import LiveConnection
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


def held_task(stage: Scene, document: str, sequence: int) -> Pending:
    """A task in hand, as the feed would have made it."""
    config = stage.config()
    reader = TaskReader(config, RuleBook(config.triggers, config.order))
    data = json.dumps(stage.task(document)).encode()
    return reader.read(data, {}, stream=stage.stream, subject="x", sequence=sequence, time=1e9)


async def parked(stage: Scene) -> list[str]:
    """The subjects of the park that hold tasks."""
    pages = stage.js.stream_subjects(f"{stage.stream}_PARK", f"{stage.stream}_PARK.q.>")
    return [subject async for page in pages for subject in page]


async def test_what_the_pull_of_a_frozen_owner_swallowed_is_delivered_and_not_taken_for_done(stage: Scene) -> None:
    """The run that lost 94 of 2,400 tasks: an old pull was served first, the rest passed for all there is."""
    async with stage.delivering():
        pass  # the durable exists from here on
    frozen = await LiveConnection.open(stage.options)
    frozen.subscribe("_INBOX.frozen", lambda _frames: None)
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{stage.stream}.TriggerDeliveryWorker"
    frozen.publish(pull, json.dumps({"batch": 5, "expires": 60_000_000_000}).encode(), "_INBOX.frozen")
    await frozen.ping()
    async with stage.delivering(stage.config(ack_wait=2.0)):
        await stage.publish_many(10)
        await stage.endpoint.wait_for(10, timeout=60)
        await eventually(stage.settled, 60)
    await frozen.close()
    assert stage.order() == {"d0": list(range(1, 11))}


async def test_a_task_that_is_finished_while_its_feed_attaches_anew_is_acknowledged(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as in hand from then on: kept in progress by heartbeats, and never acknowledged."""
    answered, resetting, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stage.endpoint.on("/hook", Answer(200, gate=answered))
    reset = JetStreamApi.consumer_reset

    async def slow_reset(api: JetStreamApi, stream: str, consumer: str, seq: int | None = None) -> dict[str, Any]:
        if consumer == "TriggerDeliveryWorker" and stage.endpoint.received:
            resetting.set()
            await go_on.wait()
        return await reset(api, stream, consumer, seq)

    monkeypatch.setattr(JetStreamApi, "consumer_reset", slow_reset)
    async with stage.delivering() as consumer:
        await stage.publish(stage.task("a"))
        await stage.endpoint.wait_for(1)
        slot = consumer._shares.slots[0]  # type: ignore[union-attr]
        slot._troubled(RequestTimeout("as after a cut"))
        await resetting.wait()
        answered.set()
        await eventually(lambda: len(slot.main) == 0, what="the task is done")
        go_on.set()
        await eventually(stage.settled)
    assert stage.order() == {"a": [1]}


async def test_a_parked_task_whose_removal_was_not_answered_holds_up_nothing(stage: Scene) -> None:
    """A second removal fails at the server under codes that mean trouble: it was tried again for ever."""
    answered = asyncio.Event()
    stage.endpoint.on("/bad", Answer(503), Answer(200, gate=answered))
    await stage.publish(stage.task("a", "/bad"))
    await stage.publish(stage.task("a", "/hook"))
    async with stage.delivering(stage.config(order="park", schedule=("300ms",))):
        await stage.endpoint.wait_for(2, timeout=60)
        (subject,) = await parked(stage)
        head = await stage.js.msg_get(f"{stage.stream}_PARK", seq=1, next_by_subj=subject)
        await stage.js.msg_delete(f"{stage.stream}_PARK", head.seq)
        answered.set()
        await stage.endpoint.wait_for(3, timeout=60)
    assert [request.path for request in stage.endpoint.received] == ["/bad", "/bad", "/hook"]


async def test_the_server_refuses_what_an_earlier_owner_writes_to_the_park(stage: Scene) -> None:
    await ensure_streams(stage.js, stage.config())
    names, held = DeliveryNames(stage.stream), held_task(stage, "a", 1)
    before, after = (Park(stage.js, names, 0, SystemClock()) for _ in range(2))
    await before.claim(1)
    await after.claim(2)
    for write in (before.append(held), before.wake_after(held.key, 9, held.id, 1), before.alone(held, 9)):
        with pytest.raises(LeaseLost):
            await write
    assert await after.keys() == {}
    await after.append(held)
    assert await after.keys() == {held.key: 1}


async def test_an_owner_whose_park_was_claimed_by_another_gives_up_and_the_task_arrives_all_the_same(
    stage: Scene,
) -> None:
    stage.endpoint.on("/bad", Answer(503), Answer(503), Answer(200))
    async with stage.delivering(stage.config(order="park", schedule=("100ms",) * 5, lease=2)) as consumer:
        await stage.js.publish(f"{stage.stream}_PARK.e.0", b"another")
        await stage.publish(stage.task("a", "/bad"))
        await eventually(lambda: consumer.partitions == (), 60)
        await stage.endpoint.wait_for(3, timeout=60)
        await eventually(stage.settled, 60)


async def test_a_task_that_comes_back_to_the_park_is_stored_again(stage: Scene) -> None:
    """Under the id of its first parking the server would drop it, and say that it has it."""
    await ensure_streams(stage.js, stage.config())
    park, held = Park(stage.js, DeliveryNames(stage.stream), 0, SystemClock()), held_task(stage, "a", 1)
    await park.append(held)
    await park.append(held)  # the answer got lost: the same message, once
    first = await park.first(held.key)
    last = await park.last(held.key)
    assert first is not None
    assert last is not None
    assert first.seq == last.seq
    await park.remove(held.key, first.seq)
    held.sequence = 77  # scheduled alone meanwhile, and back as another message of the park
    await park.append(held)
    assert (await park.keys()).keys() == {held.key}


async def test_a_parked_task_that_comes_again_does_not_replace_itself(stage: Scene) -> None:
    """With `latest`: the copy in memory was taken for a newer one, then for a repetition; both were dropped."""
    stage.endpoint.on("/hook", Answer(503), Answer(200))
    config = stage.config(order="latest", schedule=("1h",), block_for=0.0)
    async with stage.delivering(config) as consumer:
        sequence = await stage.publish(task := stage.task("a"))
        await eventually(lambda: parked(stage), 60)
        await eventually(stage.settled, 60)
        assert consumer._shares is not None
        slot = consumer._shares.slots[0]
        assert slot.lanes is not None
        again = slot._tools.reader.read(
            json.dumps(task).encode(), {}, stream=stage.stream, subject="x", sequence=sequence, time=1e9
        )
        again.feed = slot.main
        slot.lanes.sleepers.parked[again.key].due = 0.0  # as if the hour had passed
        slot.lanes.woken(Wake(again.key, 0, "", 0))
        slot.lanes.offer(again)
        await stage.endpoint.wait_for(2, timeout=60)
    assert stage.order() == {"a": [1, 1]}


async def test_a_stop_between_the_wake_up_and_the_parking_forgets_no_attempt(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task was handed back, and the wake-up that knew of its attempt belonged to a document without tasks."""
    stage.endpoint.on("/hook", Answer(503), Answer(200))
    config, stands = stage.config(order="park", schedule=("300ms",) * 3, shutdown=0.1), asyncio.Event()

    async def never(*_: object) -> None:
        stands.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Park, "append", never)
        async with stage.delivering(config):
            await stage.publish(stage.task("a"))
            async with asyncio.timeout(60):
                await stands.wait()
    async with stage.delivering(config):
        await stage.endpoint.wait_for(2, timeout=60)
    assert [request.headers["x-parti-attempt"] for request in stage.endpoint.received] == ["1", "2"]


async def test_letters_of_a_stream_that_was_made_anew_are_letters_of_their_own(stage: Scene) -> None:
    """Sequences begin at 1 again: ids made of them alone would be duplicates of the letters before."""
    stage.endpoint.on("/no", Answer(422))
    for _ in range(2):
        async with stage.delivering():
            await stage.publish(stage.task("a", "/no"))
            await eventually(stage.settled, 60)
        await stage.js.stream_delete(stage.stream)
        await asyncio.sleep(0.002)  # the ids hold milliseconds
        await stage.js.stream_create({"name": stage.stream, "subjects": [f"{stage.stream}.>"], "storage": "memory"})
    letters = [letter async for letter in DeadLetterReader(stage.js, stage.stream).walk()]
    assert [(letter.origin, letter.reason) for letter in letters] == [(f"{stage.stream}:1", "rejected")] * 2


async def test_what_was_delivered_before_the_parked_ones_does_not_come_after_them(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner before delivered the first and parked the second; its acknowledgements got lost with it.

    When the parked one is delivered before the stream has brought both once more, nobody may have forgotten.
    """
    await ensure_streams(stage.js, stage.config())
    await stage.publish(stage.task("a"))
    second = stage.task("a")
    sequence = await stage.publish(second)
    reader = TaskReader(stage.config(), RuleBook((), "block"))
    held = reader.read(
        json.dumps(second).encode(), {}, stream=stage.stream, subject="x", sequence=sequence, time=SystemClock().wall()
    )
    await Park(stage.js, DeliveryNames(stage.stream), 0, SystemClock()).append(held)
    attach = Feed.attach

    async def late(feed: Feed, connection: LiveConnection, checkpoint: FeedCheckpoint | None = None) -> None:
        if feed.source.stream == stage.stream:
            await eventually(lambda: _drained(stage))
        await attach(feed, connection, checkpoint)

    monkeypatch.setattr(Feed, "attach", late)
    async with stage.delivering():
        await eventually(stage.settled)
        await stage.publish(stage.task("a"))
        await stage.endpoint.wait_for(2)
        await eventually(stage.settled)
    assert stage.order() == {"a": [2, 3]}


async def _drained(stage: Scene) -> bool:
    return bool(stage.endpoint.received) and not await parked(stage)


async def test_what_was_parked_and_delivered_does_not_come_again_behind_it(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner before parked tasks and died with the acknowledgements; the wake-up comes sooner than the tasks do.

    Its document's park had run empty by then, and nobody knew any more up to which task it had been parked: the
    tasks went to the endpoint once more, behind later ones, in one epoch.
    """
    ready = False
    stage.endpoint.on("/hook", lambda _request: Answer(200 if ready else 503))
    for _ in range(3):
        await stage.publish(stage.task("a"))
    config = stage.config(order="park", schedule=("300ms",) * 50)
    async with stage.delivering(config):
        await eventually(stage.settled)
    await stage.js.consumer_delete(stage.stream, config.durable)  # with all that was acknowledged
    before, ready = len(stage.endpoint.received), True
    attach = Feed.attach

    async def late(feed: Feed, *given: Any) -> None:
        if feed.source.stream == stage.stream:
            await stage.endpoint.wait_for(before + 3)
            await eventually(
                lambda: not [wait for wait in asyncio.all_tasks() if wait.get_name() == "parti-deliver-lane"]
            )
        await attach(feed, *given)

    monkeypatch.setattr(Feed, "attach", late)
    async with stage.delivering(config):
        await stage.publish(stage.task("a"))
        await stage.endpoint.wait_for(before + 4)
        await eventually(stage.settled)
    assert [body["payload"]["n"] for body in stage.endpoint.bodies("/hook")][before:] == [1, 2, 3, 4]
