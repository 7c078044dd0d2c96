"""Defects of the Go library's workers, each as a case that parti must pass: moves, filters, updates, stops.

See docs/evidence/go-library.md. `test_wNN_...` is the one test of a weakness. Other tests that name a number check
one rule behind it. Leaders, leases and assignments: test_go_weaknesses_of_leaders.py.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from parti.control.identity import LeaseStatus
from parti.manager import Hooks, ManagerState, StaticSource
from parti.manager.kv_store import Store
from parti.model import Member, Partition, PartitionId, WorkerId
from parti.testing import FaultProxy, NatsServer, eventually
from parti.worker import Message, WorkerConfig, WorkerConsumer
from support.fleet import HASTY, Fleet, fleet_on, stopping

LONG: dict[str, Any] = {"prepare_timeout": 60.0, "commit_timeout": 60.0}

HOURS: dict[str, Any] = {"planned_scale_window": 7200.0, "cold_start_window": 7200.0, "rebalance_cooldown": 7200.0}

A, B, C = (Member(WorkerId(f"worker-{n}"), f"n{n}") for n in range(3))


def in_order(fleet: Fleet) -> bool:
    """Judged by the first time each message was handled: a crash may repeat."""
    for each in fleet.partitions:
        of_one = list(dict.fromkeys(m.sequence for _, m in fleet.seen if m.partition.id == each))
        if of_one != sorted(of_one):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_w01_a_partition_that_moves_takes_its_backlog_with_it(
    server: NatsServer, name: str, retention: str, layout: str
) -> None:
    async with fleet_on(server, name, count=4, retention=retention) as fleet:
        one = await fleet.worker(layout=layout, **LONG)
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        sequences = await fleet.publish(40)
        await eventually(lambda: len(fleet.entered) == 4, 60, "one message in each partition's handler")
        two = await fleet.worker(layout=layout, **LONG)
        overlap = layout == "per-worker" and retention != "workqueue"
        await eventually(lambda: stopping(one, overlap=overlap) == 2, 60, "half of them are on their way")
        fleet.gate.set()
        await fleet.handled(40, 60)
        await fleet.spread(one, two, timeout=60)
        assert sorted(fleet.sequences()) == sequences, "nothing lost, nothing twice"
        assert in_order(fleet)
        assert sum(who == "m1" for who, _ in fleet.seen) == 18, "all but the first of each partition that moved"


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_w01_a_crash_loses_nothing_and_the_durable_of_the_dead_blocks_nobody(
    server: NatsServer, name: str, retention: str
) -> None:
    """On a work queue the dead one's durable keeps its filters, and the server refuses theirs to others (10100)."""
    async with fleet_on(server, name, retention=retention) as fleet:
        one = await fleet.worker(**HASTY)
        two = await fleet.worker(**HASTY)
        await fleet.spread(one, two)
        sequences = await fleet.publish(60)
        await fleet.handled(60)
        await fleet.crash(two)
        sequences += await fleet.publish(60)
        await eventually(lambda: sorted(one.owned()) == fleet.partitions, 60, "all are covered")
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "all are handled")
        assert in_order(fleet)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_w02_a_worker_without_partitions_reads_nothing_instead_of_the_whole_stream(
    server: NatsServer, name: str, retention: str
) -> None:
    async with fleet_on(server, name, count=1, retention=retention) as fleet:
        one = await fleet.worker()
        await one.wait_for("converged", 60)
        two = await fleet.worker()
        await eventually(lambda: two.assigned() == (), 60, "the second one has nothing")

        async def filters() -> list[str]:
            names = await fleet.js.consumer_names(name)
            durable = f"parti-{name}-{two.worker_id}"
            if durable not in names:
                return []
            return list((await fleet.js.consumer_info(name, durable))["config"]["filter_subjects"])

        found = await eventually(filters, 60, "its durable")
        assert all("no_partition" in subject for subject in found)
        await fleet.publish(20)
        await fleet.handled(20)
        assert {who for who, _ in fleet.seen} == {"m0"}
        info = await fleet.js.consumer_info(name, f"parti-{name}-{two.worker_id}")
        assert (info["num_pending"], info["delivered"]["consumer_seq"]) == (0, 0)


