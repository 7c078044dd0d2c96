"""Drives any object with `update_worker_consumer` instead of parti's consumer: each call has the full set it owns.

Guarantees: one owner per partition and epoch, revoke before grant, the latest assignment last, failed calls retried
until they succeed (docs/evidence/go-library.md#w17). The object itself is responsible for positions and messages.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from parti.backoff import PATIENT
from parti.control import per_partition, signals
from parti.errors import TransientError
from parti.manager.host import Host
from parti.manager.layouts.per_partition.states import SlotPlane
from parti.model import Claim, Member, Partition, PartitionId


class UpdaterSilent(TransientError):
    """The updater failed or hung until the end: look at its own logs, and see that it stopped."""


class UpdaterPlane(SlotPlane):
    """Performs the effects of `control.slot` by updating a user-supplied consumer."""

    def __init__(self, host: Host, member: Member, updater: Any) -> None:
        super().__init__(host, member)
        self._updater = updater
        self._starting: dict[PartitionId, int] = {}
        self._stopping: set[PartitionId] = set()
        self._wanted: set[PartitionId] = set()
        self._applied: frozenset[PartitionId] | None = None
        self._wake = asyncio.Event()
        self._telling = asyncio.Lock()

    def claim_seen(self, claim: Claim, revision: int) -> None:
        if not self._closed:
            self._feed(claim.partition, signals.ClaimSeen(claim, revision))

    def begin(self) -> None:
        self._host.spawn(self._update_loop(), "parti-updater")
        self._wake.set()

    def tick(self, now: float) -> None:
        """Nothing here depends on time."""

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        return {}

    async def stop(self) -> dict[PartitionId, tuple[int, int]]:
        self._closed = True
        await self._tell_the_end()
        return {}

    async def abandon(self) -> bool:
        self._fence()
        return await self._tell_the_end()

    async def _tell_the_end(self) -> bool:
        """Update the object to own nothing. User code must not block a worker from leaving, so this call is bounded.

        True when the object was called and confirmed it.
        """
        waits = PATIENT.delays()
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
            self._host.failed(
                UpdaterSilent(f"{type(self._updater).__name__} did not confirm that it owns nothing any more")
            )
            return False

    def _perform(self, partition: PartitionId, effect: per_partition.Effect) -> None:
        match effect:
            case signals.ResetConsumer(_, _, ticket):
                self._starting[partition] = ticket
                self._wanted.add(partition)
                self._wake.set()
            case signals.StopLane():
                self._stopping.add(partition)
                self._wanted.discard(partition)
                self._wake.set()
            case signals.Discard():
                self._starting.pop(partition, None)
                self._wanted.discard(partition)
                self._wake.set()
            case signals.Settle(_, ticket):
                self._feed(partition, signals.Settled(ticket))
            case signals.WriteClaim(claim, expected):
                self._writer.write(claim, expected)
            case signals.Granted(lease):
                self._host.granted(lease)
            case signals.Revoked(lease):
                self._host.revoked(lease)

    async def _update_loop(self) -> None:
        """One call at a time, always with the newest state only."""
        waits = PATIENT.delays()
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            wanted, starting, stopping = frozenset(self._wanted), dict(self._starting), frozenset(self._stopping)
            if wanted != self._applied:
                try:
                    await self._tell(wanted)
                except Exception as error:  # user code: retry whatever it raises
                    self._host.failed(error)
                    self._wake.set()
                    await self._host.clock.sleep(next(waits))
                    continue
                self._applied = wanted
                waits = PATIENT.delays()
            for partition in stopping:
                self._stopping.discard(partition)
                self._feed(partition, signals.LaneStopped(0, None))
            for partition, ticket in starting.items():
                if self._starting.get(partition) == ticket:
                    del self._starting[partition]
                    self._feed(partition, signals.ResetDone(ticket))

    async def _tell(self, owned: frozenset[PartitionId]) -> None:
        partitions = [Partition(tuple(p.split("."))) for p in sorted(owned)]
        async with self._telling:
            result = self._updater.update_worker_consumer(self._member.worker, partitions)
            if inspect.isawaitable(result):
                await result
