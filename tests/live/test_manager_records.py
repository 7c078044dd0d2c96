"""What stands in the bucket: foreign records, wrong writers, recreated buckets, zombies."""

from __future__ import annotations

from types import MappingProxyType

from manager_fleet import HASTY, fleet_on

from parti.control import records
from parti.manager.kv_store import Store, key_of
from parti.manager.sources import KvSource, SubjectSource
from parti.model import Assignment, Claim, ClaimState, Partition, PartitionId, WorkerId
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
