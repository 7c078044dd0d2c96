"""Records in the bucket: foreign records, wrong writers, recreated buckets, zombies."""

from __future__ import annotations

from types import MappingProxyType

from parti.control import records
from parti.manager.kv_store import Store, bucket_of, key_of
from parti.model import Assignment, Checkpoint, Claim, ClaimState, Member, PartitionId, WorkerId
from parti.testing import NatsServer
from support.fleet import HASTY, fleet_on


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


async def test_records_of_fifty_thousand_partitions_stay_below_what_the_server_takes(
    server: NatsServer, name: str
) -> None:
    """The two records that grow: who owns what, and how far the one worker got that owns it all."""
    async with fleet_on(server, name) as fleet:
        store = await Store.open(fleet.js, name)
        partitions = [PartitionId(f"tenant-{n}.{n * 7919 % 100_003}") for n in range(50_000)]
        owners = {p: WorkerId(f"worker-{n % 100}") for n, p in enumerate(partitions)}
        written = Assignment(3, 7, "refresh", MappingProxyType(owners))
        assert await store.write_assignment(written, 0) is not None
        read, _ = await store.assignment()
        assert read is not None
        assert dict(read.owners) == owners
        positions = {p: (n % 7 + 1, n * 104_729 % 9_999_999_999) for n, p in enumerate(partitions)}
        everything = Checkpoint(Member(WorkerId("worker-0"), "f" * 16), MappingProxyType(positions))
        assert await store.write_checkpoint(everything, 0) is not None
        found, _ = await store.checkpoint(WorkerId("worker-0"))
        assert found is not None
        assert dict(found.positions) == positions
        state = await fleet.js.stream_info(f"KV_{bucket_of(name)}")
        assert state["state"]["bytes"] < 1_048_576, "both together are below the default max_payload"


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


async def test_a_claim_that_somebody_else_wrote_first_is_counted_as_a_conflict(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        store = await Store.open(fleet.js, name, metrics=fleet.metrics)
        claim = Claim(PartitionId("p1"))
        revision = await store.write_claim(claim, 0)
        assert revision is not None
        assert await store.write_claim(claim, revision + 7) is None
        assert await store.write_claim(claim, 0) is None
        counted = fleet.metrics.registry.get_sample_value
        assert counted("parti_handoff_cas_conflicts_total") == 2
        assert await store.write_claim(claim, revision) is not None
        assert counted("parti_handoff_cas_conflicts_total") == 2
