"""A process freezes at any moment, beyond its lease: when it resumes, only the step it was in continues.

The moments are lines: of the lanes, of the attempts, of the event loop between two callbacks, of the handlers. A
timer cannot catch one case: a task that was about to resume when the process froze.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from parti.clock import SystemClock
from parti.config.worker import WorkerConfig
from parti.model import Lease, Partition
from parti.testing import eventually
from parti.worker import Outcome, Retry, attempts, handler, lanes, room, stream
from parti.worker.channel import Channel
from parti.worker.errors import LeaseOver
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.message import Message, make_message
from parti.worker.routing import Routes, SubjectTemplate
from parti.worker.watch import HandlerWatch
from support.inbox import bare_runtime

_TRACED = {module.__file__ for module in (attempts, room, handler, lanes, selectors, asyncio.base_events)} | {__file__}
_AWAY = 9.0  # seconds
_MESSAGES, _LANES = 24, 6
_RUNS = 60


class Frozen:
    """The fence and the clock of a process that stands still once, at the chosen channel."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self.away = 0.0
        self.during: asyncio.Task[Any] | None = None
        self.effects: list[tuple[int, asyncio.Task[Any] | None]] = []
        """What began after it woke: the sequence, and who did it."""

    def now(self) -> float:
        return SystemClock().now() + self.away

    def may_pull(self) -> bool:
        return not self.away

    def may_start(self, lease: Lease) -> bool:
        return not self.away

    def effect(self, message: Message) -> None:
        if self.away:
            self.effects.append((message.sequence, asyncio.current_task()))

    @contextmanager
    def traced(self) -> Iterator[None]:
        def local(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line" and not self.away:
                self.lines += 1
                if self.lines == self.at:
                    self.during = asyncio.current_task() if asyncio._get_running_loop() is not None else None
                    self.away = _AWAY
            return local

        def calls(frame: FrameType, event: str, argument: object) -> Any:
            return local(frame, event, argument) if frame.f_code.co_filename in _TRACED else None

        before = sys.gettrace()
        sys.settrace(calls)
        try:
            yield
        finally:
            sys.settrace(before)


async def run(frozen: Frozen, rng: random.Random, *, waits: bool) -> None:
    """Some lanes of messages, handled until nothing is left or everything is fenced."""
    loop = asyncio.get_running_loop()
    real = loop.time
    loop.time = lambda: real() + frozen.away  # type: ignore[method-assign]  # a stopped process finds its timers due
    left = _MESSAGES
    bugs: list[BaseException] = []

    async def handle(message: Message) -> Outcome:
        nonlocal left
        frozen.effect(message)
        for _ in range(message.sequence % 3 if waits else 0):
            await asyncio.sleep(rng.choice((0, 0.0002, 0.0002)))
            frozen.effect(message)
        if message.attempt == 1 and not message.sequence % 7:
            return Retry(after=0.0003)
        left -= 1
        return None

    config = WorkerConfig(stream="S", subject_template="s.{partition}.*", lanes="key", retry_delays=("1ms",))
    runtime = bare_runtime(config, handler=handle, fence=frozen)
    ledger = Ledger(Routes(SubjectTemplate(config.subject_template), ()), lane_per_key=True)
    tried = attempts.Attempts(runtime, let_go=room.Room(runtime, ledger, Channel()).let_go, on_bug=bugs.append)
    tried.now = loop.time
    state = PartitionState(Partition(("a",)), Lease(Partition(("a",)).id, 1))
    ledger.states[state.id] = state
    watched = replace(runtime, clock=frozen)  # type: ignore[arg-type]  # it only asks what time it is
    watch = HandlerWatch(watched, tried, ledger.taken)
    watch.start()
    try:
        with frozen.traced():
            for sequence in range(1, _MESSAGES + 1):
                message = make_message("s.a.k", state.partition, "k", sequence, b"", lease=state.lease)
                message._lane = state.lane(f"k{sequence % _LANES}")
                state.open[sequence] = message
                tried.pool.push(message)
            await eventually(lambda: not left or state.stopped, what="all handled, or fenced")
            await asyncio.sleep(0.01)  # whatever would go on wrongly has had its turn
    finally:
        watch.stop()
        await tried.pool.halt()
        del loop.time
    assert bugs == []


@pytest.mark.parametrize("waits", [True, False])
def test_after_any_moment_of_standing_still_only_the_step_that_was_under_way_goes_on(*, waits: bool) -> None:
    dry = Frozen(0)
    asyncio.run(run(dry, random.Random(0), waits=waits))
    assert dry.lines > 1000
    for seed in range(_RUNS):
        rng = random.Random(seed)
        frozen = Frozen(rng.randrange(1, dry.lines))
        asyncio.run(run(frozen, rng, waits=waits))
        others = [sequence for sequence, task in frozen.effects if task is not frozen.during]
        assert not others, f"seed {seed}, line {frozen.at}: {others} went on"
        assert len(frozen.effects) <= 1, f"seed {seed}, line {frozen.at}: more than the step that was under way"


async def test_a_call_that_waited_for_a_thread_beyond_the_lease_does_not_begin() -> None:
    frozen, first, goes_on = Frozen(0), threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        frozen.effect(message)
        first.set()
        goes_on.wait(60)

    calls = handler.AdaptedHandler(handle, concurrency=1)
    calls.use_fence(frozen.may_start)
    partition = Partition(("a",))
    messages = [make_message("s.a", partition, "a", n, b"", lease=Lease(partition.id, 1)) for n in (1, 2)]
    begun = [asyncio.ensure_future(calls.call(message)) for message in messages]
    await asyncio.to_thread(first.wait, 60)
    frozen.away = _AWAY
    goes_on.set()
    assert await begun[0] is None
    with pytest.raises(LeaseOver):
        await begun[1]
    assert not frozen.effects
    calls.close()


async def test_what_waits_to_be_taken_beyond_the_lease_is_handed_to_nobody() -> None:
    frozen, partition = Frozen(0), Partition(("a",))
    messages = stream.MessageStream(frozen.may_start)
    begun = [
        asyncio.ensure_future(
            messages.handle(make_message("s.a", partition, "a", n, b"", lease=Lease(partition.id, 1)))
        )
        for n in (1, 2)
    ]
    assert (await anext(messages)).message.sequence == 1
    frozen.away = _AWAY
    messages.end()
    assert [received async for received in messages] == []
    for each in begun:
        each.cancel()
