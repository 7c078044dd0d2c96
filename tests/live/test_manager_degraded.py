"""NATS out of reach: workers go on until their lease is over, then stop; afterwards they come back."""

from __future__ import annotations

import asyncio

import pytest
from manager_fleet import PATIENT, fleet_on

from parti.manager import ManagerState
from parti.testing import FaultProxy, NatsServer, eventually


@pytest.mark.slow
async def test_an_outage_shorter_than_the_lease_moves_nothing(own_server: NatsServer, name: str) -> None:
    async with FaultProxy(own_server.port) as proxy, fleet_on(own_server, name) as fleet:
        one = await fleet.worker(url=proxy.url, degraded_after=0.2, **PATIENT)
        two = await fleet.worker(url=proxy.url, degraded_after=0.2, **PATIENT)
        await fleet.spread(one, two)
        before = (one.owned(), two.owned())
        await asyncio.to_thread(proxy.cut, refuse=True)
        await eventually(lambda: one.state is ManagerState.DEGRADED, 60, "degraded")
        assert (one.owned(), two.owned()) == before
        await asyncio.to_thread(proxy.heal)
        await eventually(lambda: one.state is ManagerState.STABLE, 60, "back")
        sequences = await fleet.publish(40)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "all are handled")
        assert (one.owned(), two.owned()) == before
        assert (fleet.metrics.registry.get_sample_value("parti_fenced_total") or 0) == 0
