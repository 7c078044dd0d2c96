"""The faults that the proof of delivery applies to workers and the server; each one is an entry of a log."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from parti.clock import Clock
from parti.testing import NatsServer
from parti_lab.prove.delivery_worker import Worker

Kind = Literal["kill", "freeze", "server", "stall"]
TROUBLES = ("kill", "server", "freeze", "stop")
READ = 5.0  # seconds until we have read what a worker has sent, on a machine that stalls now and then


@dataclass(frozen=True, slots=True)
class DeliveryFault:
    """One unplanned disturbance."""

    kind: Kind
    begin: float
    last: float
    """Until when a request may have been accepted and not be recorded as done; for a dead process, when it died."""


@dataclass(slots=True)
class Troubles:
    """Applies faults and logs them. A planned stop is not a fault: it must have no consequences."""

    server: NatsServer
    workers: list[Worker]
    rng: random.Random
    clock: Clock
    lease: int
    choose: Callable[[], Awaitable[Worker]] | None = None
    """Chooses the victim, and returns when the fault is due. Default: a random worker, within a second."""
    faults: list[DeliveryFault] = field(default_factory=list)
    _expected: list[tuple[Worker, float, float]] = field(default_factory=list)
    """Leases that expire because of our own faults, with their times: their consequences are explained already."""

    async def make(self, trouble: str) -> None:
        clock = self.clock
        victim = await self.choose() if self.choose is not None else self.rng.choice(self.workers)
        await clock.sleep(self.rng.uniform(0.2, 1.0))
        begin = clock.now()
        match trouble:
            case "kill":
                await asyncio.to_thread(victim.kill)
                self.faults.append(DeliveryFault("kill", begin, clock.now()))
                await asyncio.to_thread(victim.start)
            case "stop":
                await asyncio.to_thread(victim.stop)
                await asyncio.to_thread(victim.start)
            case "freeze":
                victim.signal(signal.SIGSTOP)
                self.faults.append(DeliveryFault("freeze", begin, clock.now()))
                await clock.sleep(3.0 * self.lease)
                victim.signal(signal.SIGCONT)
                self._expected.append((victim, begin, clock.now() + READ))
            case "server":
                await asyncio.to_thread(self.server.kill)
                await clock.sleep(self.rng.uniform(0.1, 1.5))
                await asyncio.to_thread(self.server.start)
                # A worker that cannot renew continues until its lease expires, and cannot report what it has done.
                last = clock.now() + self.lease
                self.faults.append(DeliveryFault("server", begin, last))
                self._expected += [(worker, begin, last + READ) for worker in self.workers]

    def stalls(self) -> list[DeliveryFault]:
        """Leases that expired without a fault of ours, as logged by the workers: the machine stalled for seconds."""
        moments = ((worker, moment) for worker in self.workers for moment in worker.lease_losses)
        return [
            DeliveryFault("stall", moment - 2 * self.lease, moment)
            for worker, moment in moments
            if not any(who is worker and begin <= moment <= end for who, begin, end in self._expected)
        ]
