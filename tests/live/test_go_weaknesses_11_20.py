"""W11 to W20 of the Go library, each as a case that parti must pass. W1 to W10: file before.

See docs/evidence/go-library.md.
"""

from __future__ import annotations

import asyncio

import pytest

from parti.control import election, membership, reconcile
from parti.control.election import LeaderRecord, ReadLeader, WriteLeader
from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lease import LeaseTerms
from parti.control.membership import Joined, LeaseSeen, Membership
from parti.control.reconcile import AssignmentSeen, MembersChanged, PartitionsChanged, WriteAssignment
from parti.manager import Hooks, ManagerState, StaticSource
from parti.manager.kv_store import Store
from parti.model import Member, Partition, WorkerId
from parti.testing import FaultProxy, NatsServer, eventually
from support.fleet import HASTY, fleet_on

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)
UNHURRIED = HASTY | {"heartbeat_ttl": 4.0, "heartbeat_interval": 0.8}
HOURS = {"planned_scale_window": 7200.0, "cold_start_window": 7200.0, "rebalance_cooldown": 7200.0}
A, B, C = (Member(WorkerId(f"worker-{n}"), f"n{n}") for n in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_w11_a_crash_waits_for_no_window_whoever_dies_and_also_while_another_joins(
    server: NatsServer, name: str, victim: str
) -> None:
    """The number of members does not shrink here, and every window is hours long."""
    async with fleet_on(server, name) as fleet:
        one, two = await fleet.worker(**UNHURRIED | HOURS), await fleet.worker(**UNHURRIED | HOURS)
        await eventually(lambda: one.is_leader or two.is_leader, 60, "one of them leads")
        await eventually(lambda: len(one._agent.members.active()) == 2, 60, "both are known")  # type: ignore[union-attr]
        await one.refresh_partitions()
        await fleet.spread(one, two)
        leader, follower = (one, two) if one.is_leader else (two, one)
        dying, other = (leader, follower) if victim == "leader" else (follower, leader)
        _, joined = await asyncio.gather(fleet.crash(dying), fleet.worker(**UNHURRIED | HOURS))
        await eventually(lambda: sorted(other.owned() | joined.owned()) == fleet.partitions, 60, "all are covered")


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


def test_w14_one_failed_renewal_costs_the_leader_nothing() -> None:
    """In virtual time: there it dropped leadership at once, and nobody could win until the key expired."""
    state = election.candidate(A, terms=TERMS)

    def feed(event: election.Event) -> list[election.Effect]:
        nonlocal state
        state, effects = election.step(state, event)
        return list(effects)

    feed(election.LeaderSeen(0.0, None, 0))
    feed(election.Tick(0.0))
    assert feed(election.Written(0.1, LeaderRecord(1, A, 1), 4)) == [election.Elected(1)]
    assert feed(election.Tick(2.0)) == [WriteLeader(LeaderRecord(1, A, 2), 4)]
    assert feed(election.NotWritten(2.5)) == [ReadLeader()]
    assert feed(election.LeaderSeen(2.6, LeaderRecord(1, A, 1), 4)) == []
    assert state.may_lead(2.7)
    assert feed(election.Tick(3.1)) == [WriteLeader(LeaderRecord(1, A, 3), 4)], "tried again"
    assert feed(election.Written(3.2, LeaderRecord(1, A, 3), 9)) == []
    assert state.may_lead(8.0)


async def test_w15_leadership_that_comes_and_goes_leaves_no_task_behind(server: NatsServer, name: str) -> None:
    def tasks() -> list[str]:
        return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("parti-"))

    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(heartbeat_interval=0.5)
        await one.wait_for("converged", 60)
        store = await Store.open(fleet.js, name)
        await eventually(lambda: tasks().count("parti-term") == 1, 60, "one task serves the term")
        before = len(tasks())
        for _ in range(4):
            term = one._agent.leadership.election.term  # type: ignore[union-attr]
            await eventually(lambda t=term: _vacate(store, t + 1), 60, "the leader is deposed")  # type: ignore[misc]
            await eventually(
                lambda t=term: one.is_leader and one._agent.leadership.election.term > t + 1,  # type: ignore[misc,union-attr]
                60,
                "and elected again",
            )
        await eventually(lambda: tasks().count("parti-term") == 1, 60, "one task serves the term")
        await eventually(lambda: len(tasks()) <= before, 60, "no more tasks than before")


async def _vacate(store: Store, term: int) -> bool:
    _, revision = await store.leader()
    return await store.write_leader(LeaderRecord(term, None, 1), revision) is not None


def test_w16_assignments_are_written_one_after_the_other_each_on_top_of_the_last() -> None:
    """The pure core: what is asked for while one is on its way goes into the next, which sees all of it."""
    members = Membership(TERMS, started=0.0)
    for revision, who in enumerate((A, B), start=1):
        members, _ = membership.step(members, LeaseSeen(0.0, who.worker, LeaseRecord(who), revision))
    partitions = tuple(Partition((f"p{n}",)) for n in range(12))
    leader = reconcile.elect(1, 1.0, members, partitions=partitions, stored=None, stored_revision=0, claims={})
    leader, effects = reconcile.step(leader, reconcile.Tick(1.0))
    (first,) = (e for e in effects if isinstance(e, WriteAssignment))
    members, _ = membership.step(members, LeaseSeen(1.1, C.worker, LeaseRecord(C), 9))
    more = (*partitions, Partition(("late",)))
    for event in (
        MembersChanged(1.1, members, (Joined(C),)),
        PartitionsChanged(1.1, more),
        PartitionsChanged(1.2, more, refresh=True),
        reconcile.Tick(1.3),
    ):
        leader, effects = reconcile.step(leader, event)
        assert not any(isinstance(e, WriteAssignment) for e in effects), "the first one is not answered yet"
    leader, answer = reconcile.step(leader, AssignmentSeen(1.4, first.assignment, 50))
    leader, later = reconcile.step(leader, reconcile.Tick(1.4))
    (second,) = (e for e in (*answer, *later) if isinstance(e, WriteAssignment))
    assert (second.expected, second.assignment.version) == (50, first.assignment.version + 1)
    assert set(second.assignment.owners) == {p.id for p in more}


async def test_w17_updates_run_one_at_a_time_the_newest_last_and_a_failed_one_is_tried_again(
    server: NatsServer, name: str
) -> None:
    class Slow:
        def __init__(self) -> None:
            self.gate = asyncio.Event()
            self.begun: list[list[str]] = []
            self.applied: list[list[str]] = []
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


@pytest.mark.slow
async def test_w18_a_pool_of_one_id_is_valid_and_a_second_worker_waits_for_it(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        only = HASTY | {"worker_id_min": 0, "worker_id_max": 0}
        one = await fleet.worker(**only)
        assert one.worker_id == "worker-0"
        two = await fleet.worker(start=False, **only)
        waiting = asyncio.create_task(two.start(60.0))
        await one.stop()
        await waiting
        assert two.worker_id == "worker-0"
        await two.wait_for("converged", 60)
        assert sorted(two.owned()) == fleet.partitions, "under its own nonce, not its predecessor's"


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_w19_an_id_is_free_only_after_the_last_handler_has_ended(
    server: NatsServer, name: str, layout: str
) -> None:
    patient = {"worker_id_max": 0, "shutdown_timeout": 60.0, "layout": layout, "heartbeat_interval": 0.5}
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
