"""A lane per key: keys overtake each other, and still a planned move repeats no message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parti.manager import Manager
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.worker import Message, Retry, WorkerConfig, WorkerConsumer
from support.fleet import Fleet, fleet_on, stopping

LONG: dict[str, Any] = {"prepare_timeout": 60.0, "commit_timeout": 60.0, "shutdown_timeout": 60.0}


class Keyed:
    """One partition with several keys; messages of the key `slow` wait in their handler until they are let go."""

    def __init__(self, fleet: Fleet, layout: str) -> None:
        self.fleet = fleet
        self.layout = layout
        self.done: list[tuple[int, str, int]] = []
        self.inside: list[int] = []
        self.retry_once = False
        self._retried: set[int] = set()

    async def worker(self, *, drain_timeout: float = 60.0, **control: Any) -> Manager:
        number = len(self.fleet.managers)
        connection = await self.fleet.connection()
        config = WorkerConfig(
            stream=self.fleet.stream,
            subject_template=f"{self.fleet.stream}.{{partition}}.*",
            lanes="key",
            pull_timeout=1.0,
            idle_heartbeat=0.25,
            drain_timeout=drain_timeout,
            retry_delays=("100ms",),
            max_deliver=1000,
        )

        async def handle(message: Message) -> Retry | None:
            key = message.subject.rpartition(".")[2]
            if key == "later" and (message.attempt == 1 or not self.fleet.gate.is_set()):
                self.inside.append(message.sequence)
                return Retry(after=1.0)
            if key == "much-later" and number == 0:
                self.inside.append(message.sequence)
                return Retry(after=600.0)
            if key == "slow":
                self.inside.append(message.sequence)
                await self.fleet.gate.wait()
                if self.retry_once and message.sequence not in self._retried:
                    self._retried.add(message.sequence)
                    return Retry()
            self.done.append((number, key, message.sequence))
            return None

        consumer = WorkerConsumer(JetStreamApi(connection), config, handle)
        return await self.fleet.worker(consumer=consumer, layout=self.layout, **(LONG | control))

    async def publish(self, *keys: str) -> None:
        for key in keys:
            await self.fleet.js.publish(f"{self.fleet.stream}.p0.{key}", b"")

    def of(self, key: str) -> list[int]:
        return [sequence for _, each, sequence in self.done if each == key]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@pytest.mark.parametrize("outcome", ["done", "retried"])
async def test_what_one_key_had_done_ahead_of_another_is_not_repeated_by_a_planned_move(
    server: NatsServer, name: str, retention: str, layout: str, outcome: str
) -> None:
    """`slow` holds 1, 2 and 6 in its lane while `quick` is through with 3, 4 and 5: the cursor alone cannot say so."""
    async with fleet_on(server, name, count=1, retention=retention) as fleet:
        keyed = Keyed(fleet, layout)
        keyed.retry_once = outcome == "retried"
        one = await keyed.worker()
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        await keyed.publish("slow", "slow", "quick", "quick", "quick", "slow")
        await eventually(lambda: keyed.of("quick") == [3, 4, 5], 60, "the quick key is ahead")
        await eventually(lambda: keyed.inside == [1], 60, "the slow key is not")
        two = await keyed.worker()
        leaving = asyncio.create_task(one.stop())
        overlap = layout == "per-worker" and retention != "workqueue"
        await eventually(lambda: stopping(one, overlap=overlap) == 1, 60, "the partition is on its way")
        fleet.gate.set()
        await leaving
        await eventually(lambda: two.owned() == {"p0"}, 60, "it has arrived")
        await keyed.publish("quick", "slow")
        await eventually(lambda: len(keyed.done) >= 8, 60, "all are handled")
        assert sorted(sequence for *_, sequence in keyed.done) == [1, 2, 3, 4, 5, 6, 7, 8], "nothing lost, none twice"
        assert keyed.of("slow") == [1, 2, 6, 8]
        assert keyed.of("quick") == [3, 4, 5, 7]
        assert {(number, s) for number, _, s in keyed.done} >= {(0, 1), (0, 2), (1, 6), (1, 7), (1, 8)}


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_keys_that_are_left_alone_are_not_finished_before_a_move(
    server: NatsServer, name: str, layout: str
) -> None:
    """Only what lies below something started has to be done first: the backlog itself moves."""
    async with fleet_on(server, name, count=1) as fleet:
        keyed = Keyed(fleet, layout)
        one = await keyed.worker()
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        await keyed.publish(*["slow"] * 20)
        await eventually(lambda: keyed.inside == [1], 60, "the first one runs")
        two = await keyed.worker()
        leaving = asyncio.create_task(one.stop())
        await eventually(lambda: stopping(one, overlap=layout == "per-worker") == 1, 60, "on its way")
        fleet.gate.set()
        await leaving
        await eventually(lambda: len(keyed.done) >= 20, 60, "all are handled")
        assert keyed.of("slow") == list(range(1, 21))
        assert [number for number, *_ in keyed.done] == [0, *[1] * 19]
        assert two.owned() == {"p0"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_move_that_is_given_up_while_a_key_waits_for_its_retry_repeats_nothing(
    server: NatsServer, name: str, retention: str, layout: str
) -> None:
    """Each time it was given up the partition began again at its cursor, and the retry with its first attempt."""
    async with fleet_on(server, name, count=1, retention=retention) as fleet:
        keyed = Keyed(fleet, layout)
        one = await keyed.worker(prepare_timeout=0.1)
        await one.wait_for("converged", 60)
        fleet.gate.clear()  # it waits for one retry after the other until the move was given up, however late that is
        await keyed.publish("later", "quick", "quick", "later", "quick")
        await eventually(lambda: keyed.of("quick") == [2, 3, 5], 60, "the quick key is ahead")
        two = await keyed.worker(prepare_timeout=0.1)
        leaving = asyncio.create_task(one.stop())

        async def given_up() -> bool:
            gone = fleet.metrics.registry.get_sample_value("parti_handoff_total", {"result": "timeout"})
            return bool(gone)

        await eventually(given_up, 60, "the move took too long")
        fleet.gate.set()
        await leaving
        await eventually(lambda: two.owned() == {"p0"}, 60, "it has arrived")
        await keyed.publish("quick", "later")
        await eventually(lambda: len(keyed.done) >= 7, 60, "all are handled")
        assert sorted(sequence for *_, sequence in keyed.done) == [1, 2, 3, 4, 5, 6, 7], "nothing lost, none twice"
        assert keyed.of("later") == [1, 4, 7]
        assert keyed.of("quick") == [2, 3, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_what_waits_for_longer_than_a_stop_may_take_is_named_to_the_next_owner(
    server: NatsServer, name: str, retention: str, layout: str
) -> None:
    """One position cannot say that 1 and 4 are left of 1 to 5: the next owner repeated 2, 3 and 5."""
    async with fleet_on(server, name, count=1, retention=retention) as fleet:
        keyed = Keyed(fleet, layout)
        one = await keyed.worker(drain_timeout=0.3)
        await one.wait_for("converged", 60)
        await keyed.publish("much-later", "quick", "quick", "much-later", "quick")
        await eventually(lambda: keyed.of("quick") == [2, 3, 5], 60, "the quick key is ahead")
        two = await keyed.worker(drain_timeout=0.3)
        await one.stop()
        await eventually(lambda: two.owned() == {"p0"}, 60, "it has arrived")
        await keyed.publish("quick", "much-later")
        await eventually(lambda: len(keyed.done) >= 7, 60, "all are handled")
        three = await keyed.worker()
        await two.stop()
        await eventually(lambda: three.owned() == {"p0"}, 60, "it has moved on")
        await keyed.publish("quick")
        await eventually(lambda: len(keyed.done) >= 8, 60, "all are handled")
        assert sorted(sequence for *_, sequence in keyed.done) == list(range(1, 9)), "nothing lost, none twice"
        assert keyed.of("much-later") == [1, 4, 7]
        assert keyed.of("quick") == [2, 3, 5, 6, 8]


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_worker_that_comes_back_repeats_nothing_although_a_key_waits(
    server: NatsServer, name: str, retention: str, layout: str
) -> None:
    async with fleet_on(server, name, count=1, retention=retention) as fleet:
        keyed = Keyed(fleet, layout)
        one = await keyed.worker(drain_timeout=0.3, instance="a")
        await one.wait_for("converged", 60)
        await keyed.publish("much-later", "quick", "quick", "much-later", "quick")
        await eventually(lambda: keyed.of("quick") == [2, 3, 5], 60, "the quick key is ahead")
        await one.stop(returning=True)
        await keyed.publish("quick", "much-later")
        await keyed.worker(drain_timeout=0.3, instance="a")
        await eventually(lambda: len(keyed.done) >= 7, 60, "all are handled")
        assert sorted(sequence for *_, sequence in keyed.done) == list(range(1, 8)), "nothing lost, none twice"
        assert keyed.of("much-later") == [1, 4, 7]


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_a_drain_that_takes_too_long_cuts_nobody_off_in_an_effect(
    server: NatsServer, name: str, layout: str
) -> None:
    """Nothing more starts in the last quarter: a handler of 20 ms was cancelled because others had used the time."""
    async with fleet_on(server, name, count=1) as fleet:
        began: list[int] = []
        ended: list[int] = []

        async def handle(message: Message) -> None:
            began.append(message.sequence)
            await asyncio.sleep(0.02)
            ended.append(message.sequence)

        async def worker() -> Manager:
            connection = await fleet.connection()
            config = WorkerConfig(
                stream=fleet.stream,
                subject_template=f"{fleet.stream}.{{partition}}.*",
                lanes="key",
                drain_timeout=0.5,
            )
            consumer = WorkerConsumer(JetStreamApi(connection), config, handle)
            return await fleet.worker(consumer=consumer, layout=layout, **LONG)

        one = await worker()
        await one.wait_for("converged", 60)
        for n in range(80):  # 1 to 78 are one key's, and what lies behind them is done first: all have to be finished
            await fleet.js.publish(f"{fleet.stream}.p0.{'slow' if n < 78 else f'k{n}'}", b"")
        await eventually(lambda: {79, 80} <= set(ended), 60, "two keys are ahead of the third")
        two = await worker()
        await one.stop()
        await eventually(lambda: len(set(ended)) == 80, 60, "all are handled")
        assert two.owned() == {"p0"}
        assert sorted(began) == sorted(ended) == list(range(1, 81)), "each once, and none was cut off"
