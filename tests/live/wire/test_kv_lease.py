"""Leases on a KV key, on a real server: one holder, which stops by its own clock before the next may begin."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from parti.clock import SimulatedClock
from parti.control.lease import LeaseTerms
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.kv import KeyValue
from parti.wire.kv_lease import KvLease
from parti.wire.kv_model import KeyExists
from parti.wire.options import ConnectOptions

TERMS = LeaseTerms(ttl=60, renew_every=20, margin=1)


@pytest.fixture
async def kv(server: NatsServer, name: str) -> AsyncIterator[KeyValue]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        yield await KeyValue.ensure(JetStreamApi(connection), name)


async def test_a_key_has_one_holder_and_each_has_a_higher_epoch(kv: KeyValue) -> None:
    clock = SimulatedClock()
    first = await KvLease.take(kv, "slot.0", b"a", TERMS, clock)
    with pytest.raises(KeyExists):
        await KvLease.take(kv, "slot.0", b"b", TERMS, clock)
    assert await first.renew()
    await first.release()
    assert first.remaining == 0
    second = await KvLease.take(kv, "slot.0", b"b", TERMS, clock)
    assert second.epoch > first.epoch
    await first.release()  # a second time changes nothing
    assert not await first.renew()
    assert (await kv.get("slot.0")).value == b"b"


async def test_time_counts_from_before_the_renewal_was_sent_and_ends_a_margin_early(kv: KeyValue) -> None:
    clock = SimulatedClock()
    lease = await KvLease.take(kv, "slot.0", b"a", TERMS, clock)
    clock.advance(58.5)
    assert lease.remaining == pytest.approx(0.5)
    assert await lease.renew()
    assert lease.remaining == pytest.approx(59)
    clock.advance(59)
    assert lease.remaining == 0


async def test_a_renewal_whose_answer_got_lost_is_known_by_its_value(kv: KeyValue) -> None:
    lease = await KvLease.take(kv, "slot.0", b"a", TERMS, clock := SimulatedClock())
    await kv.update("slot.0", b"a", lease.epoch, ttl=60)  # ours, as far as the bucket can tell
    clock.advance(10)
    assert await lease.renew()
    assert lease.remaining == pytest.approx(59)


async def test_a_key_that_somebody_else_has_or_nobody_has_is_lost(kv: KeyValue) -> None:
    for change in (kv.put("slot.0", b"thief"), kv.delete("slot.0")):
        lease = await KvLease.take(kv, "slot.0", b"a", TERMS, SimulatedClock())
        await change
        assert not await lease.renew()
        await kv.delete("slot.0")
