"""Capacities, unhealthy workers, and failed moves: partitions that no worker can carry are reported, never hidden."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from parti.errors import ConfigError
from parti.manager import Hooks, SlotSource
from parti.model import PartitionId
from parti.testing import NatsServer, eventually
from support.fleet import HASTY, fleet_on, stopping


async def test_more_partitions_than_room_are_a_state_that_everybody_can_see(server: NatsServer, name: str) -> None:
    """7 of 12 partitions were without an owner for good, all workers healthy, nothing logged."""
    told: list[tuple[PartitionId, ...]] = []
    async with fleet_on(server, name, count=12) as fleet:
        hooks = Hooks(on_partitions_unassigned=told.append)
        small = {"max_subjects": 5}
        one = await fleet.worker(hooks=hooks, worker=small)
        await eventually(lambda: len(one.owned()) == 5, 60, "it carries what it can")
        await eventually(lambda: [len(each) for each in told] == [7], 60, "the hook tells the rest")
        assert "7 partitions cannot be placed" in str(one.health_check().probe())
        assert fleet.metrics.registry.get_sample_value("parti_partitions_unassigned") == 7
        two = await fleet.worker(hooks=hooks, worker=small)
        await eventually(lambda: len(one.owned()) == len(two.owned()) == 5, 60, "both are full")
        three = await fleet.worker(hooks=hooks, worker=small)
        await eventually(lambda: sum(len(m.owned()) for m in (one, two, three)) == 12, 60, "all have an owner")
        await eventually(lambda: told[-1] == (), 60, "and the hook says so")
        assert all(len(m.owned()) <= 5 for m in (one, two, three))
        assert all(m.health_check().probe() is None for m in (one, two, three))
        await fleet.publish(48)
        await fleet.handled(48)
        assert sorted(fleet.sequences()) == list(range(1, 49)), "nothing was lost or repeated meanwhile"


async def test_a_worker_that_is_not_well_is_relieved_and_gets_nothing_until_it_is(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        one, two = await fleet.worker(), await fleet.worker()
        await fleet.spread()
        assert two._agent is not None
        two._agent.set_well(False, "its disk is full")
        await eventually(lambda: len(one.owned()) == 6 and not two.owned(), 60, "the other one has everything")
        await fleet.publish(12)
        await fleet.handled(12)
        two._agent.set_well(True)
        await fleet.spread()
        await fleet.publish(12)
        await fleet.handled(24)
        assert sorted(fleet.sequences()) == list(range(1, 25)), "moved, not taken: nothing is repeated"


async def test_a_move_that_its_owner_cannot_let_go_of_is_aborted_with_a_warning(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        terms: dict[str, Any] = {"prepare_timeout": 0.1, "prepare_retries": 1, "commit_timeout": 0.3}
        one = await fleet.worker(**terms)
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        await fleet.publish(2)
        await eventually(lambda: len(fleet.entered) == 2, 60, "both handlers are at work, and do not end")
        with structlog.testing.capture_logs() as logs:
            two = await fleet.worker(**terms)
            finished = "parti_handoff_total"
            value = fleet.metrics.registry.get_sample_value
            await eventually(lambda: (value(finished, {"result": "timeout"}) or 0) >= 1, 60, "it was aborted")
        assert not two.owned()
        line = next(entry for entry in logs if entry["event"] == "handoff.finished" and entry["result"] == "timeout")
        assert line["log_level"] == "warning"
        assert line["worker_id"] == one.worker_id
        assert line["op"] == "handoff"
        fleet.gate.set()
        await fleet.spread()
        await fleet.handled(2)
        assert sorted(fleet.sequences()) == [1, 2]


async def test_a_move_to_one_that_dies_is_aborted_and_the_owner_goes_on(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        one = await fleet.worker(**HASTY | {"prepare_timeout": 30.0})
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        await fleet.publish(2)
        await eventually(lambda: len(fleet.entered) == 2, 60, "both handlers are at work")
        two = await fleet.worker(**HASTY | {"prepare_timeout": 30.0})
        await eventually(lambda: stopping(one, overlap=True) >= 1, 60, "a move waits for its owner")
        await fleet.crash(two)
        value = fleet.metrics.registry.get_sample_value
        await eventually(lambda: (value("parti_handoff_total", {"result": "abort"}) or 0) >= 1, 60, "it was aborted")
        fleet.gate.set()
        await eventually(lambda: len(one.owned()) == 2 and one.converged(), 60, "the owner goes on")
        await fleet.publish(4)
        await fleet.handled(6)
        assert sorted(fleet.sequences()) == list(range(1, 7))


async def test_a_partition_that_the_next_owner_does_not_accept_goes_back(server: NatsServer, name: str) -> None:
    """The next owner knows other subjects than we do, and cannot serve what it is given."""
    async with fleet_on(server, name) as fleet:
        terms: dict[str, Any] = {"layout": "per-partition", "commit_timeout": 0.1, "commit_retries": 1}
        subjects = [f"{name}.a{n}" for n in range(8)]
        one = await fleet.worker(source=SlotSource(subjects, 4), **terms)
        await one.wait_for("converged", 60)
        owned = one.owned()
        with structlog.testing.capture_logs() as logs:
            two = await fleet.worker(source=SlotSource([f"{name}.other"], 1, prefix="else"), **terms)
            value = fleet.metrics.registry.get_sample_value
            done = eventually(
                lambda: (value("parti_handoff_total", {"result": "rollback"}) or 0) >= 1, 60, "rolled back"
            )
            await done
        line = next(entry for entry in logs if entry["event"] == "handoff.finished" and entry["result"] == "rollback")
        assert line["log_level"] == "warning"
        await two.stop()
        fleet.managers.remove(two)
        await eventually(lambda: one.owned() == owned, 60, "the one before has it again")
        for subject in subjects:
            await fleet.js.publish(subject, b"x")
        await fleet.handled(8)
        assert sorted(fleet.sequences()) == list(range(1, 9))


async def test_settings_that_do_not_fit_each_other_are_refused(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        with pytest.raises(ConfigError, match=r"inactive_threshold .* at least twice control.heartbeat_ttl"):
            await fleet.worker(worker={"inactive_threshold": 30.0}, heartbeat_ttl=20.0)


async def test_a_first_assignment_is_no_handoff(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        await one.wait_for("converged", 60)
        value = fleet.metrics.registry.get_sample_value
        assert (value("parti_handoff_total", {"result": "success"}) or 0) == 0
        assert value("parti_claim_store_size") == 6
        two = await fleet.worker()
        await fleet.spread(one, two)
        await eventually(lambda: value("parti_handoff_total", {"result": "success"}) == 3, 60, "three were handed over")
        assert value("parti_handoff_duration_seconds_bucket", {"le": "2.0"}) is not None, "the bucket of two seconds"
        assert value("parti_handoff_cas_conflicts_total") is not None
