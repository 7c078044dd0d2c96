"""What stands in the bucket: foreign records, wrong writers, recreated buckets, zombies."""

from __future__ import annotations

import asyncio
from types import MappingProxyType

from manager_fleet import HASTY, fleet_on

from parti.control import records
from parti.control.identity import LeaseRecord
from parti.manager.kv_store import Store, bucket_of, key_of
from parti.manager.sources import KvSource, SubjectSource
from parti.model import Assignment, Claim, ClaimState, Member, Partition, PartitionId, WorkerId
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.kv import KeyValue


async def test_foreign_corrupt_and_future_records_are_reported_and_stop_nobody(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        store = await Store.open(fleet.js, name)
        for key, value in (
            ("live.claim.stranger", b"not ours"),
            ("live.claim.p99", b'{"kind":"parti.claim","v":99,"partition":"p99"}'),
            ("live.claim.p98", b'{"kind":"parti.claim","v":1,"partition":7}'),
            ("live.lease.worker-50", b"\x78\x00\x01"),
            ("live.lease.worker-51", records.encode_claim(Claim(PartitionId("p1")))),
            ("live.claim.p97", records.encode_claim(Claim(PartitionId("elsewhere")))),
            ("live.unknown", b"{}"),
        ):
            await store.kv.put(key, value)
        one = await fleet.worker()
        await one.wait_for("converged", 30)
        await store.kv.put("live.claim.p96", b"\xff\xfe")
        await store.kv.put("live.assignment.extra", b"?")
        await fleet.publish(30)
        await fleet.handled(30)
        counted = fleet.metrics.registry.get_sample_value
        assert (counted("parti_records_unreadable_total", {"fault": "foreign"}) or 0) >= 3
        assert (counted("parti_records_unreadable_total", {"fault": "future"}) or 0) >= 1
        assert (counted("parti_records_unreadable_total", {"fault": "corrupt"}) or 0) >= 2


async def test_an_assignment_written_by_a_deposed_leader_is_not_accepted(server: NatsServer, name: str) -> None:
    """GO_PARTI W5: the record has moved on, and a CAS on an older revision is refused."""
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker()
        await one.wait_for("converged", 30)
        store = await Store.open(fleet.js, name)
        stored, revision = await store.assignment()
        assert stored is not None
        stale = Assignment(0, 99, "late", MappingProxyType({PartitionId("p0"): WorkerId("worker-9")}))
        assert await store.write_assignment(stale, revision - 1) is None
        assert (await store.assignment())[0] == stored


async def test_two_processes_cannot_hold_one_id(server: NatsServer, name: str) -> None:
    """GO_PARTI W6: whoever finds another nonce under its id stops at once, and comes back under another one."""
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 30)
        store = await Store.open(fleet.js, name)
        _, revision = await store.lease(WorkerId("worker-0"))
        thief = LeaseRecord(Member(WorkerId("worker-0"), "another-process"), beat=1)
        await eventually(lambda: _steal(store, thief), 20, "the lease is another's")
        await eventually(lambda: one.worker_id not in (None, "worker-0"), 30, "it took another id")
        assert revision
        await eventually(lambda: sorted(one.owned()) == fleet.partitions, 30, "and owns everything again")
        assert (fleet.metrics.registry.get_sample_value("parti_fenced_total") or 0) >= 1


async def _steal(store: Store, thief: LeaseRecord) -> bool:
    _, revision = await store.lease(thief.member.worker)
    return await store.write_lease(thief, revision) is not None


async def test_a_deleted_bucket_is_survived_and_nothing_is_lost(server: NatsServer, name: str) -> None:
    """GO_PARTI W7: terms and versions start over, and nobody ignores the new ones for ever."""
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 30)
        sequences = await fleet.publish(30)
        await fleet.handled(30)
        await fleet.js.stream_delete(f"KV_{bucket_of(name)}")
        await Store.open(fleet.js, name)
        sequences += await fleet.publish(30)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 40, "all are handled")
        await eventually(lambda: sorted(one.owned()) == fleet.partitions, 40, "all are owned again")


async def test_a_worker_does_not_spin_when_its_connection_is_closed(server: NatsServer, name: str) -> None:
    """GO_PARTI W4: it stops by itself when its lease is over, and burns no core."""
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 30)
        await fleet.connections[0].close()
        await eventually(lambda: one.owned() == frozenset(), 30, "it stopped by itself")
        assert one._main is not None
        one._main.cancel()
        await asyncio.gather(one._main, return_exceptions=True)
        fleet.managers.clear()


async def test_positions_survive_the_end_of_everybody(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 30)
        first = await fleet.publish(30)
        await fleet.handled(30)
        await one.stop()
        second = await fleet.publish(30)
        two = await fleet.worker(**HASTY)
        await two.wait_for("converged", 30)
        await fleet.handled(60)
        assert sorted(fleet.sequences()) == sorted(first + second)


async def test_an_assignment_larger_than_a_message_is_split_and_read_back(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        store = await Store.open(fleet.js, name)
        store._limit = 20_000
        owners = {PartitionId(f"tenant-{n}.{n * 7919 % 100_003}"): WorkerId(f"worker-{n % 100}") for n in range(50_000)}
        written = Assignment(3, 7, "refresh", MappingProxyType(owners))
        revision = await store.write_assignment(written, 0)
        assert revision is not None
        read, at = await store.assignment()
        assert at == revision
        assert read is not None
        assert dict(read.owners) == owners
        await store.kv.put("part.0", b"torn")
        assert (await store.assignment())[0] is None


async def test_claims_of_any_partition_key_are_kept_apart(server: NatsServer, name: str) -> None:
    names = ["a", "a=2E", "ä", "a:b", "a$b", "a.b", "a_b", "é/x"]
    partitions = [PartitionId(text) for text in names]
    assert len({key_of(p) for p in partitions}) == len(partitions)
    async with fleet_on(server, name) as fleet:
        store = await Store.open(fleet.js, name)
        for partition in partitions:
            assert await store.write_claim(Claim(partition), 0) is not None
        assert set(await store.claims()) == set(partitions)
        claim = Claim(partitions[0], ClaimState.UNASSIGNED, 1)
        assert await store.write_claim(claim, 0) is None


async def test_sources_follow_a_bucket_and_the_subjects_of_a_stream(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        kv = await KeyValue.ensure(fleet.js, f"{name}-source")
        await kv.put("p0", b"")
        await kv.put("p1", b"5")
        await kv.put("bad", b"heavy")
        source = KvSource(JetStreamApi(await fleet.connection()), f"{name}-source")
        assert await source.partitions() == (Partition(("p0",)), Partition(("p1",), 5))
        one = await fleet.worker(source=source)
        await eventually(lambda: one.owned() == {"p0", "p1"}, 30, "both are owned")
        await kv.put("p2", b"")
        await kv.delete("p0")
        await eventually(lambda: one.owned() == {"p1", "p2"}, 30, "changes are followed")
        await fleet.publish(6, ["p0", "p1", "p2"])
        subjects = SubjectSource(fleet.js, name, filter=f"{name}.>", token=2)
        assert [p.id for p in await subjects.partitions()] == ["p0", "p1", "p2"]
