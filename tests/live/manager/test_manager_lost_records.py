"""Records in the bucket that somebody removes or damages are written again by the process that knows their content."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from parti.manager.kv_store import Store, key_of
from parti.model import ClaimState, PartitionId
from parti.testing import NatsServer, eventually
from support.fleet import Fleet, fleet_on

HASTY_TERMS: dict[str, Any] = {"heartbeat_ttl": 2.0, "heartbeat_interval": 0.4, "lease_margin": 0.2}
TERMS: dict[str, Any] = {"heartbeat_ttl": 6.0, "heartbeat_interval": 0.5, "lease_margin": 0.3}


async def tamper(store: Store, key: str, how: str) -> None:
    if how == "delete":
        await store.kv.delete(key)
    elif how == "purge":
        await store.kv.purge(key)
    elif how == "vanish":
        await store.kv.api.stream_purge(store.kv.stream, filter=f"$KV.{store.kv.bucket}.{key}")
    else:
        await store.kv.put(key, b"\xffgarbage")


async def at_rest(fleet: Fleet, store: Store) -> bool:
    claims = await store.claims()
    owners = {p: m.worker_id for m in fleet.managers for p in m.owned()}
    return set(claims) == {PartitionId(p) for p in fleet.partitions} and all(
        c.state is ClaimState.STABLE and not c.lost and c.owner is not None and owners.get(p) == c.owner.worker
        for p, (c, _) in claims.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("how", ["delete", "purge", "garbage"])
async def test_a_claim_is_written_again_by_its_owner_and_a_new_leader_changes_nothing(
    server: NatsServer, name: str, how: str, layout: str
) -> None:
    """A claim deleted by hand, then a new leader: two processes were on one partition, and 373 messages repeated."""
    async with fleet_on(server, name) as fleet:
        managers = [await fleet.worker(layout=layout, **TERMS) for _ in range(3)]
        await fleet.spread()
        await fleet.publish(60)
        await fleet.handled(60)
        store = await Store.open(fleet.js, name)
        before = await store.claims()
        leader = next(m for m in managers if m.is_leader)
        for partition in before:
            await tamper(store, key_of(partition), how)
        await leader.stop()
        fleet.managers.remove(leader)
        await eventually(lambda: at_rest(fleet, store), 60, "every claim is there again, and names who works on it")
        await fleet.publish(60)
        await fleet.handled(120)
        assert sorted(fleet.sequences()) == list(range(1, 121)), "each once: nothing lost, nothing repeated"
        after = await store.claims()
        assert all(after[p][0].epoch > claim.epoch for p, (claim, _) in before.items())
        assert all(after[p][0].cursor >= 0 for p in before)


@pytest.mark.parametrize("how", ["delete", "garbage"])
async def test_leases_leader_assignment_and_positions_are_written_again(
    server: NatsServer, name: str, how: str
) -> None:
    async with fleet_on(server, name) as fleet:
        managers = [await fleet.worker(**TERMS) for _ in range(3)]
        await fleet.spread()
        await fleet.publish(30)
        await fleet.handled(30)
        ids = {m.worker_id for m in managers}
        store = await Store.open(fleet.js, name)
        for worker in sorted(w for w in ids if w is not None):
            await tamper(store, f"live.lease.{worker}", how)
            await tamper(store, f"positions.{worker}", how)
        await tamper(store, "live.leader", how)
        await tamper(store, "live.assignment", how)

        async def all_there() -> bool:
            leases = await store.leases()
            positions = {c.member.worker for c in await store.checkpoints()}
            leader, _ = await store.leader()
            assignment, _ = await store.assignment()
            there = {w for w, (record, _) in leases.items() if record is not None}
            return there == ids == positions and leader is not None and assignment is not None

        await eventually(all_there, 60, "every record is there again")
        await fleet.publish(30)
        await fleet.handled(60)
        assert {m.worker_id for m in managers} == ids, "nobody was fenced"
        assert sorted(fleet.sequences()) == list(range(1, 61))
        assert fleet.metrics.registry.get_sample_value("parti_fenced_total") in (None, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_random_tampering_under_load_loses_and_repeats_nothing(
    server: NatsServer, name: str, layout: str
) -> None:
    rng = random.Random(7)
    async with fleet_on(server, name, count=12) as fleet:
        for _ in range(3):
            await fleet.worker(layout=layout, **TERMS)
        await fleet.spread()
        store = await Store.open(fleet.js, name)
        published = 0
        for _ in range(25):
            published += len(await fleet.publish(40))
            present = [c.key for c in await store.kv.states("live.>") if c.value is not None]
            for key in rng.sample(present, min(3, len(present))):
                await tamper(store, key, rng.choice(["delete", "purge", "garbage"]))
            await asyncio.sleep(rng.uniform(0, 0.2))  # when the next blow comes is part of the scenario
        await fleet.handled(published, 120)
        await eventually(lambda: at_rest(fleet, store), 60, "every claim is there again")
        assert sorted(fleet.sequences()) == list(range(1, published + 1))
        owners: dict[tuple[str, int], str] = {}
        for worker, message in fleet.seen:
            assert owners.setdefault((message.partition.id, message.lease.epoch), worker) == worker, (
                "one owner an epoch"
            )
        by_partition: dict[str, int] = {}
        for _, message in fleet.seen:
            assert message.lease.epoch >= by_partition.get(message.partition.id, 0), "epochs never go back"
            by_partition[message.partition.id] = message.lease.epoch


@pytest.mark.slow
@pytest.mark.parametrize("also", [(), ("live.assignment",)], ids=["claims", "claims-and-assignment"])
async def test_a_durable_keeps_what_the_bucket_forgot_while_nobody_was_there(
    server: NatsServer, name: str, also: tuple[str, ...]
) -> None:
    """Interest: a worker that came back dropped the filters of partitions without records, and with them messages."""
    async with fleet_on(server, name, retention="interest") as fleet:
        for n in range(2):
            await fleet.worker(instance=f"w{n}", **HASTY_TERMS)
        await fleet.spread()
        await fleet.publish(20)
        await fleet.handled(20)
        for manager in list(fleet.managers):
            await fleet.crash(manager)
        store = await Store.open(fleet.js, name)
        for key in [c.key for c in await store.kv.states("live.claim.>")] + list(also):
            await tamper(store, key, "vanish")
        assert not await store.claims()
        published = len(await fleet.publish(60))
        assert (await fleet.js.stream_info(name))["state"]["messages"] >= published, "the durables keep them alive"
        for n in range(2):
            await fleet.worker(instance=f"w{n}", **HASTY_TERMS)
        await fleet.spread()
        await fleet.handled(80)
        assert set(fleet.sequences()) == set(range(1, 81))
