"""Defects of the Go library's control plane, each as a case that parti must pass: leases, leaders, plans.

See docs/evidence/go-library.md. `test_wNN_...` is the one test of a weakness. Other tests that name a number check
one rule behind it. Workers: test_go_weaknesses_of_workers.py.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from parti.control import election, membership, reconcile
from parti.control.assign import strategy_named
from parti.control.election import LeaderRecord, ReadLeader, WriteLeader
from parti.control.identity import LeaseRecord
from parti.control.lease import LeaseTerms
from parti.control.membership import Confirm, Joined, LeaseSeen, Membership, Tick
from parti.control.reconcile import AssignmentSeen, MembersChanged, PartitionsChanged, WriteAssignment
from parti.manager import AlertLevel, Hooks, Manager, ManagerState, StaticSource
from parti.manager.kv_store import Store, bucket_of
from parti.model import Assignment, Member, Partition, PartitionId, WorkerId
from parti.testing import FaultProxy, NatsServer, eventually
from support.fleet import HASTY, fleet_on

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)

UNHURRIED = HASTY | {"heartbeat_ttl": 4.0, "heartbeat_interval": 0.8}

HOURS: dict[str, Any] = {"planned_scale_window": 7200.0, "cold_start_window": 7200.0, "rebalance_cooldown": 7200.0}

A, B, C = (Member(WorkerId(f"worker-{n}"), f"n{n}") for n in range(3))


async def _usurp(store: Store, record: LeaderRecord) -> bool:
    _, revision = await store.leader()
    return await store.write_leader(record, revision) is not None


async def _steal(store: Store, thief: LeaseRecord) -> bool:
    _, revision = await store.lease(thief.member.worker)
    return await store.write_lease(thief, revision) is not None


def known(manager: Manager) -> int:
    """How many members this one knows."""
    assert manager._agent is not None
    assert manager._agent.members is not None
    return len(manager._agent.members.active())


def term_of(manager: Manager) -> int:
    assert manager._agent is not None
    assert manager._agent.leadership is not None
    return manager._agent.leadership.election.term


async def _vacate(store: Store, term: int) -> bool:
    _, revision = await store.leader()
    return await store.write_leader(LeaderRecord(term, None, 1), revision) is not None


@pytest.mark.slow
async def test_w03_degraded_mode_is_entered_alerts_by_level_and_ends(own_server: NatsServer, name: str) -> None:
    alerts: list[AlertLevel] = []
    states: list[ManagerState] = []
    hooks = Hooks(
        on_degraded_alert=lambda level, lasted: alerts.append(level),
        on_state_changed=lambda old, new: states.append(new),
    )
    async with FaultProxy(own_server.port) as proxy, fleet_on(own_server, name) as fleet:
        one = await fleet.worker(
            url=proxy.url,
            hooks=hooks,
            degraded_after=0.3,
            recovery_grace=0.5,
            alert_after=("300ms", "600ms", "900ms", "1h"),
            **HASTY,
        )
        await one.wait_for("converged", 60)
        await asyncio.to_thread(proxy.cut, refuse=True)
        await eventually(lambda: one.state is ManagerState.DEGRADED, 60, "degraded")
        await eventually(lambda: one.owned() == frozenset(), 60, "stopped by its own clock")
        sequences = await fleet.publish(20)
        await eventually(lambda: len(alerts) == 3, 60, "alerts by level")
        await asyncio.to_thread(proxy.heal)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "it is back and did the rest")
        assert alerts == [AlertLevel.INFO, AlertLevel.WARNING, AlertLevel.ERROR]
        assert ManagerState.DEGRADED in states
        await eventually(lambda: one.state is ManagerState.STABLE, 60, "stable again")


@pytest.mark.slow
async def test_w05_a_deposed_leader_writes_no_assignment_under_its_old_term(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        source = StaticSource(fleet.partitions)
        one = await fleet.worker(source=source, **HASTY)
        await one.wait_for("converged", 60)
        store = await Store.open(fleet.js, name)
        stored, at = await store.assignment()
        assert stored is not None
        written: list[Assignment] = []
        following = asyncio.Event()

        async def follow() -> None:
            async with aclosing(store.changes()) as changes:
                async for told in changes:
                    following.set()
                    if isinstance(getattr(told, "assignment", None), Assignment):
                        written.append(told.assignment)  # type: ignore[union-attr]

        watching = asyncio.create_task(follow())
        await following.wait()
        usurper = LeaderRecord(one.term + 1, Member(WorkerId("worker-9"), "usurper"), 1)
        await eventually(lambda: _usurp(store, usurper), 60, "the leader's place is another's")
        await eventually(lambda: not one.is_leader, 60, "deposed")
        source.update([*fleet.partitions, "late"])
        await eventually(lambda: "late" in one.owned(), 60, "assigned when the usurper's lease was over")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        terms = [a.term for a in written]
        assert terms == sorted(terms)
        assert min(a.term for a in written if PartitionId("late") in a.owners) > usurper.term > stored.term
        stale = Assignment(stored.term, 99, "late", MappingProxyType({PartitionId("p0"): WorkerId("worker-9")}))
        assert await store.write_assignment(stale, at) is None, "the record has moved on"


@pytest.mark.slow
async def test_w06_two_processes_cannot_hold_one_id(server: NatsServer, name: str) -> None:
    """Whoever finds another nonce under its id stops at once, and comes back under another one."""
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 60)
        store = await Store.open(fleet.js, name)
        thief = LeaseRecord(Member(WorkerId("worker-0"), "another-process"), beat=1)
        await eventually(lambda: _steal(store, thief), 60, "the lease is another's")
        await eventually(lambda: one.worker_id not in (None, "worker-0"), 60, "it took another id")
        left, _ = await store.lease(thief.member.worker)
        assert left is None or left.member == thief.member, "it neither renewed nor deleted the other's record"
        await eventually(lambda: sorted(one.owned()) == fleet.partitions, 60, "and owns everything again")
        assert (fleet.metrics.registry.get_sample_value("parti_fenced_total") or 0) >= 1


@pytest.mark.slow
async def test_w07_a_deleted_bucket_is_survived_and_later_assignments_are_not_ignored(
    server: NatsServer, name: str
) -> None:
    """Terms and versions start over there."""
    async with fleet_on(server, name) as fleet:
        source = StaticSource(fleet.partitions)
        one = await fleet.worker(source=source, **HASTY)
        await one.wait_for("converged", 60)
        sequences = await fleet.publish(30)
        await fleet.handled(30)
        await fleet.js.stream_delete(f"KV_{bucket_of(name)}")
        await Store.open(fleet.js, name)
        sequences += await fleet.publish(30)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "all are handled")
        await eventually(lambda: sorted(one.owned()) == fleet.partitions, 60, "all are owned again")
        source.update(fleet.partitions[:2])
        await eventually(lambda: sorted(one.owned()) == fleet.partitions[:2], 60, "a later assignment counts")


def test_w08_a_blink_long_ago_is_not_held_against_a_member() -> None:
    """In virtual time: there one blink stayed on record, so that the next was an instant emergency."""
    member = Member(WorkerId("worker-0"), "a")
    view = Membership(LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3), started=0.0)

    def feed(event: membership.Event) -> list[membership.Effect]:
        nonlocal view
        view, effects = membership.step(view, event)
        return list(effects)

    def renews(now: float, revision: int) -> list[membership.Effect]:
        return feed(LeaseSeen(now, member.worker, LeaseRecord(member), revision))

    renews(0.0, 1)
    assert feed(Tick(6.4)) == [Confirm(member.worker)], "the first blink: asked about"
    assert renews(6.5, 2) == []
    for now in range(8, 600, 2):
        assert renews(float(now), now) == []
        assert feed(Tick(now + 1.0)) == [], "no word about it any more"
    assert feed(Tick(604.5)) == [Confirm(member.worker)], "a whole TTL later the second blink is asked about as well"
    assert renews(604.6, 700) == []
    assert view.healthy(member)


@pytest.mark.parametrize("strategy", ["sticky", "consistent-hash", "weighted-consistent-hash", "round-robin"])
def test_w10_an_unchanged_set_of_workers_keeps_its_partitions_whatever_the_order_it_is_heard_of_in(
    strategy: str,
) -> None:
    """The pure core: members in any order of their heartbeats, under any next leader."""
    partitions = tuple(Partition((f"p{n}",), 1 + n % 5) for n in range(90))
    heard = [Member(WorkerId(f"worker-{n}"), "n") for n in range(12)]
    stored: Assignment | None = None
    for term in range(1, 20):
        members = Membership(LeaseTerms(), started=0.0)
        for revision, member in enumerate(heard, start=1):
            members, _ = membership.step(members, LeaseSeen(1.0, member.worker, LeaseRecord(member), revision))
        leader = reconcile.elect(
            term,
            1.0,
            members,
            tuple(random.Random(term).sample(partitions, 90)),
            reconcile.Found(stored, term - 1),
            strategy=strategy_named(strategy),
        )
        _, effects = reconcile.step(leader, reconcile.Tick(1.0))
        (written,) = (e.assignment for e in effects if isinstance(e, reconcile.WriteAssignment))
        assert stored is None or written.owners == stored.owners
        stored = written
        random.Random(term).shuffle(heard)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_w11_a_crash_waits_for_no_window_whoever_dies_and_also_while_another_joins(
    server: NatsServer, name: str, victim: str
) -> None:
    """The number of members does not shrink here, and every window is hours long."""
    async with fleet_on(server, name) as fleet:
        one, two = await fleet.worker(**UNHURRIED | HOURS), await fleet.worker(**UNHURRIED | HOURS)
        await eventually(lambda: one.is_leader or two.is_leader, 60, "one of them leads")
        await eventually(lambda: known(one) == 2, 60, "both are known")
        await one.refresh_partitions()
        await fleet.spread(one, two)
        leader, follower = (one, two) if one.is_leader else (two, one)
        dying, other = (leader, follower) if victim == "leader" else (follower, leader)
        _, joined = await asyncio.gather(fleet.crash(dying), fleet.worker(**UNHURRIED | HOURS))
        await eventually(lambda: sorted(other.owned() | joined.owned()) == fleet.partitions, 60, "all are covered")


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
            term = term_of(one)
            await eventually(partial(_vacate, store, term + 1), 60, "the leader is deposed")
            await eventually(
                partial(lambda t: one.is_leader and term_of(one) > t, term + 1),
                60,
                "and elected again",
            )
        await eventually(lambda: tasks().count("parti-term") == 1, 60, "one task serves the term")
        await eventually(lambda: len(tasks()) <= before, 60, "no more tasks than before")


def test_w16_assignments_are_written_one_after_the_other_each_on_top_of_the_last() -> None:
    """The pure core: what is asked for while one is on its way goes into the next, which sees all of it."""
    members = Membership(TERMS, started=0.0)
    for revision, who in enumerate((A, B), start=1):
        members, _ = membership.step(members, LeaseSeen(0.0, who.worker, LeaseRecord(who), revision))
    partitions = tuple(Partition((f"p{n}",)) for n in range(12))
    leader = reconcile.elect(1, 1.0, members, partitions, reconcile.Found())
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
