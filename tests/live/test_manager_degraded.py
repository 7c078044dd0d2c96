"""NATS out of reach: workers go on until their lease is over, then stop; afterwards they come back."""

from __future__ import annotations

import asyncio

import pytest
from manager_fleet import HASTY, PATIENT, fleet_on

from parti.manager import AlertLevel, Hooks, ManagerState
from parti.testing import FaultProxy, NatsServer, eventually


@pytest.mark.slow
async def test_a_cut_off_worker_stops_by_itself_and_comes_back(own_server: NatsServer, name: str) -> None:
    """GO_PARTI W3: degraded mode is entered, alerts by level, and ends."""
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
        await one.wait_for("converged", 30)
        await asyncio.to_thread(proxy.cut, refuse=True)
        await eventually(lambda: one.state() is ManagerState.DEGRADED, 20, "degraded")
        await eventually(lambda: one.owned() == frozenset(), 20, "stopped by its own clock")
        sequences = await fleet.publish(20)
        await eventually(lambda: len(alerts) == 3, 20, "alerts by level")
        await asyncio.to_thread(proxy.heal)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 40, "it is back and did the rest")
        assert alerts == [AlertLevel.INFO, AlertLevel.WARNING, AlertLevel.ERROR]
        assert ManagerState.DEGRADED in states
        await eventually(lambda: one.state() is ManagerState.STABLE, 20, "stable again")


@pytest.mark.slow
async def test_an_outage_shorter_than_the_lease_moves_nothing(own_server: NatsServer, name: str) -> None:
    async with FaultProxy(own_server.port) as proxy, fleet_on(own_server, name) as fleet:
        one = await fleet.worker(url=proxy.url, degraded_after=0.2, **PATIENT)
        two = await fleet.worker(url=proxy.url, degraded_after=0.2, **PATIENT)
        await fleet.spread(one, two)
        before = (one.owned(), two.owned())
        await asyncio.to_thread(proxy.cut, refuse=True)
        await eventually(lambda: one.state() is ManagerState.DEGRADED, 20, "degraded")
        assert (one.owned(), two.owned()) == before
        await asyncio.to_thread(proxy.heal)
        await eventually(lambda: one.state() is ManagerState.STABLE, 30, "back")
        sequences = await fleet.publish(40)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 40, "all are handled")
        assert (one.owned(), two.owned()) == before
        assert (fleet.metrics.registry.get_sample_value("parti_fenced_total") or 0) == 0
