"""Outcomes of handlers and their effects: retries in order, dead letters, poison, hanging and failing handlers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parti.dead_letters import DeadLetter, read_letter
from parti.testing import eventually
from parti.worker import Ack, Message, Outcome, Reject, Retry
from support.worker import Bench, Effects, parts

pytestmark = pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
FAST: dict[str, Any] = {"retry_delays": ("10ms",), "max_deliver": 3}


async def letters(bench: Bench) -> list[DeadLetter]:
    stream = f"{bench.stream}_DLQ"
    state = (await bench.js.stream_info(stream))["state"]
    found = [await bench.js.msg_get(stream, seq=seq) for seq in range(state["first_seq"] or 1, state["last_seq"] + 1)]
    return [read_letter(stored) for stored in found]


async def buried(bench: Bench, count: int) -> list[DeadLetter]:
    async def there() -> bool:
        names = await bench.js.stream_names()
        return f"{bench.stream}_DLQ" in names and len(await letters(bench)) >= count

    await eventually(there, what=f"{count} dead letters")
    return await letters(bench)


async def test_a_retry_comes_again_before_anything_else_of_its_lane(bench: Bench) -> None:
    log: list[tuple[str, int, int]] = []

    async def handle(message: Message) -> Outcome:
        log.append((message.partition.id, message.sequence, message.attempt))
        if message.partition.id == "a" and message.sequence == 1 and message.attempt < 3:
            return Retry(after=0.05)
        return Ack()

    await bench.publish("a", 3)
    await bench.publish("b", 3)
    await bench.worker(handle, **FAST).update_worker_consumer("w1", parts("a", "b"))
    await eventually(lambda: len(log) == 8)
    assert [entry[1:] for entry in log if entry[0] == "a"] == [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
    others = [index for index, entry in enumerate(log) if entry[0] == "b"]
    if bench.layout == "per-worker":  # one consumer: a comes first. With a consumer each, either may.
        assert others == [1, 2, 3], "the other lane does not wait for the retry"
    last_of_a = max(index for index, entry in enumerate(log) if entry[0] == "a")
    assert max(others) < last_of_a, "the other lane does not wait for the retry"
    await bench.settled()
    assert bench.metric("parti_consumer_redeliveries_total") == 0, "a retry is never a redelivery"


async def test_in_relaxed_order_the_lane_goes_on_while_a_retry_waits(bench: Bench) -> None:
    log: list[int] = []

    async def handle(message: Message) -> Outcome:
        log.append(message.sequence)
        return Retry(after=0.2) if message.sequence == 1 and message.attempt == 1 else None

    await bench.publish("a", 4)
    await bench.worker(handle, order="relaxed", **FAST).update_worker_consumer("w1", parts("a"))
    await eventually(lambda: len(log) == 5)
    assert log == [1, 2, 3, 4, 1]
    await bench.settled()


async def test_after_the_last_attempt_the_message_rests_in_the_dead_letter_stream(bench: Bench) -> None:
    async def handle(message: Message) -> Outcome:
        if message.data == b"poison":
            raise ValueError("bad\r\nvalue: 7")
        effects.seen.append(message)
        return None

    effects = Effects()
    await bench.publish("a", 1)
    (poison,) = await bench.publish("a", 1, b"poison", Kind="order", **{"Nats-Msg-Id": "p-1"})
    await bench.publish("a", 1)
    worker = bench.worker(handle, **FAST)
    await worker.update_worker_consumer("w1", parts("a"))
    (letter,) = await buried(bench, 1)
    await effects.count(2)
    assert effects.sequences == [1, 3], "the lane goes on behind the poison"
    assert (letter.reason, letter.attempts, letter.error) == ("max_deliver", 3, "ValueError: bad value: 7")
    assert (letter.stream, letter.subject, letter.original_sequence) == (bench.stream, f"{bench.stream}.a", poison)
    assert (letter.data, letter.worker, letter.consumer) == (b"poison", bench.worker_id, bench.consumer)
    assert dict(letter.headers) == {"Kind": "order", "Nats-Msg-Id": "p-1"}
    await bench.settled()
    assert bench.metric("parti_dead_letters_total", reason="max_deliver") == 1
    assert bench.metric("parti_handler_retries_total") == 2
    assert worker.position("a").dead_letters == 1


async def test_a_rejected_message_is_buried_at_once_with_its_reason(bench: Bench) -> None:
    attempts = []

    async def handle(message: Message) -> Outcome:
        attempts.append(message.attempt)
        return Reject("no such customer")

    await bench.publish("a", 1)
    await bench.worker(handle).update_worker_consumer("w1", parts("a"))
    (letter,) = await buried(bench, 1)
    assert attempts == [1]
    assert (letter.reason, letter.error, letter.attempts) == ("rejected", "no such customer", 1)
    await bench.settled()


async def test_poison_on_one_key_never_stops_another(bench: Bench) -> None:
    async def handle(message: Message) -> Outcome:
        if message.partition.id == "poison":
            return Retry(after=30)
        effects.seen.append(message)
        return None

    effects = Effects()
    names = ["poison", *(f"p{i}" for i in range(9))]
    await bench.publish_many(names, 30)
    worker = bench.worker(handle, max_ack_pending=100)
    await worker.update_worker_consumer("w1", parts(*names))
    await effects.count(9 * 30)
    assert worker.position("poison").cursor == 0
    assert worker.position("p0").done == 30


async def test_a_message_is_not_let_go_before_the_server_has_acknowledged_its_letter(bench: Bench) -> None:
    """A stream that takes nothing stands in for a dead-letter stream that cannot be written."""
    dlq = f"{bench.stream}_DLQ"
    full = {"name": dlq, "subjects": [f"{dlq}.>"], "storage": "memory", "max_msgs": 1, "discard": "new"}
    await bench.js.stream_create(full)
    await bench.js.publish(f"{dlq}.filler")
    effects = Effects(answer=lambda m: Reject("x") if m.sequence == 1 else None)
    await bench.publish("a", 2)
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a"))
    await eventually(lambda: not worker.is_healthy or worker.health().last_error, what="the failing letter is noticed")
    info = await bench.info()
    assert info["num_ack_pending"] == 2
    assert effects.seen == [], "the lane waits"
    await bench.js.stream_purge(dlq)
    await effects.count(1)
    assert len(await letters(bench)) == 1
    await bench.settled()


@pytest.mark.parametrize("kind", ["exception", "cancelled", "nonsense"])
async def test_whatever_a_handler_does_the_message_is_retried_and_the_loop_goes_on(bench: Bench, kind: str) -> None:
    async def handle(message: Message) -> Any:
        if message.attempt == 1 and message.sequence == 1:
            if kind == "exception":
                raise RuntimeError("boom")
            if kind == "cancelled":
                raise asyncio.CancelledError
            return {"status": 200}
        effects.seen.append(message)
        return None

    effects = Effects()
    await bench.publish("a", 3)
    await bench.worker(handle, **FAST).update_worker_consumer("w1", parts("a"))
    await effects.count(3)
    assert effects.sequences == [1, 2, 3]
    assert effects.seen[0].attempt == 2
    if kind == "nonsense":
        assert "returned dict" in effects.seen[0].last_error
    await bench.settled()


async def test_a_hanging_handler_is_cancelled_and_its_message_retried(bench: Bench) -> None:
    async def handle(message: Message) -> None:
        if message.sequence == 1 and message.attempt == 1:
            await asyncio.Event().wait()
        effects.seen.append(message)

    effects = Effects()
    await bench.publish("a", 2)
    await bench.worker(handle, handler_timeout=0.2, **FAST).update_worker_consumer("w1", parts("a"))
    await effects.count(2)
    assert effects.sequences == [1, 2]
    assert effects.seen[0].last_error.startswith("HandlerTimeout")


@pytest.mark.slow
async def test_a_slow_handler_keeps_its_message_however_long_the_queue_before_it_is(bench: Bench) -> None:
    """In-progress heartbeats from receipt on: neither running nor queueing burns a delivery."""

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.25)
        effects.seen.append(message)

    effects = Effects()
    await bench.publish("a", 6)
    await bench.worker(handle, ack_wait=0.6).update_worker_consumer("w1", parts("a"))
    await effects.count(6)
    await bench.settled()
    assert effects.sequences == [1, 2, 3, 4, 5, 6]
    assert {message.delivered for message in effects.seen} == {1}
    assert bench.metric("parti_consumer_redeliveries_total") == 0


async def test_the_async_for_form_settles_each_message_by_how_its_block_ends(bench: Bench) -> None:
    await bench.publish("a", 3)
    worker = bench.worker(None, **FAST)
    stream = worker.messages()
    seen: list[tuple[int, int]] = []

    async def loop() -> None:
        async for received in stream:
            async with received as message:
                seen.append((message.sequence, message.attempt))
                if message.sequence == 2 and message.attempt == 1:
                    raise RuntimeError("once")

    task = asyncio.create_task(loop())
    await worker.update_worker_consumer("w1", parts("a"))
    await eventually(lambda: len(seen) == 4)
    assert seen == [(1, 1), (2, 1), (2, 2), (3, 1)]
    await bench.settled()
    await worker.close()
    await asyncio.wait_for(task, 60)


async def test_backpressure_holds_at_most_80_percent_of_max_ack_pending(bench: Bench) -> None:
    gate = asyncio.Event()
    names = [f"p{i}" for i in range(20)]

    async def handle(message: Message) -> None:
        await gate.wait()
        effects.seen.append(message)

    async def full(most: int) -> None:
        await eventually(lambda: worker.info().in_hand >= 39, what="less than a share, which is two here, is left")
        info = await bench.info()
        assert info["num_ack_pending"] <= most
        assert worker.info().in_hand <= most

    effects = Effects()
    await bench.publish_many(names, 10)
    worker = bench.worker(handle, max_ack_pending=50, concurrency=5, pull_timeout=0.4)
    await worker.update_worker_consumer("w1", parts(*names))
    # Where each partition pulls for itself, one that begins last finds the places asked for: it may have one more.
    await full(most=40 if bench.layout == "per-worker" else 40 + len(names))
    gate.set()
    await effects.count(200)
    gate.clear()
    await bench.settled()
    await bench.publish_many(names, 10)
    await full(most=40)
    gate.set()
    await effects.count(400)
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))
    await bench.settled()
