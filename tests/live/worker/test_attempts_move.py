"""Attempts are counted per message, not per process: workers join, leave and crash at random between two attempts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Literal

import pytest

from parti.dead_letters import DeadLetterReader
from parti.manager import Manager
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.worker import Message, WorkerConfig, WorkerConsumer
from support.fleet import HASTY, Fleet, fleet_on

MAX_DELIVER, MESSAGES = 6, 12
LAYOUTS = ["per-worker", "per-partition"]


class Failing:
    """A fleet that can handle nothing; every start is counted."""

    def __init__(self, fleet: Fleet, layout: str, lanes: Literal["partition", "key"]) -> None:
        self.starts: Counter[int] = Counter()
        self.wait = "700ms"
        self.attempts: dict[int, list[int]] = {}
        self._fleet = fleet
        self._layout = layout
        self._lanes = lanes

    async def handle(self, message: Message) -> None:
        self.starts[message.sequence] += 1
        self.attempts.setdefault(message.sequence, []).append(message.attempt)
        raise RuntimeError("not today")

    async def join(self) -> Manager:
        config = WorkerConfig(
            stream=self._fleet.stream,
            subject_template=f"{self._fleet.stream}.{{partition}}",
            pull_timeout=1.0,
            idle_heartbeat=0.25,
            min_update_interval=0.05,
            lanes=self._lanes,
            retry_delays=(self.wait,),
            max_deliver=MAX_DELIVER,
        )
        consumer = WorkerConsumer(JetStreamApi(await self._fleet.connection()), config, self.handle)
        return await self._fleet.worker(consumer=consumer, layout=self._layout, **HASTY)

    async def tried(self, times: int) -> None:
        await eventually(lambda: sum(self.starts.values()) >= times, 60, f"{times} starts")


async def all_written(letters: DeadLetterReader) -> bool:
    return await letters.count() == MESSAGES


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("crash", [False, True], ids=["planned", "crash"])
async def test_a_message_is_tried_max_deliver_times_by_all_its_owners_together(
    server: NatsServer, name: str, layout: str, crash: bool
) -> None:
    rng = random.Random(f"{layout}{crash}")
    crashes = 0
    async with fleet_on(server, name, count=4, storage="file") as fleet:
        failing = Failing(fleet, layout, rng.choice(["partition", "key"]))
        await failing.join()
        await failing.join()
        await fleet.publish(MESSAGES)
        until = MESSAGES * MAX_DELIVER
        for share in (0.1, 0.3, 0.5):
            await failing.tried(int(until * share))
            leaving = rng.choice(fleet.managers)
            if crash:
                await fleet.crash(leaving)
                crashes += 1
            else:
                await leaving.stop()
                fleet.managers.remove(leaving)
            await failing.join()
        letters = DeadLetterReader(fleet.js, fleet.stream)
        await eventually(lambda: all_written(letters), 60, "a letter for each")
        # The count of an attempt that failed within 0.2 s of a crash is not told to anybody.
        assert max(failing.starts.values()) <= MAX_DELIVER + crashes
        if not crash:
            assert failing.attempts == {n: list(range(1, MAX_DELIVER + 1)) for n in range(1, MESSAGES + 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_process_that_ends_in_the_last_attempt_of_a_message_has_used_it_up(
    server: NatsServer, name: str, layout: str
) -> None:
    async with fleet_on(server, name, count=1, storage="file") as fleet:
        failing = Failing(fleet, layout, "partition")
        failing.wait = "50ms"
        inside = asyncio.Event()

        async def handle(message: Message) -> None:
            await Failing.handle(failing, message) if message.attempt < MAX_DELIVER else None
            failing.starts[message.sequence] += 1
            inside.set()
            await asyncio.Event().wait()

        failing.handle = handle  # type: ignore[method-assign]
        doomed = await failing.join()
        await fleet.publish(1)
        await eventually(inside.is_set, 60, "its last attempt")
        await fleet.crash(doomed)
        await failing.join()
        letters = DeadLetterReader(fleet.js, fleet.stream)

        async def written() -> bool:
            return await letters.count() == 1

        await eventually(written, 60, "its letter")
        assert failing.starts == {1: MAX_DELIVER}
