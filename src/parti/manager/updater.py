"""Any object with `update_worker_consumer` in place of parti's own consumer: told what it owns, whole each time.

What is promised then: one owner per partition and epoch, revoke before grant, the latest assignment last, failures
tried again until they succeed (GO_PARTI W17). Positions are the object's own affair, and so are the messages.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from parti.backoff import Backoff
from parti.control import slot
from parti.control.signals import (
    ClaimSeen,
    Discard,
    Fenced,
    Granted,
    LaneStopped,
    Reset,
    ResetDone,
    Revoked,
    Settle,
    Settled,
    StopLane,
    WriteClaim,
)
from parti.control.slot import Phase, Slot
from parti.errors import TransientError
from parti.manager.claim_writer import ClaimWriter
from parti.manager.host import Host
from parti.model import Claim, Lease, Member, Partition, PartitionId


class UpdaterSilent(TransientError):
    """The updater failed or hung until the end: look at its own logs, and see that it stopped."""


class UpdaterPlane:
    """Performs the effects of `control.slot` with updates of somebody else's consumer."""

    def __init__(self, host: Host, member: Member, updater: Any) -> None:
        self._host = host
        self._member = member
        self._updater = updater
        self._slots: dict[PartitionId, Slot] = {}
        self._starting: dict[PartitionId, int] = {}
        self._stopping: set[PartitionId] = set()
        self._wanted: set[PartitionId] = set()
        self._applied: frozenset[PartitionId] | None = None
        self._wake = asyncio.Event()
        self._telling = asyncio.Lock()
        self._writer = ClaimWriter(host, self._feed)
        self._closed = False

    def __repr__(self) -> str:
        return f"<UpdaterPlane {self._member} owns={len(self.owned())}>"

    def claim_seen(self, claim: Claim, revision: int) -> None:
        if not self._closed:
            self._feed(claim.partition, ClaimSeen(claim, revision))

    def begin(self) -> None:
        self._host.spawn(self._update_loop(), "parti-updater")
        self._wake.set()

    def tick(self, now: float) -> None:
        """Nothing here depends on time."""

    def allows(self, lease: Lease) -> bool:
        held = self._slots.get(lease.partition)
        return held is not None and held.lease == lease

    def holds_nothing(self) -> bool:
        return all(s.lease is None and s.phase is Phase.IDLE for s in self._slots.values())

    def owned(self) -> frozenset[PartitionId]:
        return frozenset(p for p, s in self._slots.items() if s.lease is not None)

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        return {}

    async def stop(self) -> dict[PartitionId, tuple[int, int]]:
        self._closed = True
        await self._tell_the_end()
        return {}

    async def abandon(self) -> bool:
        self._closed = True
        for partition in list(self._slots):
            self._slots[partition], effects = slot.step(self._slots[partition], Fenced())
            for effect in effects:
                if isinstance(effect, Revoked):
                    self._host.revoked(effect.lease)
        return await self._tell_the_end()

    async def _tell_the_end(self) -> bool:
        """It owns nothing any more. Somebody else's code must not keep a worker from leaving, so this has an end.

        True when it was told and said that this is so.
        """
        waits = Backoff(max_tries=None).delays()
        try:
            async with asyncio.timeout(self._host.config.shutdown_timeout):
                while True:
                    try:
                        await self._tell(frozenset())
                        return True
                    except Exception as error:
                        self._host.failed(error)
                    await self._host.clock.sleep(next(waits))
        except TimeoutError:
            self._host.failed(UpdaterSilent(f"{type(self._updater).__name__} was not told that it owns nothing more"))
            return False

    def _feed(self, partition: PartitionId, event: slot.Event) -> None:
        if self._closed:
            return
        held = self._slots.get(partition) or Slot(partition, self._member)
        self._slots[partition], effects = slot.step(held, event)
        for effect in effects:
            self._perform(partition, effect)

    def _perform(self, partition: PartitionId, effect: slot.Effect) -> None:
        match effect:
            case Reset(_, _, ticket):
                self._starting[partition] = ticket
                self._wanted.add(partition)
                self._wake.set()
            case StopLane():
                self._stopping.add(partition)
                self._wanted.discard(partition)
                self._wake.set()
            case Discard():
                self._starting.pop(partition, None)
                self._wanted.discard(partition)
                self._wake.set()
            case Settle(_, ticket):
                self._feed(partition, Settled(ticket))
            case WriteClaim(claim, expected):
                self._writer.write(claim, expected)
            case Granted(lease):
                self._host.granted(lease)
            case Revoked(lease):
                self._host.revoked(lease)

    async def _update_loop(self) -> None:
        """One call at a time, the newest state only."""
        waits = Backoff(max_tries=None).delays()
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            wanted, starting, stopping = frozenset(self._wanted), dict(self._starting), frozenset(self._stopping)
            if wanted != self._applied:
                try:
                    await self._tell(wanted)
                except Exception as error:  # somebody else's code: whatever it raises, it is tried again
                    self._host.failed(error)
                    self._wake.set()
                    await self._host.clock.sleep(next(waits))
                    continue
                self._applied = wanted
                waits = Backoff(max_tries=None).delays()
            for partition in stopping:
                self._stopping.discard(partition)
                self._feed(partition, LaneStopped(0, None))
            for partition, ticket in starting.items():
                if self._starting.get(partition) == ticket:
                    del self._starting[partition]
                    self._feed(partition, ResetDone(ticket))

    async def _tell(self, owned: frozenset[PartitionId]) -> None:
        partitions = [Partition(tuple(p.split("."))) for p in sorted(owned)]
        async with self._telling:
            result = self._updater.update_worker_consumer(self._member.worker, partitions)
            if inspect.isawaitable(result):
                await result
