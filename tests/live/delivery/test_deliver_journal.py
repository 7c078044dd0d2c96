"""After a crash only requests in flight are repeated: the journal records tasks done above an open task."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from parti.delivery import partition
from parti.delivery.journal import Journal
from parti.delivery.names import DeliveryNames
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer, Hang
from parti.wire.live import LiveConnection
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def created(stage: Scene) -> str:
    stream = await stage.js.stream_info(stage.stream)
    consumer = await stage.js.consumer_info(stage.stream, "TriggerDeliveryWorker")
    return f"{stream['created']} {consumer['created']}"


async def test_a_crash_repeats_what_was_in_flight_and_nothing_that_was_done(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "_CHECKPOINT_EVERY", 3600.0)  # as if it had crashed before the first one
    stage.endpoint.on("/stuck", Hang())
    journal = Journal(stage.js, DeliveryNames(stage.stream), 0)
    await stage.publish(stage.task("stuck", "/stuck"))
    await stage.publish_many(100, documents=10)
    async with stage.delivering() as consumer:
        await stage.endpoint.wait_for(100, path="/hook")

        async def written() -> bool:
            return len(await journal.done(await created(stage))) == 100

        await eventually(written)
        assert consumer._shares is not None
        consumer._shares.slots[0].lose()  # as after a crash: nothing is handed over
        await eventually(lambda: consumer.partitions == ())
        stage.endpoint.on("/stuck", Answer(200))
        expired = {"KV-Operation": "DEL"}
        await stage.js.publish(f"$KV.{stage.stream}_DELIVER.slot.0", b"", headers=expired)
        await eventually(stage.settled)
    paths = [request.path for request in stage.endpoint.received]
    assert paths.count("/hook") == 100
    assert paths.count("/stuck") >= 2


async def test_what_was_said_into_a_connection_that_broke_is_said_again_by_the_next_one(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed has not dealt with all that was written to it; then the lease is lost."""
    monkeypatch.setattr(partition, "_CHECKPOINT_EVERY", 3600.0)
    stage.endpoint.on("/stuck", Hang())
    journal = Journal(stage.js, DeliveryNames(stage.stream), 0)
    await stage.publish(stage.task("stuck", "/stuck"))
    await stage.publish_many(20, documents=10)
    async with stage.delivering() as consumer:
        with monkeypatch.context() as patched:
            patched.setattr(LiveConnection, "write", lambda *_: None)  # acknowledgements and entries get lost
            await stage.endpoint.wait_for(20, path="/hook")
            assert consumer._shares is not None
            feed = consumer._shares.slots[0].main
            await eventually(lambda: len(feed) == 1)
            assert feed._connection is not None
            feed._connection.abort()

        async def written() -> bool:
            return len(await journal.done(await created(stage))) == 20

        await eventually(written)


async def test_what_a_checkpoint_covers_is_dropped_from_the_journal(stage: Scene) -> None:
    stage.endpoint.on("/stuck", Hang())
    journal = Journal(stage.js, DeliveryNames(stage.stream), 0)
    await stage.publish(stage.task("stuck", "/stuck"))
    await stage.publish_many(20, documents=10)
    async with stage.delivering(stage.config(shutdown=0.1)):
        await stage.endpoint.wait_for(20, path="/hook")

        async def dropped() -> bool:
            return await journal.end() == 0

        await eventually(dropped)


async def test_entries_of_another_stream_and_damaged_ones_pass_for_nothing(stage: Scene) -> None:
    async with stage.delivering():
        pass  # the park and the durable exist from here on
    journal = Journal(stage.js, DeliveryNames(stage.stream), 0)
    for entry in (journal.entry("another stream of before", range(1, 11)), b"no entry", b"[1, 2]", b""):
        await stage.js.publish(journal.subject, entry)
    await stage.publish_many(10, documents=2)
    async with stage.delivering():
        await stage.endpoint.wait_for(10)
        await eventually(stage.settled)
    assert stage.order() == {"d0": list(range(1, 6)), "d1": list(range(1, 6))}
