"""A starved machine: every process of a scenario freezes again and again, each in its own rhythm.

After one long freeze the state is clear: the lease has expired, another worker continues. Many short freezes are
harder: a renewal is late but arrives, a worker that just lost its lease writes a claim, the server answers too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Final

from parti.errors import PartiError
from parti.testing import NatsServer
from parti_lab.prove.torture_fleet import TortureFleet, TorturePlace

_RUNS: Final = (0.02, 0.4)
"""Seconds between two freezes of a process."""
_LONG: Final = 0.15
"""Share of the freezes that last up to one and a half leases; the others last up to a third of a lease."""


async def starve(fleet: TortureFleet, seconds: float, rng: random.Random) -> None:
    """Starve the fleet for `seconds`; when this returns every process runs again."""
    until = time.monotonic() + seconds
    ttl = fleet.scenario.ttl
    servers = fleet.servers
    nodes = servers.cluster.servers if servers.cluster is not None else [servers.server] if servers.server else []
    async with asyncio.TaskGroup() as group:
        for place in fleet.workers():
            group.create_task(_starve_worker(fleet, place, until, random.Random(rng.random())))
        for node in nodes:
            group.create_task(_starve_server(node, until, ttl, random.Random(rng.random())))


async def _starve_worker(fleet: TortureFleet, place: TorturePlace, until: float, rng: random.Random) -> None:
    while time.monotonic() < until:
        process = place.process
        if process is not None and process.running and not place.busy:  # leave the victim of another fault alone
            process.freeze()
            try:
                await asyncio.sleep(_standstill(rng, fleet.scenario.ttl))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.thaw()
        await asyncio.sleep(rng.uniform(*_RUNS))


async def _starve_server(server: NatsServer, until: float, ttl: float, rng: random.Random) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(PartiError), server.frozen():  # the server may have been killed
            await asyncio.sleep(min(_standstill(rng, ttl), ttl / 2))
        await asyncio.sleep(rng.uniform(*_RUNS))


def _standstill(rng: random.Random, ttl: float) -> float:
    return rng.uniform(ttl / 3, 1.5 * ttl) if rng.random() < _LONG else rng.uniform(0.01, ttl / 3)
