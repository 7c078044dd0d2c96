"""Load of a torture run: Zipf keys, unique values, one publish in flight per unit of order, random fates."""

from __future__ import annotations

import asyncio
import json
import random
import time
import zlib
from collections.abc import Callable, Iterable

from parti.errors import PartiError
from parti.wire.api import JetStreamApi
from parti_lab.prove.torture_judge import Posted, TortureLedger
from parti_lab.prove.torture_scenario import TortureScenario

STREAM = "TORTURE"
_TICK = 0.02
_AGAIN = 0.05
_BURST = 25
_BURSTS = 0.01  # share of the draws, and so a fifth of the messages
_HOT_SHARE = 0.2  # share of the draws for a quarter of the partitions, each of which gets 1.6 times the mean


def subject_of(partition: str, key: str = "*") -> str:
    """The subject of a message; with an empty key, the partition is one literal subject."""
    return f"{STREAM}.{partition}.{key}" if key else f"{STREAM}.{partition}"


def fate_of(seed: int, unit: str, counter: int) -> str:
    """The fate of a message: 1 % retries and exceptions, 0.2 % rejects; decided by the seed and the message alone."""
    draw = zlib.crc32(f"{seed}/{unit}/{counter}".encode()) % 1000
    return "retry" if draw < 5 else "raise" if draw < 10 else "reject" if draw < 12 else ""


class TortureTraffic:
    """Publishes at the scenario's rate until stopped, and records acknowledged messages in the ledgers."""

    def __init__(
        self, js: JetStreamApi, scenario: TortureScenario, ledgers: list[TortureLedger], partitions: Iterable[str]
    ) -> None:
        self._js = js
        self._scenario = scenario
        self._ledgers = ledgers
        self._rng = random.Random(scenario.seed)
        self._partitions: list[str] = list(partitions)
        self._weights = [1 / (1 + rank) for rank in range(scenario.keys)]
        self._hot = self._rng.sample(self._partitions, len(self._partitions) // 4)
        self._counters: dict[str, int] = {}
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fates: dict[str, str] = {}
        self._muted: set[str] = set()
        self._paused = False
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self.on_slow: Callable[[float, float], None] = lambda start, end: None  # noqa: ARG005
        self.longest_pause = 0.0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="parti-torture-traffic")

    def also(self, ledger: TortureLedger) -> None:
        """Another namespace must also handle all messages from now on."""
        self._ledgers.append(ledger)

    def add(self, partition: str) -> None:
        self._partitions.append(partition)

    def plant(self, partition: str, fate: str) -> None:
        """The next message of this partition gets this fate."""
        self._fates[partition] = fate

    def planted(self, partition: str) -> bool:
        """Whether a message has taken the planted fate."""
        return partition not in self._fates

    def mute(self, partition: str) -> None:
        self._muted.add(partition)

    def unmute(self, partition: str) -> None:
        self._muted.discard(partition)

    async def pause(self) -> None:
        """Pause the load; when this returns no publish is in flight."""
        self._paused = True
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def resume(self) -> None:
        self._paused = False

    async def stop(self) -> None:
        """Stop the load; when this returns every publish has been acknowledged."""
        self._stopped = True
        if self._task is not None:
            await self._task
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def abandon(self) -> None:
        """Stop at once, even with publishes in flight: the run is over."""
        self._stopped = True
        for task in [*self._tasks, *([self._task] if self._task else [])]:
            task.cancel()

    async def _run(self) -> None:
        due = time.monotonic()
        loop = asyncio.get_running_loop()
        while not self._stopped:
            now = time.monotonic()
            due = max(due, now - 0.5)
            while due <= now:
                # Bursts, because only messages in flight when a fault happens can be lost.
                count = _BURST if self._rng.random() < _BURSTS else 1
                due += count / self._scenario.rate
                chosen = self._choose()
                if chosen is not None and not self._paused:
                    self._busy.add(chosen[2])  # here, not in the task: the next turn may choose the same unit
                    task = loop.create_task(self._publish(*chosen, count))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(_TICK)

    def _choose(self) -> tuple[str, str, str] | None:
        partition = self._rng.choice(self._hot if self._rng.random() < _HOT_SHARE else self._partitions)
        key = f"k{self._rng.choices(range(self._scenario.keys), self._weights)[0]}"
        key = "" if self._scenario.literal else key
        unit = partition if self._scenario.lanes == "partition" else f"{partition}.{key}"
        return None if unit in self._busy or partition in self._muted else (partition, key, unit)

    async def _publish(self, partition: str, key: str, unit: str, count: int) -> None:
        try:
            for _ in range(count):
                await self._publish_one(partition, key, unit)
        finally:
            self._busy.discard(unit)

    async def _publish_one(self, partition: str, key: str, unit: str) -> None:
        counter = self._counters[unit] = self._counters.get(unit, -1) + 1
        fate = self._fates.pop(partition, "") or fate_of(self._scenario.seed, unit, counter)
        body = json.dumps([unit, counter, fate]).encode()
        headers = {"Nats-Msg-Id": f"{unit}-{counter}"}
        began = time.monotonic()
        while True:
            try:
                # The same message id: stored once, however often it is sent (docs/evidence/cluster.md#c10).
                ack = await self._js.publish(subject_of(partition, key), body, headers=headers)
                break
            except PartiError:
                await asyncio.sleep(_AGAIN)
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - began)
        if now - began > self._scenario.ttl / 3:
            self.on_slow(began, now)
        for ledger in self._ledgers:
            ledger.post(Posted(unit, counter, partition, ledger.generation, ack.seq, fate, now))
