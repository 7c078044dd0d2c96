"""The lease of one process, on real NATS: performs what `control.identity` asks for, and tells it what came of it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control import identity
from parti.control.lease import LeaseTerms
from parti.errors import PartiError
from parti.manager.kv_store import Store
from parti.model import WorkerId


class Ending(StrEnum):
    """How a member's life ended."""

    STOPPED = "stopped"
    FENCED = "fenced"


def terms_of(config: ControlConfig) -> LeaseTerms:
    return LeaseTerms(config.heartbeat_ttl, config.heartbeat_interval, config.lease_margin)


class LeaseKeeper:
    """Reads and writes; every answer becomes one step."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        step: Callable[[identity.Event], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._step = step
        self._failed = failed

    async def read_pool(self) -> None:
        asked = self._clock.now()
        try:
            leases = await self._store.leases()
        except PartiError as error:
            self._failed(error)
            return
        self._step(identity.PoolRead(self._clock.now(), asked, leases))

    async def read_own(self, worker: WorkerId) -> None:
        try:
            record, revision = await self._store.lease(worker)
        except PartiError as error:
            self._failed(error)
            return
        self._step(identity.OwnRead(self._clock.now(), record, revision))

    async def write(self, record: identity.LeaseRecord, expected: int) -> None:
        revision = await self._store.write_lease(record, expected)
        now = self._clock.now()
        self._step(identity.NotWritten(now) if revision is None else identity.Written(now, record.beat, revision))
