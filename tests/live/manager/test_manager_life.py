"""Joining, sharing, leaving: managers on a real server."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from parti.errors import ConfigError, UsageError
from parti.manager import ControlConfig, Hooks, Manager, ManagerState
from parti.model import Partition
from parti.testing import NatsServer, eventually
from parti.worker import WorkerConfig, WorkerConsumer
from support.fleet import HASTY, fleet_on


async def test_the_first_worker_leads_and_owns_everything(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        assert one.worker_id == "worker-0"
        await one.wait_for("converged", 30)
        assert one.is_leader
        assert sorted(one.owned()) == fleet.partitions
        assert one.assignment == tuple(fleet.partitions)
        await one.wait_for(ManagerState.STABLE, 30)
        assert repr(one) == "<Manager worker-0 stable owns=6 leader=yes>"
        await fleet.publish(30)
        await fleet.handled(30)
        assert sorted(fleet.sequences()) == list(range(1, 31))
        for each in fleet.partitions:
            handled = [message.sequence for _, message in fleet.seen if message.partition.id == each]
            assert handled == sorted(handled)


async def test_a_join_moves_half_and_loses_repeats_and_reorders_nothing(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        await one.wait_for("converged", 30)
        publishing = asyncio.create_task(fleet.publish(400))
        two = await fleet.worker()
        await fleet.spread(one, two)
        sequences = await publishing + await fleet.publish(100)  # some after the move, for the newcomer
        await fleet.handled(500)
        assert sorted(fleet.sequences()) == sorted(sequences)
        for each in fleet.partitions:
            of_one = [m.sequence for _, m in fleet.seen if m.partition.id == each]
            assert of_one == sorted(of_one)
        assert {who for who, _ in fleet.seen} == {"m0", "m1"}


async def test_a_worker_that_leaves_hands_over_and_the_next_leader_adopts(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        two = await fleet.worker()
        await fleet.spread(one, two)
        await fleet.publish(60)
        await fleet.handled(60)
        await one.stop()
        assert one.owned() == frozenset()
        await eventually(lambda: two.is_leader, 60, "the other one leads")
        assert sorted(two.owned()) == fleet.partitions
        await fleet.publish(60)
        await fleet.handled(120)
        await asyncio.sleep(0)
        assert len(set(fleet.sequences())) == len(fleet.sequences()) == 120


async def test_a_restarted_worker_gets_its_id_and_partitions_back_with_no_movement(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        two = await fleet.worker()
        await fleet.spread(one, two)
        kept, other = two.owned(), one.owned()
        await two.stop(returning=True)
        again = await fleet.worker()
        assert again.worker_id == two.worker_id
        await eventually(lambda: again.owned() == kept, 60, "its partitions are back")
        assert one.owned() == other
        await fleet.publish(60)
        await fleet.handled(60)
        assert len(fleet.sequences()) == 60


async def test_a_pool_that_stays_full_is_a_timeout_that_says_what_to_do(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        await fleet.worker(worker_id_max=0)
        two = await fleet.worker(worker_id_max=0, start=False)
        with pytest.raises(TimeoutError, match="worker_id_max"):
            await two.start(0.5)


async def test_a_follower_can_ask_for_a_refresh(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        two = await fleet.worker()
        await fleet.spread(one, two)
        follower, leader = (two, one) if one.is_leader else (one, two)
        agent = leader._agent
        assert agent is not None
        assert agent.assignment is not None
        version = agent.assignment.version
        leader._source._partitions = leader._source._partitions[:5]  # type: ignore[attr-defined]
        await follower.refresh_partitions()

        def newer() -> bool:
            return agent.assignment is not None and agent.assignment.version > version

        await eventually(newer, 60, "a new assignment")
        await eventually(lambda: len(one.owned()) + len(two.owned()) == 5, 60, "one partition was retired")


async def test_namespaces_do_not_see_each_other(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        one = await fleet.worker(namespace=f"{name}a")
        two = await fleet.worker(namespace=f"{name}b", worker_id_prefix="other")
        await one.wait_for("converged", 30)
        await two.wait_for("converged", 30)
        assert one.is_leader
        assert two.is_leader
        assert len(one.owned()) == len(two.owned()) == 4


async def test_any_updater_can_be_plugged_in_and_hears_revoke_before_grant(server: NatsServer, name: str) -> None:
    owned: dict[str, set[str]] = {}
    overlaps: list[str] = []

    class Updater:
        def __init__(self, who: str) -> None:
            self.who = who

        async def update_worker_consumer(self, worker_id: str, partitions: list[object]) -> None:
            mine = {p.id for p in partitions}  # type: ignore[attr-defined]
            for other, theirs in owned.items():
                overlaps.extend(mine & theirs if other != self.who else ())
            owned[self.who] = mine

    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(consumer=Updater("one"))
        await one.wait_for("converged", 30)
        two = await fleet.worker(consumer=Updater("two"))
        await fleet.spread(one, two)
        await eventually(lambda: len(owned["one"]) == len(owned["two"]) == 3, 60, "both were told")
        assert overlaps == []


async def test_an_updater_that_fails_at_the_end_does_not_keep_its_worker_from_leaving(
    server: NatsServer, name: str
) -> None:
    class Stubborn:
        def __init__(self) -> None:
            self.owned: list[str] | None = None
            self.refuses = 0

        def update_worker_consumer(self, worker_id: str, partitions: list[Partition]) -> None:
            if self.refuses and not partitions:
                self.refuses -= 1
                raise RuntimeError("not yet")
            self.owned = [p.id for p in partitions]

    errors: list[Exception] = []
    async with fleet_on(server, name, count=2) as fleet:
        brief, hopeless = Stubborn(), Stubborn()
        one = await fleet.worker(consumer=brief, hooks=Hooks(on_error=errors.append))
        await eventually(lambda: brief.owned == ["p0", "p1"], 60, "told what it owns")
        brief.refuses = 2
        await one.stop()
        assert brief.owned == []
        assert any("not yet" in str(error) for error in errors)
        two = await fleet.worker(consumer=hopeless, namespace=f"{name}b", shutdown_timeout=0.5)
        await eventually(lambda: hopeless.owned == ["p0", "p1"], 60, "told what it owns")
        hopeless.refuses = 1_000_000
        await two.stop()
        assert two.owned() == frozenset()


async def test_a_manager_says_what_is_wrong_with_its_settings(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        connection = await fleet.connection()
        consumer = WorkerConsumer(fleet.js, WorkerConfig(stream=name, pull_timeout=30.0), lambda m: None)
        with pytest.raises(ConfigError, match="pull_timeout"):
            Manager(ControlConfig(), connection, ["a"], consumer=consumer)
        with pytest.raises(UsageError, match="update_worker_consumer"):
            Manager(ControlConfig(), connection, ["a"], consumer=object())
        with pytest.raises(ConfigError, match="namespace"):
            await fleet.worker(namespace="not a name")
        fleet.managers.clear()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_a_lease_that_ends_at_any_moment_of_a_stop_is_no_error(
    server: NatsServer, name: str, layout: str
) -> None:
    rng = random.Random(layout)
    async with fleet_on(server, name, count=4) as fleet:
        for turns in sorted(rng.sample(range(300), 5)):
            manager = await fleet.worker(layout=layout, **HASTY)
            await fleet.spread(manager)
            fleet.gate.clear()
            before = len(fleet.entered)
            await fleet.publish(8)
            await eventually(partial(lambda before: len(fleet.entered) > before, before), what="a message in hand")
            stopping = asyncio.create_task(manager.stop())
            for _ in range(turns):
                await asyncio.sleep(0)
            if (agent := manager._agent) is not None:
                agent._fenced("the lease ran out by our own clock")
            fleet.gate.set()
            await stopping
            fleet.managers.remove(manager)


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_a_worker_fenced_while_it_hands_over_waits_for_nobody(server: NatsServer, name: str, layout: str) -> None:
    """It waited for the whole shutdown_timeout, although it owned nothing any more (torture 2600081: 4 s)."""
    async with fleet_on(server, name, count=4) as fleet:
        endless: dict[str, Any] = {"shutdown_timeout": 3600.0, "prepare_timeout": 3600.0}
        one = await fleet.worker(layout=layout, worker={"drain_timeout": 3600.0}, **endless)
        await fleet.spread(one)
        two = await fleet.worker(layout=layout, **endless)
        await fleet.spread(one, two)
        fleet.gate.clear()
        await fleet.publish(8)
        await eventually(lambda: {e.worker_id for e in fleet.entered} >= {one.worker_id}, what="a message in hand")
        leaving = asyncio.create_task(one.stop())
        await eventually(lambda: two.state is ManagerState.REBALANCING, what="its partitions are on their way")
        assert one._agent is not None
        one._agent._fenced("the lease ran out by our own clock")
        async with asyncio.timeout(60):
            await leaving
        fleet.gate.set()
