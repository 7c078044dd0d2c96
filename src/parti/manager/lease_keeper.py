"""The lease of one process on real NATS: performs the effects of `control.identity`, and reports their results."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import StrEnum
from typing import Any

from parti.backoff import FAST
from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control import identity
from parti.control.identity import Identity
from parti.control.lease import LeaseTerms
from parti.errors import PartiError
from parti.manager.kv_store import Store
from parti.model import Member, WorkerId
from parti.observe.logs import get_logger

log = get_logger("control")


class Ending(StrEnum):
    """How a member ended."""

    STOPPED = "stopped"
    FENCED = "fenced"


def terms_of(config: ControlConfig) -> LeaseTerms:
    return LeaseTerms(config.heartbeat_ttl, config.heartbeat_interval, config.lease_margin)


class LeaseKeeper:
    """Acquires a worker id, keeps it, and releases it. Every reply of the bucket becomes one step."""

    def __init__(
        self,
        seeker: Identity,
        store: Store,
        clock: Clock,
        *,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        granted: Callable[[Member], None],
        fenced: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.identity = seeker
        self._store = store
        self._clock = clock
        self._spawn = spawn
        self._granted = granted
        self._fenced = fenced
        self._failed = failed

    def __repr__(self) -> str:
        return f"<LeaseKeeper {self.identity.member or '-'} {self.identity.phase.value}>"

    def may_act(self) -> bool:
        return self.identity.may_act(self._clock.now())

    def tick(self, seen: Callable[[], int]) -> None:
        """Time passed; `seen` returns `LeaseRecord.seen`, and is called when a record is due."""
        now = self._clock.now()
        if self.identity.hold.due(now):
            self.identity = replace(self.identity, seen=seen())
        self.step(identity.Tick(now))

    def renew_soon(self) -> None:
        """Renew, or look for an id, at the next tick: NATS is back, or the record has to change."""
        if not self.identity.hold.waiting:
            self.identity = replace(self.identity, hold=self.identity.hold.failed(self._clock.now()))

    def set_well(self, well: bool, reason: str) -> None:
        """Set the flag in the next record, which is written at once."""
        if well == self.identity.well:
            return
        write_log, word = (log.info, "well") if well else (log.warning, "unwell")
        write_log("worker.well", worker_id=self.identity.worker, op="well", result=word, reason=reason)
        self.identity = replace(self.identity, well=well)
        self.renew_soon()

    def leave(self) -> None:
        """Ask the others to take our partitions."""
        self.step(identity.Leave(self._clock.now()))

    def end(self) -> None:
        """No further work is done under this nonce."""
        self.identity = replace(self.identity, phase=identity.Phase.STOPPED)

    def step(self, event: identity.Event) -> None:
        self.identity, effects = identity.step(self.identity, event)
        for effect in effects:
            match effect:
                case identity.ReadPool():
                    self._spawn(self._read_pool(), "parti-read-pool")
                case identity.ReadOwn(worker):
                    self.look(worker)
                case identity.WriteLease(_, record, expected):
                    self._spawn(self._write(record, expected), "parti-write-lease")
                case identity.IdGranted(member):
                    self._granted(member)
                case identity.IdFenced(_, reason):
                    self._fenced(reason)

    def look(self, worker: WorkerId) -> None:
        """Read the record under our id, and act on it."""
        self._spawn(self._read_own(worker), "parti-read-own")

    async def say_stopped(self, *, returning: bool) -> None:
        """When this returns, the record under our id says that we stopped cleanly, or our lease is over."""
        waits = FAST.delays()
        while self.may_act():
            stopped, effects = identity.step(self.identity, identity.Stop(self._clock.now(), returning))
            for effect in effects:
                if isinstance(effect, identity.WriteLease):
                    if await self._store.write_lease(effect.record, effect.expected) is not None:
                        self.identity = stopped
                        return
                    # One of our renewals came first, or a reply got lost: continue from what the bucket holds.
                    await self._read_own(effect.worker)
                    await self._clock.sleep(next(waits))

    async def _read_pool(self) -> None:
        asked = self._clock.now()
        try:
            leases = await self._store.leases()
        except PartiError as error:
            self._failed(error)
            return
        self.step(identity.PoolRead(self._clock.now(), asked, leases))

    async def _read_own(self, worker: WorkerId) -> None:
        try:
            record, revision = await self._store.lease(worker)
        except PartiError as error:
            self._failed(error)
            return
        self.step(identity.OwnRead(self._clock.now(), record, revision))

    async def _write(self, record: identity.LeaseRecord, expected: int) -> None:
        revision = await self._store.write_lease(record, expected)
        now = self._clock.now()
        self.step(identity.NotWritten(now) if revision is None else identity.Written(now, record.beat, revision))
