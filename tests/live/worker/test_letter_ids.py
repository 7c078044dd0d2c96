"""A dead letter is stored once, whichever worker writes it, and never mistaken for a letter of another stream."""

from __future__ import annotations

from typing import Any

import pytest

from parti.dead_letters import DeadLetterReader, dead_letter_stream
from parti.model import Partition
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.worker import Message, Reject, WorkerConfig, WorkerConsumer
from support.fleet import fleet_on


async def ids(js: JetStreamApi, stream: str) -> list[str]:
    name = dead_letter_stream(stream)
    last = int((await js.stream_info(name))["state"]["last_seq"])
    return [(await js.msg_get(name, seq=n)).headers["Nats-Msg-Id"] for n in range(1, last + 1)]


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_the_id_of_a_letter_names_the_stream_and_the_namespace_and_no_worker(
    server: NatsServer, name: str, layout: str
) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        connection = await fleet.connection()
        config = WorkerConfig(stream=name, subject_template=f"{name}.{{partition}}")
        consumer = WorkerConsumer(JetStreamApi(connection), config, lambda message: Reject("no"))
        one = await fleet.worker(consumer=consumer, layout=layout)
        await one.wait_for("converged", 60)
        await fleet.publish(2)
        letters = DeadLetterReader(fleet.js, name)

        async def both() -> bool:
            return await letters.count() == 2

        await eventually(both, 60, "two letters")
        created = (await fleet.js.stream_info(name))["created"]
        found = await ids(fleet.js, name)
        assert all(each.startswith(f"{name}:{created}:parti-{name}:") for each in found), found
        assert len(set(found)) == 2
        assert not any("worker-" in each for each in found)
        assert [letter.consumer async for letter in letters.walk()] == [f"parti-{name}-worker-0"] * 2


async def bury_first(js: JetStreamApi, stream: str, worker_id: str, **settings: Any) -> None:
    """A worker that is new to the stream buries its first message, and ends."""
    buried = []

    async def handle(message: Message) -> Reject:
        buried.append(message.sequence)
        return Reject("no")

    config = WorkerConfig(stream=stream, subject_template=f"{stream}.{{partition}}", **settings)
    async with WorkerConsumer(js, config, handle) as worker:
        await worker.update_worker_consumer(worker_id, [Partition(("p0",))])
        await eventually(lambda: buried, 60, "buried")
    assert buried == [1]


async def test_two_workers_that_bury_the_same_message_store_one_letter(server: NatsServer, name: str) -> None:
    """The second one reads it by range, the first one live: the id is the same."""
    async with fleet_on(server, name, count=1) as fleet:
        await fleet.publish(1)
        await bury_first(fleet.js, name, "w1")
        await bury_first(fleet.js, name, "w2")
        assert await DeadLetterReader(fleet.js, name).count() == 1
        await bury_first(fleet.js, name, "w1", consumer_prefix="another")
        assert await DeadLetterReader(fleet.js, name).count() == 2, (
            "another reader of the stream has letters of its own"
        )


async def test_a_letter_of_a_stream_that_was_made_anew_is_no_duplicate(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=1) as fleet:
        config = (await fleet.js.stream_info(name))["config"]
        await fleet.publish(1)
        await bury_first(fleet.js, name, "w1")
        await fleet.js.stream_delete(name)
        await fleet.js.stream_create(config)
        await fleet.publish(1)
        await bury_first(fleet.js, name, "w1")
        assert await DeadLetterReader(fleet.js, name).count() == 2


async def test_a_letter_of_a_stream_made_anew_under_a_running_worker_is_no_duplicate(
    server: NatsServer, name: str
) -> None:
    """At once: what the worker knows of the stream may be a second old, the message's own time is not."""
    async with fleet_on(server, name, count=1) as fleet:
        letters = DeadLetterReader(fleet.js, name)
        config = WorkerConfig(
            stream=name, subject_template=f"{name}.{{partition}}", pull_timeout=1.0, idle_heartbeat=0.25
        )
        async with WorkerConsumer(fleet.js, config, lambda message: Reject("no")) as worker:
            await worker.update_worker_consumer("w1", [Partition(("p0",))])
            made = (await fleet.js.stream_info(name))["config"]
            for count in (1, 2, 3):
                await fleet.publish(1)

                async def stored(wanted: int = count) -> bool:
                    return await letters.count() == wanted

                await eventually(stored, 60, f"{count} letters")
                await fleet.js.stream_delete(name)
                await fleet.js.stream_create(made)
