"""W1 to W10 of the Go library, each as a case that parti must pass. W11 to W20: the next file.

See docs/evidence/go-library.md.

`test_wNN_...` is the one place of a weakness. Other tests that name a number are about one rule behind it.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from types import MappingProxyType

import pytest

from parti.control import membership, reconcile
from parti.control.assign import strategy_named
from parti.control.election import LeaderRecord
from parti.control.identity import LeaseRecord
from parti.control.lease import LeaseTerms
from parti.control.membership import Confirm, LeaseSeen, Membership, Tick
from parti.manager import AlertLevel, Hooks, ManagerState, StaticSource
from parti.manager.kv_store import Store, bucket_of
from parti.model import Assignment, Member, Partition, PartitionId, WorkerId
from parti.testing import FaultProxy, NatsServer, eventually
from parti.worker import Message, WorkerConfig, WorkerConsumer
from support.fleet import HASTY, Fleet, fleet_on, stopping

LONG = {"prepare_timeout": 60.0, "commit_timeout": 60.0}


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


async def _usurp(store: Store, record: LeaderRecord) -> bool:
    _, revision = await store.leader()
    return await store.write_leader(record, revision) is not None


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


async def _steal(store: Store, thief: LeaseRecord) -> bool:
    _, revision = await store.lease(thief.member.worker)
    return await store.write_lease(thief, revision) is not None


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
            partitions=tuple(random.Random(term).sample(partitions, 90)),
            stored=stored,
            stored_revision=term - 1,
            claims={},
            strategy=strategy_named(strategy),
        )
        _, effects = reconcile.step(leader, reconcile.Tick(1.0))
        (written,) = (e.assignment for e in effects if isinstance(e, reconcile.WriteAssignment))
        assert stored is None or written.owners == stored.owners
        stored = written
        random.Random(term).shuffle(heard)
