"""Handled messages leave a work queue, also if their ack was lost."""

from __future__ import annotations

from typing import Any

import pytest

from parti.testing import eventually
from support.worker import Bench, Effects, parts


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_messages_whose_acks_got_lost_are_acknowledged_again_and_not_handled_again(
    bench: Bench, retention: str
) -> None:
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention=retention)
    effects = Effects()
    worker = bench.worker(effects, ack_wait=600.0)  # the server would not ask again for ten minutes
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await bench.publish("a", 1)
    await effects.count(1)
    connection = worker._engine.channel.connection
    through, connection.write = connection.write, lambda data: None if b"+ACK" in data else through(data)
    await bench.publish("a", 5)
    await bench.publish("b", 5)
    await effects.count(11)
    connection.write = through

    async def empty() -> bool:
        return bool((await bench.js.stream_info(bench.stream))["state"]["messages"] == 0)

    await eventually(empty, 60, "the stream is empty")
    assert len(effects.seen) == 11


async def test_what_another_consumer_keeps_in_an_interest_stream_is_asked_for_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow consumer beside us made us reset ours every two seconds, for as long as it was behind."""
    monkeypatch.setattr("parti.worker.engine._VERIFY_EVERY", 0.02)
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention="interest")
    slow = {"name": "slow", "durable_name": "slow", "ack_policy": "explicit", "filter_subject": f"{bench.stream}.>"}
    await bench.js.consumer_create(bench.stream, slow)
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    engine, looks, resets = worker._engine, [], []
    look, reset = engine._clear_leftovers, engine.durable.reset

    async def counted_look() -> None:
        await look()
        looks.append(1)

    async def counted_reset(*args: Any, **named: Any) -> bool:
        resets.append(1)
        return bool(await reset(*args, **named))

    monkeypatch.setattr(engine, "_clear_leftovers", counted_look)
    monkeypatch.setattr(engine.durable, "reset", counted_reset)
    await bench.publish("a", 2)
    await bench.publish("b", 2)
    await effects.count(4)
    seen = len(looks)
    await eventually(lambda: len(looks) >= seen + 20, 60, "it was looked at twenty times")
    assert len(resets) <= 2, "once for each partition at most"
    assert len(effects.seen) == 4