@pytest.mark.slow
async def test_w04_a_worker_whose_connection_is_closed_stops_by_itself_and_does_not_spin(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 60)
        await fleet.connections[0].close()
        await eventually(lambda: one.owned() == frozenset(), 60, "it stopped by itself")

        async def a_quiet_moment() -> bool:
            """A loop that spins leaves none: there 5.02 s of CPU were used in 5 s."""
            cpu, wall = time.process_time(), time.monotonic()
            await asyncio.sleep(0.5)
            return time.process_time() - cpu < 0.5 * (time.monotonic() - wall)

        await eventually(a_quiet_moment, 60, "half a core is left free")
        await fleet.crash(one)


async def test_w09_after_a_change_of_the_worker_id_the_new_durable_is_pulled_and_the_old_one_stays_away(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name, count=1) as fleet:

        async def handle(message: Message) -> None:
            fleet.seen.append(("w", message))

        config = WorkerConfig(stream=name, subject_template=f"{name}.{{partition}}", allow_worker_id_change=True)
        async with WorkerConsumer(fleet.js, config, handle) as worker:
            await fleet.publish(3)
            await worker.update_worker_consumer("w1", [Partition(("p0",))])
            await fleet.handled(3)
            await worker.update_worker_consumer("w2", [Partition(("p0",))])
            await fleet.publish(3)
            await fleet.handled(6)
            assert fleet.sequences() == [1, 2, 3, 4, 5, 6]
            assert await fleet.js.consumer_names(name) == ["parti-w2"]


