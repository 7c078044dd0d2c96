"""NATS is unreachable: workers continue until their lease expires, then stop; afterwards they rejoin."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from parti.manager import ManagerState
from parti.testing import FaultProxy, NatsServer, eventually
from support.fleet import HASTY, PATIENT, fleet_on


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


@pytest.mark.slow
async def test_after_an_outage_longer_than_the_lease_each_worker_has_its_id_and_its_partitions_again(
    own_server: NatsServer, name: str
) -> None:
    # Long enough that a busy machine starves nobody to death, before the outage or in the grace period behind it.
    lease = PATIENT | {"heartbeat_ttl": 4.0, "heartbeat_interval": 0.8, "degraded_after": 0.5, "recovery_grace": 30.0}
    async with FaultProxy(own_server.port) as proxy, fleet_on(own_server, name) as fleet:
        one = await fleet.worker(url=proxy.url, **lease)
        two = await fleet.worker(url=proxy.url, **lease)
        await fleet.spread(one, two)
        ids, before = (one.worker_id, two.worker_id), (one.owned(), two.owned())
        await asyncio.to_thread(proxy.cut, refuse=True)
        await eventually(lambda: not one.owned() and not two.owned(), 60, "both have stopped by themselves")
        sequences = await fleet.publish(40)
        await asyncio.to_thread(proxy.heal)
        await eventually(lambda: (one.owned(), two.owned()) == before, 60, "everything is where it was")
        assert (one.worker_id, two.worker_id) == ids
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "all are handled")


async def test_a_start_waits_for_a_server_that_does_not_answer_and_says_so(own_server: NatsServer, name: str) -> None:
    async with FaultProxy(own_server.port) as proxy, fleet_on(own_server, name) as fleet:
        one = await fleet.worker(url=proxy.url, start=False, **HASTY)
        two = await fleet.worker(url=proxy.url, start=False, **HASTY)
        await asyncio.to_thread(proxy.half_open)
        with capture_logs() as logs:
            begun = asyncio.create_task(one.start(60.0))
            await eventually(lambda: any(log["event"] == "manager.start_delayed" for log in logs), 30, "it says why")
            with pytest.raises(TimeoutError, match="did not let this worker start within 3 s: no answer to"):
                await two.start(3.0)
            await asyncio.to_thread(proxy.heal)
            await begun
        await one.wait_for("converged", 30)
