"""Upgrade from durables without a namespace in their names: nothing lost, repeated or out of order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parti.testing import NatsServer, eventually
from support.fleet import HASTY, Fleet, fleet_on
from support.old_version import old_version

LAYOUTS = ["per-worker", "per-partition"]
RETENTIONS = ["limits", "workqueue", "interest"]
COUNT = 240
LEASE: dict[str, Any] = {"heartbeat_ttl": 6.0, "heartbeat_interval": 1.0}


def in_order(fleet: Fleet) -> bool:
    last: dict[str, int] = {}
    for _, message in fleet.seen:
        if message.sequence <= last.get(message.partition.id, 0):
            return False
        last[message.partition.id] = message.sequence
    return True


async def names(fleet: Fleet) -> list[str]:
    return sorted(await fleet.js.consumer_names(fleet.stream))


async def stored(fleet: Fleet) -> int:
    return int((await fleet.js.stream_info(fleet.stream))["state"]["messages"])


async def settled(fleet: Fleet, retention: str) -> None:
    """Only our names are left, and nothing that was handled is kept."""

    async def clean() -> bool:
        found = await names(fleet)
        ours = all(each.startswith(f"parti-{fleet.stream}-") for each in found)
        return ours and (retention == "limits" or await stored(fleet) == 0)

    await eventually(clean, 60, "only our names are left, and what was handled is gone")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("workers", [2, 1])
async def test_a_fleet_stopped_in_the_middle_of_a_backlog_goes_on_under_its_new_names(
    server: NatsServer, name: str, layout: str, retention: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_on(server, name, count=6, retention=retention) as fleet:
        with old_version(monkeypatch):
            old = [await fleet.worker(layout=layout, **LEASE) for _ in range(workers)]
            await fleet.spread(*old)
        before = await names(fleet)
        assert not any(each.startswith(f"parti-{name}") for each in before), before
        fleet.gate.clear()
        sequences = await fleet.publish(COUNT)
        await eventually(lambda: len(fleet.entered) == 6, 60, "one message in each handler")
        stops = [asyncio.create_task(manager.stop(returning=workers > 1)) for manager in old]
        await asyncio.sleep(0)
        fleet.gate.set()
        await asyncio.gather(*stops)
        fleet.managers.clear()
        assert len(fleet.seen) < COUNT, "the backlog is not done"
        sequences += await fleet.publish(60)  # while nobody is there: an interest stream keeps it for the old durables
        new = [await fleet.worker(layout=layout, **LEASE) for _ in range(2)]
        await fleet.handled(COUNT + 60)
        await fleet.spread(*new)
        await settled(fleet, retention)
        sequences += await fleet.publish(60)
        await fleet.handled(COUNT + 120)
        assert sorted(fleet.sequences()) == sequences, "each exactly once"
        assert in_order(fleet)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_workers_upgraded_one_by_one_under_load_lose_repeat_and_reorder_nothing(
    server: NatsServer, name: str, layout: str, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_on(server, name, count=6, retention=retention) as fleet:
        with old_version(monkeypatch):
            old = [await fleet.worker(layout=layout, **LEASE) for _ in range(2)]
            await fleet.spread(*old)
        ended = asyncio.Event()
        sequences: list[int] = []

        async def load() -> None:
            while not ended.is_set():
                sequences.extend(await fleet.publish(12))
                await asyncio.sleep(0.02)

        loading = asyncio.create_task(load())
        for manager in old:
            await manager.stop()
            fleet.managers.remove(manager)
            await fleet.worker(layout=layout, **LEASE)
            await fleet.spread()
        ended.set()
        await loading
        await fleet.handled(len(sequences))
        await settled(fleet, retention)
        assert sorted(fleet.sequences()) == sequences, "each exactly once"
        assert in_order(fleet)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_fleet_that_crashed_before_the_upgrade_loses_nothing(
    server: NatsServer, name: str, layout: str, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_on(server, name, count=6, retention=retention) as fleet:
        with old_version(monkeypatch):
            old = [await fleet.worker(layout=layout, **HASTY) for _ in range(2)]
            await fleet.spread(*old)
        sequences = await fleet.publish(COUNT)
        await fleet.handled(30)
        for manager in old:
            await fleet.crash(manager)
        sequences += await fleet.publish(60)
        new = [await fleet.worker(layout=layout, **HASTY) for _ in range(2)]
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "all are handled")
        await fleet.spread(*new)
        await settled(fleet, retention)


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_a_durable_with_an_old_name_that_was_there_before_the_namespace_is_somebody_elses(
    server: NatsServer, name: str, retention: str
) -> None:
    """A namespace has its bucket before its first durable."""
    async with fleet_on(server, name, count=2, retention=retention) as fleet:
        theirs = [f"{name}.p0", f"{name}.p1"]
        config = {"name": "parti-worker-0", "durable_name": "parti-worker-0", "ack_policy": "explicit"}
        await fleet.js.consumer_create(name, config | {"filter_subjects": theirs}, action="create")
        one = await fleet.worker()
        await one.wait_for("converged", 60)
        await fleet.publish(20)
        await fleet.handled(20)

        async def looked() -> bool:
            return bool(await fleet.js.consumer_info(name, f"parti-{name}-worker-0"))

        await eventually(looked, 60, "our own")
        await asyncio.sleep(2.5)  # longer than it takes to look twice: nothing is to happen
        found = await fleet.js.consumer_info(name, "parti-worker-0")
        assert sorted(found["config"]["filter_subjects"]) == theirs
        assert found["num_pending"] == 20