async def test_w12_start_returns_when_the_member_is_live_without_waiting_for_work(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        first = await fleet.worker(**HOURS)
        await first.wait_for("converged", 60)
        late = await fleet.worker(**HOURS)
        assert late.worker_id == "worker-1"
        assert late.owned() == frozenset()
        assert late.state not in (ManagerState.INIT, ManagerState.CLAIMING_ID)


async def test_w13_hooks_tell_old_and_new_also_the_first_time_never_equal_ones_and_may_fail(
    server: NatsServer, name: str
) -> None:
    told: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    states: list[tuple[str, str]] = []
    grants: list[str] = []
    revokes: list[str] = []
    errors: list[Exception] = []

    async def granted(lease: object) -> None:
        grants.append(lease.partition)  # type: ignore[attr-defined]
        raise RuntimeError("a bug in a hook")

    hooks = Hooks(
        on_assignment_changed=lambda old, new: told.append((old, new)),
        on_state_changed=lambda old, new: states.append((old.value, new.value)),
        on_partition_granted=granted,
        on_partition_revoked=lambda lease: revokes.append(lease.partition),
        on_error=errors.append,
    )
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(hooks=hooks)
        await one.wait_for("converged", 60)
        await eventually(lambda: sorted(grants) == fleet.partitions, 60, "all grants told")
        assert told == [((), tuple(fleet.partitions))]
        assert states[0] == ("init", "claiming_id")
        await one.refresh_partitions()
        two = await fleet.worker()
        await fleet.spread(one, two)
        await eventually(lambda: len(revokes) == 3, 60, "all revocations told")
        assert told[-1] == (tuple(fleet.partitions), tuple(sorted(one.owned())))
        assert all(old != new for old, new in told)
        assert any("a bug in a hook" in str(error) for error in errors)


async def test_w17_updates_run_one_at_a_time_the_newest_last_and_a_failed_one_is_tried_again(
    server: NatsServer, name: str
) -> None:
    class Slow:
        def __init__(self) -> None:
            self.gate = asyncio.Event()
            self.begun: list[list[PartitionId]] = []
            self.applied: list[list[PartitionId]] = []
            self.busy = self.most_at_once = 0

        async def update_worker_consumer(self, worker_id: str, partitions: list[Partition]) -> None:
            self.busy += 1
            self.most_at_once = max(self.most_at_once, self.busy)
            mine = sorted(p.id for p in partitions)
            self.begun.append(mine)
            await self.gate.wait()
            self.busy -= 1
            if mine and mine not in self.begun[:-1]:
                raise RuntimeError("not at the first time")
            self.applied.append(mine)

    errors: list[Exception] = []
    async with fleet_on(server, name) as fleet:
        slow, source = Slow(), StaticSource(["p0"])
        one = await fleet.worker(source=source, consumer=slow, hooks=Hooks(on_error=errors.append))
        await eventually(lambda: len(slow.begun) == 1, 60, "the first update")
        for names in (["p0", "p1"], ["p0", "p1", "p2", "p3"], ["p1", "p2"]):
            source.update(names)
            await eventually(lambda want=names: sorted(one.assignment) == want, 60, "assigned")  # type: ignore[misc]
        slow.gate.set()
        await eventually(lambda: one.owned() == {"p1", "p2"}, 60, "the newest is in force")
        assert slow.applied[-1] == ["p1", "p2"]
        assert slow.most_at_once == 1
        assert any("not at the first time" in str(error) for error in errors)


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_w19_an_id_is_free_only_after_the_last_handler_has_ended(
    server: NatsServer, name: str, layout: str
) -> None:
    patient: dict[str, Any] = {
        "worker_id_max": 0,
        "shutdown_timeout": 60.0,
        "layout": layout,
        "heartbeat_interval": 0.5,
    }
    async with fleet_on(server, name, count=2) as fleet:
        one = await fleet.worker(worker={"drain_timeout": 60.0}, **patient)
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        await fleet.publish(2)
        await eventually(lambda: len(fleet.entered) == 2, 60, "both handlers run")
        leaving = asyncio.create_task(one.stop())
        two = await fleet.worker(start=False, **patient)
        joining = asyncio.create_task(two.start(60.0))
        await asyncio.wait({leaving, joining}, timeout=0.5)  # neither may end now, however long it is given
        assert not leaving.done()
        assert not joining.done()
        store = await Store.open(fleet.js, name)
        record, _ = await store.lease(WorkerId("worker-0"))
        assert record is not None
        assert record.status in (LeaseStatus.ACTIVE, LeaseStatus.LEAVING)
        fleet.gate.set()
        await leaving
        assert len(fleet.seen) == 2
        await joining
        assert two.worker_id == "worker-0"


@pytest.mark.slow
async def test_w19_a_stop_while_nats_is_away_ends_and_leaves_no_handler_running(
    own_server: NatsServer, name: str
) -> None:
    async with FaultProxy(own_server.port) as proxy, fleet_on(own_server, name, count=2) as fleet:
        short = {"drain_timeout": 0.3}
        one = await fleet.worker(url=proxy.url, worker=short, shutdown_timeout=0.5, **HASTY)
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        await fleet.publish(2)
        await eventually(lambda: len(fleet.entered) == 2, 60, "both handlers run")
        await asyncio.to_thread(proxy.cut, refuse=True)
        async with asyncio.timeout(60):
            await one.stop()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "parti-lane"]
        fleet.gate.set()
        assert fleet.seen == []
        assert one.state is ManagerState.SHUTDOWN


async def test_w20_a_worker_is_ready_while_it_rebalances_and_without_partitions(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=1) as fleet:
        one = await fleet.worker(shutdown_timeout=60.0, worker={"drain_timeout": 60.0}, prepare_timeout=60.0)
        await one.wait_for("converged", 60)
        two = await fleet.worker()
        await eventually(lambda: two.assigned() == (), 60, "there is nothing for the second one")
        assert two.health_check().probe() is None
        fleet.gate.clear()
        await fleet.publish(1)
        await eventually(lambda: len(fleet.entered) == 1, 60, "the handler runs")
        leaving = asyncio.create_task(one.stop())
        await eventually(lambda: two.state is ManagerState.REBALANCING, 60, "the partition is on its way")
        assert two.health_check().probe() is None
        fleet.gate.set()
        await leaving
        await eventually(lambda: two.state is ManagerState.STABLE, 60, "it has arrived")
        assert two.health_check().probe() is None
        assert one.health_check().probe() is not None
