"""Handlers that misbehave: in each case the message is done, retried or a dead letter, and the lane continues."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parti.testing import NatsServer, eventually
from parti.worker import Message, Outcome, Retry
from support.worker import Bench, Effects, bench_on, parts

FAST: dict[str, Any] = {"retry_delays": ("10ms",), "max_deliver": 50, "handler_timeout": 0.1}


both_layouts = pytest.mark.parametrize("layout", ["per-worker", "per-partition"])


class OwnBaseException(BaseException):
    """What a library of the user's may raise."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "exit": functools.partial(SystemExit, 3),
    "interrupt": KeyboardInterrupt,
    "own": OwnBaseException,
    "stop": StopIteration,
    "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "error": ValueError,
}


@pytest.mark.slow
@both_layouts
@pytest.mark.parametrize("thread", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("kind", [*RAISED])
async def test_whatever_a_handler_raises_on_the_last_message_it_is_tried_again(
    bench: Bench, kind: str, thread: bool
) -> None:
    seen: list[tuple[int, int]] = []

    def act(message: Message) -> None:
        seen.append((message.sequence, message.attempt))
        if message.attempt == 1:
            raise RAISED[kind]()

    async def handle(message: Message) -> None:
        act(message)

    await bench.publish("a", 1)
    await bench.worker(act if thread else handle, **FAST).update_worker_consumer("w1", parts("a"))
    await eventually(lambda: len(seen) == 2, what=f"a second attempt after {kind}")
    assert seen == [(1, 1), (1, 2)]
    await bench.settled()


@both_layouts
async def test_a_handler_that_cancels_its_own_task_holds_up_nothing(bench: Bench) -> None:
    effects = Effects()

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if message.sequence % 2:
                await asyncio.sleep(0)
        effects.seen.append(message)

    await bench.publish("a", 6)
    await bench.worker(handle, **FAST).update_worker_consumer("w1", parts("a"))
    await bench.settled()
    assert sorted(set(effects.sequences)) == [1, 2, 3, 4, 5, 6]


@both_layouts
async def test_burying_is_not_ended_by_the_timeout_of_the_handler_before_it(bench: Bench) -> None:
    """The dead-letter stream takes nothing for longer than handler_timeout: the message must survive that."""
    dlq = f"{bench.stream}_DLQ"
    full = {"name": dlq, "subjects": [f"{dlq}.>"], "storage": "memory", "max_msgs": 1, "discard": "new"}
    await bench.js.stream_create(full)
    await bench.js.publish(f"{dlq}.filler")

    async def handle(message: Message) -> Outcome:
        effects.seen.append(message)
        return Retry() if message.sequence == 1 else None

    effects = Effects()
    await bench.publish("a", 2)
    worker = bench.worker(handle, **FAST | {"max_deliver": 1, "handler_timeout": 0.05})
    await worker.update_worker_consumer("w1", parts("a"))
    await eventually(lambda: not worker.is_healthy, what="letters fail for longer than the timeout")
    await bench.js.stream_purge(dlq)
    await bench.settled()
    assert effects.sequences == [1, 2]


@both_layouts
async def test_a_message_whose_last_attempt_timed_out_is_buried_with_that_reason(bench: Bench) -> None:
    async def handle(message: Message) -> None:
        if message.sequence == 1:
            await asyncio.Event().wait()
        effects.seen.append(message)

    effects = Effects()
    await bench.publish("a", 2)
    await bench.worker(handle, **FAST | {"max_deliver": 2}).update_worker_consumer("w1", parts("a"))
    await effects.count(1)
    await bench.settled()
    assert bench.metric("parti_dead_letters_total", reason="timeout") == 1


async def test_a_retry_that_waits_does_not_outlive_its_partition(bench: Bench) -> None:
    """Gone and back within the wait: the lane starts over at once, and no second runner ever joins the first."""
    running: set[int] = set()
    together = 0

    async def handle(message: Message) -> Outcome:
        nonlocal together
        if first and message.sequence == 1:
            return Retry(after=0.3)
        running.add(message.sequence)
        together = max(together, len(running))
        await asyncio.sleep(0.05)
        running.discard(message.sequence)
        effects.seen.append(message)
        return None

    effects, first = Effects(), True
    await bench.publish("a", 12)
    worker = bench.worker(handle, max_deliver=50, drain_timeout=0.05)
    await worker.update_worker_consumer("w1", parts("a"))
    await eventually(lambda: worker.position("a").retries == 1, what="a retry waits")
    first = False
    await worker.update_worker_consumer("w1", [])
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(12)
    assert effects.sequences == list(range(1, 13))
    assert together == 1


PLANS = st.lists(
    st.sampled_from(["ok", "ok", "ok", "slow", "hang", "deaf", "exit", "own", "error", "cancel", "nonsense"]),
    min_size=4,
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(plan=PLANS, relaxed=st.booleans(), keyed=st.booleans(), slots=st.booleans())
def test_any_plan_of_misbehaviour_ends_with_every_message_done_in_order(
    server: NatsServer, plan: list[str], relaxed: bool, keyed: bool, slots: bool
) -> None:
    layout = "per-partition" if slots else "per-worker"
    asyncio.run(_play(server, plan, relaxed=relaxed, keyed=keyed, layout=layout))


async def _play(server: NatsServer, plan: list[str], *, relaxed: bool, keyed: bool, layout: str) -> None:
    name = f"m{abs(hash((*plan, relaxed, keyed, asyncio.get_running_loop().time())))}"
    done: list[Message] = []
    begun: set[int] = set()

    async def misbehave(kind: str) -> Any:
        match kind:
            case "slow":
                await asyncio.sleep(0.02)
            case "hang":
                await asyncio.Event().wait()
            case "deaf":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await asyncio.sleep(0.02)
                    raise ValueError("late") from None
            case "exit":
                raise SystemExit(1)
            case "own":
                raise OwnBaseException
            case "error":
                raise ValueError(kind)
            case "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            case "nonsense":
                return {"status": 200}
        return None

    async def handle(message: Message) -> Any:
        if message.sequence not in begun:
            begun.add(message.sequence)
            answer = await misbehave(plan[message.sequence - 1])
            if answer is not None:
                return answer
        done.append(message)
        return None

    async with bench_on(server, name, layout=layout) as bench:
        await bench.create()
        for index in range(len(plan)):
            await bench.publish(f"a.{index % 3}")
        settings_ = FAST | {"order": "relaxed" if relaxed else "strict", "lanes": "key" if keyed else "partition"}
        template = f"{name}.{{partition}}.*"
        worker = bench.worker(handle, subject_template=template, **settings_)
        await worker.update_worker_consumer("w1", parts("a"))
        await eventually(lambda: len(done) == len(plan), what=f"all of {plan} done, have {[m.sequence for m in done]}")
        await bench.settled()
        assert sorted(m.sequence for m in done) == list(range(1, len(plan) + 1)), "nothing twice"
        if not relaxed:
            for key in {m.key if keyed else "" for m in done}:
                of_lane = [m.sequence for m in done if not keyed or m.key == key]
                assert of_lane == sorted(of_lane)
        await bench.js.stream_delete(name)


@both_layouts
async def test_a_handler_that_blocks_the_loop_does_not_time_its_neighbours_out(bench: Bench) -> None:
    """The neighbour waits for an event that comes while the loop is blocked for longer than the timeout."""
    attempts: list[int] = []
    inside, woken = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        if message.partition.id == "a":
            attempts.append(message.attempt)
            inside.set()
            await woken.wait()
            await asyncio.sleep(0.01)  # some more of its own time
        else:
            await inside.wait()
            asyncio.get_running_loop().call_later(0.01, woken.set)
            time.sleep(1.5)  # noqa: ASYNC251 - that is what is tested

    await bench.publish("a", 1)
    await bench.publish("b", 1)
    worker = bench.worker(handle, handler_timeout=1.0, max_deliver=3, retry_delays=("10ms",))
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await bench.settled()
    assert attempts == [1]
